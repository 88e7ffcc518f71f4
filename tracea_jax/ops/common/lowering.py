"""How an op's primitive reaches its kernels: the glue that all ops share."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from tracea_jax import _compat, catalogue, dispatch, variants
from tracea_jax.catalogue import Planned
from tracea_jax.ops.common import taylor
from tracea_jax.options import current, device_for
from tracea_jax.problem import Problem
from tracea_jax.runtime import launch

PLATFORMS = ("cpu", "cuda")

# Errors, profiles and HLO name the user's line, not ours.
source_info_util.register_exclusion(str(pathlib.Path(__file__).parent.parent))


def primitive(name: str, reference: Callable[..., Any]) -> Primitive:
    """A primitive with several results, those of its reference by shape and dtype."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(functools.partial(xla.apply_primitive, made))

    def abstract_eval(*avals: Any, **params: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(functools.partial(reference, **params))(*avals)
        return list(jaxpr.out_avals)

    made.def_abstract_eval(abstract_eval)
    return made


def register(
    op: str,
    primitive: Primitive,
    problem_of: Callable[..., Problem],
    reference: Callable[..., Any],
    **rules: Callable[..., Any],
) -> Planned:
    """Gives a primitive its lowerings: a planned kernel, or JAX code inline.

    XLA gets the reference, unless there is a rule of the name "xla".

    Args:
      op: that it belongs to.
      primitive: with several results; ``implementation`` and ``config`` are params.
      problem_of: (abstract operands, **params) -> problem, for static shapes.
      reference: (operands, **params) -> results in jnp.
      **rules: further implementations like it, by ``variants.Inline.rule``.

    Returns:
      The primitive for the op's record, without which no one looks for its problems.
    """
    launch.register()
    taylor.register(primitive, reference)
    inline = {
        name: mlir.lower_fun(f, multiple_results=True)
        for name, f in {"xla": reference, **rules}.items()
    }

    def rule(
        ctx: Any, *operands: Any, platform: str | None = None, **params: Any
    ) -> Any:
        target = platform or ctx.module_context.platforms[0]
        plan = _plan(op, ctx, problem_of, params, target)
        call = plan.call if plan else variants.Inline()
        if isinstance(call, variants.Inline):
            return inline[call.rule](ctx, *operands, **params)
        assert plan is not None
        results = dispatch.lower(ctx, operands, plan)
        return inline["xla"](ctx, *operands, **params) if results is None else results

    mlir.register_lowering(primitive, rule)
    for platform in PLATFORMS:
        mlir.register_lowering(
            primitive, functools.partial(rule, platform=platform), platform=platform
        )
    return Planned(primitive=primitive, problem_of=problem_of, reference=reference)


def _plan(
    op: str, ctx: Any, problem_of: Callable[..., Problem], params: Any, platform: str
) -> dispatch.Plan | None:
    """The plan for one equation; None where only the reference can be lowered.

    Raises:
      dispatch.Unsupported: if our kernels were demanded there.
    """
    implementation, config = params["implementation"], params["config"]
    if reason := _needs_xla(ctx):
        _refuse_ours(op, implementation, reason)
        return None
    return dispatch.plan(
        problem_of(ctx.avals_in, **params),
        device_for(platform),
        implementation=implementation,
        config=dict(config) if isinstance(config, tuple) else config,
    )


def left_to_xla(primitive: Primitive, operands: Sequence[Any], **params: Any) -> bool:
    """Whether XLA would serve the primitive on JAX's default backend.

    A named device in the settings stands for a GPU. A derivative rule asks it where the
    reference's own derivative is then the better one. Which backend compiles is not
    known for certain while tracing: the answer may decide about speed, never about
    values.
    """
    avals = [jax.typeof(x) for x in operands]
    if not _static(avals):
        return True
    backend = "gpu" if current().device else jax.default_backend()
    plan = dispatch.plan(
        catalogue.planned()[primitive].problem_of(avals, **params),
        device_for({"gpu": "cuda"}.get(backend, backend)),
        implementation=params["implementation"],
    )
    return plan.call == variants.Inline()


def _static(avals: Sequence[Any]) -> bool:
    return all(isinstance(d, int) for aval in avals for d in aval.shape)


def _needs_xla(ctx: Any) -> str | None:
    if not _static(ctx.avals_in):
        return "the shapes are symbolic"
    if _compat.partitioned_automatically(ctx):
        return "the arrays are partitioned automatically; use shard_map"
    return None


def _refuse_ours(op: str, implementation: str | None, reason: str) -> None:
    implementation = implementation or dispatch.default_implementation(op)
    if implementation not in (None, "xla"):
        raise dispatch.Unsupported(f"{implementation=} cannot run here: {reason}")


def explicitly_sharded(
    op: str, operands: Sequence[Any], implementation: str | None
) -> bool:
    """Whether the types of operands say how they are sharded over a mesh.

    XLA's partitioner serves them, and lax knows the sharding of every derivative: an op
    is then best traced as its reference.

    Raises:
      dispatch.Unsupported: if our kernels were demanded there.
    """
    specs = [jax.typeof(x).sharding.spec for x in operands]
    if not any(axis is not None for spec in specs for axis in spec):
        return False
    _refuse_ours(op, implementation, "the arrays are sharded explicitly; use shard_map")
    return True


def align_varying_axes(operands: Sequence[Any]) -> list[Any]:
    """Operands that all vary over the same mesh axes, as lax primitives arrange.

    Inside ``shard_map``, the cotangent of an operand that did not vary must be summed
    over the axes on which another one does; making the cast explicit gives AD that sum.
    """
    axes = [_compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]

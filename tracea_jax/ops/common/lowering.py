"""Lowering of primitives to their kernels, which all ops share.

What serves an equation is ``serving``'s answer, and ``emission`` writes it down; here
they are made a lowering rule of JAX. Every op registers its primitives at import.
"""

from __future__ import annotations

import functools
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from tracea_jax import (
    _compat,
    catalogue,
    dispatch,
    emission,
    faults,
    serving,
    variants,
)
from tracea_jax.catalogue import Planned
from tracea_jax.device import PLATFORMS
from tracea_jax.mistakes import shown
from tracea_jax.ops.common import by_reference, partition
from tracea_jax.ops.common.ranks import are_flat
from tracea_jax.ops.common.typed import (
    Aval,
    Params,
    Primitive,
    device_count,
    lax,
    make_jaxpr,
    mlir,
)
from tracea_jax.options import current, device_for, planned_device, planning
from tracea_jax.problem import Problem
from tracea_jax.runtime import launch
from tracea_jax.serving import Request, Served
from tracea_jax.tuning.answers.legality import hashable

# Errors, profiles and HLO name the user's line, not ours.
source_info_util.register_exclusion(str(pathlib.Path(__file__).parent.parent))


def primitive(name: str, reference: Callable[..., Any]) -> Primitive:
    """A primitive with several results, those of its reference by shape and dtype."""
    made = Primitive(name)
    made.multiple_results = True

    def abstract_eval(*avals: Aval, **params: Any) -> list[Aval]:
        return result_types(functools.partial(reference, **params), *avals)

    made.def_abstract_eval(abstract_eval)
    return made


def result_types(f: Callable[..., Any], *avals: Aval) -> list[Aval]:
    """Shape and dtype of every result of a function in jnp, which is traced."""
    return list(make_jaxpr(f)(*avals).out_avals)


def register(
    op: str,
    primitive: Primitive,
    problem_of: Callable[..., Problem],
    reference: Callable[..., Any],
    *,
    sharding: partition.Sharding | None = None,
    flattened: Callable[..., Any] | None = None,
    is_one_operation: Callable[..., bool] = catalogue.never,
    **rules: Callable[..., Any],
) -> Planned:
    """Gives a primitive its lowerings: a planned kernel, or JAX code inline.

    XLA gets the reference, unless the op has a rule of the name "xla".

    Args:
      op: that it belongs to.
      primitive: with several results; ``implementation`` and ``config`` are params.
      problem_of: (abstract operands, **params) -> problem, for static shapes.
      reference: (operands, **params) -> results in jnp.
      sharding: how it is split over devices, as in ``catalogue.Planned``.
      flattened: how kernels compute equations with ``ranks``, likewise.
      is_one_operation: whether XLA's variant is one operation of lax, likewise.
      **rules: further functions like the reference, by ``variants.Inline.rule``.

    Returns:
      The primitive for the op's record, without which no one looks for its problems.
    """
    launch.register()
    by_reference.register(primitive, reference)
    planned = Planned(
        op=op,
        primitive=primitive,
        problem_of=problem_of,
        reference=reference,
        rules={"xla": reference, **rules},
        sharding=sharding,
        flattened=flattened,
        is_one_operation=is_one_operation,
    )
    inline: dict[str, Callable[..., Any]] = {
        name: mlir.lower_fun(f, multiple_results=True)
        for name, f in planned.rules.items()
    }

    def rule(
        ctx: Any, *operands: Any, platform: str | None = None, **params: Any
    ) -> Any:
        answer = served(ctx, planned, ctx.avals_in, params, platform)
        if answer.is_xla and not is_planned_in_parts(ctx, planned, params):
            return inline["xla"](ctx, *operands, **params)
        try:
            return emitted(ctx, operands, answer, params)
        except Exception as e:
            asked = params["implementation"], params["config"]
            if serving.is_demanded(op, *asked) or faults.is_for_user(op, e):
                raise
            faults.reported(op, e, "emit")
            return inline["xla"](ctx, *operands, **params)

    def emitted(
        ctx: Any, operands: Sequence[Any], answer: Served, params: Params
    ) -> Any:
        call = answer.call
        if may_be_split(ctx, planned, params):
            assert sharding is not None
            split = sharding(ctx.avals_in, **params)
            device = device_for(ctx.module_context.platforms[0])
            return partition.emit(ctx, operands, primitive, params, split, device)
        if isinstance(call, variants.Inline):
            given = {**params, **dict(call.params)}
            return inline[call.rule](ctx, *operands, **given)
        if flattened is not None and not are_flat(params):
            merged = mlir.lower_fun(flattened, multiple_results=True)
            return merged(ctx, *operands, **params)
        code = dict(zip(variants.kernels_in(call), answer.cubins, strict=True))
        return emission.emit(ctx, operands, call, code)

    mlir.register_lowering(primitive, rule)
    for platform in PLATFORMS:
        mlir.register_lowering(
            primitive, functools.partial(rule, platform=platform), platform=platform
        )
    return planned


def served(
    ctx: Any,
    planned: Planned,
    avals: Sequence[Any],
    params: dict[str, Any],
    platform: str | None,
) -> Served:
    """The plan of an equation that is being lowered, with its kernels compiled.

    Where an equation is split by its rule, every device has a plan of its own, made
    when XLA asks for its program. The plan of the whole problem decides whether the
    rule splits it, unless that is certain (``is_planned_in_parts``).

    Args:
      ctx: the context of a lowering rule.
      planned: the equation's primitive.
      avals, params: the equation's abstract operands and parameters.
      platform: what the rule lowers for; None for a module of one platform.

    Raises:
      ValueError, LookupError, CompileError: if compiling the program has to fail.

    Warns:
      UserWarning: if XLA steps in for a kernel that was chosen.
    """
    splits = may_be_split(ctx, planned, params)
    partitioned = None if splits else _why_partitioned(ctx)
    asked = request(planned, avals, params, partitioned=partitioned)
    device = device_for(platform or ctx.module_context.platforms[0])
    answer = serving.serve(
        asked,
        device,
        settings=partition.unmeasured() if splits else None,
        compiles=not splits,
    )
    if answer.error is not None:
        raise answer.error
    partition.note(asked.problem, answer)
    if answer.failure is not None:
        message = f"{asked.problem} is left to XLA: {answer.failure}"
        warnings.warn(message, stacklevel=3)
    return answer


def _why_partitioned(ctx: Any) -> str | None:
    """Why the compiler splits arrays, and no rule; None where it does not."""
    if not _compat.partitioned_automatically(ctx):
        return None
    if _compat.manual_axes(ctx):
        return serving.PARTLY_MANUAL
    return serving.PARTITIONED


def may_be_split(ctx: Any, planned: Planned, params: Params) -> bool:
    """Tests whether an equation that is being lowered can be split by its op's rule."""
    return partition.is_possible(ctx) and has_rule(planned, params)


def is_planned_in_parts(ctx: Any, planned: Planned, params: Params) -> bool:
    """Tests whether the rule of the op splits an equation, whatever serves the whole.

    See ``leaves_choice_to_parts``.
    """
    return partition.is_possible(ctx) and leaves_choice_to_parts(planned, params)


def may_be_partitioned() -> bool:
    """Tests whether devices may plan parts of what XLA serves in this process.

    Not where a problem without a tuned answer is an error, or tuned at once: only the
    problems of the whole program are asked for then.
    """
    return device_count() > 1 and current().on_miss == "heuristic"


def leaves_choice_to_parts(planned: Planned, params: Params) -> bool:
    """Tests whether only the plans of its parts matter where XLA partitions arrays.

    That is so if XLA's variant is one operation of lax: each device compiles that
    operation or a kernel, and the rule never sends more bytes than XLA's partitioner.
    """
    default = dispatch.default_implementation(planned.op, partition.unmeasured())
    return (
        may_be_partitioned()
        and (params["implementation"] or default) != "xla"
        and planned.is_one_operation(**params)
        and has_rule(planned, params)
    )


def has_rule(planned: Planned, params: Params) -> bool:
    """True if an equation can be split by its op's rule where XLA partitions arrays."""
    return (
        planned.sharding is not None
        and partition.is_supported()
        and partition.has_text(params)
    )


def request(
    planned: Planned,
    avals: Sequence[Aval],
    params: Params,
    *,
    partitioned: str | None = None,
) -> Request:
    """The request of an equation.

    Args:
      planned: its primitive.
      avals, params: the equation's abstract operands and parameters.
      partitioned: as in ``serving.Request``.
    """
    problem = failure = None
    asked = params["implementation"], params["config"]
    if all(isinstance(d, int) for aval in avals for d in aval.shape):
        try:
            problem = planned.problem_of(avals, **params)
        except Exception as e:
            if serving.is_demanded(planned.op, *asked):
                raise
            failure = faults.reported(planned.op, e, "plan")
    return Request(
        op=planned.op,
        problem=problem,
        partitioned=partitioned,
        implementation=asked[0],
        config=asked[1],
        failure=failure,
    )


def left_to_xla(
    primitive: core.Primitive, operands: Sequence[Any], **params: Any
) -> bool:
    """Returns whether XLA would serve the primitive on the device that is planned for.

    A derivative rule asks it where the reference's own derivative is then the better
    one. Which backend compiles is not known for certain while tracing: the answer may
    decide about speed, never about values.

    Raises:
      dispatch.Unsupported: if what was demanded cannot run there.
    """
    avals = [jax.typeof(x) for x in operands]
    return would_be_xla(catalogue.planned()[primitive], avals, params)


def would_be_xla(
    planned: Planned, avals: Sequence[Any], params: dict[str, Any]
) -> bool:
    """``left_to_xla`` for abstract operands."""
    asked = request(planned, avals, params)
    if asked.problem is None:
        return True  # also where that is an error, which lowering raises if it comes
    with planning() as device:
        served = serving.serve(asked, device)
    if served.error is not None:
        raise served.error
    return served.is_xla


def has_kernel(primitive: core.Primitive, avals: Sequence[Aval], **params: Any) -> bool:
    """True if a kernel could serve the primitive on the device that is planned for.

    Ops that no program calls ask it: where none can run, programs keep their own
    equations, whatever was demanded.
    """
    planned = catalogue.planned()[primitive]
    how = {"implementation": None, "config": None}
    asked = request(planned, avals, {**params, **how})
    device = planned_device()
    return asked.problem is not None and any(
        variant is not variants.XLA and variant.why_not(asked.problem, device) is None
        for variant in variants.of(planned.op)
    )


def bound(
    primitive: Primitive,
    reference: Callable[..., Any],
    operands: Sequence[Any],
    params: Params,
) -> list[Any]:
    """A primitive's results.


    Operands vary over the same mesh axes. Where their types say how they are sharded,
    the results have the shardings that lax gives those of the reference; in between
    the compiler splits arrays, by sharding rules.

    Args:
      primitive: with several results.
      reference: (operands, **params) -> its results in jnp.
      operands, params: of both.
    """

    def call(*operands: Any) -> list[Any]:
        return list(primitive.bind(*align_varying_axes(operands), **params))

    if not are_sharded(operands):
        return call(*operands)
    types = result_types(functools.partial(reference, **params), *operands)
    shardings = [cast("Any", t).sharding for t in types]
    with _compat.tracing_like([jax.typeof(x) for x in operands]):
        return with_automatic_axes(call, shardings)(*operands)


def with_automatic_axes(
    f: Callable[..., list[Any]], shardings: list[Any]
) -> Callable[..., list[Any]]:
    """f where types of arrays do not say how they are sharded, but its results'."""
    return cast("Any", jax.sharding).auto_axes(f, out_sharding=shardings)


def with_out_sharding(
    f: Callable[..., jax.Array], out_sharding: Any, a: Any, b: Any
) -> Callable[..., jax.Array]:
    """f with its result sharded over explicit axes as ``jnp.matmul`` shards a @ b.

    Args:
      f: computes something of the product's shape.
      out_sharding: as in ``jnp.matmul``; None for what lax derives.
      a, b: the product's operands.

    Raises:
      Exception: what ``jnp.matmul`` raises for such a sharding.
    """
    if out_sharding is None:
        return f
    product = functools.partial(jnp.matmul, out_sharding=out_sharding)
    result_types(product, a, b)
    return cast("Any", jax.sharding).auto_axes(f, out_sharding=out_sharding)


def are_sharded(operands: Sequence[Any]) -> bool:
    """Tests whether the types of operands say how they are sharded over a mesh."""
    specs = [jax.typeof(x).sharding.spec for x in operands]
    return any(axis is not None for spec in specs for axis in spec)


def align_varying_axes(operands: Sequence[Any]) -> list[Any]:
    """Operands that all vary over the same mesh axes, as lax primitives arrange.

    Inside ``shard_map``, the cotangent of an operand that did not vary must be summed
    over the axes on which another one does; making the cast explicit gives AD that sum.
    """
    axes = [_compat.varying_axes(x) for x in operands]
    union = frozenset[str]().union(*axes)
    return [
        lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]


def hashable_config(config: Any) -> Any:
    """A config as a primitive's parameter: pairs in place of a dict of its fields.

    Raises:
      ValueError: if it cannot be a parameter, as an array cannot.
    """
    given: Any = config
    if isinstance(config, dict):
        fields = hashable(cast("dict[str, Any]", config))
        given = tuple(sorted(fields.items(), key=lambda field: str(field[0])))
    try:
        hash(given)
    except TypeError as e:
        raise ValueError(
            f"config={shown(config)} must be a variant's config, or a dict of its "
            "fields"
        ) from e
    return given

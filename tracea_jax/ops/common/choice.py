"""A call of our ops beside the user's equations that it stands for.

    choice_p: (*operands; ours, written) -> results of either

``ours`` is the call as a jaxpr, ``written`` the equations of the user's program that it
replaces; both take all operands, and compute the same results up to rounding. Which of
the two runs is decided where it is known:

| where           | ours runs if                                                  |
|-----------------|---------------------------------------------------------------|
| lowering        | a kernel serves a call in it; if XLA partitions the arrays,   |
|                 | also if it is one operation of lax, planned for each part     |
| differentiation | a kernel would serve a call in it, or one of its gradients';  |
|                 | with several devices also if it is one operation of lax       |
| vmap            | nothing is decided: both are batched                          |
| checkify        | never, where it looks for more than the checks of users       |

Where a rule of ours fails, the user's equations are differentiated or mapped instead,
and ``faults`` warns; calls of ours in a derivative that was taken already have no other
side, but their references (``jax_rules``). So a site that XLA serves compiles to what
the user wrote, bit by bit, and a rewrite that only pays with a kernel (weights that a
batch normalisation is folded into, relaid operands) happens only with that kernel.
``rewrite.replace`` binds the primitive; which equations make a site is not decided
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tracea_jax import _compat, dispatch, faults
from tracea_jax.device import PLATFORMS
from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common.jax_rules import chosen, jvp_of_some, merged
from tracea_jax.ops.common.programs import Call, calls_in, equations_in, is_composite
from tracea_jax.ops.common.typed import (
    Cotangents,
    Dims,
    Operand,
    Primitive,
    Tangents,
    ad,
    batching,
    jaxpr_as_fun,
    linear_transpose,
    make_jaxpr,
    make_user_context,
    mlir,
    vjp,
)
from tracea_jax.options import planning_state

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Written:
    """The user's equations, which readers of programs see no calls of ours in.

    Attributes:
      closed: their closed jaxpr, which takes all operands of the choice.
      key: of the call beside them; the same for calls that trace alike.
      is_part: whether they are a product within a larger site that XLA serves: without
        devices that plan parts of it, nothing is planned.
    """

    closed: Any
    key: Hashable
    is_part: bool = False

    def __call__(self, *operands: Any) -> list[Any]:
        return jaxpr_as_fun(self.closed)(*operands)

    def __repr__(self) -> str:
        return f"{len(self.closed.eqns)} equations as written"


# --- the primitive --------------------------------------------------------------------

choice_p = Primitive("tracea_choice")
choice_p.multiple_results = True


@choice_p.def_abstract_eval
def _abstract_eval(*_: Any, ours: Any, written: Written) -> list[Any]:
    return list(written.closed.out_avals)


def _lower(
    ctx: Any, *operands: Any, ours: Any, written: Written, platform: str | None = None
) -> Any:
    is_left = all(
        not lowering.is_planned_in_parts(ctx, planned, params)
        and (
            written.is_part
            or lowering.served(ctx, planned, avals, params, platform).is_xla
        )
        for planned, avals, params in calls_in(ours)
    )
    f = written if is_left else jaxpr_as_fun(ours)
    return mlir.lower_fun(f, multiple_results=True)(ctx, *operands)


mlir.register_lowering(choice_p, _lower)
for _platform in PLATFORMS:
    mlir.register_lowering(
        choice_p, functools.partial(_lower, platform=_platform), platform=_platform
    )


def _as_written(*operands: Any, ours: Any, written: Written) -> list[Any]:
    return written(*operands)


by_reference.register(choice_p, _as_written)


# --- derivatives ----------------------------------------------------------------------


def _by_better_side(
    transformed: Callable[[Callable[..., Any]], T], ours: Any, written: Written
) -> T:
    """A transformation of the side whose derivative is the better one."""
    if _is_left_to_xla(ours, written):
        return transformed(written)
    try:
        with jax_rules.raising():
            return transformed(jaxpr_as_fun(ours))
    except Exception as e:
        found = transformed(written)  # raises what plain JAX does
        _report(ours, e, "differentiate")
        return found


def _is_left_to_xla(ours: Any, written: Written) -> bool:
    """Returns whether XLA would serve every call, and every one of the gradients'.

    Not if devices may plan parts of the calls.
    """
    keyed = _Keyed(key=(written.key, planning_state()), ours=ours)
    try:
        with jax_rules.raising():
            calls = _with_gradients(keyed)
    except Exception as e:
        _report(ours, e, "differentiate")
        return True
    try:
        is_left = all(lowering.would_be_xla(*call) for call in calls)
    except dispatch.Unsupported:
        return False  # what was demanded cannot run here; lowering says so, if it comes
    in_parts = all(
        lowering.leaves_choice_to_parts(planned, params)
        for planned, _, params in calls_in(ours)
    )
    return is_left and not in_parts


def _report(ours: Any, error: Exception, failed: str) -> None:
    """Warns of a rule of ours that failed; raises what is for the user."""
    op = next((planned.op for planned, *_ in calls_in(ours)), "site")
    faults.reported(op, error, failed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Keyed:
    """A call of ours, equal to those that trace alike: the layers of a model.

    Derivative rules ask for plans, so that the key holds what these depend on.
    """

    key: Hashable
    ours: Any = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _with_gradients(keyed: _Keyed) -> tuple[Call, ...]:
    """The calls of our ops, and of their gradients in reverse mode."""
    ours = keyed.ours

    def pulled(*operands: Any) -> Any:
        floating = [_is_floating(x) for x in operands]

        def of_floating(*some: Any) -> Any:
            return f(*merged(operands, some, floating))

        results, pull = vjp(of_floating, *chosen(operands, floating))
        return pull(results)

    f = jaxpr_as_fun(ours)
    with _compat.linearize_hook(None):  # the calls are ours already
        gradients = make_jaxpr(pulled)(*ours.in_avals)
    return (*calls_in(ours), *calls_in(gradients))


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.numpy.inexact)


def _jvp(
    primals: Sequence[Any], tangents: Tangents, *, ours: Any, written: Written
) -> Any:
    def differentiated(f: Callable[..., Any]) -> Any:
        return jvp_of_some(f, primals, tangents)

    return _by_better_side(differentiated, ours, written)


def _transpose(
    cts: Cotangents, *operands: Operand, ours: Any, written: Written
) -> Cotangents:
    """Cotangents of the operands that the results are linear in."""
    linear = [ad.is_undefined_primal(x) for x in operands]
    if all(isinstance(ct, ad.Zero) for ct in cts):
        pairs = zip(operands, linear, strict=True)
        return [ad.Zero(x.aval) if is_so else None for x, is_so in pairs]
    avals = [x.aval for x in chosen(operands, linear)]
    given = [ad.instantiate_zeros(ct) for ct in cts]

    def transposed(f: Callable[..., Any]) -> Any:
        def of_linear(*some: Any) -> Any:
            return f(*merged(operands, some, linear))

        return linear_transpose(of_linear, *avals)(given)

    grads = _by_better_side(transposed, ours, written)
    return merged([None] * len(operands), grads, linear)


ad.primitive_jvps[choice_p] = _jvp
ad.primitive_transposes[choice_p] = _transpose


# --- vmap -----------------------------------------------------------------------------


def _batch(
    axis: Any, operands: Sequence[Any], dims: Dims, *, ours: Any, written: Written
) -> Any:
    """Both sides, the results mapped where the user's equations have them."""
    theirs, places = _compat.batched(written.closed, axis, dims)
    try:
        with jax_rules.raising():
            own, found = _compat.batched(ours, axis, dims)
    except Exception as e:
        _report(ours, e, "map")
        own, found = theirs, places  # without a call of ours
    if tuple(found) != tuple(places):
        own = _moved(own, found, places, axis.size)
    key = (written.key, tuple(dims), axis.size)
    mapped = Written(theirs, key, written.is_part)
    outs = choice_p.bind(*operands, ours=own, written=mapped)
    return outs, places


def _moved(jaxpr: Any, dims: Sequence[Any], places: Sequence[Any], size: int) -> Any:
    """The jaxpr with the mapped axes of its results elsewhere."""

    def moved(*operands: Any) -> list[Any]:
        outs = jaxpr_as_fun(jaxpr)(*operands)
        return [
            y
            if dim == place
            else jnp.broadcast_to(y, (size, *y.shape))
            if dim is None
            else jnp.moveaxis(y, dim, place)
            for y, dim, place in zip(outs, dims, places, strict=True)
        ]

    return make_jaxpr(moved)(*jaxpr.in_avals)


batching.fancy_primitive_batchers[choice_p] = _batch


# --- where every site shall be seen ---------------------------------------------------

_bare = make_user_context(None)


@contextlib.contextmanager
def without_choices() -> Generator[None, None, None]:
    """Programs spliced in this context hold calls of ours and no choices.

    For those who ask about every site and its gradients, also where XLA serves them.
    """
    with _bare(True):
        yield


def are_made() -> bool:
    """Returns whether sites become choices here."""
    return not _bare.value


def is_as_written(jaxpr: Any) -> bool:
    """True if XLA would serve all calls in a program: it compiles to what is written.

    Never of a program with an op that is made of others; what implementation is asked
    for and cannot run is no call that XLA serves.
    """
    try:
        return not is_composite(jaxpr) and all(
            lowering.would_be_xla(*call) for call in calls_in(jaxpr)
        )
    except dispatch.Unsupported:
        return False


def all_left_to_xla(jaxpr: Any) -> bool:
    """Returns whether XLA would serve each choice in a jaxpr, and its gradients.

    The derivative of the program is then that of what the user wrote, as a whole. Never
    of one with an op that is made of others, which does not wait for a kernel.
    """
    if is_composite(jaxpr):
        return False
    choices = (eqn for eqn in equations_in(jaxpr) if eqn.primitive is choice_p)
    unlike = {eqn.params["written"].key: eqn for eqn in choices}  # of a model's layers
    return all(map(_is_left_inside, unlike.values()))


def _is_left_inside(choice: Any) -> bool:
    """True if XLA would serve a choice; asked from outside of its ``shard_map``.

    Never of one with products that devices may plan in parts.
    """
    avals = [x.aval for x in choice.invars]
    ours, written = choice.params["ours"], choice.params["written"]
    if any(eqn.primitive is choice_p for eqn in equations_in(written.closed)):
        return False
    with choice.ctx.manager, _compat.tracing_like(avals):
        return _is_left_to_xla(ours, written)

"""Registration of the rules of primitives: derivatives, transposes and ``vmap``.

    register(op, primitive, reference, jvp=..., transpose=..., batch=...)

Where a rule of ours fails, JAX gets that of the primitive's reference in its place, and
``faults`` warns. The error reaches the user if it is meant for the user, or if the
reference cannot be transformed either. Inside ``raising`` every error is raised:
``choice`` has the user's equations to put in the place of a call. Lowerings of
primitives with kernels are guarded in ``lowering``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from tracea_jax import faults
from tracea_jax.ops.common.typed import (
    Arrays,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Primitive,
    Tangents,
    Zero,
    ad,
    batching,
    jvp,
    linear_transpose,
    mlir,
    vmap,
)

T = TypeVar("T")
Rule = Callable[..., Any]

# The rules of ours: what a primitive's guarded rule of a kind calls.
OWN: dict[tuple[Primitive, str], Rule] = {}

_raises = contextvars.ContextVar("tracea_rules_raise", default=False)


def register(
    op: str,
    primitive: Primitive,
    reference: Callable[..., Any],
    *,
    jvp: Rule,
    batch: Rule,
    transpose: Rule | None = None,
) -> None:
    """Gives a primitive its rules.

    Args:
      op: that it belongs to.
      primitive: with one result, or several.
      reference: (operands, **params) -> the same results, computed in jnp.
      jvp, batch, transpose: as JAX takes them.
    """
    plain = functools.partial(_batch, primitive, reference)
    batching.primitive_batchers[primitive] = _guarded(
        op, primitive, "map", batch, plain
    )
    plain = functools.partial(_jvp, reference)
    rule = _guarded(op, primitive, "differentiate", jvp, plain)
    ad.primitive_jvps[primitive] = rule
    if transpose is not None:
        plain = functools.partial(_transpose, primitive, reference)
        rule = _guarded(op, primitive, "transpose", transpose, plain)
        ad.primitive_transposes[primitive] = rule


def register_lowering(
    op: str, primitive: Primitive, lower: Rule, reference: Callable[..., Any]
) -> None:
    """Gives a primitive that is made of others its lowering.

    Args:
      op: that it belongs to.
      primitive: with several results.
      lower: the lowering.
      reference: (operands, **params) -> the same results, computed in jnp.
    """
    plain = mlir.lower_fun(reference, multiple_results=True)
    rule = _guarded(op, primitive, "emit", lower, plain)
    mlir.register_lowering(primitive, rule)


@contextlib.contextmanager
def raising() -> Generator[None, None, None]:
    """A context in which errors of rules are raised."""
    token = _raises.set(True)
    try:
        yield
    finally:
        _raises.reset(token)


def are_raising() -> bool:
    return _raises.get()


def _guarded(op: str, primitive: Primitive, kind: str, own: Rule, plain: Rule) -> Rule:
    """A rule of ours with that of the reference in its place where it fails."""
    OWN[primitive, kind] = own

    @functools.wraps(own)
    def rule(*args: Any, **params: Any) -> Any:
        try:
            return OWN[primitive, kind](*args, **params)
        except Exception as e:
            if are_raising() or faults.is_for_user(op, e):
                raise
            error = e
        try:
            found = plain(*args, **params)
        except Exception:
            raise error from None
        faults.reported(op, error, kind)
        return found

    return rule


# --- rules of references --------------------------------------------------------------


def jvp_of_some(
    f: Callable[..., T], primals: Arrays, tangents: Tangents
) -> tuple[T, T]:
    """``jax.jvp`` with respect to the operands whose tangent is not zero."""
    perturbed = [not isinstance(t, Zero) for t in tangents]

    def of_perturbed(*some: Any) -> T:
        return f(*merged(primals, some, perturbed))

    xs, dxs = (tuple(chosen(all_, perturbed)) for all_ in (primals, tangents))
    return jvp(of_perturbed, xs, dxs)


def own_value(primitive: Primitive, f: Callable[..., Any]) -> Rule:
    """A derivative rule: the primitive's own value, and the derivative of f."""

    def rule(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
        outs = primitive.bind(*primals, **params)
        return outs, _jvp(f, primals, tangents, **params)[1]

    return rule


def _jvp(
    reference: Callable[..., Any], primals: Arrays, tangents: Tangents, **params: Any
) -> Differentiated:
    return jvp_of_some(functools.partial(reference, **params), primals, tangents)


def _transpose(
    primitive: Primitive,
    reference: Callable[..., Any],
    cts: Any,
    *operands: Operand,
    **params: Any,
) -> Cotangents:
    linear = [ad.is_undefined_primal(x) for x in operands]
    given = cts if primitive.multiple_results else [cts]
    if all(isinstance(ct, Zero) for ct in given):
        pairs = zip(operands, linear, strict=True)
        return [Zero(x.aval) if is_so else None for x, is_so in pairs]

    def of_linear(*some: Any) -> Any:
        return reference(*merged(operands, some, linear), **params)

    full = [ad.instantiate_zeros(ct) for ct in given]
    avals = [x.aval for x in chosen(operands, linear)]
    transposed = linear_transpose(of_linear, *avals)
    grads = transposed(full if primitive.multiple_results else full[0])
    return merged([None] * len(operands), grads, linear)


def _batch(
    primitive: Primitive,
    reference: Callable[..., Any],
    operands: Arrays,
    dims: Dims,
    **params: Any,
) -> tuple[Any, Any]:
    outs = vmap(functools.partial(reference, **params), in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs) if primitive.multiple_results else 0


def chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [x for x, is_so in zip(values, which, strict=True) if is_so]


def merged(
    values: Sequence[Any], some: Sequence[Any], which: Sequence[bool]
) -> list[Any]:
    """The values, those that ``chosen`` takes replaced."""
    new = iter(some)
    return [next(new) if is_so else x for x, is_so in zip(values, which, strict=True)]

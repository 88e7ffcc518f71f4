"""The primitive of cross entropy over a vocabulary, and its rules for JAX.

    linear_cross_entropy: x, w, labels (, bias) -> log-sum-exp, label logit
    its tangent:          x, w, labels (, bias), log-sum-exp, tangents -> their tangents
    its gradients:        x, w, labels (, bias), log-sum-exp, cotangents -> gradients

x is (rows..., features), w as ``Head.layout`` says, labels (rows...) integers, bias
(vocabulary,). Dimensions of rows, one at least, stay apart, so that each can be split
over devices. A label outside of the vocabulary has the logit 0. The tangent is linear
in the tangents, and its transpose are the gradients. Where the compiler partitions
arrays, all columns are one chunk. What the loops compute is in ``chunks``; what
programs call is in ``public``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import _compat, faults
from tracea_jax.catalogue import Composite
from tracea_jax.ops.common import by_reference, jax_rules, lowering, remat
from tracea_jax.ops.common.jax_rules import jvp_of_some
from tracea_jax.ops.common.ranks import Ranks, as_ranks
from tracea_jax.ops.common.shapes import move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Params,
    Primitive,
    Tangents,
    Zero,
    ad,
    jvp,
    lax,
    linear_transpose,
    make_jaxpr,
    mlir,
    zeros_like,
)
from tracea_jax.ops.linear_cross_entropy import chunks
from tracea_jax.ops.linear_cross_entropy.chunks import Head
from tracea_jax.ops.matmul.primitive import as_dot as product_as_dot

_NAME = "linear_cross_entropy"


def bind(*operands: Any, head: Head) -> list[Any]:
    """[log-sum-exp, label logit]; those of the reference for explicit shardings."""
    if lowering.are_sharded(operands):
        return reference(*operands, head=head)
    aligned = lowering.align_varying_axes(operands)
    body = _body(functools.partial(_chunked, head=head), aligned)
    if body is None:
        return reference(*aligned, head=head)
    return linear_cross_entropy_p.bind(*aligned, head=head, body=body)


def _body(f: Callable[..., list[Any]], operands: Sequence[Any]) -> Any:
    """The open jaxpr of a loop, for readers of programs; None after a failure."""
    try:
        made = make_jaxpr(f)(*operands)
    except Exception as e:
        if jax_rules.are_raising():
            raise
        faults.reported(_NAME, e, "trace")
        return None
    return getattr(made, "jaxpr", made)


def reference(
    x: Any, w: Any, labels: Any, bias: Any = None, *, head: Head, **_: Any
) -> list[Any]:
    """The primitive in jnp, of all logits at once: the tests' oracle."""
    logits = head.logits_of(x, w, bias)
    inside = (labels >= 0) & (labels < logits.shape[-1])
    safe = jnp.where(inside, labels, 0)[..., None]
    label = jnp.take_along_axis(logits, safe, -1, mode="promise_in_bounds")[..., 0]
    zero = zeros_like(label)
    return [jax.nn.logsumexp(logits, -1), jnp.where(inside, label, zero)]


def _chunked(*operands: Any, head: Head, **_: Any) -> list[Any]:
    return list(chunks.forward(*operands, head=head))


linear_cross_entropy_p = lowering.primitive("tracea_linear_cross_entropy", reference)


def _register_lowering(
    primitive: Primitive,
    f: Callable[..., list[Any]],
    plain: Callable[..., list[Any]],
) -> None:
    """Lowers a primitive to the loop, or to one chunk where arrays are partitioned.

    Args:
      primitive: of the op.
      f: the loop.
      plain: the same results of all logits at once.
    """
    lower = mlir.lower_fun(f, multiple_results=True)

    def rule(ctx: Any, *operands: Any, head: Head, **params: Any) -> Any:
        if _compat.partitioned_automatically(ctx):
            head = head.at_once(ctx.avals_in[1])
        return lower(ctx, *operands, head=head, **params)

    jax_rules.register_lowering(_NAME, primitive, rule, plain)


_register_lowering(linear_cross_entropy_p, _chunked, reference)
by_reference.register(linear_cross_entropy_p, reference)


def _reason(avals: Sequence[Aval], *, head: Head, **_: Any) -> str:
    rows, vocabulary = math.prod(avals[0].shape[:-1]), head.vocabulary(avals[1])
    size = rows * jnp.dtype(head.logits).itemsize / 2**20
    return (
        f"{head.chunk} of {vocabulary} columns at a time: {size * head.chunk:.3g} "
        f"MiB of logits instead of {size * vocabulary:.3g}"
    )


LINEAR_CROSS_ENTROPY = Composite(
    name=_NAME,
    primitive=linear_cross_entropy_p,
    how="chunks",
    reason=_reason,
)


# --- derivatives ----------------------------------------------------------------------
#
# Operands of the tangent: those of the primitive, the log-sum-exp, and tangents of
# those operands whose names are in ``of``.


def _tangent(
    *operands: Any, has_bias: bool, of: tuple[str, ...], head: Head
) -> list[Any]:
    x, w, labels, bias, lse, tangents = _split(operands, has_bias)
    given = dict(zip(of, tangents, strict=True))
    dx, dw, dbias = (given.get(name) for name in ("x", "w", "bias"))
    return list(chunks.tangent(x, w, labels, bias, lse, dx, dw, dbias, head=head))


def _split(operands: Sequence[Any], has_bias: bool) -> tuple[Any, ...]:
    """(x, w, labels, bias or None, lse, the other operands)."""
    x, w, labels, *rest = operands
    bias = rest.pop(0) if has_bias else None
    return x, w, labels, bias, rest[0], rest[1:]


def _plain_tangent(
    *operands: Any, has_bias: bool, of: tuple[str, ...], head: Head
) -> list[Any]:
    x, w, labels, bias, _, tangents = _split(operands, has_bias)
    primals = {"x": x, "w": w, "bias": bias}

    def f(*some: Any) -> list[Any]:
        now = {**primals, **dict(zip(of, some, strict=True))}
        return reference(now["x"], now["w"], labels, now["bias"], head=head)

    return list(jvp(f, [primals[name] for name in of], list(tangents))[1])


tangent_p = lowering.primitive("tracea_linear_cross_entropy_tangent", _tangent)
_register_lowering(tangent_p, _tangent, _plain_tangent)
by_reference.register(tangent_p, _tangent)


def _bind_tangent(*operands: Any, **params: Any) -> list[Any]:
    return tangent_p.bind(*lowering.align_varying_axes(operands), **params)


def _jvp(
    primals: Arrays, tangents: Tangents, *, head: Head, body: Any
) -> Differentiated:
    lse, label = bind(*primals, head=head)
    names = ("x", "w", "labels", "bias")
    given = {
        name: t
        for name, t in zip(names, tangents, strict=False)
        if name != "labels" and not isinstance(t, Zero)
    }
    douts = _bind_tangent(
        *primals,
        lse,
        *given.values(),
        has_bias=len(primals) == 4,
        of=tuple(given),
        head=head,
    )
    return [lse, label], douts


def _tangent_jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """Second order: the tangent's own value, the derivative of its loop."""
    outs = _bind_tangent(*primals, **params)
    _, douts = jvp_of_some(functools.partial(_tangent, **params), primals, tangents)
    return outs, douts


def _tangent_transpose(
    cts: Tangents, *operands: Operand, has_bias: bool, of: tuple[str, ...], head: Head
) -> Cotangents:
    x, w, labels, bias, lse, tangents = _split(operands, has_bias)
    linear = {
        name: t.aval
        for name, t in zip(of, tangents, strict=True)
        if ad.is_undefined_primal(t)
    }
    known = [None] * (len(operands) - len(tangents))
    if all(isinstance(ct, Zero) for ct in cts):
        return [*known, *(Zero(linear[n]) if n in linear else None for n in of)]
    ct_lse, ct_label = map(ad.instantiate_zeros, cts)
    present = [a for a in (x, w, labels, bias, lse, ct_lse, ct_label) if a is not None]
    how: Params = {"has_bias": has_bias, "wanted": tuple(linear), "head": head}
    found = dict(zip(linear, _bind_gradients(*present, **how), strict=True))
    return [*known, *(found.get(name) for name in of)]


# --- gradients ------------------------------------------------------------------------
#
# Operands: those of the primitive, the log-sum-exp, and the cotangents of both results.
# ``wanted`` names what there are gradients of, ``body`` is the open jaxpr of the loop.


def _gradients(
    *operands: Any, has_bias: bool, wanted: tuple[str, ...], head: Head, **_: Any
) -> list[Any]:
    x, w, labels, bias, lse, cts = _split(operands, has_bias)
    found = chunks.backward(x, w, labels, bias, lse, *cts, wanted=wanted, head=head)
    return [found[name] for name in wanted]


def _plain_gradients(
    *operands: Any, has_bias: bool, wanted: tuple[str, ...], head: Head, **_: Any
) -> list[Any]:
    *primals, ct_lse, ct_label = operands
    names: tuple[str, ...] = ("x", "w", "labels", "bias")
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in primals]
    given: Params = dict(zip(names, avals, strict=False))
    f = functools.partial(
        _plain_tangent, *primals, has_bias=has_bias, of=wanted, head=head
    )
    return list(linear_transpose(f, *(given[n] for n in wanted))([ct_lse, ct_label]))


gradients_p = lowering.primitive("tracea_linear_cross_entropy_gradients", _gradients)
_register_lowering(gradients_p, _gradients, _plain_gradients)
by_reference.register(gradients_p, _gradients)


def _bind_gradients(*operands: Any, **params: Any) -> list[Any]:
    aligned = lowering.align_varying_axes(operands)
    body = _body(functools.partial(_gradients, **params), aligned)
    if body is None:
        return _plain_gradients(*aligned, **params)
    return gradients_p.bind(*aligned, body=body, **params)


def _gradients_jvp(
    primals: Arrays, tangents: Tangents, *, body: Any, **params: Any
) -> Differentiated:
    """Second order: the gradients' own values, the derivative of their loop."""
    outs = _bind_gradients(*primals, **params)
    _, douts = jvp_of_some(functools.partial(_gradients, **params), primals, tangents)
    return outs, douts


def _gradients_transpose(
    cts: Tangents, *operands: Operand, body: Any, **params: Any
) -> Cotangents:
    """They are linear in the cotangents."""
    linear = [ad.is_undefined_primal(x) for x in operands]

    def of_linear(*some: Any) -> list[Any]:
        rest = iter(some)
        pairs = zip(operands, linear, strict=True)
        return _gradients(*(next(rest) if is_so else x for x, is_so in pairs), **params)

    avals = [x.aval for x, is_so in zip(operands, linear, strict=True) if is_so]
    given = [ad.instantiate_zeros(ct) for ct in cts]
    found = iter(linear_transpose(of_linear, *avals)(given))
    return [next(found) if is_so else None for is_so in linear]


# --- vmap, rematerialisation ----------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, *, head: Head, body: Any) -> Batched:
    """One call where only rows are mapped; heads are computed one after another."""
    moved, mapped, size = move_mapped(operands, dims)
    if mapped[1] or mapped[3:] == [True]:
        return _one_by_one(functools.partial(bind, head=head), moved, mapped)
    x, w, labels, *bias = moved
    x, labels = (
        a if is_mapped else jnp.broadcast_to(a, (size, *a.shape))
        for a, is_mapped in ((x, mapped[0]), (labels, mapped[2]))
    )
    return bind(x, w, labels, *bias, head=head), [0, 0]


def _batch_tangent(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    moved, mapped, _ = move_mapped(operands, dims)
    return _one_by_one(functools.partial(_bind_tangent, **params), moved, mapped)


def _batch_gradients(
    operands: Arrays, dims: Dims, *, body: Any, **params: Any
) -> Batched:
    moved, mapped, _ = move_mapped(operands, dims)
    return _one_by_one(functools.partial(_bind_gradients, **params), moved, mapped)


def _one_by_one(
    f: Callable[..., list[Any]], moved: Arrays, mapped: Sequence[bool]
) -> Batched:
    """vmap that has the logits of one chunk of one example in memory at a time."""
    pairs = list(zip(moved, mapped, strict=True))

    def of_one(own: list[Any]) -> list[Any]:
        rest = iter(own)
        return f(*(next(rest) if is_mapped else a for a, is_mapped in pairs))

    outs = lax.map(of_one, [a for a, is_mapped in pairs if is_mapped])
    return outs, [0] * len(outs)


jax_rules.register(_NAME, linear_cross_entropy_p, reference, jvp=_jvp, batch=_batch)
jax_rules.register(
    _NAME,
    tangent_p,
    _plain_tangent,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    batch=_batch_tangent,
)
jax_rules.register(
    _NAME,
    gradients_p,
    _plain_gradients,
    jvp=_gradients_jvp,
    transpose=_gradients_transpose,
    batch=_batch_gradients,
)


def _as_dot(avals: Sequence[Aval], params: Params) -> tuple[Any, ...]:
    """The product of all logits, of which little is saved."""
    head = params["head"]
    how = {"layout": head.layout, "precision": head.precision, "out": head.logits}
    how |= as_ranks(Ranks(rows=len(avals[0].shape) - 1))
    return product_as_dot(avals, how)


remat.seen_as(linear_cross_entropy_p, _as_dot)

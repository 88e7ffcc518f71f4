"""The primitive of matrix products with an epilogue, and its rules for JAX.

Its canonical form has two operands of rank 2 or 3, where a rank-2 operand is shared by
all batches; with ``ranks`` there are more dimensions of each kind (``common.ranks``).
``ops.matmul.public`` and ``rewrite.matmul`` bind it.

Operands: lhs, rhs, then bias and residual if the epilogue has them. Results: y, then z
if the epilogue saves it, or column sums in float32. ``layout`` is ``GemmProblem``'s;
``out`` the dtype of y and z; of ``stored``, the module of that name tells.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.faults import NotLinear
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import jax_rules, lowering, remat
from tracea_jax.ops.common.jax_rules import jvp_of_some
from tracea_jax.ops.common.ranks import Ranks, as_ranks, of_mapped, spread
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
    Tangents,
    Zero,
    ad,
    unless_zero,
)
from tracea_jax.ops.matmul.definition import (
    of_batches,
    problem_of,
    reference,
    split,
    written,
)
from tracea_jax.ops.matmul.sharding import rule
from tracea_jax.ops.matmul.stored import NONE, Stored, alone
from tracea_jax.problem import Epilogue

FLIP = {"n": "t", "t": "n"}


def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The primitive's results."""
    return lowering.bound(matmul_p, reference, operands, params)


def unfused(*operands: jax.Array, epilogue: Epilogue, **params: Any) -> list[jax.Array]:
    """The results of an epilogue with a derivative, the product planned on its own."""
    lhs, rhs, _, z = split(operands, epilogue)
    (acc,) = bind(lhs, rhs, **{**params, "epilogue": Epilogue(), "config": None})
    return epilogues.apply(acc, epilogue, None, z, params["out"])


def flattened(
    *operands: jax.Array,
    layout: str,
    epilogue: Epilogue,
    ranks: Ranks,
    **params: Any,
) -> list[jax.Array]:
    """The primitive by the canonical one, whose dimensions of a kind are merged."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    left, right = ranks.lhs(lhs, layout[0]), ranks.rhs(rhs, layout[1])
    n = math.prod(right.outer)
    batch = (*(left.batch or right.batch),)
    merged = (*((math.prod(batch),) if batch else ()), math.prod(left.outer), n)
    canonical = [
        lhs.reshape(left.flat(layout[0], outer_first=True)),
        rhs.reshape(right.flat(layout[1], outer_first=False)),
    ]
    if bias is not None:
        own = merged[:1] if epilogue.bias == "batched_row" else ()
        canonical.append(bias.reshape(*own, n))
    if residual is not None:
        canonical.append(residual.reshape(merged))
    how: Params = {"layout": layout, "epilogue": epilogue, **params}
    results = matmul_p.bind(*canonical, **how)
    shapes = [(*batch, *left.outer, *right.outer)] * len(results)
    if epilogue.column_sums:
        shapes[-1] = right.outer
    return [y.reshape(shape) for y, shape in zip(results, shapes, strict=True)]


def is_one_operation(
    *, epilogue: Epilogue, stored: Stored = NONE, **params: Any
) -> bool:
    """Returns whether the primitive is a ``dot_general`` and nothing else."""
    return epilogue == Epilogue() and stored == NONE


matmul_p = lowering.primitive("tracea_matmul", reference)
PLANNED = (
    lowering.register(
        "matmul",
        matmul_p,
        problem_of,
        reference,
        flattened=flattened,
        sharding=functools.partial(rule, matmul_p),
        is_one_operation=is_one_operation,
        xla=written,
    ),
)


def _jvp(
    primals: Arrays, tangents: Tangents, *, epilogue: Epilogue, **params: Any
) -> Differentiated:
    """y' = activation'(z) z' + residual' with z' = lhs' rhs + lhs rhs' + bias'.

    If the residual is multiplied with, y' is activation'(z) z' residual +
    activation(z) residual'. Where it takes z, z becomes a second result of the same
    product.
    """
    if epilogue.is_derivative:
        return jvp_of_some(
            functools.partial(unfused, epilogue=epilogue, **params), primals, tangents
        )
    residual = split(primals, epilogue)[3]
    dresidual = unless_zero(split(tangents, epilogue)[3])
    scaled = _multiplies(epilogue) and dresidual is not None
    saved = epilogue
    if epilogue.activation != "none" or scaled:
        saved = dataclasses.replace(epilogue, save_preactivation=True)
    outs = bind(*primals, epilogue=saved, **params)
    dz = _preactivation_tangent(primals, tangents, outs[0], epilogue, params)
    # Without z, outs[-1] is y; then there is no activation, and no use for either.
    dy = epilogues.jvp(epilogue, outs[-1], residual, dz, dresidual)
    zero = Zero(jax.typeof(outs[0]).to_tangent_aval())
    douts = [zero if d is None else d for d in (dy, dz)]
    count = 1 + epilogue.save_preactivation
    return outs[:count], douts[:count]


def _multiplies(epilogue: Epilogue) -> bool:
    return epilogue.residual and epilogue.residual_op == "multiply"


def _preactivation_tangent(
    primals: Arrays,
    tangents: Tangents,
    y: jax.Array,
    epilogue: Epilogue,
    params: Params,
) -> jax.Array | None:
    """lhs' rhs + lhs rhs' + bias', or None if all three tangents are zero."""
    lhs, rhs, *_ = primals
    dlhs, drhs, dbias, _ = map(unless_zero, split(tangents, epilogue))
    plain = {**params, "epilogue": Epilogue(), "config": None}
    terms: list[jax.Array] = []
    if dlhs is not None:
        terms += bind(dlhs, rhs, **plain)
    if drhs is not None:
        terms += bind(lhs, drhs, **plain)
    if (dbias := of_batches(dbias, epilogue, Ranks.of(lhs, rhs, params))) is not None:
        terms.append(jnp.broadcast_to(dbias, y.shape).astype(y.dtype))
    return functools.reduce(jnp.add, terms) if terms else None


def _transpose(
    cts: Tangents, *operands: Operand, epilogue: Epilogue, layout: str, **params: Any
) -> Cotangents:
    """Cotangents of the operands the primitive is linear in.

    Derivatives of an activation are products without one; with one it is not linear.
    A residual that is multiplied with is one more factor.
    """
    if epilogue.is_derivative:
        return _transpose_derivative(
            cts, *operands, epilogue=epilogue, layout=layout, **params
        )
    if epilogue.activation != "none":
        raise NotLinear(
            f"matmul with activation={epilogue.activation!r} is not linear, so it has "
            "no transpose; use jax.vjp"
        )
    (ct, *_) = cts
    lhs, rhs, bias, residual = split(operands, epilogue)
    undefined = [ad.is_undefined_primal(x) for x in operands]
    if isinstance(ct, Zero):
        return [
            Zero(x.aval) if u else None
            for x, u in zip(operands, undefined, strict=True)
        ]
    plain = {**params, "epilogue": Epilogue(), "config": None}
    ranks = Ranks.of(_aval(lhs), _aval(rhs), params)
    if _multiplies(epilogue):
        if undefined[-1]:
            return _transpose_factor(ct, operands, undefined, epilogue, layout, plain)
        ct, residual = epilogues.times(ct, operands[-1], ct.dtype), None
    grads: Cotangents = [None, None]
    if ad.is_undefined_primal(lhs):
        grads[0] = _transpose_lhs(lhs.aval, rhs, ct, layout, ranks, plain)
    if ad.is_undefined_primal(rhs):
        grads[1] = _transpose_rhs(rhs.aval, lhs, ct, layout, ranks, plain)
    if bias is not None:
        first = 0 if epilogue.bias == "row" else ranks.batch
        axes = tuple(range(first, ct.ndim - ranks.columns))
        linear = ad.is_undefined_primal(bias)
        grads.append(ct.sum(axes).astype(bias.aval.dtype) if linear else None)
    if residual is not None:
        linear = ad.is_undefined_primal(residual)
        grads.append(ct.astype(residual.aval.dtype) if linear else None)
    return grads + [None] * (len(operands) - len(grads))


def _transpose_derivative(
    cts: Tangents, *operands: Operand, epilogue: Epilogue, **params: Any
) -> Cotangents:
    """Cotangents of lhs and rhs: a product's, with (ct + that of sums) act'(z)."""
    *factors, z = operands
    if ad.is_undefined_primal(z):
        raise NotLinear(
            "matmul times a derivative is not linear in the derivative's argument, so "
            "it has no transpose with respect to it; use jax.vjp"
        )
    terms = [ct for ct in cts if not isinstance(ct, Zero)]
    ct = (
        Zero(z.aval)
        if not terms
        else epilogues.activation_jvp(
            epilogue.activation, z, functools.reduce(jnp.add, terms)
        ).astype(params["out"])
    )
    step: Params = {"epilogue": Epilogue(), "config": None}
    return [*_transpose([ct], *factors, **{**params, **step}), None]


def _transpose_factor(
    ct: jax.Array,
    operands: Sequence[Operand],
    undefined: Sequence[bool],
    epilogue: Epilogue,
    layout: str,
    params: Params,
) -> Cotangents:
    """The cotangent of a residual that z is multiplied with: ct z."""
    if any(undefined[:-1]):
        raise NotLinear(
            "matmul times a residual is not linear in both, so it has no transpose "
            "with respect to both; use jax.vjp"
        )
    *known, residual = operands
    step = Epilogue(bias=epilogue.bias)
    (z,) = bind(*known, layout=layout, **{**params, "epilogue": step})
    return [None] * len(known) + [epilogues.times(ct, z, residual.aval.dtype)]


def _aval(x: Operand) -> Any:
    return x.aval if ad.is_undefined_primal(x) else x


def _transpose_lhs(
    aval: Aval,
    rhs: jax.Array,
    ct: jax.Array,
    layout: str,
    ranks: Ranks,
    params: Params,
) -> jax.Array:
    params = {**alone(params, 1, first=layout[0] == "t"), "out": aval.dtype}
    m, k, n = ranks.rows, ranks.contraction, ranks.columns
    if layout[0] == "n":  # (m, k) = ct (m, n) @ rhs' (n, k)
        operands, layout = (ct, rhs), "n" + FLIP[layout[1]]
        new = dataclasses.replace(ranks, rows=m, contraction=n, columns=k)
    else:  # (k, m) = rhs (k, n) @ ct' (n, m)
        operands, layout = (rhs, ct), layout[1] + "t"
        new = dataclasses.replace(ranks, rows=k, contraction=n, columns=m)
    return _gradient(operands, layout, new, aval, params)


def _transpose_rhs(
    aval: Aval,
    lhs: jax.Array,
    ct: jax.Array,
    layout: str,
    ranks: Ranks,
    params: Params,
) -> jax.Array:
    params = {**alone(params, 0, first=layout[1] == "n"), "out": aval.dtype}
    shared = aval.ndim == ranks.contraction + ranks.columns
    if shared and ranks.has_batch(lhs, aval)[0] and layout[0] == "n":
        # The batch joins the contraction, which is better than a sum.
        rows = ranks.batch + ranks.rows
        ranks = dataclasses.replace(ranks, batch=0, rows=rows)
    m, k, n = ranks.rows, ranks.contraction, ranks.columns
    if layout[1] == "n":  # (k, n) = lhs' (k, m) @ ct (m, n)
        operands, layout = (lhs, ct), FLIP[layout[0]] + "n"
        new = dataclasses.replace(ranks, rows=k, contraction=m, columns=n)
    else:  # (n, k) = ct' (n, m) @ lhs (m, k)
        operands, layout = (ct, lhs), "t" + layout[0]
        new = dataclasses.replace(ranks, rows=n, contraction=m, columns=k)
    return _gradient(operands, layout, new, aval, params)


def _gradient(
    operands: tuple[jax.Array, jax.Array],
    layout: str,
    ranks: Ranks,
    aval: Aval,
    params: Params,
) -> jax.Array:
    """A product in the shape of its operand, summed over batches that share this."""
    others = {name: value for name, value in params.items() if name != "ranks"}
    (grad,) = bind(*operands, layout=layout, **others, **as_ranks(ranks))
    return grad.sum(tuple(range(ranks.batch))) if grad.ndim > aval.ndim else grad


def _batch(
    operands: Arrays, dims: Dims, *, epilogue: Epilogue, layout: str, **params: Any
) -> Batched:
    """vmap: stacks rows where only they are mapped, else makes a batched product."""
    if epilogue.is_derivative:
        how = {**params, "epilogue": epilogue, "layout": layout}
        f = jax.vmap(functools.partial(unfused, **how), in_axes=tuple(dims))
        outs = f(*operands)
        return outs, [0] * len(outs)
    moved, mapped, size = move_mapped(operands, dims)
    lhs, rhs, bias, residual = split(moved, epilogue)
    lhs_mapped, rhs_mapped, bias_mapped, residual_mapped = split(mapped, epilogue)
    params = {**params, "layout": layout}
    batched = of_mapped((lhs, rhs), mapped, size, layout, params)
    ranks, batch = batched.ranks, batched.batch
    if not (lhs_mapped or rhs_mapped):
        outs = _epilogue_of_shared_product(moved, mapped, size, epilogue, ranks, params)
        return outs, [0] * len(outs)

    others = {name: value for name, value in params.items() if name != "ranks"}
    lhs_inner, rhs_inner = batched.inner
    if not (rhs_mapped or bias_mapped or ranks.batch) and layout[0] == "n":
        new = batched.with_rows
    else:
        new = batched.with_batch
        if lhs_mapped or lhs_inner:
            lhs = spread(lhs, lhs_mapped, lhs_inner, batch)
        if rhs_mapped or rhs_inner:
            rhs = spread(rhs, rhs_mapped, rhs_inner, batch)
        own = ranks.batch if epilogue.bias == "batched_row" else 0
        if bias is not None and (bias_mapped or own):
            bias = spread(bias, bool(bias_mapped), own, batch)
            epilogue = dataclasses.replace(epilogue, bias="batched_row")
    if residual is not None:
        residual = spread(residual, bool(residual_mapped), ranks.batch, batch)
    moved = [x for x in (lhs, rhs, bias, residual) if x is not None]
    outs = bind(*moved, epilogue=epilogue, **others, **as_ranks(new))
    return outs, [0] * len(outs)


def _epilogue_of_shared_product(
    operands: Arrays,
    mapped: Sequence[bool],
    size: int,
    epilogue: Epilogue,
    ranks: Ranks,
    params: Params,
) -> list[jax.Array]:
    """Only bias or residual are mapped: one product, then an epilogue for each."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    _, _, bias_mapped, residual_mapped = split(mapped, epilogue)
    out = params["out"]
    wide = epilogues.accumulator_dtype(epilogue, lhs.dtype, rhs.dtype, out)
    plain = {**params, "out": wide, "epilogue": Epilogue(), "config": None}
    (acc,) = bind(lhs, rhs, **plain)
    acc = jnp.broadcast_to(acc, (size, *acc.shape))
    if bias is not None:
        own = ranks.batch if epilogue.bias == "batched_row" else 0
        bias = spread(bias, bool(bias_mapped), own, (size, *acc.shape[1 : 1 + own]))
        places = range(1 + own, acc.ndim - ranks.columns)
        bias = jnp.expand_dims(bias, tuple(places))
    if residual is not None and not residual_mapped:
        residual = residual[None]
    return epilogues.apply(acc, epilogue, bias, residual, out)


def as_dot(avals: Sequence[Aval], params: Params) -> tuple[Any, ...]:
    """The product as ``lax.dot_general``, for policies of rematerialisation."""
    lhs, rhs, *_ = avals
    return (
        jax.lax.dot_general_p,
        (lhs, rhs),
        {
            "dimension_numbers": Ranks.of(lhs, rhs, params).dot_dimensions(
                lhs, rhs, params["layout"]
            ),
            "precision": params["precision"],
            "preferred_element_type": params["out"],
        },
    )


remat.seen_as(matmul_p, as_dot)
jax_rules.register(
    "matmul", matmul_p, written, jvp=_jvp, transpose=_transpose, batch=_batch
)

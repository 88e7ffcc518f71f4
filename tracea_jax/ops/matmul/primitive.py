"""The primitive of matrix products with an epilogue, and its rules for JAX.

It works on the canonical form: two operands of rank 2 or 3, where a rank-2 operand is
shared by all batches. What ``jnp.matmul`` accepts beyond that, ``ops.matmul.public``
folds into it; ``rewrite.matmul`` binds it where a program has such a product.

Operands: lhs, rhs, then bias and residual if the epilogue has them. Results: y, then z
if the epilogue saves it, or column sums in float32. ``layout`` is ``GemmProblem``'s;
``out`` the dtype of y and z; of ``stored``, the module of that name tells.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import lowering, remat
from tracea_jax.ops.common.precision import precision_name
from tracea_jax.ops.common.shapes import flat, move_mapped, with_batch
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
    batching,
    jvp,
    lax,
    unless_zero,
)
from tracea_jax.ops.matmul.stored import NONE, Stored, alone
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.problem.gemm import Layout

FLIP = {"n": "t", "t": "n"}
T = TypeVar("T")  # one thing for each operand: its array, tangent, type or axis


def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The primitive's results; those of its reference for explicit shardings."""
    if lowering.explicitly_sharded("matmul", operands, params["implementation"]):
        return reference(*operands, **params)
    return matmul_p.bind(*lowering.align_varying_axes(operands), **params)


def dimension_numbers(
    lhs: jax.Array | Aval, rhs: jax.Array | Aval, layout: str
) -> jax.lax.DotDimensionNumbers:
    """Those of the ``lax.dot_general`` that contracts op(lhs) with op(rhs)."""
    contract = (
        lhs.ndim - (1 if layout[0] == "n" else 2),
        rhs.ndim - (2 if layout[1] == "n" else 1),
    )
    batch = ((0,), (0,)) if lhs.ndim == rhs.ndim == 3 else ((), ())
    return ((contract[0],), (contract[1],)), batch


def product(
    lhs: jax.Array, rhs: jax.Array, *, layout: str, out: jnp.dtype, precision: Any
) -> jax.Array:
    """op(lhs) @ op(rhs) in canonical form, as one ``lax.dot_general``.

    Where dtypes differ, as of a float32 cotangent and bfloat16 weights, no operand is
    rounded: XLA would round both to a narrower result's dtype.
    """
    mixed = lhs.dtype != rhs.dtype
    acc = lax.dot_general(
        lhs,
        rhs,
        dimension_numbers(lhs, rhs, layout),
        precision=precision,
        preferred_element_type=epilogues.written_dtype(out, lhs, rhs) if mixed else out,
    ).astype(out)
    return acc.swapaxes(0, 1) if lhs.ndim == 2 and rhs.ndim == 3 else acc


def split(operands: Sequence[T], epilogue: Epilogue) -> tuple[T, T, T | None, T | None]:
    """(lhs, rhs, bias or None, residual or None) of the primitive's operands."""
    lhs, rhs, *rest = operands
    bias = rest.pop(0) if epilogue.bias != "none" else None
    return lhs, rhs, bias, rest.pop(0) if epilogue.residual else None


def reference(
    *operands: jax.Array,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    **_: Any,
) -> list[jax.Array]:
    """The primitive in jnp: the default lowering and the tests' oracle."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    wide = epilogues.accumulator_dtype(epilogue, lhs.dtype, rhs.dtype, out)
    acc = product(lhs, rhs, layout=layout, out=wide, precision=precision)
    return epilogues.apply(acc, epilogue, _of_batches(bias, epilogue), residual, out)


def written(
    *operands: jax.Array,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    **_: Any,
) -> list[jax.Array]:
    """The primitive as people write it in jnp, every step rounded: XLA's variant."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    dtype = epilogues.written_dtype(out, bias, residual)
    acc = product(lhs, rhs, layout=layout, out=dtype, precision=precision)
    return epilogues.apply(acc, epilogue, _of_batches(bias, epilogue), residual, out)


def unfused(*operands: jax.Array, epilogue: Epilogue, **params: Any) -> list[jax.Array]:
    """The results of an epilogue with a derivative, the product planned on its own."""
    lhs, rhs, _, z = split(operands, epilogue)
    (acc,) = bind(lhs, rhs, **{**params, "epilogue": Epilogue(), "config": None})
    return epilogues.apply(acc, epilogue, None, z, params["out"])


def _of_batches(bias: jax.Array | None, epilogue: Epilogue) -> jax.Array | None:
    if bias is None or epilogue.bias != "batched_row":
        return bias
    return bias[:, None, :]


def problem_of(
    avals: Sequence[Aval],
    *,
    layout: Layout,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    stored: Stored = NONE,
    **_: Any,
) -> GemmProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    lhs, rhs, bias, residual = split(avals, epilogue)
    rows, cols = lhs.shape[-2:], rhs.shape[-2:]
    return GemmProblem(
        batch=max([x.shape[0] for x in (lhs, rhs) if x.ndim == 3], default=1),
        m=rows[0] if layout[0] == "n" else rows[1],
        k=rows[1] if layout[0] == "n" else rows[0],
        n=cols[1] if layout[1] == "n" else cols[0],
        lhs=lhs.dtype.name,
        rhs=rhs.dtype.name,
        out=jnp.dtype(out).name,
        layout=layout,
        lhs_batched=lhs.ndim == 3,
        rhs_batched=rhs.ndim == 3,
        precision=precision_name(precision),
        epilogue=dataclasses.replace(
            epilogue,
            bias_dtype=epilogues.other_dtype(bias, out),
            residual_dtype=epilogues.other_dtype(residual, out),
        ),
        **dict(zip(("lhs_stored", "rhs_stored"), stored, strict=True)),
    )


matmul_p = lowering.primitive("tracea_matmul", reference)
PLANNED = (lowering.register("matmul", matmul_p, problem_of, reference, xla=written),)


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


def jvp_of_some(
    f: Callable[..., T], primals: Arrays, tangents: Tangents
) -> tuple[T, T]:
    """``jax.jvp`` with respect to the operands whose tangent is not zero."""
    perturbed = [not isinstance(t, Zero) for t in tangents]

    def of_perturbed(*some: jax.Array) -> T:
        rest = iter(some)
        pairs = zip(primals, perturbed, strict=True)
        return f(*(next(rest) if p else x for x, p in pairs))

    xs, dxs = (
        tuple(x for x, p in zip(all_, perturbed, strict=True) if p)
        for all_ in (primals, tangents)
    )
    return jvp(of_perturbed, xs, dxs)


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
    if (dbias := _of_batches(dbias, epilogue)) is not None:
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
        raise ValueError(
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
    if _multiplies(epilogue):
        if undefined[-1]:
            return _transpose_factor(ct, operands, undefined, epilogue, layout, plain)
        ct, residual = epilogues.times(ct, operands[-1], ct.dtype), None
    grads: Cotangents = [None, None]
    if ad.is_undefined_primal(lhs):
        grads[0] = _transpose_lhs(lhs.aval, rhs, ct, layout, plain)
    if ad.is_undefined_primal(rhs):
        grads[1] = _transpose_rhs(rhs.aval, lhs, ct, layout, plain)
    if bias is not None:
        axes = tuple(range(ct.ndim - 1)) if epilogue.bias == "row" else (1,)
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
        raise ValueError(
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
        raise ValueError(
            "matmul times a residual is not linear in both, so it has no transpose "
            "with respect to both; use jax.vjp"
        )
    *known, residual = operands
    step = Epilogue(bias=epilogue.bias)
    (z,) = bind(*known, layout=layout, **{**params, "epilogue": step})
    return [None] * len(known) + [epilogues.times(ct, z, residual.aval.dtype)]


def _transpose_lhs(
    aval: Aval, rhs: jax.Array, ct: jax.Array, layout: str, params: Params
) -> jax.Array:
    params = {**alone(params, 1, first=layout[0] == "t"), "out": aval.dtype}
    if layout[0] == "n":  # (m, k) = ct (m, n) @ rhs' (n, k)
        operands, layout = (ct, rhs), "n" + FLIP[layout[1]]
    else:  # (k, m) = rhs (k, n) @ ct' (n, m)
        operands, layout = (rhs, ct), layout[1] + "t"
    return _sum_batch(bind(*operands, layout=layout, **params)[0], aval)


def _transpose_rhs(
    aval: Aval, lhs: jax.Array, ct: jax.Array, layout: str, params: Params
) -> jax.Array:
    params = {**alone(params, 0, first=layout[1] == "n"), "out": aval.dtype}
    if aval.ndim == 2 and lhs.ndim == 3 and layout[0] == "n":
        # A shared rhs: the batch joins the contraction, which is better than a sum.
        lhs, ct = flat(lhs, 1), flat(ct, 1)
    if layout[1] == "n":  # (k, n) = lhs' (k, m) @ ct (m, n)
        operands, layout = (lhs, ct), FLIP[layout[0]] + "n"
    else:  # (n, k) = ct' (n, m) @ lhs (m, k)
        operands, layout = (ct, lhs), "t" + layout[0]
    return _sum_batch(bind(*operands, layout=layout, **params)[0], aval)


def _sum_batch(grad: jax.Array, aval: Aval) -> jax.Array:
    """The gradient of an operand that all batches share."""
    return grad.sum(0) if grad.ndim > aval.ndim else grad


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
    if not (lhs_mapped or rhs_mapped):
        outs = _epilogue_of_shared_product(moved, mapped, size, epilogue, params)
        return outs, [0] * len(outs)

    lhs_inner, rhs_inner = lhs.ndim - lhs_mapped == 3, rhs.ndim - rhs_mapped == 3
    inner = [x.shape[-3] for x, i in ((lhs, lhs_inner), (rhs, rhs_inner)) if i][:1]
    batch = (size, *inner)
    m = lhs.shape[-2 if layout[0] == "n" else -1]
    n = rhs.shape[-1 if layout[1] == "n" else -2]
    if residual is not None:
        residual = with_batch(residual, residual_mapped, bool(inner), batch, 2)
    if not (rhs_mapped or bias_mapped or inner) and layout[0] == "n":
        lhs = flat(lhs, 1)
        residual = None if residual is None else flat(residual, 1)
    else:
        if lhs_mapped or lhs_inner:
            lhs = with_batch(lhs, lhs_mapped, lhs_inner, batch, 2)
        if rhs_mapped or rhs_inner:
            rhs = with_batch(rhs, rhs_mapped, rhs_inner, batch, 2)
        if bias_mapped or epilogue.bias == "batched_row":
            bias = with_batch(
                bias, bias_mapped, epilogue.bias == "batched_row", batch, 1
            )
            epilogue = dataclasses.replace(epilogue, bias="batched_row")
    moved = [x for x in (lhs, rhs, bias, residual) if x is not None]
    outs = bind(*moved, epilogue=epilogue, **params)
    return [y.reshape(*batch, m, n) for y in outs], [0] * len(outs)


def _epilogue_of_shared_product(
    operands: Arrays,
    mapped: Sequence[bool],
    size: int,
    epilogue: Epilogue,
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
        own_batch = epilogue.bias == "batched_row"
        bias = jnp.expand_dims(bias, -2)
        if bias_mapped and not own_batch:
            bias = bias.reshape(size, *(1,) * (acc.ndim - 2), bias.shape[-1])
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
            "dimension_numbers": dimension_numbers(lhs, rhs, params["layout"]),
            "precision": params["precision"],
            "preferred_element_type": params["out"],
        },
    )


remat.seen_as(matmul_p, as_dot)
ad.primitive_jvps[matmul_p] = _jvp
ad.primitive_transposes[matmul_p] = _transpose
batching.primitive_batchers[matmul_p] = _batch

"""gated_matmul: activation(x @ w_gate) * (x @ w_up), the first half of a gated MLP.

The primitive works on the forms of ``ops.matmul``, with two right operands.
Its derivatives are plain products, ``matmul_p``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from tracea_jax import variants
from tracea_jax.faults import NotLinear
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import jax_rules, lowering, remat
from tracea_jax.ops.common.precision import canonical_precision
from tracea_jax.ops.common.promotion import (
    preferred_dtype,
    product_dtype,
    promoted,
)
from tracea_jax.ops.common.ranks import Ranks, as_ranks, of_mapped, spread
from tracea_jax.ops.common.shapes import check_arrays, fold, move_mapped
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Params,
    Tangent,
    Tangents,
    Zero,
    ad,
    broadcast_shapes,
    jit,
)
from tracea_jax.ops.gated_matmul.sharding import rule
from tracea_jax.ops.matmul.definition import problem_of as problem_of_product
from tracea_jax.ops.matmul.definition import product
from tracea_jax.ops.matmul.primitive import as_dot
from tracea_jax.ops.matmul.primitive import bind as bind_product
from tracea_jax.problem import Epilogue, GatedMatmulProblem, check_activation
from tracea_jax.typing import Activation, Implementation
from tracea_jax.variants.gated import PRODUCT_FIELDS, gate_epilogue


def gated_matmul(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    *,
    activation: Activation = "silu",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """activation(x @ w_gate) * (x @ w_up).

    Kernels compute the gate in float32 from the unrounded product with w_gate. What
    they store on the way is rounded to the result's dtype: the product with w_up, and
    in "gated_unfused" also the activated one. Where XLA serves the problem, it is the
    same expression in jnp, whose every step rounds.

    Args:
      x: (..., m, k), or (k,). Batch dimensions broadcast as in ``jnp.matmul``.
      w_gate, w_up: (..., k, n), of one shape.
      activation: "none", "relu", "gelu" (tanh form), "gelu_exact" (erf form), "silu".
      precision: of both products, as in ``jax.lax.dot_general``.
      preferred_element_type: dtype of the result; by default the common one of x and
        the weights, as in jnp.
      out_sharding: the result's sharding over explicit axes of a mesh, as in
        ``jnp.matmul``: a ``NamedSharding`` or ``PartitionSpec``, None for what lax
        derives.
      implementation: None for the best known, "xla", "tracea" (kernels of ours or an
        error with every reason), "gated_fused" or "gated_unfused"; for the products of
        derivatives None, "xla" or else "tracea".
      config: explicit config. The variants have no choices of their own: their products
        are planned as problems of ``matmul``.

    Returns:
      (..., m, n), without m if x is a vector.

    Raises:
      ValueError: on shapes that do not fit, an unknown activation or implementation, a
        config, or an implementation that cannot run the problem.
      TypeError: on operands that are no arrays, such as lists, or a preferred dtype
        that ``jnp.matmul`` refuses.
    """
    check_activation(activation)
    variants.check_implementation("gated_matmul", implementation)
    call = functools.partial(
        _gated_matmul,
        activation=activation,
        precision=canonical_precision(precision),
        out=preferred_dtype(preferred_element_type),
        implementation=implementation,
        config=lowering.hashable_config(config),
    )
    call = lowering.with_out_sharding(call, out_sharding, x, w_gate)
    return call(x, w_gate, w_up)


@functools.partial(
    jit,
    static_argnames=("activation", "precision", "out", "implementation", "config"),
    inline=True,
)
def _gated_matmul(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: str,
    out: Any,
    **how: Any,
) -> jax.Array:
    check_arrays("gated_matmul", x=x, w_gate=w_gate, w_up=w_up)
    _check_shapes(x, w_gate, w_up)
    factors = [product_dtype(x, w, out) for w in (w_gate, w_up)]
    out = functools.reduce(jnp.promote_types, factors)
    epilogues.check_result(activation, out)
    rhs = promoted(w_gate.dtype, w_up.dtype)
    lhs = x[None, :] if x.ndim == 1 else x
    batch = broadcast_shapes(lhs.shape[:-2], w_gate.shape[:-2])
    keep = (*batch, *lhs.shape[-2:-1][: x.ndim - 1], w_gate.shape[-1])
    rights = w_gate.astype(rhs), w_up.astype(rhs)
    operands, ranks = fold(lhs, *rights, batch=batch)
    how |= {"layout": "nn", "out": out, "activation": activation, **as_ranks(ranks)}
    (y,) = _bind(*operands, save_products=False, **how)
    return y.reshape(keep)


def _check_shapes(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> None:
    if w_gate.shape != w_up.shape or w_gate.ndim < 2:
        raise ValueError(
            "w_gate and w_up must have one shape, (..., k, n); they have "
            f"{w_gate.shape} and {w_up.shape}"
        )
    if x.ndim == 0 or x.shape[-1] != w_gate.shape[-2]:
        raise ValueError(
            f"gated_matmul contracts the last dimension of x, {x.shape}, with the "
            f"second to last of the weights, {w_gate.shape}; the two must be equal"
        )


# --- the primitive --------------------------------------------------------------------
#
# Operands: lhs, gate, up. Results: y, then g = lhs @ gate and u = lhs @ up if they are
# saved. ``layout`` is GatedMatmulProblem's; ``out`` the results' dtype.


def _bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    return lowering.bound(gated_matmul_p, reference, operands, params)


def reference(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    out: jnp.dtype,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> list[jax.Array]:
    """The primitive in jnp: the default lowering and the tests' oracle."""
    step = gate_epilogue(activation, save_products, fused=True)
    wide = epilogues.accumulator_dtype(step, lhs.dtype, gate.dtype, out)
    how: Params = {
        "layout": params["layout"],
        "precision": params["precision"],
        "out": wide,
        "ranks": Ranks.of(lhs, gate, params),
    }
    g, u = (product(lhs, w, **how) for w in (gate, up))
    results = epilogues.apply(g, step, None, u, out)
    return [*results, u.astype(out)] if save_products else results


def written(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    out: jnp.dtype,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> list[jax.Array]:
    """The primitive as people write it in jnp, every step rounded: XLA's variant."""
    how: Params = {
        "layout": params["layout"],
        "precision": params["precision"],
        "out": out,
        "ranks": Ranks.of(lhs, gate, params),
    }
    g, u = (product(lhs, w, **how) for w in (gate, up))
    step = gate_epilogue(activation, save_products, fused=True)
    results = epilogues.apply(g, step, None, u, out)
    return [*results, u] if save_products else results


def fused(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> list[jax.Array]:
    """The product with up, read by the epilogue of the other one."""
    how = _of_our_kernels(params)
    (u,) = bind_product(lhs, up, epilogue=Epilogue(), **how)
    step = gate_epilogue(activation, save_products, fused=True)
    results = bind_product(lhs, gate, u, epilogue=step, **how)
    return [*results, u] if save_products else results


def unfused(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> list[jax.Array]:
    """Two products, multiplied by XLA."""
    how = _of_our_kernels(params)
    (u,) = bind_product(lhs, up, epilogue=Epilogue(), **how)
    step = gate_epilogue(activation, save_products, fused=False)
    activated, *g = bind_product(lhs, gate, epilogue=step, **how)
    y = epilogues.times(activated, u, params["out"])
    return [y, *g, u] if save_products else [y]


def _of_our_kernels(params: Params) -> Params:
    return {**params, "implementation": "tracea", "config": None}


def problem_of(
    avals: Sequence[Aval],
    *,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> GatedMatmulProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    lhs, gate, _ = avals
    one = problem_of_product((lhs, gate), epilogue=Epilogue(), **params)
    fields = {name: getattr(one, name) for name in PRODUCT_FIELDS}
    return GatedMatmulProblem(
        **fields, activation=activation, save_products=save_products
    )


def flattened(
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    layout: str,
    ranks: Ranks,
    **params: Any,
) -> list[jax.Array]:
    """The primitive by the canonical one, whose dimensions of a kind are merged."""
    right = ranks.rhs(gate, layout[1]).flat(layout[1], outer_first=False)
    left = ranks.lhs(lhs, layout[0]).flat(layout[0], outer_first=True)
    canonical = [lhs.reshape(left), gate.reshape(right), up.reshape(right)]
    results = gated_matmul_p.bind(*canonical, layout=layout, **params)
    return [y.reshape(ranks.result(lhs, gate, layout)) for y in results]


gated_matmul_p = lowering.primitive("tracea_gated_matmul", reference)
PLANNED = (
    lowering.register(
        "gated_matmul",
        gated_matmul_p,
        problem_of,
        reference,
        flattened=flattened,
        sharding=functools.partial(rule, gated_matmul_p),
        xla=written,
        fused=fused,
        unfused=unfused,
    ),
)


def _jvp(
    primals: Arrays,
    tangents: Tangents,
    *,
    activation: Activation,
    save_products: bool,
    **params: Any,
) -> Differentiated:
    """y' = activation'(g) g' u + activation(g) u', with g' = lhs' gate + lhs gate'."""
    outs = _bind(*primals, activation=activation, save_products=True, **params)
    _, g, u = outs
    lhs, gate, up = primals
    dlhs, dgate, dup = tangents
    dg = _product_tangent(lhs, gate, dlhs, dgate, params)
    du = _product_tangent(lhs, up, dlhs, dup, params)
    step = gate_epilogue(activation, True, fused=True)
    dy = epilogues.jvp(step, g, u, dg, du)
    zero = Zero(jax.typeof(g).to_tangent_aval())
    douts = [zero if d is None else d for d in (dy, dg, du)]
    count = 3 if save_products else 1
    return outs[:count], douts[:count]


def _product_tangent(
    lhs: jax.Array, rhs: jax.Array, dlhs: Tangent, drhs: Tangent, params: Params
) -> jax.Array | None:
    """lhs' rhs + lhs rhs', or None if both tangents are zero."""
    implementation = params["implementation"]
    if implementation not in (None, "xla"):
        implementation = "tracea"  # the names of our variants are not matmul's
    how = {**params, "implementation": implementation, "config": None}
    terms: list[jax.Array] = []
    if not isinstance(dlhs, Zero):
        terms += bind_product(dlhs, rhs, epilogue=Epilogue(), **how)
    if not isinstance(drhs, Zero):
        terms += bind_product(lhs, drhs, epilogue=Epilogue(), **how)
    return functools.reduce(jnp.add, terms) if terms else None


def _transpose(cts: Tangents, *operands: Operand, **params: Any) -> Cotangents:
    raise NotLinear(
        "gated_matmul multiplies two products, so it is not linear and has no "
        "transpose; use jax.vjp"
    )


def _batch(operands: Arrays, dims: Dims, *, layout: str, **params: Any) -> Batched:
    """vmap: stacks rows where only they are mapped, else makes batched products."""
    (lhs, gate, up), mapped, size = move_mapped(operands, dims)
    batched = of_mapped((lhs, gate), mapped, size, layout, params)
    rhs_mapped = mapped[1] or mapped[2]
    ranks = batched.with_rows
    if rhs_mapped or batched.ranks.batch or layout[0] == "t":
        ranks = batched.with_batch
        if mapped[0] or batched.inner[0]:
            lhs = spread(lhs, mapped[0], batched.inner[0], batched.batch)
    if rhs_mapped or batched.inner[1]:
        gate = spread(gate, mapped[1], batched.inner[1], batched.batch)
        up = spread(up, mapped[2], batched.inner[1], batched.batch)
    others = {name: value for name, value in params.items() if name != "ranks"}
    outs = _bind(lhs, gate, up, layout=layout, **others, **as_ranks(ranks))
    return outs, [0] * len(outs)


remat.seen_as(gated_matmul_p, as_dot)
jax_rules.register(
    "gated_matmul",
    gated_matmul_p,
    written,
    jvp=_jvp,
    batch=_batch,
)
ad.primitive_transposes[gated_matmul_p] = _transpose

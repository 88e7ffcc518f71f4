"""Layers in a row, y = activation(x @ w + bias), with one derivative rule for all.

With z = x @ w + bias of a layer and the cotangent ct of the z of the next one, whose
weights are w', the backward pass needs

    dz = (ct @ w'^T) * activation'(z)        and        dbias = sum of dz over its rows

Rules of single products make that three passes over arrays of the layer's size: the
product, and what a rule of another equation does with its result. Here they are one
product with an epilogue. To that end a layer's tangent is passed on as that of z, and
the bias's beside it, to the linear map ``tangent_p``, whose transpose is this product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from tracea_jax import dispatch
from tracea_jax.faults import NotLinear
from tracea_jax.ops.common import by_reference, jax_rules, lowering
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.jax_rules import jvp_of_some
from tracea_jax.ops.common.promotion import added
from tracea_jax.ops.common.ranks import Ranks, as_ranks
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Cotangents,
    Dims,
    Operand,
    Params,
    Primitive,
    Tangent,
    Tangents,
    Zero,
    ad,
    make_jaxpr,
    mlir,
    unless_zero,
    zeros_like,
)
from tracea_jax.ops.matmul.primitive import (
    FLIP,
    bind,
    matmul_p,
    unfused,
)
from tracea_jax.problem import Epilogue
from tracea_jax.typing import Activation

T = TypeVar("T")  # one thing for each operand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One product of a chain, as ``matmul_p`` has it.

    Attributes:
      layout: "nn" or "nt".
      out: dtype of the result.
      precision: as in ``jax.lax.dot_general``.
      epilogue: with an activation and no residual, unless the layer is the last one.
      rows: how many dimensions rows have.
      scope: names of the scopes it is in, as in a profile.
    """

    layout: str
    out: Any
    precision: Any
    epilogue: Epilogue
    rows: int = 1
    scope: str = ""

    @property
    def params(self) -> Params:
        """Parameters of the layer's product without its epilogue."""
        return {
            "layout": self.layout,
            "out": self.out,
            "precision": self.precision,
            "epilogue": Epilogue(),
            "implementation": None,
            "config": None,
            **as_ranks(Ranks(rows=self.rows)),
        }

    @property
    def operands(self) -> int:
        """Number of the layer's operands without the lhs."""
        return 1 + (self.epilogue.bias != "none") + self.epilogue.residual


def chain(layers: tuple[Layer, ...], *operands: jax.Array) -> jax.Array:
    """The last layer's result.

    Args:
      layers: at least one.
      operands: the first lhs, (rows..., k); for each layer in turn rhs, and bias, (n,),
        and residual, (rows..., n), if its epilogue has them.
    """
    body = make_jaxpr(functools.partial(_products, layers=layers))(*operands)
    aligned = lowering.align_varying_axes(operands)
    return chain_p.bind(*aligned, layers=layers, body=getattr(body, "jaxpr", body))


def _products(*operands: jax.Array, layers: tuple[Layer, ...], **_: Any) -> jax.Array:
    """The layers one after another."""
    y, *rest = operands
    for layer, (rhs, *others) in _of_layers(layers, rest):
        with jax.named_scope(layer.scope):
            how = {**layer.params, "epilogue": layer.epilogue}
            (y,) = bind(y, rhs, *others, **how)
    return y


def _of_layers(
    layers: Sequence[Layer], operands: Sequence[T]
) -> Iterator[tuple[Layer, list[T]]]:
    """Each layer with those of these that are its own."""
    rest = list(operands)
    for layer in layers:
        yield layer, [rest.pop(0) for _ in range(layer.operands)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tangent:
    """activation'(z) (dz + dbias): the tangent of an array, and of a layer's result.

    Attributes:
      dz, dbias: of the array's shape and of its last dimension; None if zero.
      z: None if the tangent is dz.
      activation: as in ``Epilogue``.
    """

    dz: jax.Array | None
    dbias: jax.Array | None = None
    z: jax.Array | None = None
    activation: str = "none"

    @property
    def is_zero(self) -> bool:
        return self.dz is None and self.dbias is None

    def times(self, rhs: jax.Array, params: Params) -> jax.Array:
        """The product with rhs."""
        if self.z is None:
            assert self.dz is not None
            return bind(self.dz, rhs, **params)[0]
        if self.dz is None:
            assert self.dbias is not None
            dbias = jnp.broadcast_to(self.dbias, self.z.shape).astype(self.z.dtype)
            return _Tangent(dz=dbias, z=self.z, activation=self.activation).times(
                rhs, params
            )
        operands = [x for x in (self.dz, self.dbias, self.z, rhs) if x is not None]
        how = {k: v for k, v in params.items() if k not in ("epilogue", "config")}
        return tangent_p.bind(
            *lowering.align_varying_axes(operands),
            activation=self.activation,
            has_bias=self.dbias is not None,
            **how,
        )


# --- the primitive --------------------------------------------------------------------
#
# Operands are those of ``chain``. ``body``, the open jaxpr of the products, is for
# readers of programs.

chain_p = Primitive("tracea_matmul_chain")


def _chain_abstract_eval(*avals: Aval, **params: Any) -> Aval:
    return lowering.result_types(functools.partial(_products, **params), *avals)[0]


def _chain_jvp(
    primals: Arrays, tangents: Tangents, *, layers: tuple[Layer, ...], body: Any
) -> tuple[jax.Array, jax.Array]:
    """The last layer's result and its tangent, computed layer by layer."""
    y, *rest = primals
    dx, *drest = map(unless_zero, tangents)
    dy = _Tangent(dz=dx)
    own_tangents = _of_layers(layers, drest)
    pairs = zip(_of_layers(layers, rest), own_tangents, strict=True)
    result: jax.Array | None = None
    for index, ((layer, operands), (_, doperands)) in enumerate(pairs):
        is_last = index + 1 == len(layers)
        with jax.named_scope(layer.scope):
            y, dy, result = _layer_jvp(layer, y, dy, operands, doperands, is_last)
    return y, zeros_like(y) if result is None else result


def _layer_jvp(
    layer: Layer,
    x: jax.Array,
    dx: _Tangent,
    operands: Arrays,
    doperands: Sequence[jax.Array | None],
    is_last: bool,
) -> tuple[jax.Array, _Tangent, jax.Array | None]:
    """(y, its tangent for the next layer, or as an array if it is the last)."""
    step, params = layer.epilogue, layer.params
    has_bias = step.bias != "none"
    rhs, drhs = operands[0], doperands[0]
    dbias = doperands[1] if has_bias else None
    residual, dresidual = (
        xs[-1] if step.residual else None for xs in (operands, doperands)
    )
    terms = [] if dx.is_zero else [dx.times(rhs, params)]
    if drhs is not None:
        terms += bind(x, drhs, **params)
    if is_last and dbias is not None:
        shape = (*x.shape[:-1], dbias.shape[0])
        terms.append(jnp.broadcast_to(dbias, shape).astype(layer.out))
    dz = functools.reduce(jnp.add, terms) if terms else None

    scales = step.residual_op == "multiply" and dresidual is not None
    needs_z = step.activation != "none" and (dz is not None or dbias is not None)
    saved = dataclasses.replace(step, save_preactivation=needs_z or scales)
    y, *z = bind(x, *operands, **{**params, "epilogue": saved})
    if is_last:
        dy = epilogues.jvp(step, z[0] if z else y, residual, dz, dresidual)
        return y, _Tangent(dz=None), dy
    if not z:
        return y, _Tangent(dz=None), None
    return (
        y,
        _Tangent(dz=dz, dbias=dbias, z=z[0], activation=step.activation),
        None,
    )


def _chain_batch(
    operands: Arrays, dims: Dims, *, layers: tuple[Layer, ...], body: Any
) -> tuple[jax.Array, int]:
    """vmap: stacks rows where only they are mapped, else leaves the layers apart."""
    x, *rest = operands
    rows, *others = dims
    if rows is None or any(d is not None for d in others):
        f = jax.vmap(functools.partial(_products, layers=layers), in_axes=tuple(dims))
        return f(*operands), 0
    x = jnp.moveaxis(x, rows, 0)
    more = tuple(dataclasses.replace(one, rows=one.rows + 1) for one in layers)
    return chain(more, x, *rest), 0


chain_p.def_abstract_eval(_chain_abstract_eval)
mlir.register_lowering(chain_p, mlir.lower_fun(_products, multiple_results=False))
by_reference.register(chain_p, _products)
jax_rules.register("matmul", chain_p, _products, jvp=_chain_jvp, batch=_chain_batch)


# --- the tangent of a product whose lhs is activated ----------------------------------
#
# Operands: dz, dbias if ``has_bias``, z, rhs. The result, linear in the first one or
# two, is (activation'(z) (dz + dbias)) @ op(rhs).

tangent_p = Primitive("tracea_matmul_tangent")


def _split(operands: Sequence[T], has_bias: bool) -> tuple[T, T | None, T, T]:
    """(dz, dbias or None, z, rhs)."""
    dz, *dbias, z, rhs = operands
    return dz, dbias[0] if has_bias else None, z, rhs


def _tangent(
    *operands: jax.Array, activation: str, has_bias: bool, **params: Any
) -> jax.Array:
    dz, dbias, z, rhs = _split(operands, has_bias)
    wide = epilogues.in_float32(dz)
    if dbias is not None:
        wide = added(wide, dbias)
    lhs = epilogues.activation_jvp(activation, z, wide).astype(dz.dtype)
    (y,) = bind(lhs, rhs, epilogue=Epilogue(), config=None, **params)
    return y


def _abstract_eval(*avals: Aval, **params: Any) -> Aval:
    return lowering.result_types(functools.partial(_tangent, **params), *avals)[0]


def _tangent_jvp(
    primals: Arrays,
    tangents: Tangents,
    *,
    activation: str,
    has_bias: bool,
    **params: Any,
) -> tuple[jax.Array, jax.Array]:
    """Linear in dz and dbias; in z and rhs as what it is computed by."""
    known: Params = {"activation": activation, "has_bias": has_bias, **params}
    y = tangent_p.bind(*primals, **known)
    _, _, z, rhs = _split(primals, has_bias)
    ddz, ddbias, dz, drhs = _split(tangents, has_bias)
    moved = _Tangent(
        dz=unless_zero(ddz), dbias=unless_zero(ddbias), z=z, activation=activation
    )
    plain = {**params, "epilogue": Epilogue(), "config": None}
    terms = [] if moved.is_zero else [moved.times(rhs, plain)]
    if not (isinstance(dz, Zero) and isinstance(drhs, Zero)):
        linear = [Zero(jax.typeof(x).to_tangent_aval()) for x in primals[:-2]]
        f = functools.partial(_tangent, **known)
        terms.append(jvp_of_some(f, primals, [*linear, dz, drhs])[1])
    return y, functools.reduce(jnp.add, terms)


def _tangent_transpose(
    ct: Tangent,
    *operands: Operand,
    activation: Activation,
    has_bias: bool,
    layout: str,
    out: jnp.dtype,
    precision: Any,
    implementation: str | None,
    **ranks: Any,
) -> Cotangents:
    """Cotangents of dz and dbias, from one product with both as results."""
    _, dbias, z, rhs = _split(operands, has_bias)
    undefined = [ad.is_undefined_primal(x) for x in operands]
    if any(undefined[-2:]):
        raise NotLinear(
            "the tangent of a matmul is not linear in its operands; use jax.vjp"
        )
    if isinstance(ct, Zero):
        pairs = zip(operands, undefined, strict=True)
        return [Zero(x.aval) if u else None for x, u in pairs]
    step = Epilogue(
        activation=activation,
        residual=True,
        residual_op="derivative",
        column_sums=dbias is not None,
    )
    how: Params = {
        "layout": "n" + FLIP[layout[1]],
        "out": z.dtype,
        "precision": precision,
        **ranks,
    }
    how |= {"epilogue": step, "implementation": implementation, "config": None}
    results = (bind if _is_fused(ct, rhs, z, **how) else unfused)(ct, rhs, z, **how)
    grads = [
        x.astype(of.aval.dtype) if ad.is_undefined_primal(of) else None
        for x, of in zip(results, operands[:-2], strict=True)
    ]
    return [*grads, None, None]


def _is_fused(*operands: jax.Array, **how: Any) -> bool:
    """Returns whether a kernel serves the product with all of its epilogue."""
    try:
        return not lowering.left_to_xla(matmul_p, operands, **how)
    except dispatch.Unsupported:  # a kernel that was demanded may yet serve the product
        return False


def _tangent_batch(
    operands: Arrays, dims: Dims, **params: Any
) -> tuple[jax.Array, int]:
    f = jax.vmap(functools.partial(_tangent, **params), in_axes=tuple(dims))
    return f(*operands), 0


tangent_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
by_reference.register(tangent_p, _tangent)
jax_rules.register(
    "matmul",
    tangent_p,
    _tangent,
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    batch=_tangent_batch,
)

"""The primitive of convolutions with an epilogue, and its rules for JAX.

The gradients of a convolution are the same primitive in another direction; see
``directions``. ``ops.conv2d.public`` binds it for programs, ``rewrite.convolution``
where a program has such a convolution.

Operands: lhs, rhs in the direction's roles, then bias and residual if the epilogue has
them, which only a forward convolution may. Results: y, then z if the epilogue saves it.
``size`` is the height and width of a gradient; None for "forward".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax.faults import NotLinear
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import jax_rules, lowering, remat
from tracea_jax.ops.common.precision import precision_name
from tracea_jax.ops.common.promotion import added
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
    unless_zero,
)
from tracea_jax.ops.conv2d import directions, product
from tracea_jax.ops.conv2d.sharding import rule
from tracea_jax.ops.matmul.definition import split
from tracea_jax.problem import Conv2dProblem, Epilogue

conv2d_p = Primitive("tracea_conv2d")
conv2d_p.multiple_results = True


def bind(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """The primitive's results."""
    return lowering.bound(conv2d_p, reference, operands, params)


def reference(
    *operands: jax.Array,
    out: jnp.dtype,
    epilogue: Epilogue,
    precision: Any,
    **params: Any,
) -> list[jax.Array]:
    """The primitive in jnp: the default lowering and the tests' oracle."""
    lhs, rhs, bias, residual = split(operands, epilogue)
    wide = epilogues.accumulator_dtype(epilogue, lhs.dtype, rhs.dtype, out)
    form = directions.Form.of(params)
    acc = directions.convolve(lhs, rhs, form, out=wide, precision=precision)
    _check_residual(residual, acc.shape)
    return _finish(acc, epilogue, bias, residual, out, params["layout"])


def written(
    *operands: jax.Array,
    out: jnp.dtype,
    epilogue: Epilogue,
    precision: Any,
    **params: Any,
) -> list[jax.Array]:
    """The primitive as people write it in jnp, every step rounded: XLA's variant.

    A wider bias, such as a folded batch normalisation's, widens the epilogue alone; the
    result of wide operands is rounded after the epilogue.
    """
    lhs, rhs, bias, residual = split(operands, epilogue)
    form = directions.Form.of(params)
    wide = out if epilogue.is_identity else epilogues.written_dtype(out, lhs, rhs)
    acc = directions.convolve(lhs, rhs, form, out=wide, precision=precision)
    acc = acc.astype(epilogues.written_dtype(acc.dtype, bias, residual))
    return _finish(acc, epilogue, bias, residual, out, params["layout"])


def _check_residual(residual: jax.Array | Aval | None, shape: tuple[Any, ...]) -> None:
    if residual is not None and residual.shape != shape:
        raise ValueError(
            f"residual must have the result's shape, {shape}; {residual.shape=}"
        )


def _finish(
    acc: jax.Array,
    epilogue: Epilogue,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out: jnp.dtype,
    layout: str,
) -> list[jax.Array]:
    """The epilogue; bias and residual may have a further dimension in front."""
    if bias is not None:
        acc = added(acc, _along_channels(bias, layout))
    if residual is not None:
        acc = added(acc, residual)
    return epilogues.apply(acc, epilogue, None, None, out)


def _along_channels(bias: jax.Array, layout: str) -> jax.Array:
    """bias, (..., channels), as it broadcasts to (..., *y.shape)."""
    shape = [1] * 4
    shape[directions.SPECS[layout]["y"][1]] = bias.shape[-1]
    return bias.reshape(*bias.shape[:-1], *shape)


def problem_of(
    avals: Sequence[Aval],
    *,
    out: jnp.dtype,
    precision: Any,
    epilogue: Epilogue,
    **params: Any,
) -> Conv2dProblem:
    """The problem that the primitive's parameters and static shapes describe."""
    lhs, rhs, bias, residual = split(avals, epilogue)
    form = directions.Form.of(params)
    x, w = form.forward_shapes(lhs.shape, rhs.shape)
    batch, in_channels, height, width = x
    out_channels, _, kernel_height, kernel_width = w
    return Conv2dProblem(
        direction=form.direction,
        batch=batch,
        height=height,
        width=width,
        in_channels=in_channels,
        kernel_height=kernel_height,
        kernel_width=kernel_width,
        out_channels=out_channels,
        strides=form.strides,
        padding=form.padding,
        dilation=form.dilation,
        groups=form.groups,
        layout=form.layout,
        lhs=lhs.dtype.name,
        rhs=rhs.dtype.name,
        out=jnp.dtype(out).name,
        precision=precision_name(precision),
        epilogue=dataclasses.replace(
            epilogue,
            bias_dtype=epilogues.other_dtype(bias, out),
            residual_dtype=epilogues.other_dtype(residual, out),
        ),
    )


def _abstract_eval(
    *avals: Aval, epilogue: Epilogue, out: jnp.dtype, **params: Any
) -> list[Aval]:
    """The result's types; usual cases skip tracing, which takes milliseconds."""
    form = directions.Form.of(params)
    if not _is_simple(avals, form.padding):
        f = functools.partial(reference, epilogue=epilogue, out=out, **params)
        return lowering.result_types(f, *avals)
    lhs, rhs, _, residual = split(avals, epilogue)
    shape = form.result_shape(lhs.shape, rhs.shape)
    _check_residual(residual, shape)
    # Operands vary over the same mesh axes, see bind, and so does the result.
    result = lhs.update(shape=shape, dtype=jnp.dtype(out), weak_type=False)
    return [result] * (1 + epilogue.save_preactivation)


def _is_simple(avals: Sequence[Aval], padding: Any) -> bool:
    """True if shapes are static, types name no sharding, and the padding crops none."""
    if isinstance(padding, str) or min(map(min, padding)) < 0:
        return False
    static = all(isinstance(d, int) for aval in avals for d in aval.shape)
    specs = [aval.sharding.spec for aval in avals]
    return static and all(axis is None for spec in specs for axis in spec)


def as_product(
    *operands: jax.Array, implementation: str | None, config: Any, **params: Any
) -> list[jax.Array]:
    """The primitive as a matrix product, which is planned on its own.

    Where kernels of ours are demanded, one has to run the product.
    """
    return product.convolved(
        operands,
        problem_of([jax.typeof(x) for x in operands], **params),
        epilogue=params["epilogue"],
        out=params["out"],
        precision=params["precision"],
        implementation="tracea" if implementation == "tracea" else None,
    )


conv2d_p.def_abstract_eval(_abstract_eval)


def is_one_operation(*, epilogue: Epilogue, **params: Any) -> bool:
    """Returns whether the primitive is a convolution and nothing else."""
    return epilogue == Epilogue()


PLANNED = (
    lowering.register(
        "conv2d",
        conv2d_p,
        problem_of,
        reference,
        sharding=functools.partial(rule, conv2d_p, _finish),
        is_one_operation=is_one_operation,
        xla=written,
        product=as_product,
    ),
)


def _jvp(
    primals: Arrays, tangents: Tangents, *, epilogue: Epilogue, **params: Any
) -> Differentiated:
    """y' = activation'(z) z' with z' = conv(x', w) + conv(x, w') + bias' + residual'.

    A non-linear activation needs z, so z becomes a second result of the same call.
    """
    linear = epilogue.activation == "none"
    saved = (
        epilogue if linear else dataclasses.replace(epilogue, save_preactivation=True)
    )
    outs = bind(*primals, epilogue=saved, **params)
    dz = _preactivation_tangent(primals, tangents, outs[0], epilogue, params)
    dy = dz
    if dz is not None and not linear:
        dy = epilogues.activation_jvp(epilogue.activation, outs[1], dz)
    zero = Zero(jax.typeof(outs[0]).to_tangent_aval())
    douts = [zero if d is None else d for d in (dy, dz)]
    count = 1 + epilogue.save_preactivation
    return outs[:count], douts[:count]


def _preactivation_tangent(
    primals: Arrays,
    tangents: Tangents,
    y: jax.Array,
    epilogue: Epilogue,
    params: Params,
) -> jax.Array | None:
    """conv(x', w) + conv(x, w') + bias' + residual', None if all of them are zero."""
    lhs, rhs, *_ = primals
    dlhs, drhs, dbias, dresidual = map(unless_zero, split(tangents, epilogue))
    plain = {**params, "epilogue": Epilogue(), "config": None}
    terms: list[jax.Array] = []
    if dlhs is not None:
        terms += bind(dlhs, rhs, **plain)
    if drhs is not None:
        terms += bind(lhs, drhs, **plain)
    if dbias is not None:
        dbias = _along_channels(dbias, params["layout"])
        terms.append(jnp.broadcast_to(dbias, y.shape).astype(y.dtype))
    if dresidual is not None:
        terms.append(dresidual.astype(y.dtype))
    return functools.reduce(jnp.add, terms) if terms else None


def _transpose(
    cts: Tangents, *operands: Operand, epilogue: Epilogue, **params: Any
) -> Cotangents:
    """Cotangents of the operands the primitive is linear in.

    Derivatives of an activation are calls without one; with one it is not linear.
    """
    if epilogue.activation != "none":
        raise NotLinear(
            f"conv2d with activation={epilogue.activation!r} is not linear, so it has "
            "no transpose; use jax.vjp"
        )
    linear = [ad.is_undefined_primal(x) for x in operands]
    terms = [ct for ct in cts if not isinstance(ct, Zero)]
    if not terms:
        return [
            Zero(x.aval) if u else None for x, u in zip(operands, linear, strict=True)
        ]
    ct = functools.reduce(jnp.add, terms)  # without an activation, z is y
    params = {**params, "epilogue": Epilogue(), "config": None}
    grads: Cotangents = [_transpose_bilinear(i, ct, operands, params) for i in range(2)]
    _, _, bias, residual = split(operands, epilogue)
    if bias is not None:
        channel = directions.SPECS[params["layout"]]["y"][1]
        axes = [axis for axis in range(4) if axis != channel]
        grads.append(ct.sum(axes) if ad.is_undefined_primal(bias) else None)
    if residual is not None:
        grads.append(ct if ad.is_undefined_primal(residual) else None)
    return [
        g.astype(x.aval.dtype) if u else None
        for g, x, u in zip(grads, operands, linear, strict=True)
    ]


def _transpose_bilinear(
    wanted: int, ct: jax.Array, operands: Sequence[Operand], params: Params
) -> jax.Array | None:
    """The cotangent of lhs (wanted=0) or rhs (wanted=1), if it is a linear operand."""
    if not ad.is_undefined_primal(operands[wanted]):
        return None
    roles, aval = directions.ROLES[params["direction"]], operands[wanted].aval
    known = {roles[2]: ct, roles[1 - wanted]: operands[1 - wanted]}
    role = roles[wanted]
    direction = directions.DIRECTION_TO[role]
    lhs, rhs, _ = directions.ROLES[direction]
    size = (
        None if role == "y" else directions.spatial(aval.shape, role, params["layout"])
    )
    params = {**params, "direction": direction, "size": size, "out": aval.dtype}
    return bind(known[lhs], known[rhs], **params)[0]


def _batch(
    operands: Arrays, dims: Dims, *, epilogue: Epilogue, **params: Any
) -> Batched:
    """vmap: the mapped axis joins the batch, the channels or the groups."""
    moved, mapped, size = move_mapped(operands, dims)
    lhs_mapped, rhs_mapped, bias_mapped, _ = split(mapped, epilogue)
    params = {**params, "epilogue": epilogue}
    if size == 0:  # there are no zero groups
        f = functools.partial(reference, **params)
        outs = jax.vmap(f, in_axes=[0 if m else None for m in mapped])(*moved)
        return outs, [0] * len(outs)
    index = "none"
    if lhs_mapped or rhs_mapped:
        index = directions.index_to_join(params["direction"], lhs_mapped, rhs_mapped)
    if index == "none" or (index == "n" and bias_mapped):
        outs = _epilogue_of_each(moved, mapped, params)
    else:
        outs = _joined(moved, mapped, size, index, params)
    return outs, [0] * len(outs)


def _joined(
    operands: Arrays, mapped: Sequence[bool], size: int, index: str, params: Params
) -> list[jax.Array]:
    """One call in which the index of the convolution has grown by the mapped axis."""
    epilogue, groups, layout = params["epilogue"], params["groups"], params["layout"]
    roles = directions.ROLES[params["direction"]]
    place = functools.partial(
        directions.place, index=index, groups=groups, layout=layout
    )
    lhs, rhs, bias, residual = split(operands, epilogue)
    lhs_mapped, rhs_mapped, bias_mapped, residual_mapped = split(mapped, epilogue)
    if lhs_mapped:
        lhs = directions.fold(lhs, *place(roles[0]))
    if rhs_mapped:
        rhs = directions.fold(rhs, *place(roles[1]))
    if bias is not None and index != "n":
        _, outer = place("y")
        bias = directions.fold(_mapped(bias, bias_mapped, size), 0, outer)
    if residual is not None:
        residual = _mapped(residual, residual_mapped, size)
        residual = directions.fold(residual, *place("y"))
    joined = [x for x in (lhs, rhs, bias, residual) if x is not None]
    outs = bind(*joined, **{**params, "groups": groups * (size if index == "g" else 1)})
    return [directions.unfold(y, *place(roles[2]), size) for y in outs]


def _mapped(x: jax.Array, is_mapped: bool | None, size: int) -> jax.Array:
    return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))


def _epilogue_of_each(
    operands: Arrays, mapped: Sequence[bool], params: Params
) -> list[jax.Array]:
    """Bias or residual differ where the convolution is shared or joins the batch."""
    epilogue, out = params["epilogue"], params["out"]
    lhs, rhs, bias, residual = split(operands, epilogue)
    wide = epilogues.accumulator_dtype(epilogue, lhs.dtype, rhs.dtype, out)
    plain: Params = {**params, "out": wide, "epilogue": Epilogue(), "config": None}
    if any(mapped[:2]):
        (acc,), _ = _batch([lhs, rhs], [0 if m else None for m in mapped[:2]], **plain)
    else:
        (acc,) = bind(lhs, rhs, **plain)
    return _finish(acc, epilogue, bias, residual, out, params["layout"])


def _as_conv(avals: Sequence[Aval], params: Params) -> tuple[Any, ...]:
    lhs, rhs, *_ = avals
    seen = directions.Form.of(params).lax_arguments(lhs.shape, rhs.shape)
    seen |= dict(precision=params["precision"], out_sharding=None)
    seen |= dict(preferred_element_type=params["out"])
    return jax.lax.conv_general_dilated_p, (lhs, rhs), seen


remat.seen_as(conv2d_p, _as_conv)
jax_rules.register(
    "conv2d", conv2d_p, written, jvp=_jvp, transpose=_transpose, batch=_batch
)

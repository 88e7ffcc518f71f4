"""conv2d: a 2-D convolution with a fused epilogue, on the best implementation there is.

Its arguments become the parameters of the primitive here (``ops.conv2d.primitive``).
Programs call it ``tracea.ops.conv2d``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from tracea_jax import variants
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.precision import canonical_precision
from tracea_jax.ops.common.promotion import (
    check_kinds,
    convolution_dtype,
    preferred_dtype,
)
from tracea_jax.ops.common.shapes import check_arrays
from tracea_jax.ops.common.typed import jit
from tracea_jax.ops.conv2d import arguments, directions
from tracea_jax.ops.conv2d.primitive import bind
from tracea_jax.problem import Epilogue, check_activation
from tracea_jax.typing import Activation, Implementation


def conv2d(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation = "none",
    strides: int | Sequence[int] = (1, 1),
    padding: str | int | Sequence[Sequence[int]] = "SAME",
    dilation: int | Sequence[int] = (1, 1),
    groups: int = 1,
    layout: str = "NHWC",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """activation(conv(x, w) + bias + residual), rounded once.

    Kernels compute the epilogue in float32 from the unrounded convolution; where XLA
    serves the problem, it is the same expression in jnp, whose every step rounds.
    Without bias, residual and activation this is ``lax.conv_general_dilated`` of x and
    w in their common dtype.

    Args:
      x: (batch, height, width, in_channels).
      w: (kernel height, kernel width, in_channels / groups, out_channels).
      bias: (out_channels,).
      residual: of the result's shape, added before the activation.
      activation: "none", "relu", "gelu" (tanh form), "gelu_exact" (erf form), "silu".
      strides: steps between windows, a pair for height and width or one for both.
      padding: "SAME", "VALID" or "SAME_LOWER", ((top, bottom), (left, right)), or one
        number for all four; negative numbers crop.
      dilation: distance between the kernel's taps, a pair or one for both.
      groups: channels are split into so many independent convolutions; in_channels of
        them are a depthwise convolution.
      layout: "NHWC" as described, or "NCHW": x, residual and result are (batch,
        channels, height, width) and w is (out, in, kernel height, kernel width).
      precision: as in ``jax.lax.conv_general_dilated``.
      preferred_element_type: dtype of the result; by default the common one of x and w,
        as in jnp.
      implementation: None for the best known, "xla", "tracea" (a kernel of ours or an
        error with every reason), or a variant's name; for derivatives likewise.
      config: explicit config, the variant's own type or a dict of its fields.

    Returns:
      (batch, out height, out width, out_channels), or as ``layout`` says.

    Raises:
      ValueError: on shapes that do not fit, strides, padding, dilation or groups that
        are not possible, an unknown activation, layout or implementation, a config that
        is not legal, or an implementation that cannot run the problem.
      TypeError: on operands that are no arrays, such as lists, a preferred dtype that
        lax refuses, or a bias or residual that the result's dtype would cut: floats
        added to integers.

    Symbolic shapes are left to XLA.
    """
    check_activation(activation)
    variants.check_implementation("conv2d", implementation)
    arguments.check_layout(layout)
    return _conv2d(
        x,
        w,
        bias,
        residual,
        activation=activation,
        strides=arguments.pair("strides", strides),
        padding=arguments.known_padding(padding),
        dilation=arguments.pair("dilation", dilation),
        groups=arguments.positive("groups", groups),
        layout=layout,
        precision=canonical_precision(precision),
        out=preferred_dtype(preferred_element_type),
        implementation=implementation,
        config=lowering.hashable_config(config),
    )


@functools.partial(
    jit,
    static_argnames=(
        *("activation", "strides", "padding", "dilation", "groups", "layout"),
        *("precision", "out", "implementation", "config"),
    ),
    inline=True,
)
def _conv2d(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation,
    padding: arguments.Padding,
    layout: str,
    out: Any,
    **how: Any,
) -> jax.Array:
    optional = {"bias": bias, "residual": residual}
    given = {name: a for name, a in optional.items() if a is not None}
    check_arrays("conv2d", x=x, w=w, **given)
    arguments.check_shapes(x, w, bias, how["groups"], layout)
    out = convolution_dtype(x, w, out)
    check_kinds(out, bias=bias, residual=residual)
    epilogues.check_result(activation, out)
    layout = layout.lower()
    padding = arguments.explicit_padding(
        padding,
        directions.spatial(x.shape, "x", layout),
        directions.spatial(w.shape, "w", layout),
        how["strides"],
        how["dilation"],
    )
    step = Epilogue(
        bias="none" if bias is None else "row",
        activation=activation,
        residual=residual is not None,
    )
    operands = [a for a in (x, w, bias, residual) if a is not None]
    how |= dict(direction="forward", size=None, layout=layout, padding=padding)
    return bind(*operands, out=out, epilogue=step, **how)[0]

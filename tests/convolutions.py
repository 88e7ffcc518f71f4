"""conv2d and the plain code beside it, for the tests of convolutions."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from numerics import Exact, activate, f64, normal
from transforms import PLAIN

from tracea_jax.ops import conv2d

SPECS = {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}
KERNELS = ((1, 1), (3, 3), (7, 5), (2, 2), (1, 4))
CROPPING = ((-1, 1), (0, -1))
PADDINGS = (
    *("SAME", "VALID", "SAME_LOWER", CROPPING),
    *(((0, 0), (0, 0)), ((1, 2), (3, 0)), ((8, 0), (0, 9))),
)


def lax_conv(
    x, w, *, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1, layout="NHWC"
):
    return jax.lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        rhs_dilation=dilation,
        feature_group_count=groups,
        dimension_numbers=SPECS[layout],
    )


def plain(x, w, bias=None, residual=None, activation="none", layout="NHWC", **how):
    """activation(conv(x, w) + bias + residual)."""
    z = lax_conv(x, w, layout=layout, **how)
    if bias is not None:
        z = z + (bias if layout == "NHWC" else bias[:, None, None])
    if residual is not None:
        z = z + residual
    return PLAIN[activation](z)


def ours(x, w, bias=None, residual=None, **how):
    return conv2d(x, w, bias=bias, residual=residual, **how)


GELU = functools.partial(ours, activation="gelu")
PLAIN_GELU = functools.partial(plain, activation="gelu")


def gradients(f, *args, argnums=(0, 1, 2, 3)):
    return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=argnums)(*args)


def exact(
    x: Any,
    w: Any,
    bias: Any = None,
    residual: Any = None,
    activation: str = "none",
    layout: str = "NHWC",
    **how: Any,
) -> Exact:
    """activation(conv(x, w) + bias + residual) in float64, by NumPy."""
    x, w, *added = (None if a is None else f64(a) for a in (x, w, bias, residual))
    bias, residual = added
    if layout == "NCHW":
        x, w = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0)
        residual = None if residual is None else residual.transpose(0, 2, 3, 1)
    value, scale = _sums(x, w, **how), _sums(np.abs(x), np.abs(w), **how)
    for term in (bias, residual):
        if term is not None:
            value, scale = value + term, scale + np.abs(term)
    value = activate(value, activation)
    back = (0, 3, 1, 2) if layout == "NCHW" else (0, 1, 2, 3)
    return Exact(value=value.transpose(back), scale=scale.transpose(back))


def _sums(x, w, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1):
    """x (n, h, w, g c), w (kh, kw, c, g o): the convolution, tap by tap."""
    extents = [d * (k - 1) + 1 for k, d in zip(w.shape, dilation, strict=False)]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:3], extents, strides, padding)
    grown = [(max(low, 0), max(high, 0)) for low, high in padding]
    x = np.pad(x, ((0, 0), *grown, (0, 0)))
    for axis, (low, high) in enumerate(padding, 1):
        kept = np.arange(max(-low, 0), x.shape[axis] - max(-high, 0))
        x = np.take(x, kept, axis)
    rows, columns = (
        max((n - extent) // s + 1, 0)
        for n, extent, s in zip(x.shape[1:3], extents, strides, strict=True)
    )
    each = w.shape[3] // groups
    x = x.reshape(*x.shape[:3], groups, w.shape[2])
    w = w.reshape(*w.shape[:3], groups, each)
    result = np.zeros((x.shape[0], rows, columns, groups, each))
    for i, j in np.ndindex(w.shape[:2]):
        start = i * dilation[0], j * dilation[1]
        seen = x[:, start[0] :: strides[0], start[1] :: strides[1]][:, :rows, :columns]
        result += np.einsum("nhwgc,cgo->nhwgo", seen, w[i, j])
    return result.reshape(*result.shape[:3], groups * each)


@st.composite
def calls(draw):
    """(shapes of x and w, arguments) that a convolution accepts."""
    layout = draw(st.sampled_from(["NHWC", "NCHW"]))
    groups, each_in, each_out = draw(
        st.sampled_from([(1, 3, 4), (1, 1, 1), (2, 2, 3), (3, 1, 1), (4, 1, 2)])
    )
    kernel = draw(st.sampled_from(KERNELS))
    steps = st.tuples(st.integers(1, 3), st.integers(1, 3))
    batch, height, width = (draw(st.integers(*r)) for r in ((0, 3), (2, 9), (2, 9)))
    x = (batch, groups * each_in, height, width)
    w = (groups * each_out, each_in, *kernel)
    if layout == "NHWC":
        x, w = (batch, height, width, x[1]), (*kernel, w[1], w[0])
    how = dict(
        strides=draw(steps),
        padding=draw(st.sampled_from(PADDINGS)),
        dilation=draw(st.sampled_from([(1, 1), (2, 1), (2, 3)])),
        groups=groups,
        layout=layout,
    )
    return x, w, how


def arguments(layout="NHWC", groups=1, batch=2, size=(4, 5), kernel=(3, 2), stride=1):
    """x, w, bias, residual for "SAME"; no sum before the activation is near a kink."""
    inputs, outputs = 2 * groups, 3 * groups
    x, w = normal(batch, *size, inputs), normal(*kernel, 2, outputs)
    rows, columns = (-(-n // stride) for n in size)
    bias, residual = normal(outputs), normal(batch, rows, columns, outputs)
    if layout == "NCHW":
        x, residual = (jnp.moveaxis(a, -1, 1) for a in (x, residual))
        w = w.transpose(3, 2, 0, 1)
    z = plain(x, w, bias, residual, strides=(stride,) * 2, groups=groups, layout=layout)
    gap = np.where(np.abs(z) < 0.02, 0.1, 0)
    return x, w, bias, residual + gap

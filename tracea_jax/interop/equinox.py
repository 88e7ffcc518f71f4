"""Models of equinox on our convolutions.

    model = tracea.interop.equinox.patch_conv2d(model)

Modules of equinox do not change: each function returns another model with the same
arrays. Images of equinox have their channels first, those of our kernels last, so that
a layer transposes its input and its result; XLA removes two transpositions that meet.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from tracea_jax.interop.layers import Layer, Layers
from tracea_jax.ops import conv2d

_NN: Any = eqx.nn


class TraceaConv2d(_NN.Conv2d):
    """``equinox.nn.Conv2d`` on ``ops.conv2d``, with the same arguments."""

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """(in channels, height, width) -> (out channels, out height, out width)."""
        if _never(self) or not _takes(self, x):
            return super().__call__(x, key=key)
        y = conv2d(
            jnp.moveaxis(x, 0, -1)[None],
            jnp.transpose(self.weight, (2, 3, 1, 0)),
            bias=jnp.ravel(self.bias) if self.use_bias else None,
            strides=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        return jnp.moveaxis(y[0], -1, 0)


def patch_conv2d(model: Any) -> Any:
    """The model with each ``equinox.nn.Conv2d`` on ``ops.conv2d``.

    ``layers(model)`` says what runs where, and ``unpatch(model)`` takes it back.
    """
    return _with_classes(model, _NN.Conv2d, TraceaConv2d)


def unpatch(model: Any) -> Any:
    """The model with ``equinox.nn.Conv2d`` in place of each TraceaConv2d."""
    return _with_classes(model, TraceaConv2d, _NN.Conv2d)


def layers(model: Any) -> Layers:
    """The convolutions of a model, and why equinox computes those that it computes."""
    paths, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_convolution)
    found = (
        Layer(
            name=jax.tree_util.keystr(path).lstrip(".") or "itself",
            fallback=_never(x) or _unless_patched(x),
        )
        for path, x in paths
        if _is_convolution(x)
    )
    return Layers(model=type(model).__name__, layers=tuple(found))


def _is_convolution(x: Any) -> bool:
    return isinstance(x, _NN.Conv2d)


def _never(layer: Any) -> str | None:
    """Why the layer stays as it is, or None."""
    if type(layer) not in (_NN.Conv2d, TraceaConv2d):
        return f"its class is {type(layer).__name__}, which may compute something else"
    if layer.padding_mode != "ZEROS":
        return f"padding_mode {layer.padding_mode}; it takes ZEROS"
    return None


def _takes(layer: Any, x: jax.Array) -> bool:
    """True if equinox takes an input: its errors are the ones that people know."""
    fits = x.ndim == 3 and x.shape[0] == layer.in_channels
    return fits and x.dtype == layer.weight.dtype


def _unless_patched(layer: Any) -> str | None:
    return None if type(layer) is TraceaConv2d else "it is not patched"


def _with_classes(model: Any, before: type, after: type) -> Any:
    def made(x: Any) -> Any:
        if type(x) is not before or _never(x):
            return x
        new = object.__new__(after)
        for field in dataclasses.fields(x):
            object.__setattr__(new, field.name, getattr(x, field.name))
        return new

    return jax.tree.map(made, model, is_leaf=_is_convolution)


__all__ = ["TraceaConv2d", "layers", "patch_conv2d", "unpatch"]

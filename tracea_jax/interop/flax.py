"""Models of flax nnx on our convolutions.

    model = tracea.interop.flax.patch_conv2d(model)

A patched ``nnx.Conv`` calls ``ops.conv2d`` where it called
``lax.conv_general_dilated``; nothing else of it changes.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import lax

from tracea_jax.interop.convolution import as_lax
from tracea_jax.interop.layers import Layer, Layers


def patch_conv2d(model: Any) -> Any:
    """Puts each 2-D ``nnx.Conv`` of a model on ``ops.conv2d``, and returns the model.

    Args:
      model: an ``nnx.Module``, which is changed.

    ``layers(model)`` says what runs where, and ``unpatch(model)`` takes it back.

    Raises:
      TypeError: if the model is no ``nnx.Module``, as those of flax.linen.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"patch_conv2d takes an nnx.Module, not a value of {type(model).__name__}; "
            "tracea_jax.transform finds the convolutions of any function"
        )
    for _, layer in _convolutions(model):
        if _never(layer) is None:
            layer.conv_general_dilated = as_lax
    return model


def unpatch(model: Any) -> Any:
    """Gives each layer lax's convolution again, and returns the model."""
    for _, layer in _convolutions(model):
        if layer.conv_general_dilated is as_lax:
            layer.conv_general_dilated = lax.conv_general_dilated
    return model


def layers(model: Any) -> Layers:
    """The convolutions of a model, and why lax computes those that it computes."""
    found = (
        Layer(
            name=".".join(map(str, path)) or "itself",
            fallback=None
            if _is_patched(layer)
            else _never(layer) or "it is not patched",
        )
        for path, layer in _convolutions(model)
    )
    return Layers(model=type(model).__name__, layers=tuple(found))


def _convolutions(model: Any) -> list[tuple[Any, Any]]:
    return [(p, x) for p, x in nnx.iter_graph(model) if isinstance(x, nnx.Conv)]


def _is_patched(layer: Any) -> bool:
    return layer.conv_general_dilated is as_lax


def _never(layer: Any) -> str | None:
    """Why the layer stays as it is, or None."""
    if len(layer.kernel_size) != 2:
        return f"its kernel has {len(layer.kernel_size)} dimensions; it takes 2"
    dilation = layer.input_dilation
    sizes = (dilation,) if isinstance(dilation, int) else dilation or ()
    if any(size != 1 for size in sizes):
        return f"input_dilation {dilation}; it takes 1"
    if layer.conv_general_dilated not in (lax.conv_general_dilated, as_lax):
        return "its conv_general_dilated is a function of its own"
    return None


__all__ = ["layers", "patch_conv2d", "unpatch"]

"""Models of PyTorch on our convolutions, forward and backward.

    model = tracea.interop.torch.patch_conv2d(model)

A patched layer is the same object with the same parameters, so that optimizers, hooks
and state dicts know nothing of it. Tensors become arrays, and results tensors, without
copies, in the memory format ``torch.channels_last``. Tensors in torch's default format
are transposed before and after, so models should be
``model.to(memory_format=torch.channels_last)``. Each call waits for its result: torch
may write into tensors, which arrays of JAX never expect.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import _compat, variants
from tracea_jax.interop import convolution
from tracea_jax.interop.convolution import Geometry
from tracea_jax.interop.layers import Layer, Layers
from tracea_jax.typing import Implementation

try:
    # By name, as the types of torch are known only where it is installed.
    torch: Any = importlib.import_module("torch")
except ImportError as e:
    raise ImportError(
        "tracea_jax.interop.torch needs torch: pip install 'tracea_jax[torch]', with "
        "--index-url https://download.pytorch.org/whl/cpu for one without CUDA"
    ) from e

_is_orphan = False  # a child that was forked after JAX had started its threads


def _after_fork() -> None:
    global _is_orphan
    _is_orphan = _is_orphan or _compat.has_clients()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")


# --- arrays ---------------------------------------------------------------------------


def to_jax(tensor: Any) -> jax.Array:
    """The tensor's memory as an array of JAX, without its gradient.

    Nothing is copied if the tensor is contiguous, begins at a multiple of 64 bytes and
    is no negative or conjugate view. An array must not change: do not write into the
    tensor while the array is used.

    Raises:
      TypeError: on a dtype that JAX would narrow, such as float64 without
        ``jax_enable_x64``.
    """
    # A negative view is another tensor's memory with a mark, which DLPack leaves out.
    plain = tensor.detach().resolve_conj().resolve_neg()
    array = (
        _of_host(plain) if plain.device.type == "cpu" else jax.dlpack.from_dlpack(plain)
    )
    if array.dtype.itemsize != tensor.element_size():
        raise TypeError(
            f"a tensor of {tensor.dtype} would become an array of {array.dtype}: set "
            "jax_enable_x64, or convert the tensor"
        )
    return array


def _of_host(tensor: Any) -> jax.Array:
    """A tensor of the CPU by way of NumPy.

    A thread of XLA may be the last to hold an argument. It would itself free what came
    by DLPack, for which torch takes the lock of Python's interpreter: a program that
    ends just then aborts. Threads of Python free what came from NumPy.
    """
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype.kind == "V":  # NumPy has no dtype of its own, and torch makes none
        tensor = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    cpu = jax.local_devices(backend="cpu")[0]
    return jax.device_put(tensor.numpy().view(dtype), cpu, may_alias=True)


def to_torch(array: jax.Array) -> Any:
    """The array's memory as a tensor, without a copy, when it has been computed.

    Do not write into the tensor while the array is used.
    """
    return torch.from_dlpack(jax.block_until_ready(array))


# --- the layer ------------------------------------------------------------------------


class TraceaConv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on ``ops.conv2d``, with the same arguments and parameters.

    Where that cannot be, torch computes it as before, and ``fallback`` says why.

    Attributes:
      fallback: the sentence why torch computed the last call; None if we did.
      implementation: as of ``ops.conv2d``.
    """

    fallback: str | None = None
    implementation: Implementation | None = None

    def forward(self, input: Any) -> Any:
        reason = why_not(self, input)
        if reason != self.fallback:
            self.fallback = reason
        if reason is not None:
            return super().forward(input)
        if input.ndim == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return _Convolution.apply(input, self.weight, self.bias, self)

    def __prepare_scriptable__(self) -> Any:
        # torch would put what this returns into the model, in place of the layer.
        raise TypeError(
            "torch.jit.script compiles the operations of torch: "
            "unpatch(copy.deepcopy(model)) has them"
        )


def patch_conv2d(model: Any, *, implementation: Implementation | None = None) -> Any:
    """Puts each ``torch.nn.Conv2d`` of a model on ``ops.conv2d``; returns the model.

    Args:
      model: a ``torch.nn.Module``, which is changed.
      implementation: as of ``ops.conv2d``.

    ``layers(model)`` says what runs where, and ``unpatch(model)`` takes it back. Layers
    of other classes, also of those derived from Conv2d, stay as they are.

    Raises:
      ValueError: on an implementation that there is not.
      TypeError: if the model is no module.
    """
    variants.check_implementation("conv2d", implementation)
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise TypeError(f"patch_conv2d takes a torch.nn.Module, not a value of {kind}")
    for layer in model.modules():
        if type(layer) is torch.nn.Conv2d and _never(layer) is None:
            layer.__class__ = TraceaConv2d
        if type(layer) is TraceaConv2d:
            layer.implementation = implementation
    return model


def unpatch(model: Any) -> Any:
    """Makes ``torch.nn.Conv2d`` of each TraceaConv2d again, and returns the model."""
    for layer in model.modules():
        if type(layer) is TraceaConv2d:
            for name in ("fallback", "implementation"):
                layer.__dict__.pop(name, None)
            layer.__class__ = torch.nn.Conv2d
    return model


def layers(model: Any) -> Layers:
    """The convolutions of a model, and why torch computes those that it computes.

    What depends on the tensors, such as their dtype, is known after a call.
    """
    found = (
        Layer(name=name or "itself", fallback=_said(layer))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Conv2d)
    )
    return Layers(model=type(model).__name__, layers=tuple(found))


def _said(layer: Any) -> str | None:
    if type(layer) is TraceaConv2d:
        return layer.fallback
    return _never(layer) or "it is not patched"


# --- what is left to torch ------------------------------------------------------------


def _never(layer: Any) -> str | None:
    """Why the layer can never run on ``ops.conv2d``, or None."""
    if type(layer) not in (torch.nn.Conv2d, TraceaConv2d):
        return f"its class is {type(layer).__name__}, which may compute something else"
    if layer.padding_mode != "zeros":
        return f"padding_mode {layer.padding_mode}; it takes zeros"
    return None


def why_not(layer: Any, x: Any) -> str | None:
    """The sentence why torch computes a layer for this input; None if we do."""
    if reason := _never(layer):
        return reason
    if _is_orphan:
        return "the process was forked after JAX had started, whose threads it lacks"
    if not isinstance(x, torch.Tensor) or torch.jit.is_tracing():
        return "the call is traced, which records the operations of torch"
    if torch.compiler.is_compiling():
        return "torch.compile compiles the operations of torch"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the operations of torch"
    if x.device.type not in _DEVICES:
        return f"input is on {x.device}; it takes {' and '.join(_DEVICES)}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses the dtype of the operations of torch"
    for name, tensor in (("input", x), ("weight", layer.weight), ("bias", layer.bias)):
        if tensor is not None and (reason := _refuses(name, tensor, x)):
            return reason
    return _mistake(layer, x)


def _refuses(name: str, tensor: Any, x: Any) -> str | None:
    if tensor.dtype not in _DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        return f"{name} of {tensor.dtype}; it takes {names}"
    if tensor.dtype != x.dtype or tensor.device != x.device:
        return f"{name} is {tensor.dtype} on {tensor.device}, and input is not"
    if tensor.layout is not torch.strided or type(tensor) not in (
        torch.Tensor,
        torch.nn.Parameter,
    ):
        return f"{name} is no plain dense tensor"
    if tensor.numel() == 0:
        return f"{name} is empty"
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        return f"{name} has a tangent of forward-mode differentiation"
    if tensor.device.type == "cuda" and jax.default_backend() != "gpu":
        return "torch has the tensors on a GPU, and JAX uses none"
    return None


def _mistake(layer: Any, x: Any) -> str | None:
    """Why torch shall see the call: its errors are the ones that people know."""
    if x.ndim not in (3, 4) or x.shape[-3] != layer.in_channels:
        return f"input has shape {tuple(x.shape)}"
    windows = zip(_pair(layer.dilation), layer.weight.shape[2:], strict=True)
    sizes = zip(x.shape[-2:], _padding(layer), windows, strict=True)
    if any(n + sum(added) <= d * (k - 1) for n, added, (d, k) in sizes):
        return f"input has shape {tuple(x.shape)}, smaller than the kernel"
    return None


# --- the function ---------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """conv(x, w) + bias, whose gradients are those of ``ops.conv2d``."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, layer: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        with torch.no_grad():
            y = convolution.forward(
                _channels_last(x),
                _weights(weight),
                None if bias is None else to_jax(bias.detach().contiguous()),
                geometry=_geometry(layer, weight),
            )
            return _like(_from_channels_last(y), x, weight)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # gradients of gradients are wanted
            return (*_by_torch(ctx.layer, x, weight, cotangent, wanted), None)
        dx, dw, db = convolution.gradients(
            _channels_last(x),
            _weights(weight),
            _channels_last(cotangent),
            geometry=_geometry(ctx.layer, weight),
            wanted=wanted,
        )
        back = (0, 3, 1, 2) if _is_channels_last(weight) else (0, 1, 2, 3)
        return (
            None if dx is None else _like(_from_channels_last(dx), x, weight),
            None if dw is None else to_torch(dw).permute(*back),
            None if db is None else to_torch(db),
            None,
        )


def _by_torch(layer: Any, x: Any, weight: Any, cotangent: Any, wanted: Any) -> Any:
    """The gradients as torch computes them, which it can differentiate."""
    (top, bottom), (left, right) = _padding(layer)
    even = top == bottom and left == right
    padded = x if even else torch.nn.functional.pad(x, (left, right, top, bottom))
    padding = [top, left] if even else [0, 0]
    dx, dw, db = torch.ops.aten.convolution_backward(
        *(cotangent, padded, weight, [layer.out_channels]),
        *(list(_pair(layer.stride)), padding, list(_pair(layer.dilation))),
        *(False, [0, 0], layer.groups, list(wanted)),
    )
    if dx is not None and not even:
        height, width = x.shape[2:]
        dx = dx[:, :, top : top + height, left : left + width]
    return dx, dw, db


def _padding(layer: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padding of the height and of the width, each before and after."""
    if layer.padding == "same":  # what is left over is added at the end
        pairs = zip(_pair(layer.dilation), layer.kernel_size, strict=True)
        (height, width) = (d * (k - 1) for d, k in pairs)
        return (height // 2, height - height // 2), (width // 2, width - width // 2)
    height, width = (0, 0) if layer.padding == "valid" else _pair(layer.padding)
    return (height, height), (width, width)


def _pair(sizes: Any) -> tuple[int, int]:
    """Sizes along height and width; torch also takes one number for both."""
    height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
    return int(height), int(width)


def _geometry(layer: Any, weight: Any) -> Geometry:
    return Geometry(
        strides=_pair(layer.stride),
        padding=_padding(layer),
        dilation=_pair(layer.dilation),
        groups=layer.groups,
        precision=_precision(weight),
        implementation=layer.implementation,
        weights="OHWI" if _is_channels_last(weight) else "OIHW",
    )


def _precision(weight: Any) -> str | None:
    """None, or "highest" where torch was told not to round to TF32."""
    is_exact = weight.is_cuda and not torch.backends.cudnn.allow_tf32
    return "highest" if is_exact else None


def _is_channels_last(tensor: Any) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(
        memory_format=torch.channels_last
    )


def _channels_last(tensor: Any) -> jax.Array:
    """(batch, channels, height, width) as an array with the channels last."""
    ready = tensor.detach().contiguous(memory_format=torch.channels_last)
    return to_jax(ready.permute(0, 2, 3, 1).contiguous())


def _weights(weight: Any) -> jax.Array:
    """The weights as they lie in memory, see ``Geometry.weights``."""
    weight = weight.detach()
    if _is_channels_last(weight):
        return to_jax(weight.permute(0, 2, 3, 1))
    return to_jax(weight.contiguous())


def _from_channels_last(array: jax.Array) -> Any:
    # ``data``, as results that are views may not be updated in place.
    return to_torch(array).permute(0, 3, 1, 2).data


def _like(result: Any, x: Any, weight: Any) -> Any:
    """The result in the memory format that torch would have chosen."""
    if _is_channels_last(x) or _is_channels_last(weight):
        return result
    return result.contiguous()


__all__ = [
    "TraceaConv2d",
    "layers",
    "patch_conv2d",
    "to_jax",
    "to_torch",
    "unpatch",
    "why_not",
]

"""Kernels as XLA custom calls: registration of the handlers, encoding of attributes.

The only module that uses the native extension. Targets carry a version in their names,
so a program lowered for another interface is refused instead of misread.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracea_jax.device import CudaDevice
from tracea_jax.emit.kernel import (
    SCALAR_BITS,
    Im2colMap,
    Kernel,
    Param,
    Pointer,
    Scalar,
    TensorMap,
)
from tracea_jax.runtime import parameters
from tracea_jax.runtime.nvrtc import Cubin

try:
    from tracea_jax import _native
except ImportError as e:
    _package = pathlib.Path(__file__).parent.parent
    raise ImportError(
        f"tracea_jax in {_package} has no compiled extension ({e}). If that is a "
        "source tree, install the package (pip install .) and run outside of the tree."
    ) from e

CUDA_TARGET = "tracea_cuda_launch_v1"
ABI = 1  # of the attributes below; ffi/launch_spec.h has the same number

# CUtensorMapDataType, CUDA driver API. 8-bit floats travel as bytes.
TENSOR_MAP_DTYPES = {
    "uint8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "tfloat32": 11,  # float32 in memory, rounded to TF32 on the way
}


# Handlers for CPUs that are symbols of the extension and no part of its tables: the
# sources of the launcher of CUDA kernels do not change with them.
_BY_SYMBOL = ("tracea_cpu_elementwise_v1",)


def targets() -> tuple[str, ...]:
    """The names of all handlers, those of the CPU and the launcher of CUDA kernels."""
    return (*_native.ffi_targets(), *_BY_SYMBOL)


@functools.cache
def register() -> None:
    """Registers all handlers with XLA; further calls do nothing.

    CUDA handlers are registered everywhere: without a GPU they wait, unused.
    """
    for name, target in _native.ffi_targets().items():
        platform = target["platform"]
        if "state" in target:  # XLA wants the type first
            state_name, state = target["state"]
            jax.ffi.register_ffi_type(state_name, state, platform=platform)
        jax.ffi.register_ffi_target(name, target["stages"], platform=platform)
    extension = ctypes.CDLL(_native.__file__)
    for name in _BY_SYMBOL:
        handler = jax.ffi.pycapsule(getattr(extension, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


def set_cubin_directory(directory: pathlib.Path | None) -> None:
    """Names the cache directory in which loaded programs look for their kernels.

    Programs that were lowered in this process do not need it; deserialised ones do.
    """
    _native.set_cubin_directory(None if directory is None else str(directory))


def cpu_isa() -> str:
    """The widest instruction set that this processor and the extension share."""
    return _native.cpu_isa()


def cpu_lowering(
    ctx: Any, operands: Sequence[Any], target: str, attributes: Mapping[str, Any]
) -> Sequence[Any]:
    """Emits a custom call to a CPU handler.

    Args:
      ctx: the lowering rule's context; its avals give the result types.
      operands: MLIR values.
      target: name of a registered handler.
      attributes: what the handler decodes.
    """
    register()
    return jax.ffi.ffi_lowering(target)(ctx, *operands, **attributes)


def cuda_lowering(
    ctx: Any, operands: Sequence[Any], kernel: Kernel, cubin: Cubin, *, embed: bool
) -> Sequence[Any]:
    """Emits a custom call that launches a kernel.

    Args:
      ctx: the lowering rule's context; its avals give the result types.
      operands: MLIR values; operands of the kernel are these, then the results.
      kernel: the launch.
      cubin: its compiled code, made known to the launcher of this process.
      embed: whether the program shall carry the code itself, for export.

    Raises:
      ValueError: naming the limit that the launch breaks, or the parameter that the
        compiled code has otherwise.
    """
    attributes = ready(kernel, cubin, embed)
    return jax.ffi.ffi_lowering(CUDA_TARGET)(ctx, *operands, **attributes)


def cuda_call(
    *operands: jax.Array,
    results: Sequence[jax.ShapeDtypeStruct],
    kernel: Kernel,
    cubin: Cubin,
    embed: bool,
    updates: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Launches a kernel from JAX code that is being traced for a GPU.

    Args:
      operands: the kernel's first operands.
      results: shapes and dtypes of the others.
      kernel, cubin, embed: as in ``cuda_lowering``; it raises the same.
      updates: operands that share the memory of a result, operand number to result
        number; XLA copies an operand that is needed again.
    """
    attributes = ready(kernel, cubin, embed)
    call = jax.ffi.ffi_call(CUDA_TARGET, results, input_output_aliases=updates)
    return call(*operands, **attributes)


def ready(kernel: Kernel, cubin: Cubin, embed: bool) -> dict[str, Any]:
    """The attributes of a launch whose code this process, or the program, has."""
    register()
    if (wrong := parameters.mismatch(kernel, cubin.image, cubin.entry)) is not None:
        raise ValueError(wrong)
    attributes = cuda_attributes(kernel, cubin.key)
    attributes["entry"] = cubin.entry  # a mangled one, where an expression names it
    _native.check_launch(attributes["launch"].tolist(), attributes["params"].tolist())
    _native.put_cubin(cubin.key, cubin.image)
    # What makes a file on a disk the image that this program means.
    attributes["sha256"] = hashlib.sha256(cubin.image).hexdigest()
    if embed:
        attributes["cubin"] = base64.b64encode(cubin.image).decode()
    return attributes


def broken_limit(kernel: Kernel, device: CudaDevice) -> str | None:
    """The sentence why no such GPU launches the kernel; None if it does.

    The limits are those of grids, blocks, clusters, shared memory, tensor maps and
    parameters that are passed by value.
    """
    if kernel.smem_bytes > (most := device.smem_per_block_bytes):
        return f"a block needs {kernel.smem_bytes} bytes of shared memory, of {most}"
    try:
        attributes = cuda_attributes(kernel, key="")
        _native.check_launch(
            attributes["launch"].tolist(), attributes["params"].tolist()
        )
    except OverflowError:
        return "a size of the launch is more than 64 bits count"
    except ValueError as e:
        return str(e)
    return None


def cuda_attributes(kernel: Kernel, key: str) -> dict[str, Any]:
    """The attributes of a launch; ffi/launch_spec.h describes the encoding.

    Args:
      kernel: the launch.
      key: content hash of its compiled code (``nvrtc.key``).
    """
    launch = (*kernel.grid, *kernel.block, *kernel.cluster, kernel.smem_bytes)
    params = [number for param in kernel.params for number in _record(param)]
    return {
        "abi": ABI,
        "kernel_key": key,
        "entry": kernel.entry,
        "arch": kernel.arch,
        "launch": np.array(launch, np.int64),
        "params": np.array(params, np.int64),
    }


def _record(param: Param) -> tuple[int, ...]:
    match param:
        case Pointer():
            return 0, param.operand
        case Scalar():
            return 2 if SCALAR_BITS[param.dtype] == 64 else 1, _bits(param)
        case TensorMap():
            layout = (*param.dims, *param.strides, *param.box, int(param.swizzle))
            return 3, param.operand, _dtype(param.dtype), len(param.dims), *layout
        case Im2colMap():
            layout = (*param.dims, *param.strides, *param.lower, *param.upper)
            copied = (param.channels, param.pixels, *param.element_strides)
            head = (4, param.operand, _dtype(param.dtype), len(param.dims))
            return *head, *layout, *copied, int(param.swizzle)


def _bits(scalar: Scalar) -> int:
    """A number whose low bytes, in two's complement, are the scalar's.

    That of an integer is the integer itself, as far as an int64 has it.
    """
    if isinstance(scalar.value, int) and "int" in scalar.dtype:
        return scalar.value - (2**64 if scalar.value >= 2**63 else 0)
    with np.errstate(over="ignore"):
        value = np.asarray(scalar.value, jax.numpy.dtype(scalar.dtype))
    if math.isfinite(scalar.value) and not math.isfinite(float(value)):
        raise ValueError(f"{scalar} is too large for its type")
    bits = SCALAR_BITS[scalar.dtype]
    return int(value.view(np.dtype(f"{'int' if bits == 64 else 'uint'}{bits}")))


def _dtype(name: str) -> int:
    if name not in TENSOR_MAP_DTYPES:
        raise ValueError(
            f"tensor maps have no element type {name!r}; "
            f"they have {', '.join(TENSOR_MAP_DTYPES)}"
        )
    return TENSOR_MAP_DTYPES[name]

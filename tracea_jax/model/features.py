"""Features from which the time of a choice follows: numbers with names.

problem, device        -> numbers that all choices share, and all that peers depend on
problem, device, space -> columns: how each config fits the problem and the device

Sizes are logarithms to base 2, of which an empty one is 0, as is that of one element.
How often a size holds 2, and which part of a last tile it fills, say what kernels with
any tiles pay. The names belong to the format of models: one that is not known here is
no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tracea_jax import roofline
from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.problem import (
    ITEMSIZE,
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)
from tracea_jax.variants import Space

Numbers = dict[str, Any]  # a number, or a column of them, by name

_TILES = (16, 32, 64, 128, 256)  # along an axis; those of all libraries divide these
_MOST_QUERIES = 4096  # whose keys are counted
_MOST_TWOS = 256  # no kernel reads more elements at once


def kind(problem: Problem) -> str:
    """The kind of a problem, which a survey must have for a model to cover it.

    Dtypes, layouts and directions choose kernels, so that nothing follows from others;
    but float16 and bfloat16 have the same.
    """
    return " ".join(map(str, _kind(problem)))


def of_problem(problem: Problem, device: Device) -> Numbers:
    """Features that all choices share, and all that a peer's time depends on.

    Raises:
      KeyError: if nothing is known of the op.
    """
    numbers = _of_device(problem, device)
    numbers.update(_FAMILIES[problem.op](problem, device))
    return numbers


def of_space(problem: Problem, device: Device, variant: str, space: Space) -> Numbers:
    """How each config of a variant's space fits."""
    numbers: Numbers = {f"variant={variant}": 1.0}
    for name, values in space.columns.items():
        numbers.update(_of_field(name, values))
    numbers.update({f"derived.{n}": values for n, values in space.derived.items()})
    numbers.update(_of_tiles(problem, device, space.columns))
    if space.modelled_us is not None:
        floor_us = roofline.floor_us(problem, device) or 0.0
        numbers["modelled"] = np.log2(space.modelled_us)
        numbers["modelled_per_floor"] = numbers["modelled"] - _log_ratio(floor_us, 1)
    return numbers


def of_reference(peer: str) -> Numbers:
    """The peer whose time the times of ours are relative to."""
    return {"over_cudnn": float(peer == "cudnn")}


def knows(op: str) -> bool:
    """Whether there are features of problems of this op."""
    return op in _FAMILIES


# ---- what all problems have ----------------------------------------------------------


def _of_device(problem: Problem, device: Device) -> Numbers:
    floor = roofline.floor_us(problem, device) or 0.0
    numbers = {
        "flops": _log(problem.flops),
        "bytes": _log(problem.bytes),
        "intensity": _log(problem.flops) - _log(problem.bytes),
        "floor_ns": _log(1e3 * floor),
        "itemsize": float(ITEMSIZE.get(problem.operand_dtypes[0], 4)),
    }
    for dtype in ITEMSIZE:
        numbers[f"dtype={dtype}"] = float(dtype == problem.operand_dtypes[0])
    if isinstance(device, CpuDevice):
        numbers |= {
            "cores": _log(device.cores),
            "flops_of_core": _log(problem.flops / device.cores),
            "bytes_per_l1": _log_ratio(problem.bytes, device.l1d_bytes),
            "bytes_per_l2": _log_ratio(problem.bytes, device.l2_bytes),
            "bytes_per_l3": _log_ratio(problem.bytes, device.l3_bytes),
        }
    elif isinstance(device, CudaDevice):
        numbers |= {
            "flops_of_core": _log(problem.flops / device.sm_count),
            "bytes_per_l2": _log_ratio(problem.bytes, device.l2_bytes),
            **of_gpu(device),
        }
    return numbers


OF_GPUS = ("multiprocessors", "bandwidth", "peak")


def of_gpu(device: CudaDevice) -> dict[str, float]:
    """The features ``OF_GPUS``, which no problem changes."""
    peak = roofline.peak(device)
    numbers = (
        device.sm_count,
        peak.bytes if peak else 0.0,
        peak.flops if peak else 0.0,
    )
    return dict(zip(OF_GPUS, map(_log, numbers), strict=True))


def _of_epilogue(epilogue: Epilogue) -> Numbers:
    e = epilogue
    return {
        f"activation={e.activation}": 1.0,
        "activation": float(e.activation != "none"),
        "bias": float(e.bias != "none"),
        "residual": float(e.residual),
        "derivative": float(e.is_derivative),
        "saves": float(e.save_preactivation),
        "column_sums": float(e.column_sums),
    }


# ---- families of ops -----------------------------------------------------------------


def _product(problem: GemmProblem | GatedMatmulProblem, device: Device) -> Numbers:
    p = problem
    epilogue = (
        p.epilogue
        if isinstance(p, GemmProblem)
        else Epilogue(activation=p.activation, save_preactivation=p.save_products)
    )
    numbers = _of_product(p.m, p.n, p.k, p.batch, device) | _of_epilogue(epilogue)
    return numbers | {
        "lhs_t": float(p.layout[0] == "t"),
        "rhs_t": float(p.layout[1] == "t"),
        "lhs_batched": float(p.lhs_batched),
        "rhs_batched": float(p.rhs_batched),
        "lhs_elements": _log(p.m * p.k),
        "rhs_elements": _log(p.k * p.n),
        "out_bytes": float(ITEMSIZE.get(p.out, 4)),
        "exact": float(p.precision != "default"),
    }


def _of_product(m: int, n: int, k: int, batch: int, device: Device) -> Numbers:
    """Features of a product of these sizes, which may stand for a convolution's."""
    numbers: Numbers = {"batch": _log(batch), "outputs": _log(batch * m * n)}
    for name, size in (("m", m), ("n", n), ("k", k)):
        numbers |= {name: _log(size), f"{name}_twos": _twos(size)}
        numbers |= {f"{name}_fills_{t}": _filled(size, t) for t in _TILES}
    numbers |= {
        "least": _log(min(m, n)),
        "most": _log(max(m, n)),
        "m_per_n": _log(m) - _log(n),
        "k_per_mn": 2 * _log(k) - _log(m) - _log(n),
        "aligned": min(_twos(m), _twos(n), _twos(k)),
    }
    if isinstance(device, CudaDevice):
        for tile_m, tile_n in ((64, 64), (128, 128), (128, 256)):
            tiles = batch * -(-m // tile_m) * -(-n // tile_n)
            waves = tiles / device.sm_count
            numbers |= {
                f"waves_{tile_m}x{tile_n}": _log_ratio(waves, 1),
                f"tail_{tile_m}x{tile_n}": waves / max(math.ceil(waves), 1),
            }
    return numbers


def _convolution(problem: Conv2dProblem, device: Device) -> Numbers:
    p = problem
    m, n, k = conv_product(p)
    pixels = p.batch * math.prod(p.out_size)
    itemsize = ITEMSIZE.get(p.lhs, 4)
    x, w, y = p.elements
    numbers = _of_product(m, n, k, p.groups, device) | _of_epilogue(p.epilogue)
    for direction in ("forward", "input_grad", "weight_grad"):
        numbers[f"direction={direction}"] = float(p.direction == direction)
    return numbers | {
        "images": _log(p.batch),
        "height": _log(p.height),
        "width": _log(p.width),
        "in_channels": _log(p.in_channels),
        "out_channels": _log(p.out_channels),
        "in_channels_twos": _twos(p.in_channels),
        "out_channels_twos": _twos(p.out_channels),
        "in_of_group": _log(p.in_channels // p.groups),
        "out_of_group": _log(p.out_channels // p.groups),
        "pixels": _log(pixels),
        "kernel_height": float(p.kernel_height),
        "kernel_width": float(p.kernel_width),
        "taps": float(p.kernel_height * p.kernel_width),
        "stride_y": float(p.strides[0]),
        "stride_x": float(p.strides[1]),
        "dilation_y": float(p.dilation[0]),
        "dilation_x": float(p.dilation[1]),
        "padding": float(sum(map(sum, p.padding))),
        "is_depthwise": float(p.groups == p.in_channels > 1),
        "out_width": _log(p.out_size[1]),
        "channels_last": float(p.layout == "nhwc"),
        "image_bytes": _log(itemsize * x),
        "weight_bytes": _log(itemsize * w),
        "result_bytes": _log(itemsize * y),
        "exact": float(p.precision != "default"),
    }


def conv_product(problem: Conv2dProblem) -> tuple[int, int, int]:
    """Rows, columns and depth of the product of one group of a convolution."""
    p = problem
    taps = p.kernel_height * p.kernel_width
    pixels, ins = p.batch * math.prod(p.out_size), p.in_channels // p.groups
    outs = p.out_channels // p.groups
    if p.direction == "forward":
        return pixels, outs, taps * ins
    if p.direction == "input_grad":
        return p.batch * p.height * p.width, ins, taps * outs
    return taps * ins, outs, pixels


def _attention(problem: AttentionProblem, device: Device) -> Numbers:
    p = problem
    seen = _seen_part(p)
    rows = p.q_len * p.heads // max(p.kv_heads, 1)
    numbers: Numbers = {
        "batch": _log(p.batch),
        "queries": _log(p.q_len),
        "keys": _log(p.kv_len),
        "queries_twos": _twos(p.q_len),
        "keys_twos": _twos(p.kv_len),
        "heads": _log(p.heads),
        "kv_heads": _log(p.kv_heads),
        "sharing": _log_ratio(p.heads, p.kv_heads),
        "sequences": _log(p.batch * p.kv_heads),
        "tasks": _log(p.batch * p.heads),
        "rows": _log(rows),
        "head_dim": float(p.head_dim),
        "head_twos": _twos(p.head_dim),
        "value_dim": float(p.columns),
        "scores": _log(p.batch * p.heads * p.q_len * p.kv_len),
        "seen": seen,
        "seen_flops": _log(p.flops * seen),
        "is_backward": float(p.direction == "backward"),
        "is_causal": float(p.is_causal),
        "window": _log(sum(p.window)) if p.window else -1.0,
        "bias": _log(math.prod(p.bias)) if p.bias else -1.0,
        "mask": _log(math.prod(p.mask)) if p.mask else -1.0,
        "mask_block": _log(math.prod(p.mask_block)) if p.mask_block else -1.0,
        "lengths": float(p.q_lengths) + float(p.kv_lengths),
        "segments": float(p.segments),
        "soft_cap": float(p.soft_cap is not None),
        "sinks": float(p.sinks),
        "alibi": float(p.alibi is not None),
        "saves": float(p.saves_lse),
        "bias_gradient": float(p.bias_gradient),
    }
    for tile in _TILES:
        numbers |= {f"queries_fill_{tile}": _filled(p.q_len, tile)}
        numbers |= {f"keys_fill_{tile}": _filled(p.kv_len, tile)}
    if isinstance(device, CudaDevice):
        for tile in (64, 128):
            blocks = p.batch * p.heads * -(-p.q_len // tile)
            waves = blocks / device.sm_count
            numbers |= {
                f"waves_{tile}": _log_ratio(waves, 1),
                f"tail_{tile}": waves / max(math.ceil(waves), 1),
            }
    return numbers


def _seen_part(problem: AttentionProblem) -> float:
    """The part of all scores that positions leave, of causal masks and windows."""
    p = problem
    everything = p.q_len + p.kv_len
    left, right = p.window or (everything, everything)
    right = min(right, 0) if p.is_causal else right
    if 0 in (p.q_len, p.kv_len):
        return 0.0
    queries = np.linspace(0, p.q_len - 1, min(p.q_len, _MOST_QUERIES)).round()
    queries += p.kv_len - p.q_len if p.aligned_at_end else 0
    first = np.clip(queries - left, 0, p.kv_len)
    last = np.clip(queries + right + 1, 0, p.kv_len)
    return float(np.maximum(last - first, 0).mean()) / p.kv_len


_FAMILIES: Mapping[str, Callable[[Any, Device], Numbers]] = {
    "matmul": _product,
    "gated_matmul": _product,
    "conv2d": _convolution,
    "attention": _attention,
}


def _kind(problem: Any) -> tuple[Any, ...]:
    p = problem
    if isinstance(p, GemmProblem | GatedMatmulProblem):
        return (p.op, *map(_width, (p.lhs, p.rhs, p.out)), *_exact(p))
    if isinstance(p, Conv2dProblem):
        dtypes = map(_width, (p.lhs, p.rhs, p.out))
        return (p.op, p.direction, p.layout, *dtypes, *_exact(p))
    if isinstance(p, AttentionProblem):
        # A query of a sequence is multiplied by other kernels than many, cuDNN's too.
        queries = ["of one query"] if p.q_len == 1 else []
        return (p.op, p.direction, _width(p.dtype), *queries)
    return (p.op,)


def _width(dtype: str) -> str:
    return "16-bit" if dtype in ("float16", "bfloat16") else dtype


def _exact(problem: GemmProblem | GatedMatmulProblem | Conv2dProblem) -> list[str]:
    """The precision, if it is not the default one."""
    return [] if problem.precision == "default" else [problem.precision]


# ---- configs -------------------------------------------------------------------------


def _of_field(name: str, values: np.ndarray) -> Numbers:
    """A field of configs: numbers, or a number for each of its words."""
    if values.dtype.kind in "biuf":
        return {name: values.astype(np.float64)}
    words = np.array([str(value) for value in values.tolist()])
    return {f"{name}={word}": (words == word) * 1.0 for word in np.unique(words)}


def _of_tiles(problem: Problem, device: Device, columns: Mapping[str, Any]) -> Numbers:
    """Waves of tiles over the device, and how deep a pipeline is against k."""
    if not isinstance(device, CudaDevice):
        return {}
    if isinstance(problem, AttentionProblem):
        p = problem
        if "tile_q" not in columns:
            return {}
        tiles = p.batch * p.heads * _ceil_div(p.q_len, columns["tile_q"])
        return _of_waves(tiles, device)
    if isinstance(problem, GemmProblem | GatedMatmulProblem):
        (m, n, k), batch = (problem.m, problem.n, problem.k), problem.batch
    elif isinstance(problem, Conv2dProblem):
        (m, n, k), batch = conv_product(problem), problem.groups
    else:
        return {}
    if not {"tile_m", "tile_n"} <= columns.keys():
        return {}
    tile_m, tile_n = (columns[name].astype(np.int64) for name in ("tile_m", "tile_n"))
    rows, cols = _ceil_div(m, tile_m), _ceil_div(n, tile_n)
    filled = m * n / np.maximum(rows * tile_m * cols * tile_n, 1)
    numbers = _of_waves(batch * rows * cols, device)
    numbers |= {"tile_filled": filled, "tile_area": np.log2(tile_m * tile_n)}
    if "stages" in columns:
        numbers["depth_of_stages"] = _log(k) - np.log2(columns["stages"])
    return numbers


def _of_waves(tiles: np.ndarray, device: CudaDevice) -> Numbers:
    waves = tiles / device.sm_count
    return {
        "tile_waves": np.log2(np.maximum(waves, 2.0**-20)),
        "tile_tail": waves / np.maximum(np.ceil(waves), 1),
    }


def _ceil_div(size: int, tile: np.ndarray) -> np.ndarray:
    return -(-size // np.maximum(tile.astype(np.int64), 1))


def _log(value: float) -> float:
    return math.log2(value) if value > 1 else 0.0


def _log_ratio(value: float, unit: float) -> float:
    """The logarithm of a quotient; that of an empty one is out of sight below."""
    return math.log2(value / unit) if value > 0 and unit > 0 else -60.0


def _twos(size: int) -> float:
    """How often the size, or a block of 256, can be halved."""
    return math.log2(math.gcd(size, _MOST_TWOS))


def _filled(size: int, tile: int) -> float:
    return size / (tile * max(-(-size // tile), 1))

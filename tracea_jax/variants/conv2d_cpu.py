"""conv2d_cpu: implicit matrix products in C++, prebuilt for each CPU ISA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracea_jax.device import CPU_ISAS, CpuDevice, Device
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants.base import Call, CpuCall
from tracea_jax.variants.space import Columns, Space, grid, representative, survivors

DTYPES = ("float32", "bfloat16", "float16")
TARGET = "tracea_cpu_conv2d_v1"
ABI = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dCpuConfig:
    """Cache blocking and task count; the register tile follows from the ISA.

    Attributes:
      kc: depth of a packed block, in elements of the sum over taps and channels (over
        pixels, for the weights' gradient). The one choice that changes rounding: blocks
        are summed one by one.
      nc: width of a packed block, in channels of the result.
      tasks: independent pieces of the output for each thread.
    """

    kc: int
    nc: int
    tasks: int

    def __str__(self) -> str:
        return f"kc {self.kc} nc {self.nc} tasks {self.tasks}"


_LIMITS = {"kc": 8192, "nc": 8192, "tasks": 64}
_MOST_SIZE = 2**31  # of strides, dilation and padding
_STEP = 32  # blocks of depth are multiples of it
_KC = 576  # deep enough to amortise the partial sums, shallow enough for L1
_PANEL_SHARE = (
    0.4  # of L2 for the packed weights; image and result pass through the rest
)
_FEW_COLUMNS = 4
_MOST_NC = 4096  # wider blocks are cut to this
# With the heuristic's own width these are few enough to measure all.
_DEPTHS = (192, 384, 576, 1152)
_WIDTHS = (64, 128, 256)
_TASKS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dCpu:
    """See the module; the methods are ``variants.base.Variant``'s."""

    name: str = "conv2d_cpu"
    config_type: type = Conv2dCpuConfig
    sources: tuple[str, ...] = ("cpu/",)

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        if not isinstance(device, CpuDevice):
            return f"it runs on CPUs; the device is {device.platform}"
        if problem.layout != "nhwc":
            return f"layout {problem.layout}; it takes nhwc"
        if problem.lhs != problem.rhs:
            return (
                f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
            )
        for role, dtype in (("operands", problem.lhs), ("output", problem.out)):
            if dtype not in DTYPES:
                return f"{role} of dtype {dtype}; it takes {', '.join(DTYPES)}"
        if problem.precision not in ("default", "high", "highest"):
            return f"precision {problem.precision} names an algorithm only XLA has"
        sizes = (*problem.strides, *problem.dilation, *sum(problem.padding, ()))
        if max(map(abs, sizes)) >= _MOST_SIZE:
            return f"strides, dilation or padding of {max(map(abs, sizes))}"
        return None

    def check(
        self, problem: Conv2dProblem, config: Conv2dCpuConfig, device: Device
    ) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(config, name)
            if not (isinstance(value, int) and 1 <= value <= limit):
                raise ValueError(
                    f"{name}={value!r} must be an integer from 1 to {limit}"
                )

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        assert isinstance(device, CpuDevice)
        hero = self.heuristic(problem, device)
        widths = sorted({*_WIDTHS, hero.nc})
        columns = grid(kc=_DEPTHS, nc=widths, tasks=_TASKS)
        alive, pruned = survivors(_repeats(problem, device, hero, columns))
        columns = {name: values[alive] for name, values in columns.items()}
        return Space(
            config_type=Conv2dCpuConfig,
            columns=columns,
            derived=_derived(problem, device, columns),
            pruned=pruned,
        )

    def heuristic(self, problem: Conv2dProblem, device: Device) -> Conv2dCpuConfig:
        assert isinstance(device, CpuDevice)
        kc, itemsize = (2 * _KC, 2) if on_amx(problem, device) else (_KC, 4)
        columns = int(_PANEL_SHARE * device.l2_bytes / (itemsize * kc)) // 32 * 32
        return Conv2dCpuConfig(kc=kc, nc=min(max(64, columns), _MOST_NC), tasks=2)

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        """Against XLA, which is slow at groups and widens 16-bit operands to float32.

        A register tile is 32 columns wide: a result of very few channels wastes it.
        """
        if _is_depthwise(problem) or on_amx(problem, device):
            return True
        if problem.groups == 1:
            return width(problem) > _FEW_COLUMNS
        one_channel = problem.in_channels == problem.groups
        return not one_channel or problem.lhs == "float32"

    def call(
        self, problem: Conv2dProblem, config: Conv2dCpuConfig, device: Device
    ) -> Call:
        assert device.arch in CPU_ISAS
        epilogue = problem.epilogue
        axes = zip(
            ("height", "width"),
            *(problem.strides, problem.dilation, problem.padding),
            strict=True,
        )
        geometry = [
            (f"{what}_{axis}", value)
            for axis, stride, dilation, (before, _) in axes
            for what, value in (
                *(("stride", stride), ("dilation", dilation), ("padding", before)),
            )
        ]
        return CpuCall(
            target=TARGET,
            attributes=(
                ("abi", ABI),
                ("direction", problem.direction),
                *geometry,
                ("groups", problem.groups),
                ("bias", epilogue.bias != "none"),
                ("activation", epilogue.activation),
                ("residual", epilogue.residual),
                ("save_preactivation", epilogue.save_preactivation),
                ("isa", device.arch),
                ("kc", config.kc),
                ("nc", config.nc),
                ("tasks", config.tasks),
            ),
        )


def on_amx(problem: Conv2dProblem, device: Device) -> bool:
    """Whether AMX's tiles multiply; f32 registers do otherwise."""
    if device.arch != "amx" or problem.lhs != "bfloat16" or _is_depthwise(problem):
        return False
    if problem.direction == "weight_grad":
        return False
    return _depth(problem, _STEP) <= 4 * _depth(problem, 1)


def _is_depthwise(problem: Conv2dProblem) -> bool:
    groups = problem.groups
    return groups > 1 and problem.in_channels == groups == problem.out_channels


def depth(problem: Conv2dProblem, device: Device) -> int:
    """Number of terms in each sum; for the input's gradient in its longest one.

    AMX fills up every run of contiguous terms to a multiple of 32.
    """
    return _depth(problem, _STEP if on_amx(problem, device) else 1)


def _depth(problem: Conv2dProblem, unit: int) -> int:
    p = problem
    if p.direction == "weight_grad":
        return p.batch * math.prod(p.out_size)
    taps_y, taps_x = p.kernel_height, p.kernel_width
    channels, next_tap = p.in_channels // p.groups, p.dilation[1]
    if p.direction == "input_grad":  # the taps that one row of pixels or column sees
        common = [math.gcd(d, s) for d, s in zip(p.dilation, p.strides, strict=True)]
        taps_y, taps_x = (
            _ceil_div(k, s // c)
            for k, s, c in zip((taps_y, taps_x), p.strides, common, strict=True)
        )
        channels, next_tap = p.out_channels // p.groups, p.dilation[1] // common[1]
    if p.groups == 1 and next_tap == 1:
        return taps_y * unit * _ceil_div(taps_x * channels, unit)
    return taps_y * taps_x * unit * _ceil_div(channels, unit)


def width(problem: Conv2dProblem) -> int:
    """Channels of the result in each group."""
    by_input = problem.direction == "input_grad"
    count = problem.in_channels if by_input else problem.out_channels
    return count // problem.groups


def _repeats(
    problem: Conv2dProblem, device: CpuDevice, hero: Conv2dCpuConfig, columns: Columns
) -> Iterator[tuple[str, np.ndarray]]:
    """Which configs run exactly as another one, by the choice that makes no difference.

    Of those the heuristic's stands for the others, else the smallest.
    """
    effects = {
        "kc": lambda kc: block_depth(problem, device, kc),
        "nc": lambda nc: np.minimum(nc, width(problem)),
        "tasks": lambda tasks: 0 if device.cores == 1 else tasks,
    }
    for name, effect in effects.items():
        values = columns[name]
        choices = (getattr(hero, name), *np.unique(values).tolist())
        yield name, representative(values, choices, effect) != values


def block_depth(problem: Conv2dProblem, device: Device, kc: Any) -> Any:
    """Depth of the packed blocks: equal multiples of 32, at most kc rounded up."""
    units = _ceil_div(depth(problem, device), _STEP)
    blocks = np.maximum(_ceil_div(units, _ceil_div(kc, _STEP)), 1)
    return _STEP * _ceil_div(units, blocks)


def _ceil_div(a: Any, b: Any) -> Any:
    return -(-a // b)


def _derived(problem: Conv2dProblem, device: CpuDevice, columns: Columns) -> Columns:
    """Features that say how a blocking fits the problem and the caches."""
    itemsize = 2 if on_amx(problem, device) else 4
    deep = np.maximum(block_depth(problem, device, columns["kc"]), 1)
    wide = np.clip(columns["nc"], 1, max(width(problem), 1))
    return {
        "log2_panel_per_l2": np.log2(itemsize * deep * wide / device.l2_bytes),
        "log2_depth_blocks": np.log2(
            np.maximum(_ceil_div(depth(problem, device), deep), 1)
        ),
        "log2_strips": np.log2(np.maximum(_ceil_div(width(problem), wide), 1)),
    }


CONV2D_CPU = Conv2dCpu()

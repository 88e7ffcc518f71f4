"""conv2d_cpu: implicit matrix products in C++, prebuilt for each CPU ISA.

Here are its configs, heuristic and the problems it expects to win; the kernel is in
kernels/cpu. A weights' gradient that is a plain product uses the configs of
``gemm_cpu``. Caller: the op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tracea_jax.device import CPU_ISAS, CpuDevice, Device
from tracea_jax.problem import Conv2dProblem, GemmProblem
from tracea_jax.variants import cpu_calls
from tracea_jax.variants.base import Call, CpuCall
from tracea_jax.variants.conv2d_product import product_of
from tracea_jax.variants.cpu import (
    blocking_features,
    ceil_div,
    refuses_product,
    tasks_of_thread,
)
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.space import (
    Columns,
    Space,
    check_ranges,
    grid,
    repeated,
    survivors,
)

TARGET = "tracea_cpu_conv2d_v1"
ABI = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dCpuConfig:
    """Cache blocking and task count; the register tile follows from the ISA.

    Attributes:
      kc: depth of a packed block, in elements of the sum over taps and channels (over
        pixels, for the weights' gradient). Only this field changes rounding, because
        blocks are summed one after another.
      nc: width of a packed block, in channels of the result.
      tasks: independent pieces of the output for each thread.
    """

    kc: int
    nc: int
    tasks: int

    def __str__(self) -> str:
        return f"kc {self.kc} nc {self.nc} tasks {self.tasks}"


_RANGES = {"kc": (1, 8192), "nc": (1, 8192), "tasks": (1, 64)}
_MOST_SIZE = 2**31  # strides, dilation and padding are below this
_STEP = 32  # the depth of blocks is a multiple of this
_KC = 576  # default depth: deep enough to amortise partial sums, shallow enough for L1
_PANEL_SHARE = (
    0.4  # of L2 for the packed weights; image and result pass through the rest
)
_FEW_COLUMNS = 4
# Channels of the result from which a gradient of weights uses each window that it has
# packed often enough: with few taps and channels of the image, and with more.
_GRADIENT_COLUMNS = {"few": 96, "more": 64}
_FEW_GRADIENT_ROWS = 64
_GRADIENT_FLOPS = 2**22  # of the smallest that were measured; others hardly pay anyway
_MOST_NC = 4096  # the widest block; wider ones are cut to this
# Values worth measuring; with the heuristic's own width, few enough to measure all.
_DEPTHS = (192, 384, 576, 1152)
_WIDTHS = (64, 128, 256)
_TASKS = (1, 2, 4, 8)


def _pays(problem: Conv2dProblem, device: CpuDevice) -> bool:
    """Returns whether our kernel saves more than its call costs.

    XLA is slow at convolutions with groups, whatever their size.
    """
    p = problem
    return p.groups > 1 or cpu_calls.pays(
        widens=p.lhs == "bfloat16" and device.isa == "avx512_bf16",
        madds=p.flops // 2,
        elements=p.batch * p.height * p.width * p.in_channels,
        madd_ns=cpu_calls.CONV_MADD_NS,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dCpu:
    """The variant conv2d_cpu; for its methods see ``variants.base.Variant``."""

    name: str = "conv2d_cpu"
    config_type: type = Conv2dCpuConfig
    sources: tuple[str, ...] = ("cpu/conv2d",)

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        if reason := refuses_product(problem, device):
            return reason
        if problem.layout != "nhwc":
            return f"layout {problem.layout}; it takes nhwc"
        sizes = (*problem.strides, *problem.dilation, *sum(problem.padding, ()))
        if max(map(abs, sizes)) >= _MOST_SIZE:
            return f"strides, dilation or padding of {max(map(abs, sizes))}"
        return None

    def check(
        self, problem: Conv2dProblem, config: Conv2dCpuConfig, device: Device
    ) -> None:
        check_ranges(config, _RANGES)

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        assert isinstance(device, CpuDevice)
        if product := plain_product(problem):
            known = GEMM_CPU.space(product, device)
            return dataclasses.replace(known, config_type=Conv2dCpuConfig)
        hero = self.heuristic(problem, device)
        widths = sorted({*_WIDTHS, hero.nc})
        columns = grid(kc=_DEPTHS, nc=widths, tasks=_TASKS)
        alive, pruned = survivors(repeated(columns, hero, _effects(problem, device)))
        columns = {name: values[alive] for name, values in columns.items()}
        return dataclasses.replace(
            self.described(problem, columns, device), pruned=pruned
        )

    def described(
        self, problem: Conv2dProblem, columns: Columns, device: Device
    ) -> Space:
        assert isinstance(device, CpuDevice)
        if product := plain_product(problem):
            known = GEMM_CPU.described(product, columns, device)
            return dataclasses.replace(known, config_type=Conv2dCpuConfig)
        return Space(
            config_type=Conv2dCpuConfig,
            columns=columns,
            derived=_derived(problem, device, columns),
        )

    def heuristic(self, problem: Conv2dProblem, device: Device) -> Conv2dCpuConfig:
        assert isinstance(device, CpuDevice)
        if product := plain_product(problem):
            known = GEMM_CPU.heuristic(product, device)
            return Conv2dCpuConfig(**dataclasses.asdict(known))
        itemsize = _packed_bytes(problem, device)
        kc = _KC * 4 // itemsize
        columns = int(_PANEL_SHARE * device.l2_bytes / (itemsize * kc)) // 32 * 32
        nc = min(max(64, columns), _MOST_NC)
        tasks = tasks_of_thread(problem.flops, device)
        return Conv2dCpuConfig(kc=kc, nc=nc, tasks=tasks)

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        """Returns whether the kernel is expected to beat XLA.

        XLA is slow at groups and widens 16-bit operands to float32. Our register tile
        is 32 columns wide, so a result of very few channels wastes most of it.
        """
        if self.doubt(problem, device):
            return False
        if plain_product(problem):
            return True
        if _is_depthwise(problem) or on_amx(problem, device):
            return True
        if problem.groups == 1:
            return width(problem) > _FEW_COLUMNS
        one_channel = problem.in_channels == problem.groups
        gradient = problem.direction != "forward"
        return not one_channel or gradient or problem.lhs == "float32"

    def doubt(self, problem: Conv2dProblem, device: Device) -> str | None:
        assert isinstance(device, CpuDevice)
        if product := plain_product(problem):
            return GEMM_CPU.doubt(product, device)
        if not _pays(problem, device):
            return cpu_calls.REASON
        if _packs_for_few(problem, device):
            return "packing windows takes longer than what few channels save"
        return None

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


def plain_product(problem: Conv2dProblem) -> GemmProblem | None:
    """The product x^T @ dy, if the problem is a weights' gradient equal to it.

    The kernel runs such a gradient as that product; else the result is None.
    """
    p = problem
    is_pointwise = (p.kernel_height, p.kernel_width, *p.strides, p.groups) == (1,) * 5
    is_whole = not any(sum(p.padding, ()))
    if p.direction != "weight_grad" or not (is_pointwise and is_whole):
        return None
    return product_of(problem)


def on_amx(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the problem runs on AMX's tiles, else on vectors."""
    if device.arch != "amx" or problem.lhs != "bfloat16" or _is_depthwise(problem):
        return False
    return _depth(problem, _STEP) <= 4 * _depth(problem, 1)


def in_pairs(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the problem runs on vectors of pairs of bfloat16.

    In the input's gradient, no pair may span two taps.
    """
    if device.arch != "avx512_bf16" or problem.lhs != "bfloat16":
        return False
    if _is_depthwise(problem):
        return False
    even = problem.out_channels // problem.groups % 2 == 0
    return even or problem.direction != "input_grad"


def _packs_for_few(problem: Conv2dProblem, device: Device) -> bool:
    """True if XLA's gradient of weights is faster, as few channels use each window.

    On AVX2, XLA was faster with 16 to 32 channels of the result, and with 64 if a
    window has 27 elements; as fast with 48, and slower with more.
    """
    p = problem
    if p.direction != "weight_grad" or p.groups > 1 or on_amx(problem, device):
        return False
    if p.flops < _GRADIENT_FLOPS:
        return False
    rows = p.kernel_height * p.kernel_width * p.in_channels
    kind = "few" if rows <= _FEW_GRADIENT_ROWS else "more"
    return p.out_channels < _GRADIENT_COLUMNS[kind]


def _packed_bytes(problem: Conv2dProblem, device: Device) -> int:
    """Bytes of a packed element, which is bfloat16 or float32."""
    return 2 if on_amx(problem, device) or in_pairs(problem, device) else 4


def _is_depthwise(problem: Conv2dProblem) -> bool:
    groups = problem.groups
    return groups > 1 and problem.in_channels == groups == problem.out_channels


def depth(problem: Conv2dProblem, device: Device) -> int:
    """Number of terms in each sum; of the input's gradient, in its longest sum.

    AMX pads every run of contiguous terms to a multiple of 32.
    """
    return _depth(problem, _STEP if on_amx(problem, device) else 1)


def _depth(problem: Conv2dProblem, unit: int) -> int:
    p = problem
    if p.direction == "weight_grad":
        return p.batch * math.prod(p.out_size)
    taps_y, taps_x = p.kernel_height, p.kernel_width
    channels, next_tap = p.in_channels // p.groups, p.dilation[1]
    if p.direction == "input_grad":  # the taps that reach one row or column of pixels
        common = [math.gcd(d, s) for d, s in zip(p.dilation, p.strides, strict=True)]
        taps_y, taps_x = (
            ceil_div(k, s // c)
            for k, s, c in zip((taps_y, taps_x), p.strides, common, strict=True)
        )
        channels, next_tap = p.out_channels // p.groups, p.dilation[1] // common[1]
    if p.groups == 1 and next_tap == 1:
        return taps_y * unit * ceil_div(taps_x * channels, unit)
    return taps_y * taps_x * unit * ceil_div(channels, unit)


def width(problem: Conv2dProblem) -> int:
    """Channels of the result in each group."""
    by_input = problem.direction == "input_grad"
    count = problem.in_channels if by_input else problem.out_channels
    return count // problem.groups


def _effects(
    problem: Conv2dProblem, device: CpuDevice
) -> dict[str, Callable[[Any], Any]]:
    """For each field the effect of its values; configs of equal effects run alike."""
    return {
        "kc": lambda kc: block_depth(problem, device, kc),
        "nc": lambda nc: np.minimum(nc, width(problem)),
        "tasks": lambda tasks: 0 if device.cores == 1 else tasks,
    }


def block_depth(problem: Conv2dProblem, device: Device, kc: Any) -> Any:
    """Depth of the packed blocks: equal multiples of 32, at most kc rounded up."""
    units = ceil_div(depth(problem, device), _STEP)
    blocks = np.maximum(ceil_div(units, ceil_div(kc, _STEP)), 1)
    return _STEP * ceil_div(units, blocks)


def _derived(problem: Conv2dProblem, device: CpuDevice, columns: Columns) -> Columns:
    """Features that say how a blocking fits the problem and the caches."""
    itemsize = _packed_bytes(problem, device)
    deep = np.maximum(block_depth(problem, device, columns["kc"]), 1)
    wide = np.clip(columns["nc"], 1, max(width(problem), 1))
    return blocking_features(
        device,
        depth=depth(problem, device),
        width=width(problem),
        kc=deep,
        nc=wide,
        panel_bytes=itemsize * deep * wide,
    )


CONV2D_CPU = Conv2dCpu()

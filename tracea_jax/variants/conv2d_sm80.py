"""conv2d_sm80: convolutions as implicit products by mma.sync, on GPUs since Ampere.

    forward       y = activation(conv(x, w) + bias + residual)
    input_grad    dx, phase by phase where the convolution has a stride
    weight_grad   dw, as partial sums of parts of the pixels, added in a fixed order

Operands are bfloat16 or float16, or float32 as TF32. The configs are those of the
product, see ``variants.gemm_sm80``, and so is the model that ranks them. Here are the
reasons that refuse problems, and the default; the kernels' texts are written in
``emit.conv2d_sm80`` and ``emit.conv2d_weights_sm80``. Caller: the op's record
(``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_sm80 as emit
from tracea_jax.emit import conv2d_weights_sm80 as emit_weights
from tracea_jax.emit import conv_product as products
from tracea_jax.emit.conv_axes import walks
from tracea_jax.emit.gemm_sm80 import GemmSm80Config, tile_count
from tracea_jax.problem import ITEMSIZE, Conv2dProblem, GemmProblem
from tracea_jax.variants import gemm_sm80, images
from tracea_jax.variants.base import Call
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.partial_sums import SOURCE, summed
from tracea_jax.variants.space import (
    Columns,
    Rule,
    Space,
    as_config,
    check_rules,
    grid,
    legal_columns,
)

_MOST_PHASES = 2  # of an axis
_MOST_UNITS = 2**30  # so that sums with offsets of taps fit 31 bits, too
_MOST_PIXELS = 2**30
# Of gradients of weights that were measured.
_MOST_FLOPS, _MOST_FLOPS_OF_GROUPS = 2**35, 2**32
# A thread has registers for this many sums and words that say where its pixels are.
_MOST_WITH_PIXELS = 136
_PIXEL_WORDS = 2
_NEAR, _EQUAL = 1.15, 1.02  # of the least time that the model finds: no difference
_RING_BYTES = 256  # along the depth, of the usual ring
# Of gradients of weights: blocks that parts make for each multiprocessor, and the
# steps of a part of few pixels.
_BLOCKS, _FEWEST_STEPS = 2, 8


def _pixel_words(p: GemmProblem, c: GemmSm80Config) -> Any:
    """Registers of a thread for the rows of pixels that it copies, if they are rows."""
    if p.layout[0] == "t":
        return np.zeros_like(c.tile_m)
    copied = c.tile_m * c.tile_k * ITEMSIZE[p.lhs] // products.UNIT_BYTES
    return _PIXEL_WORDS * copied // c.threads


# Of the product; beside those of ``gemm_sm80``.
_LEGAL = (
    Rule(
        code="pixels",
        refuses=lambda p, c, d: c.accumulators + _pixel_words(p, c) > _MOST_WITH_PIXELS,
        why=lambda p, c, d: (
            f"{c.accumulators} accumulators a thread leave no room for the places of "
            f"pixels, {_pixel_words(p, c)} registers; use more warps or a smaller tile"
        ),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dSm80:
    """The variant conv2d_sm80; for its methods see ``variants.base.Variant``."""

    name: str = "conv2d_sm80"
    config_type: type = GemmSm80Config
    sources: tuple[str, ...] = (
        "cuda/conv2d_sm80.cuh",
        "cuda/conv2d_weights_sm80.cuh",
        SOURCE,
    )

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: Conv2dProblem, config: GemmSm80Config, device: Device
    ) -> None:
        assert isinstance(device, CudaDevice)
        asked = products.product(problem)
        gemm_sm80.GEMM_SM80.check(asked, config, device)
        check_rules(_LEGAL, asked, config, device)

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        asked = products.product(problem)
        columns, pruned = legal_columns(
            grid(**gemm_sm80.GRID),
            GemmSm80Config,
            (*gemm_sm80.LEGAL, *_LEGAL, *gemm_sm80.WORTH),
            asked,
            device,
        )
        return dataclasses.replace(
            self.described(problem, columns, device), pruned=pruned
        )

    def described(
        self, problem: Conv2dProblem, columns: Columns, device: Device
    ) -> Space:
        assert isinstance(device, CudaDevice)
        config = as_config(GemmSm80Config, columns)
        return Space(
            config_type=GemmSm80Config,
            columns=columns,
            derived=gemm_sm80.derived(products.product(problem), config, device),
            modelled_us=_modelled_us(problem, columns, device),
        )

    def heuristic(self, problem: Conv2dProblem, device: Device) -> GemmSm80Config:
        return choose(problem, self.space(problem, device))

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        """Returns whether the kernel was measured to beat cuDNN on such problems.

        By ``conv2d.json`` of an H100, in float32, cuDNN took 1.02 to 1.15 times as
        long for the gradient of weights of 3 x 3 kernels of 64, 128 and 256 channels
        on 64 images of ResNets, and 1.35 to 1.5 times on 8. It was slower for 32 groups
        of 8 to 32, too, of which no results are kept, and faster for y, for dx of
        images that are padded evenly, and for more channels.
        """
        p = problem
        return (
            isinstance(device, CudaDevice)
            and device.capability == (9, 0)
            and p.lhs == "float32" == p.out
            and p.direction == "weight_grad"
            and (p.kernel_height, p.kernel_width) == (3, 3)
            and p.strides == (1, 1) == p.dilation
            and (_has_measured_groups(p) if p.groups > 1 else _is_measured_dense(p))
        )

    def call(
        self, problem: Conv2dProblem, config: GemmSm80Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        p = problem
        if p.direction != "weight_grad":
            return emit.kernel(p, config, device)
        inputs = p.in_channels // p.groups
        shape = (p.kernel_height, p.kernel_width, inputs, p.out_channels)
        parts = parts_of(p, config, device)
        kernel = emit_weights.kernel(p, config, parts, device)
        return summed(kernel, parts, shape, p.out, device)


CONV2D_SM80 = Conv2dSm80()


def _is_measured_dense(p: Conv2dProblem) -> bool:
    return (
        p.in_channels in (64, 96, 128, 256)
        and p.out_channels == p.in_channels
        and images.FEW_FLOPS <= p.flops <= _MOST_FLOPS
    )


def _has_measured_groups(p: Conv2dProblem) -> bool:
    return (
        p.groups == 32
        and p.in_channels in (256, 512, 1024)
        and p.out_channels == p.in_channels
        and images.FEW_FLOPS <= p.flops <= _MOST_FLOPS_OF_GROUPS
    )


def choose(problem: Conv2dProblem, space: Space) -> GemmSm80Config:
    """The config to use without measurements.

    Of those that the model finds as good as equal, small tiles were fastest on an H100,
    as many blocks hide the gathering of pixels; and square ones where few of the taps
    meet a pixel. Weights' gradients gather for each step, and large tiles share that.
    """
    config: Any = as_config(GemmSm80Config, space.columns)
    us: Any = space.modelled_us
    tile = config.tile_m, config.tile_n
    is_equal, preferred = us <= us.min() * _NEAR, config.tile_m * config.tile_n
    if problem.direction == "weight_grad":
        is_equal, preferred = us <= us.min() * _EQUAL, np.zeros_like(us)
    elif emit.scatters(problem):
        preferred = np.maximum(*tile) / np.minimum(*tile)
    unusual = config.raster_band != gemm_sm80.USUAL_BAND
    depth = abs(config.stages * config.tile_k * ITEMSIZE[problem.lhs] - _RING_BYTES)
    order = np.lexsort((us, depth, unusual, preferred, ~is_equal))
    return space.config(int(order[0]))


def parts_of(problem: Conv2dProblem, config: GemmSm80Config, device: CudaDevice) -> int:
    """Ranges of pixels to sum apart, so that multiprocessors have as much to do."""
    asked = products.product(problem)
    wanted = _BLOCKS * device.sm_count // tile_count(asked, config)
    steps = -(-asked.k // config.tile_k)
    return max(min(wanted, steps // _FEWEST_STEPS), 1)


def _modelled_us(
    problem: Conv2dProblem, columns: Columns, device: CudaDevice
) -> np.ndarray:
    if problem.direction == "weight_grad":
        configs = Space(config_type=GemmSm80Config, columns=columns).configs()
        return np.array([_of_parts_us(problem, config, device) for config in configs])
    asked = products.product(problem)
    if problem.direction == "input_grad":  # a phase meets a part of the taps
        asked = dataclasses.replace(asked, k=-(-asked.k // math.prod(problem.strides)))
    config = as_config(GemmSm80Config, columns)
    return gemm_sm80.multiplied_us(asked, config, device)


def _of_parts_us(
    problem: Conv2dProblem, config: GemmSm80Config, device: CudaDevice
) -> float:
    parts = parts_of(problem, config, device)
    asked = emit_weights.shared_product(problem, parts)
    return float(gemm_sm80.multiplied_us(asked, config, device))


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    """Why the problem is refused; reasons that hold for every problem come first."""
    p = problem
    yield from refused_device(device)
    yield from images.refused_arrays(p, products.DTYPES)
    if p.lhs not in products.DTYPES or p.lhs != p.rhs or 0 in p.elements:
        return
    yield from images.refused_tf32(p)
    unit = products.unit(p)
    for name, channels in (("in", p.in_channels), ("out", p.out_channels)):
        if (count := channels // p.groups) % unit:
            yield (
                f"{count} {name}_channels of a group; pixels and weights are copied in "
                f"units of {unit}"
            )
    if (taps := max(p.kernel_height, p.kernel_width)) > products.MOST_TAPS:
        yield f"a kernel of {taps} taps along an axis; it takes {products.MOST_TAPS}"
    if products.units(p) > _MOST_UNITS:
        yield f"an array has more than {_MOST_UNITS} units of 16 bytes"
    if products.pixels(p) > _MOST_PIXELS:
        yield f"its images have more than {_MOST_PIXELS} pixels"
    if p.direction == "input_grad" and max(map(len, walks(p))) > _MOST_PHASES:
        yield (
            f"the gradient of strides {p.strides} has more than {_MOST_PHASES} phases "
            "of an axis"
        )

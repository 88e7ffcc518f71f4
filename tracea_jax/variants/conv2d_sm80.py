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
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_sm80 as emit
from tracea_jax.emit import conv2d_weights_sm80 as emit_weights
from tracea_jax.emit import conv_product as products
from tracea_jax.emit.conv_axes import walks
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.problem import ITEMSIZE, Conv2dProblem, GemmProblem
from tracea_jax.variants import gemm_sm80, images
from tracea_jax.variants.base import Call
from tracea_jax.variants.partial_sums import SOURCE, summed
from tracea_jax.variants.space import (
    Columns,
    Rule,
    Space,
    as_config,
    first_refusal,
    grid,
    legal_columns,
)

_MOST_PHASES = 2  # of an axis
_MOST_UNITS = 2**30  # so that sums with offsets of taps fit 31 bits, too
_MOST_PIXELS = 2**30
# A thread has registers for this many sums and words that say where its pixels are.
_MOST_WITH_PIXELS = 136
_PIXEL_WORDS = 2


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
        if rule := first_refusal(_LEGAL, asked, config, device):
            raise ValueError(rule.why(asked, config, device))

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
        config = as_config(GemmSm80Config, columns)
        return Space(
            config_type=GemmSm80Config,
            columns=columns,
            derived=gemm_sm80.derived(asked, config, device),
            modelled_us=_modelled_us(problem, columns, device),
            pruned=pruned,
        )

    def heuristic(self, problem: Conv2dProblem, device: Device) -> GemmSm80Config:
        space = self.space(problem, device)
        assert space.modelled_us is not None
        return space.config(int(np.argmin(space.modelled_us)))

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        # cuDNN's kernels are tuned for these GPUs.
        return False

    def call(
        self, problem: Conv2dProblem, config: GemmSm80Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        p = problem
        if p.direction != "weight_grad":
            return emit.kernel(p, config, device)
        inputs = p.in_channels // p.groups
        shape = (p.kernel_height, p.kernel_width, inputs, p.out_channels)
        kernel = emit_weights.kernel(p, config, device)
        parts = emit_weights.parts(p, config, device)
        return summed(kernel, parts, shape, p.out, device)


CONV2D_SM80 = Conv2dSm80()


def _modelled_us(
    problem: Conv2dProblem, columns: Columns, device: CudaDevice
) -> np.ndarray:
    if problem.direction != "weight_grad":
        config = as_config(GemmSm80Config, columns)
        return gemm_sm80.multiplied_us(products.product(problem), config, device)
    space = Space(config_type=GemmSm80Config, columns=columns)
    return np.array(
        [
            gemm_sm80.multiplied_us(
                emit_weights.shared_product(problem, config, device), config, device
            )
            for config in space.configs()
        ]
    )


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    """Why the problem is refused; reasons that hold for every problem come first."""
    p = problem
    yield from images.refused_device(device)
    yield from images.refused_arrays(p, products.DTYPES)
    if p.lhs not in products.DTYPES or p.lhs != p.rhs or 0 in p.elements:
        return
    if p.lhs == "float32" and p.precision != "default":
        yield (
            f"precision {p.precision} of float32 operands; it multiplies them as TF32, "
            "which is the default precision"
        )
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

"""conv2d_stem_weights: the gradient of the weights of convolutions of few channels.

Such as the first one of a network, on every GPU since sm_80. Here are the reasons that
refuse problems, and the default; the kernel's text is written in
``emit.conv2d_stem_weights``. Caller: the op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_stem_weights as emit
from tracea_jax.emit.conv2d_stem_weights import StemWeightsConfig
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import EXACT_PRECISIONS, INT32_MAX
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.partial_sums import SOURCE, summed
from tracea_jax.variants.space import Space, check_choices

DTYPES = ("bfloat16", "float16")
OUT_DTYPES = ("float32", "bfloat16", "float16")
CHOICES: dict[str, tuple[int, ...]] = {"splits": (1, 2, 3, 4), "blocks": (1, 2, 3, 4)}
_MOST_CHANNELS, _MOST_WARPS = 8, 12
_MANY_BYTES, _FEWEST_BYTES = 2**26, {7: 2**20}  # by taps of an axis
_MOST_BLOCKS_OF_ROWS = 4  # whose sums fit the registers of a warp
_USUAL_WARPS = 8
_MOST_PADDING = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dStemWeights:
    """The variant conv2d_stem_weights; for its methods see ``variants.base``."""

    name: str = "conv2d_stem_weights"
    config_type: type = StemWeightsConfig
    sources: tuple[str, ...] = ("cuda/conv2d_stem_weights.cuh", SOURCE)

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: Conv2dProblem, config: StemWeightsConfig, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        if problem.kernel_height * config.splits > _MOST_WARPS:
            raise ValueError(
                f"splits={config.splits} of {problem.kernel_height} rows of taps are "
                f"more than {_MOST_WARPS} warps"
            )

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        return Space.of(
            *(
                StemWeightsConfig(splits=splits, blocks=blocks)
                for splits in CHOICES["splits"]
                for blocks in CHOICES["blocks"]
                if problem.kernel_height * splits <= _MOST_WARPS
            )
        )

    def heuristic(self, problem: Conv2dProblem, device: Device) -> StemWeightsConfig:
        splits = max(1, min(_USUAL_WARPS // problem.kernel_height, 4))
        return StemWeightsConfig(splits=splits, blocks=2)

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        """Returns whether the kernel was measured to beat cuDNN on such problems.

        By ``conv2d.json`` of an H100 cuDNN took 2.4 times as long for a 7 x 7
        kernel of 3 channels in steps of two, on 64 images of 224 x 224. It was slower
        for 3 x 3 kernels, too, of which no results are kept. By the answers of an H200
        that ship it took 2.6 and 1.9 times as long for 7 x 7 on one image and eight.
        """
        p = problem
        return (
            images.is_measured(p, device)
            and p.in_channels == 3
            and p.strides == (2, 2)
            and p.kernel_height == p.kernel_width in (3, 5, 7)
            and p.bytes >= _FEWEST_BYTES.get(p.kernel_height, _MANY_BYTES)
        )

    def call(
        self, problem: Conv2dProblem, config: StemWeightsConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        p = problem
        shape = (p.kernel_height, p.kernel_width, p.in_channels, p.out_channels)
        parts = emit.parts(p, config, device) * config.splits
        return summed(emit.kernel(p, config, device), parts, shape, p.out, device)


CONV2D_STEM_WEIGHTS = Conv2dStemWeights()


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if p.direction != "weight_grad":
        yield f"direction {p.direction}; it computes the gradient of weights"
        return
    if p.layout != "nhwc":
        yield f"layout {p.layout}; it takes nhwc"
    if p.groups != 1:
        yield f"it has {p.groups} groups; it takes one"
    if p.in_channels > _MOST_CHANNELS:
        yield f"x has {p.in_channels} channels; it takes up to {_MOST_CHANNELS}"
    if p.lhs != p.rhs or p.lhs not in DTYPES:
        yield f"operands {p.lhs} and {p.rhs}; it takes two of {', '.join(DTYPES)}"
    if p.out not in OUT_DTYPES:
        yield f"output of dtype {p.out}; it gives {', '.join(OUT_DTYPES)}"
    if p.precision not in EXACT_PRECISIONS:
        yield f"precision {p.precision} names an algorithm only XLA has"
    if 0 in p.elements:
        yield "its arrays are empty"
        return
    yield from _unfit(p, device)


def _unfit(problem: Conv2dProblem, device: CudaDevice) -> Iterator[str]:
    """Sizes that the kernel is not made for."""
    p = problem
    if p.out_size[1] % emit.COLUMNS:
        yield f"y has {p.out_size[1]} columns; it takes multiples of {emit.COLUMNS}"
    if p.out_channels % 8:
        yield f"{p.out_channels} output channels; it takes multiples of 8"
    if p.dilation != (1, 1):
        yield f"dilation {p.dilation}; it takes none"
    if p.strides[0] > p.kernel_height:
        yield f"a stride of {p.strides[0]} rows is more than the kernel's"
    if p.kernel_height > _MOST_WARPS:
        yield f"{p.kernel_height} rows of taps; it takes up to {_MOST_WARPS}"
    if emit.blocks_of_rows(p) > _MOST_BLOCKS_OF_ROWS:
        yield f"{p.kernel_width} columns of taps are too many"
    if (needed := emit.smem_bytes(p)) > device.smem_per_block_bytes:
        yield (
            f"rows of images need {needed} bytes of shared memory; a block has "
            f"{device.smem_per_block_bytes}"
        )
    if max(map(abs, sum(p.padding, ()))) > _MOST_PADDING:
        yield f"padding {p.padding}; it may be up to {_MOST_PADDING}"
    if max(emit.elements_of_image(p), p.batch * p.out_size[0]) > INT32_MAX:
        yield "an image has more than 2^31 - 1 elements"

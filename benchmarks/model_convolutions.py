"""The convolutions of well-known models, in the order in which they are tuned.

Each is asked as inference has it, with what follows it up to the activation, and as
training does: plain, with the gradients of its input and of its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from conv2d_suite import conv

from tracea_jax.problem import Conv2dProblem, Epilogue

BATCHES = (64, 8, 128, 1)
_RELU = Epilogue(bias="row", activation="relu")
_JOINED = Epilogue(bias="row", activation="relu", residual=True)
_SILU = Epilogue(bias="row", activation="silu")
_BIAS = Epilogue(bias="row")
_ADDED = Epilogue(bias="row", residual=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One convolution of a model, with as much padding as keeps or divides the size.

    Attributes:
      size: of the image, a square.
      inputs, outputs: channels.
      fused: what inference applies to the result.
      is_first: whether nothing asks for the gradient of its input.
    """

    size: int
    inputs: int
    outputs: int
    taps: int = 3
    stride: int = 1
    groups: int = 1
    fused: Epilogue = _RELU
    is_first: bool = False

    def problems(self, batch: int) -> Iterator[Conv2dProblem]:
        around = self.taps - self.stride if self.size % self.stride == 0 else 0
        before = max(around, 0) // 2
        plain = conv(
            *(batch, self.size, self.inputs, self.outputs),
            taps=self.taps,
            stride=self.stride,
            pads=(before, max(around, 0) - before),
            groups=self.groups,
        )
        yield dataclasses.replace(plain, epilogue=self.fused)
        yield plain
        if not self.is_first:
            yield dataclasses.replace(plain, direction="input_grad")
        yield dataclasses.replace(plain, direction="weight_grad")


def resnet50() -> Iterator[Layer]:
    yield Layer(size=224, inputs=3, outputs=64, taps=7, stride=2, is_first=True)
    inputs = 64
    for size, channels in ((56, 64), (28, 128), (14, 256), (7, 512)):
        wide, stride = 4 * channels, 1 if channels == 64 else 2
        before = stride * size
        for first in (True, False):
            here = before if first else size
            yield Layer(
                size=here,
                inputs=channels,
                outputs=channels,
                stride=stride if first else 1,
            )
            yield Layer(
                size=here, inputs=inputs if first else wide, outputs=channels, taps=1
            )
        yield Layer(size=size, inputs=channels, outputs=wide, taps=1, fused=_JOINED)
        yield Layer(
            size=before, inputs=inputs, outputs=wide, taps=1, stride=stride, fused=_BIAS
        )
        inputs = wide


def unet() -> Iterator[Layer]:
    """Layers of Stable Diffusion's U-Net, for latents of 64 x 64 x 4."""
    widths = {64: 320, 32: 640, 16: 1280, 8: 1280}
    for size, channels in widths.items():
        yield Layer(size=size, inputs=channels, outputs=channels, fused=_ADDED)
        yield Layer(size=size, inputs=channels, outputs=channels, fused=_BIAS)
    for size, channels in list(widths.items())[:3]:
        yield Layer(size=size, inputs=channels, outputs=channels, stride=2, fused=_BIAS)
    joined = {64: (640, 960), 32: (320, 960, 1280, 1920), 16: (640, 1920, 2560)}
    for size, inputs in {**joined, 8: (2560,)}.items():
        for channels in inputs:
            for taps in (3, 1):  # and what is added to it
                yield Layer(
                    size=size,
                    inputs=channels,
                    outputs=widths[size],
                    taps=taps,
                    fused=_BIAS,
                )


def convnext_tiny() -> Iterator[Layer]:
    for size, channels in ((56, 96), (28, 192), (14, 384), (7, 768)):
        yield Layer(
            size=size,
            inputs=channels,
            outputs=channels,
            taps=7,
            groups=channels,
            fused=_BIAS,
        )
        if size > 7:
            yield Layer(
                size=size,
                inputs=channels,
                outputs=2 * channels,
                taps=2,
                stride=2,
                fused=_BIAS,
            )
    yield Layer(
        size=224, inputs=3, outputs=96, taps=4, stride=4, fused=_BIAS, is_first=True
    )


def efficientnet_b0() -> Iterator[Layer]:
    # Of a stage: size, inputs and outputs, taps, stride of the first block, expansion.
    stages = (
        *((112, 32, 16, 3, 1, 1), (112, 16, 24, 3, 2, 6), (56, 24, 40, 5, 2, 6)),
        *((28, 40, 80, 3, 2, 6), (14, 80, 112, 5, 1, 6), (14, 112, 192, 5, 2, 6)),
        (7, 192, 320, 3, 1, 6),
    )
    for size, inputs, outputs, taps, stride, factor in stages:
        for first in (True, False):
            here = size if first else size // stride
            narrow = inputs if first else outputs
            wide, step = factor * narrow, stride if first else 1
            yield Layer(
                size=here,
                inputs=wide,
                outputs=wide,
                taps=taps,
                stride=step,
                groups=wide,
                fused=_SILU,
            )
            if factor > 1:
                yield Layer(size=here, inputs=narrow, outputs=wide, taps=1, fused=_SILU)
            yield Layer(
                size=here // step, inputs=wide, outputs=outputs, taps=1, fused=_BIAS
            )
    yield Layer(size=7, inputs=320, outputs=1280, taps=1, fused=_SILU)
    yield Layer(size=224, inputs=3, outputs=32, stride=2, fused=_SILU, is_first=True)


Model = Callable[[], Iterator[Layer]]
# Those of groups come later: there is little to choose, and XLA's kernels take long to
# compile.
MODELS: tuple[tuple[Model, ...], ...] = (
    (resnet50, unet),
    (convnext_tiny, efficientnet_b0),
)


def order() -> tuple[Conv2dProblem, ...]:
    """Every problem once; models with a usual batch before other batches."""
    return tuple(
        dict.fromkeys(
            problem
            for models in MODELS
            for batch in BATCHES
            for model in models
            for layer in model()
            for problem in layer.problems(batch)
        )
    )

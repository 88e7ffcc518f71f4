"""The programs of ``bench_programs``: which steps, at which sizes, with what bars.

The steps themselves are in ``programs_language`` and ``programs_vision``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from bench_models import LLAMA_3_8B
from programs_language import Decoding, Function, Gpt2, Wrap, with_gradients
from programs_vision import (
    B0,
    Images,
    convnext,
    efficientnet,
    resnet,
    unet,
    vit,
)

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit of a figure of the row: the least, or the most if ``is_upper``."""

    figure: str
    limit: float
    is_upper: bool = False

    def is_met(self, row: dict[str, Any]) -> bool:
        value = row[self.figure]
        return value <= self.limit if self.is_upper else value >= self.limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function that users compile as a whole.

    Attributes:
      name: of the row.
      text: its sizes.
      step: makes the function for a dtype to compute in, and for what is done to the
        part that it differentiates.
      inputs: makes the arguments, which are equal each time.
      dtype: what the program computes in.
      carried: how many of the first results are the first arguments of the next call.
      donated: whether those arguments are donated.
      differentiates: whether the function differentiates.
      bars: limits of figures.
    """

    name: str
    text: str
    step: Callable[[str, Wrap], Function]
    inputs: Callable[[], tuple[Any, ...]]
    dtype: str
    carried: int = 0
    donated: bool = False
    differentiates: bool = True
    bars: tuple[Bar, ...] = ()


def programs(sizes: str) -> Iterator[Program]:
    """The programs of one kind of sizes: "full", "cpu" or "small"."""
    yield from {"full": _full, "cpu": _cpu, "small": _small}[sizes]()


def _full() -> Iterator[Program]:
    """The programs that the bars are set for."""
    yield gpt2_step(
        GPT2_124M, _least(ratio=2.0, wall_ratio=2.0) + (_most("memory_ratio", 0.6),)
    )
    yield vit_step(vit_b16(batch=64), _least(ratio=1.6))
    yield convnext_step(convnext_t(batch=64), _least(ratio=1.3))
    yield from _efficientnets(efficientnet_b0(batch=64), _least(ratio=0.99))
    yield llama_block_step(LLAMA_3_8B, _least(ratio=1.70))
    decoding = dataclasses.replace(LLAMA_3_8B, batch=64, tokens=2048)
    yield from _decodings(Decoding(model=decoding), donated=5.0, kept=1.45)
    resnet_50 = resnet50(batch=64)
    yield _inference("resnet50_inference", resnet_50, _least(ratio=1.45))
    yield _training("resnet50_step", resnet_50, _least(ratio=1.25))
    yield from _unets("unet_block", unet_block(channels=320), _least(ratio=1.15))
    yield from _unets("unet_block_640", unet_block(channels=640), _least(ratio=1.15))


def _cpu() -> Iterator[Program]:
    """Steps that take some 100 ms on two cores."""
    bars = _least(inside_ratio=0.985)
    for dtype in DTYPES:
        yield gpt2_step(dataclasses.replace(SMALL_GPT2, dtype=dtype), bars)
    for dtype in DTYPES:
        yield vit_step(
            vit(layers=6, width=256, heads=4, patch=16, batch=8, size=96, dtype=dtype),
            bars,
        )


def _small() -> Iterator[Program]:
    """Every program, so small that all of them run in a test."""
    yield gpt2_step(TINY_GPT2)
    yield vit_step(
        vit(layers=1, width=32, heads=2, patch=8, batch=2, size=16, dtype="bfloat16")
    )
    yield convnext_step(
        convnext(blocks=(1, 1), width=8, batch=2, size=16, dtype="bfloat16")
    )
    stages = tuple(dataclasses.replace(s, blocks=1) for s in B0[:3])
    yield from _efficientnets(
        efficientnet(
            stages=stages, first=8, last=32, batch=2, size=16, dtype="bfloat16"
        )
    )
    llama = dataclasses.replace(
        LLAMA_3_8B, batch=2, tokens=16, width=64, hidden=96, heads=4, kv_heads=2
    )
    yield llama_block_step(llama)
    yield from _decodings(Decoding(model=llama), donated=None, kept=None)
    images = resnet(blocks=(1, 1), filters=8, batch=2, size=32, dtype="bfloat16")
    yield _inference("resnet50_inference", images)
    yield _training("resnet50_step", images)
    block = unet(channels=32, batch=2, size=8, dtype="bfloat16")
    yield from _unets("unet_block", block)


GPT2_124M = Gpt2(
    batch=8,
    tokens=1024,
    layers=12,
    width=768,
    heads=12,
    vocabulary=50257,
    dtype="bfloat16",
)
SMALL_GPT2 = Gpt2(
    batch=2,
    tokens=128,
    layers=4,
    width=256,
    heads=4,
    vocabulary=8192,
    dtype="bfloat16",
)
TINY_GPT2 = dataclasses.replace(
    SMALL_GPT2, tokens=16, layers=1, width=32, heads=2, vocabulary=64
)


def vit_b16(batch: int) -> Images:
    return vit(
        layers=12,
        width=768,
        heads=12,
        patch=16,
        batch=batch,
        size=224,
        dtype="bfloat16",
    )


def resnet50(batch: int) -> Images:
    return resnet(
        blocks=(3, 4, 6, 3), filters=64, batch=batch, size=224, dtype="bfloat16"
    )


def convnext_t(batch: int) -> Images:
    return convnext(
        blocks=(3, 3, 9, 3), width=96, batch=batch, size=224, dtype="bfloat16"
    )


def unet_block(channels: int) -> Images:
    return unet(channels=channels, batch=8, size=64, dtype="bfloat16")


def efficientnet_b0(batch: int) -> Images:
    return efficientnet(
        stages=B0, first=32, last=1280, batch=batch, size=224, dtype="bfloat16"
    )


def gpt2_step(model: Gpt2, bars: tuple[Bar, ...] = ()) -> Program:
    return Program(
        name="gpt2_step",
        text=str(model),
        step=lambda dtype, wrap: model.step(wrap),
        inputs=model.inputs,
        dtype=model.dtype,
        carried=2,
        donated=True,
        bars=bars,
    )


def vit_step(model: Images, bars: tuple[Bar, ...] = ()) -> Program:
    return _training("vit_step", model, bars)


def convnext_step(model: Images, bars: tuple[Bar, ...] = ()) -> Program:
    return _training("convnext_step", model, bars)


def _training(name: str, model: Images, bars: tuple[Bar, ...] = ()) -> Program:
    return Program(
        name=name,
        text=str(model),
        step=model.step,
        inputs=model.training_inputs,
        dtype=model.dtype,
        carried=3,
        donated=True,
        bars=bars,
    )


def llama_block_step(model: Any, bars: tuple[Bar, ...] = ()) -> Program:
    def inputs() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 2)
        shape = (model.batch, model.tokens, model.width)
        x = jax.random.normal(keys[1], shape).astype(model.dtype)
        return model.layer_parameters(keys[0]), x, _cotangent(x)

    return Program(
        name="llama_block_step",
        text=str(model),
        step=lambda dtype, wrap: with_gradients(wrap(model.block)),
        inputs=inputs,
        dtype=model.dtype,
        bars=bars,
    )


def _decodings(
    decoding: Decoding, donated: float | None, kept: float | None
) -> Iterator[Program]:
    program = Program(
        name="llama_decode donated",
        text=str(decoding),
        step=lambda dtype, wrap: decoding.step,
        inputs=decoding.inputs,
        dtype=decoding.model.dtype,
        carried=1,
        donated=True,
        differentiates=False,
        bars=() if donated is None else _least(wall_ratio=donated),
    )
    yield program
    bars = () if kept is None else _least(wall_ratio=kept)
    yield dataclasses.replace(
        program, name="llama_decode kept", donated=False, bars=bars
    )


def _unets(name: str, block: Images, bars: tuple[Bar, ...] = ()) -> Iterator[Program]:
    yield _inference(name, block, bars)

    def inputs() -> tuple[Any, ...]:
        variables, x = block.variables()
        return variables, x, _cotangent(x)

    yield Program(
        name=f"{name}_step",
        text=str(block),
        step=lambda dtype, wrap: with_gradients(wrap(block.apply(dtype))),
        inputs=inputs,
        dtype=block.dtype,
        bars=bars,
    )


def _efficientnets(model: Images, bars: tuple[Bar, ...] = ()) -> Iterator[Program]:
    yield _inference("efficientnet_inference", model, bars)
    yield _training("efficientnet_step", model, bars)


def _inference(name: str, model: Images, bars: tuple[Bar, ...] = ()) -> Program:
    return Program(
        name=name,
        text=str(model),
        step=lambda dtype, wrap: model.apply(dtype),
        inputs=model.variables,
        dtype=model.dtype,
        differentiates=False,
        bars=bars,
    )


def _cotangent(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype)


def _least(**limits: float) -> tuple[Bar, ...]:
    return tuple(Bar(figure=name, limit=limit) for name, limit in limits.items())


def _most(figure: str, limit: float) -> Bar:
    return Bar(figure=figure, limit=limit, is_upper=True)

"""Vision models of ``whole_programs``, in flax linen as their users write them.

Parameters are float32; what the modules compute has the dtype that they are given.
Nothing of the package is used here; ``whole_programs`` says at which sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]  # what is done to a function before it is used

CLASSES = 1000


class VitBlock(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        y = norm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=self.dtype)(y)
        x = x + y
        y = nn.gelu(dense(4 * x.shape[-1])(norm()(x)))
        return x + dense(x.shape[-1])(y)


class Vit(nn.Module):
    layers: int
    width: int
    heads: int
    patch: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, "VALID", dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(first.astype(x.dtype), (x.shape[0], 1, self.width))
        x = jnp.concatenate([first, x], axis=1)
        normal = nn.initializers.normal(0.02)
        positions = self.param("positions", normal, (1, *x.shape[1:]))
        x = x + positions.astype(x.dtype)
        for _ in range(self.layers):
            x = VitBlock(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x[:, 0])


class Bottleneck(nn.Module):
    filters: int
    strides: tuple[int, int]
    is_training: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = batch_norm(self.is_training, self.dtype)
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
        y = norm()(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    blocks: tuple[int, ...]
    filters: int
    is_training: bool
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = conv(self.filters, (7, 7), (2, 2), [(3, 3), (3, 3)])(images)
        x = nn.relu(batch_norm(self.is_training, self.dtype)()(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, count in enumerate(self.blocks):
            for j in range(count):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                filters = self.filters * 2**i
                x = Bottleneck(filters, strides, self.is_training, self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def batch_norm(is_training: bool, dtype: Any) -> Function:
    return functools.partial(
        nn.BatchNorm, use_running_average=not is_training, momentum=0.9, dtype=dtype
    )


class UnetBlock(nn.Module):
    channels: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for _ in range(2):
            y = nn.swish(nn.GroupNorm(num_groups=32, dtype=self.dtype)(y))
            y = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(y)
        return x + y


class ConvNextBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
        y = nn.LayerNorm(epsilon=1e-6, dtype=self.dtype)(y)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        y = nn.Dense(width, dtype=self.dtype)(y)
        scale = self.param("scale", nn.initializers.constant(1e-6), (width,))
        return x + y * scale.astype(y.dtype)


class ConvNext(nn.Module):
    blocks: tuple[int, ...]
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, padding="VALID", dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        x = norm()(conv(self.width, (4, 4), (4, 4))(images))
        for i, count in enumerate(self.blocks):
            if i > 0:
                x = conv(self.width * 2**i, (2, 2), (2, 2))(norm()(x))
            for _ in range(count):
                x = ConvNextBlock(self.dtype)(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(norm()(x.mean((1, 2))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks of EfficientNet with one number of filters; the first has the strides."""

    expansion: int
    filters: int
    blocks: int
    stride: int
    taps: int


B0 = (
    Stage(expansion=1, filters=16, blocks=1, stride=1, taps=3),
    Stage(expansion=6, filters=24, blocks=2, stride=2, taps=3),
    Stage(expansion=6, filters=40, blocks=2, stride=2, taps=5),
    Stage(expansion=6, filters=80, blocks=3, stride=2, taps=3),
    Stage(expansion=6, filters=112, blocks=3, stride=1, taps=5),
    Stage(expansion=6, filters=192, blocks=4, stride=2, taps=5),
    Stage(expansion=6, filters=320, blocks=1, stride=1, taps=3),
)


class InvertedBottleneck(nn.Module):
    stage: Stage
    stride: int
    is_training: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        bare = functools.partial(conv, use_bias=False)
        norm = batch_norm(self.is_training, self.dtype)
        taps, strides = (self.stage.taps,) * 2, (self.stride,) * 2
        wide = self.stage.expansion * x.shape[-1]
        y = x
        if self.stage.expansion > 1:
            y = nn.swish(norm()(bare(wide, (1, 1))(y)))
        y = bare(wide, taps, strides, feature_group_count=wide)(y)
        y = nn.swish(norm()(y))
        gate = nn.swish(conv(x.shape[-1] // 4, (1, 1))(y.mean((1, 2), keepdims=True)))
        y = y * nn.sigmoid(conv(wide, (1, 1))(gate))
        y = norm()(bare(self.stage.filters, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    stages: tuple[Stage, ...]
    first: int
    last: int
    is_training: bool
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = batch_norm(self.is_training, self.dtype)
        x = nn.swish(norm()(conv(self.first, (3, 3), (2, 2))(images)))
        for stage in self.stages:
            for i in range(stage.blocks):
                stride = stage.stride if i == 0 else 1
                x = InvertedBottleneck(stage, stride, self.is_training, self.dtype)(x)
        x = nn.swish(norm()(conv(self.last, (1, 1))(x)))
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images and the sizes of what looks at them.

    Attributes:
      module: makes the module from a dtype and from whether it trains.
      text: sizes of the module.
      batch, size, channels: images are (batch, size, size, channels).
      dtype: of images and of what the module computes.
    """

    module: Callable[[Any, bool], nn.Module]
    text: str
    batch: int
    size: int
    channels: int = 3
    dtype: str

    def __str__(self) -> str:
        shape = f"{self.batch} x {self.size} x {self.size} x {self.channels}"
        return f"{self.text}, {shape}, {self.dtype}"

    def variables(self) -> tuple[Any, jax.Array]:
        """Random variables of the module, and images."""
        shape = (self.batch, self.size, self.size, self.channels)
        images = jax.random.normal(jax.random.key(1), shape).astype(self.dtype)
        init = jax.jit(self.module(self.dtype, False).init)
        return init(jax.random.key(0), images[:1]), images

    def apply(self, dtype: str) -> Function:
        """The module at inference: (variables, images) -> results."""
        return self.module(dtype, False).apply

    def training_inputs(self) -> tuple[Any, ...]:
        """Parameters, running statistics, the optimizer's state, images, labels."""
        variables, images = self.variables()
        statistics = variables.get("batch_stats", {})
        params = variables["params"]
        labels = jax.random.randint(jax.random.key(2), (self.batch,), 0, CLASSES)
        return params, statistics, OPTIMIZER.init(params), images, labels

    def step(self, dtype: str, wrap: Wrap) -> Function:
        """A step of training; the loss is differentiated as ``wrap`` returns it."""
        module = self.module(dtype, True)

        @wrap
        def loss(params: Any, statistics: Any, images: Any, labels: Any) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = module.apply(variables, images, mutable=["batch_stats"])
            values = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), labels
            )
            return values.mean(), changed.get("batch_stats", {})

        def step(
            params: Any, statistics: Any, state: Any, images: Any, labels: Any
        ) -> Any:
            (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(
                params, statistics, images, labels
            )
            updates, state = OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), statistics, state, value

        return step


OPTIMIZER = optax.sgd(0.01, momentum=0.9)


def vit(
    *,
    layers: int,
    width: int,
    heads: int,
    patch: int,
    batch: int,
    size: int,
    dtype: str,
) -> Images:
    def module(dtype: Any, is_training: bool) -> nn.Module:
        return Vit(layers, width, heads, patch, dtype)

    text = f"{layers} layers, width {width}, {heads} heads, patches of {patch}"
    return Images(module=module, text=text, batch=batch, size=size, dtype=dtype)


def resnet(
    *, blocks: tuple[int, ...], filters: int, batch: int, size: int, dtype: str
) -> Images:
    def module(dtype: Any, is_training: bool) -> nn.Module:
        return ResNet(blocks, filters, is_training, dtype)

    text = f"{sum(blocks)} bottlenecks, {filters} filters"
    return Images(module=module, text=text, batch=batch, size=size, dtype=dtype)


def convnext(
    *, blocks: tuple[int, ...], width: int, batch: int, size: int, dtype: str
) -> Images:
    def module(dtype: Any, is_training: bool) -> nn.Module:
        return ConvNext(blocks, width, dtype)

    text = f"{sum(blocks)} blocks, width {width}"
    return Images(module=module, text=text, batch=batch, size=size, dtype=dtype)


def efficientnet(
    *,
    stages: tuple[Stage, ...],
    first: int,
    last: int,
    batch: int,
    size: int,
    dtype: str,
) -> Images:
    def module(dtype: Any, is_training: bool) -> nn.Module:
        return EfficientNet(stages, first, last, is_training, dtype)

    text = f"{sum(s.blocks for s in stages)} inverted bottlenecks, {first} to {last}"
    return Images(module=module, text=text, batch=batch, size=size, dtype=dtype)


def unet(*, channels: int, batch: int, size: int, dtype: str) -> Images:
    def module(dtype: Any, is_training: bool) -> nn.Module:
        return UnetBlock(channels, dtype)

    return Images(
        module=module,
        text="two 3 x 3 convolutions",
        batch=batch,
        size=size,
        channels=channels,
        dtype=dtype,
    )

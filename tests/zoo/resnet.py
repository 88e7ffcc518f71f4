"""ResNets of bottlenecks in flax linen, at inference and in training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zoo.model import Model, Program, normal, random_like

CLASSES, FILTERS = 10, 8
RESNET50, RESNET14 = (3, 4, 6, 3), (1, 1, 1, 1)


class Bottleneck(nn.Module):
    filters: int
    strides: tuple[int, int]
    is_training: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.is_training)
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
        y = norm()(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    blocks: Sequence[int]
    is_training: bool

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(FILTERS, (7, 7), (2, 2), [(3, 3), (3, 3)], use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not self.is_training)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, n in enumerate(self.blocks):
            for j in range(n):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = Bottleneck(FILTERS * 2**i, strides, self.is_training)(x)
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


def resnet(
    blocks: Sequence[int], *, batch: int, image: int, is_training: bool
) -> Program:
    """fn(params, statistics, images), in training with the new statistics."""
    module = ResNet(blocks, is_training)
    images = normal(batch, image, image, 3)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)
    variables = random_like(shapes)
    for name, block in variables["params"].items():
        # As where training begins; so many loud blocks would make noise of rounding.
        if name.startswith("Bottleneck"):
            block["BatchNorm_2"]["scale"] *= 0.2

    def fn(params: Any, statistics: Any, images: jax.Array) -> Any:
        state = {"params": params, "batch_stats": statistics}
        mutable = ["batch_stats"] if is_training else False
        return module.apply(state, images, mutable=mutable)

    return fn, (variables["params"], variables["batch_stats"], images)


def _sites(blocks: Sequence[int]) -> dict[str, int]:
    # Stem; three a block; the projection of a stage's first block. The classes.
    return {"conv2d": 1 + 3 * sum(blocks) + len(blocks), "matmul": 1}


# At inference the batch norms fold into the convolutions, in training they cannot.
MODELS = (
    Model(
        name="resnet50",
        build=lambda: resnet(RESNET50, batch=2, image=32, is_training=False),
        sites=_sites(RESNET50),
        gradients_within=1e-3,  # relu's kinks
        narrow=False,  # so many kinks leave little of a gradient
    ),
    Model(
        name="resnet50_training",
        build=lambda: resnet(RESNET50, batch=4, image=64, is_training=True),
        sites=_sites(RESNET50),
        outputs_within=5e-5,
        gradients_within=1e-3,
        narrow=False,
    ),
    Model(
        name="resnet14",
        build=lambda: resnet(RESNET14, batch=2, image=32, is_training=False),
        sites=_sites(RESNET14),
        gradients_within=1e-3,
    ),
)

"""ViT, MLP-Mixer and ConvNeXt in flax linen, and a U-Net's blocks in plain lax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zoo.model import Model, Program, floats, linen_program, normal, random_like

WIDTH, HEADS, LAYERS, CLASSES, PATCH = 32, 2, 2, 10, 4


class Mlp(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.hidden)(x)))


class Vit(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = self.param("token", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        shape = (1, x.shape[1], WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), shape)
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(y)
            x = x + Mlp(4 * WIDTH)(nn.LayerNorm()(x))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x)[:, 0])


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH))(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for _ in range(LAYERS):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x = x + jnp.swapaxes(Mlp(24)(y), 1, 2)
            x = x + Mlp(48)(nn.LayerNorm()(x))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))


class ConvNextBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        y = nn.Conv(channels, (7, 7), feature_group_count=channels)(x)
        y = nn.LayerNorm()(y)
        y = nn.gelu(nn.Dense(4 * channels)(y), approximate=False)
        y = nn.Dense(channels)(y)
        return x + y * self.param("layer_scale", nn.initializers.ones, (channels,))


class ConvNext(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(16, (2, 2), strides=(2, 2))(images))
        for _ in range(LAYERS):
            x = ConvNextBlock()(x)
        return x


def vit() -> Program:
    return linen_program(Vit(), normal(2, 16, 16, 3))


def mixer() -> Program:
    return linen_program(Mixer(), normal(2, 16, 16, 3))


def conv_next() -> Program:
    return linen_program(ConvNext(), normal(2, 16, 16, 3))


def unet() -> Program:
    params = {
        "time1": floats(w=(16, 32), bias=(32,)),
        "time2": floats(w=(32, 32), bias=(32,)),
        "first": _conv_shapes(3, 16),
        "down": _block_shapes(16, 16),
        "narrow": _conv_shapes(16, 16),
        "middle": _block_shapes(16, 32),
        "up": _block_shapes(32 + 16, 16),
        "norm": floats(scale=(16,), bias=(16,)),
        "last": _conv_shapes(16, 3),
    }
    return _unet, (random_like(params), normal(2, 3, 16, 16), normal(2, 16))


def _conv_shapes(n_in: int, n_out: int, size: int = 3, groups: int = 1) -> Any:
    return floats(w=(n_out, n_in // groups, size, size), bias=(n_out,))


def _block_shapes(n_in: int, n_out: int) -> Any:
    return {
        "norm1": floats(scale=(n_in,), bias=(n_in,)),
        "conv1": _conv_shapes(n_in, n_out),
        "time": floats(w=(32, n_out), bias=(n_out,)),
        "norm2": floats(scale=(n_out,), bias=(n_out,)),
        "conv2": _conv_shapes(n_out, n_out, groups=4),
        **({} if n_in == n_out else {"skip": _conv_shapes(n_in, n_out, 1)}),
    }


def _unet(p: Any, image: jax.Array, time: jax.Array) -> jax.Array:
    t = jax.nn.silu(time @ p["time1"]["w"] + p["time1"]["bias"])
    t = jax.nn.silu(t @ p["time2"]["w"] + p["time2"]["bias"])
    x = _unet_block(p["down"], _conv(p["first"], image), t)
    y = _unet_block(p["middle"], _conv(p["narrow"], x, stride=2), t)
    y = jax.image.resize(y, (*y.shape[:2], *x.shape[2:]), "bilinear")
    y = _unet_block(p["up"], jnp.concatenate([y, x], axis=1), t)
    return _conv(p["last"], jax.nn.silu(_group_norm(p["norm"], y)))


def _unet_block(p: Any, x: jax.Array, t: jax.Array) -> jax.Array:
    h = _conv(p["conv1"], jax.nn.silu(_group_norm(p["norm1"], x)))
    h = h + (t @ p["time"]["w"] + p["time"]["bias"])[:, :, None, None]
    h = _conv(p["conv2"], jax.nn.silu(_group_norm(p["norm2"], h)), groups=4)
    return h + (_conv(p["skip"], x) if "skip" in p else x)


def _conv(p: Any, x: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x, p["w"], (stride, stride), "SAME", feature_group_count=groups
    )
    return y + p["bias"][None, :, None, None]


def _group_norm(p: Any, x: jax.Array, groups: int = 4) -> jax.Array:
    n, c, h, w = x.shape
    z = x.reshape(n, groups, c // groups, h, w)
    mean = z.mean((2, 3, 4), keepdims=True)
    z = (z - mean) * jax.lax.rsqrt(z.var((2, 3, 4), keepdims=True) + 1e-5)
    return z.reshape(x.shape) * p["scale"][:, None, None] + p["bias"][:, None, None]


MODELS = (
    # Patches; of a layer: the four projections and two of the MLP; the classes.
    Model(
        name="vit",
        build=vit,
        sites={"conv2d": 1, "matmul": LAYERS * 6 + 1, "attention": LAYERS},
    ),
    # Patches; of a layer: two MLPs of two; the classes.
    Model(name="mixer", build=mixer, sites={"conv2d": 1, "matmul": LAYERS * 4 + 1}),
    # Stem; of a layer: one depthwise, two dense.
    Model(
        name="conv_next",
        build=conv_next,
        sites={"conv2d": 1 + LAYERS, "matmul": LAYERS * 2},
    ),
    # Convolutions: first, narrow, last, two in each of three blocks, the skips of the
    # middle and of up. Products: two of the time, one in each block, and two of resize,
    # which multiplies height and width with precision HIGHEST.
    Model(
        name="unet",
        build=unet,
        sites={"conv2d": 3 + 3 * 2 + 2, "matmul": 2 + 3 + 2},
    ),
)

"""GPT-2 in flax linen and nnx, and in plain JAX the way nanoGPT writes it."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from zoo.model import Model, Program, floats, linen_program, random_like, tokens

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 40, 32, 2, 2, 12


class LinenBlock(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=self.dtype)(
            y, mask=mask
        )
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(y))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(y)


class LinenGpt(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        positions = nn.Embed(LENGTH, WIDTH, dtype=self.dtype)
        x = embed(ids) + positions(jnp.arange(ids.shape[1]))
        mask = nn.make_causal_mask(ids)
        for _ in range(LAYERS):
            x = LinenBlock(dtype=self.dtype)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxGpt(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def linen_gpt(dtype: Any = None) -> Program:
    return linen_program(LinenGpt(dtype=dtype), tokens(2, LENGTH, VOCABULARY))


def nnx_gpt() -> Program:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxGpt(nnx.Rngs(0))))

    def fn(state: nnx.State, ids: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(ids)

    return fn, (random_like(shapes), tokens(2, LENGTH, VOCABULARY))


def nano_gpt() -> Program:
    layer = floats(
        ln1_scale=(WIDTH,),
        ln1_bias=(WIDTH,),
        c_attn=(WIDTH, 3 * WIDTH),
        c_attn_bias=(3 * WIDTH,),
        c_proj=(WIDTH, WIDTH),
        c_proj_bias=(WIDTH,),
        ln2_scale=(WIDTH,),
        ln2_bias=(WIDTH,),
        c_fc=(WIDTH, 4 * WIDTH),
        c_fc_bias=(4 * WIDTH,),
        mlp_proj=(4 * WIDTH, WIDTH),
        mlp_proj_bias=(WIDTH,),
    )
    outer = floats(
        wte=(VOCABULARY, WIDTH),
        wpe=(LENGTH, WIDTH),
        ln_scale=(WIDTH,),
        ln_bias=(WIDTH,),
    )
    params = random_like({**outer, "layers": [layer] * LAYERS})
    return _nano_gpt, (params, tokens(2, LENGTH, VOCABULARY))


def _nano_gpt(params: Any, ids: jax.Array) -> jax.Array:
    x = params["wte"][ids] + params["wpe"][: ids.shape[1]]
    for p in params["layers"]:
        x = x + _nano_attention(p, _layer_norm(x, p["ln1_scale"], p["ln1_bias"]))
        h = _layer_norm(x, p["ln2_scale"], p["ln2_bias"]) @ p["c_fc"] + p["c_fc_bias"]
        x = x + (_new_gelu(h) @ p["mlp_proj"] + p["mlp_proj_bias"])
    return _layer_norm(x, params["ln_scale"], params["ln_bias"]) @ params["wte"].T


def _nano_attention(p: Any, x: jax.Array) -> jax.Array:
    b, t, c = x.shape
    q, k, v = jnp.split(x @ p["c_attn"] + p["c_attn_bias"], 3, axis=-1)
    q, k, v = (
        z.reshape(b, t, HEADS, c // HEADS).transpose(0, 2, 1, 3) for z in (q, k, v)
    )
    att = (q @ jnp.swapaxes(k, -2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    mask = jnp.tril(jnp.ones((t, t)))[None, None]
    att = jnp.where(mask == 0, float("-inf"), att)
    y = jax.nn.softmax(att, axis=-1) @ v
    y = y.transpose(0, 2, 1, 3).reshape(b, t, c)
    return y @ p["c_proj"] + p["c_proj_bias"]


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


def _new_gelu(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


# Of a layer: query, key, value and output projection, and two of the MLP; one
# attention. The logits are one more.
_SITES = {"matmul": LAYERS * 6 + 1, "attention": LAYERS}
MODELS = (
    Model(name="gpt_linen", build=linen_gpt, sites=_SITES),
    Model(name="gpt_nnx", build=nnx_gpt, sites=_SITES, narrow=False),
    Model(
        name="gpt_linen_bf16",
        build=lambda: linen_gpt(jnp.bfloat16),
        sites=_SITES,
        exact="gpt_linen",
    ),
    # Of a layer: c_attn makes query, key and value at once; c_proj, two of the MLP.
    Model(
        name="nano_gpt",
        build=nano_gpt,
        sites={"matmul": LAYERS * 4 + 1, "attention": LAYERS},
    ),
)

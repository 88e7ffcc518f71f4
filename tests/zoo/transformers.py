"""Other transformers: T5, Mistral, BERT, and one that hears (Whisper)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zoo.model import (
    Model,
    Program,
    floats,
    linen_program,
    normal,
    random_like,
    tokens,
)

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS = 40, 32, 4, 2, 8, 48, 2
LENGTH, BUCKETS, WINDOW = 12, 8, 4


def t5() -> Program:
    layer = floats(
        scale1=(WIDTH,),
        wq=(WIDTH, HEADS, HEAD),
        wk=(WIDTH, KV_HEADS, HEAD),
        wv=(WIDTH, KV_HEADS, HEAD),
        wo=(HEADS, HEAD, WIDTH),
        scale2=(WIDTH,),
        wi=(WIDTH, HIDDEN),
        wf=(HIDDEN, WIDTH),
    )
    outer = floats(relative=(BUCKETS, HEADS))
    params = random_like({**outer, "layers": [layer] * LAYERS})
    return _t5, (params, normal(2, LENGTH, WIDTH))


def _t5(params: Any, x: jax.Array) -> jax.Array:
    position = jnp.arange(LENGTH)
    distance = jnp.clip(position[:, None] - position[None, :], 0, BUCKETS - 1)
    bias = params["relative"][distance].transpose(2, 0, 1)[None]
    mask = jnp.where(position[:, None] >= position[None, :], 0.0, -1e9)
    bias = bias + mask.astype(x.dtype)
    for p in params["layers"]:
        x = x + _t5_attention(p, _rms_norm(x, p["scale1"]), bias)
        h = jax.nn.relu(jnp.einsum("btd,df->btf", _rms_norm(x, p["scale2"]), p["wi"]))
        x = x + jnp.einsum("btf,fd->btd", h, p["wf"])
    return x


def _t5_attention(p: Any, x: jax.Array, bias: jax.Array) -> jax.Array:
    q = jnp.einsum("btd,dhk->bthk", x, p["wq"])
    k = jnp.einsum("bsd,dhk->bshk", x, p["wk"])
    v = jnp.einsum("bsd,dhk->bshk", x, p["wv"])
    k = jnp.repeat(k, HEADS // KV_HEADS, axis=2)
    v = jnp.repeat(v, HEADS // KV_HEADS, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) + bias
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
    o = jnp.einsum("bhts,bshk->bthk", weights, v)
    return jnp.einsum("bthk,hkd->btd", o, p["wo"])


def mistral() -> Program:
    params = random_like(
        floats(
            scale1=(WIDTH,),
            wq=(WIDTH, HEADS * HEAD),
            wk=(WIDTH, KV_HEADS * HEAD),
            wv=(WIDTH, KV_HEADS * HEAD),
            wo=(HEADS * HEAD, WIDTH),
            scale2=(WIDTH,),
            w_gate=(WIDTH, HIDDEN),
            w_up=(WIDTH, HIDDEN),
            w_down=(HIDDEN, WIDTH),
        )
    )
    return _mistral, (params, normal(2, LENGTH, WIDTH))


def _mistral(p: Any, x: jax.Array) -> jax.Array:
    y = _rms_norm(x, p["scale1"])
    q, k, v = (_heads(y @ p[name]) for name in ("wq", "wk", "wv"))
    k = jnp.repeat(k, HEADS // KV_HEADS, axis=1)
    v = jnp.repeat(v, HEADS // KV_HEADS, axis=1)
    scores = jnp.matmul(q, k.transpose(0, 1, 3, 2)) / jnp.sqrt(HEAD).astype(x.dtype)
    row = jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (LENGTH, LENGTH), 1)
    seen = (column <= row) & (column > row - WINDOW)
    scores = jnp.where(seen[None, None], scores, jnp.finfo(scores.dtype).min)
    o = jnp.matmul(jax.nn.softmax(scores, axis=-1), v)
    x = x + o.transpose(0, 2, 1, 3).reshape(x.shape) @ p["wo"]
    y = _rms_norm(x, p["scale2"])
    return x + (jax.nn.silu(y @ p["w_gate"]) * (y @ p["w_up"])) @ p["w_down"]


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, HEAD).transpose(0, 2, 1, 3)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * scale


class PostNormBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS)(x, mask=mask)
        x = nn.LayerNorm()(x + y)
        y = nn.gelu(nn.Dense(HIDDEN)(x), approximate=False)
        return nn.LayerNorm()(x + nn.Dense(WIDTH)(y))


class Bert(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array, padding: jax.Array) -> jax.Array:
        positions = nn.Embed(LENGTH, WIDTH)(jnp.arange(ids.shape[1]))
        x = nn.LayerNorm()(nn.Embed(VOCABULARY, WIDTH)(ids) + positions)
        for _ in range(LAYERS):
            x = PostNormBlock()(x, padding[:, None, None, :])
        return nn.tanh(nn.Dense(WIDTH)(x[:, 0]))


class Whisper(nn.Module):
    @nn.compact
    def __call__(self, spectrum: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Conv(WIDTH, (3,))(spectrum))
        x = nn.gelu(nn.Conv(WIDTH, (3,), strides=(2,))(x))
        for _ in range(LAYERS):
            x = PostNormBlock()(x, None)
        return x


def bert() -> Program:
    padding = jnp.arange(LENGTH) < jnp.array([LENGTH, 7])[:, None]
    return linen_program(Bert(), tokens(2, LENGTH, VOCABULARY), padding)


def whisper() -> Program:
    return linen_program(Whisper(), normal(2, 2 * LENGTH, 20))


MODELS = (
    # Of a layer: query, key, value and output projection, and two of the MLP.
    Model(name="t5", build=t5, sites={"matmul": LAYERS * 6, "attention": LAYERS}),
    # One layer: the four projections, and the last of the MLP; gate and up together.
    Model(
        name="mistral",
        build=mistral,
        sites={"matmul": 4 + 1, "gated_matmul": 1, "attention": 1},
    ),
    # As GPT-2, with a pooler where that has the logits.
    Model(
        name="bert",
        build=bert,
        sites={"matmul": LAYERS * 6 + 1, "attention": LAYERS},
    ),
    Model(
        name="whisper",
        build=whisper,
        sites={"matmul": LAYERS * 6, "attention": LAYERS, "conv2d": 2},
    ),
)

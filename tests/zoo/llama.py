"""Llama in flax linen, a Gemma-like one in nnx, and a scanned one in plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from zoo.model import Model, Program, floats, linen_program, random_like, tokens

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS = 40, 32, 4, 2, 8, 48, 2
LENGTH = 12


def rope(x: jax.Array) -> jax.Array:
    """Rotary positions on (batch, length, heads, head), the halves paired."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin = jnp.sin(angle)[:, None, :].astype(x.dtype)
    cos = jnp.cos(angle)[:, None, :].astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_interleaved(x: jax.Array) -> jax.Array:
    """Rotary positions, neighbours paired."""
    half = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(half) / half))
    sin = jnp.sin(angle)[None, :, None].astype(x.dtype)
    cos = jnp.cos(angle)[None, :, None].astype(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        y = nn.RMSNorm()(x)
        q = nn.Dense(HEADS * HEAD, use_bias=False)(y).reshape(b, t, HEADS, HEAD)
        k = nn.Dense(KV_HEADS * HEAD, use_bias=False)(y).reshape(b, t, KV_HEADS, HEAD)
        v = nn.Dense(KV_HEADS * HEAD, use_bias=False)(y).reshape(b, t, KV_HEADS, HEAD)
        o = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + nn.Dense(WIDTH, use_bias=False)(o.reshape(b, t, HEADS * HEAD))
        y = nn.RMSNorm()(x)
        gate = nn.Dense(HIDDEN, use_bias=False)(y)
        up = nn.Dense(HIDDEN, use_bias=False)(y)
        return x + nn.Dense(WIDTH, use_bias=False)(nn.silu(gate) * up)


class LinenLlama(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(ids)
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.RMSNorm()(x))


class NnxBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm1 = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.q = linear(WIDTH, (HEADS, HEAD))
        self.k = linear(WIDTH, (KV_HEADS, HEAD))
        self.v = linear(WIDTH, (KV_HEADS, HEAD))
        self.o = linear((HEADS, HEAD), WIDTH, axis=(-2, -1))
        self.norm2 = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.gate = linear(WIDTH, HIDDEN)
        self.up = linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k = rope_interleaved(self.q(y)), rope_interleaved(self.k(y))
        x = x + self.o(nnx.dot_product_attention(q, k, self.v(y), is_causal=True))
        y = self.norm2(x)
        return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class NnxLlama(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def linen_llama() -> Program:
    return linen_program(LinenLlama(), tokens(2, LENGTH, VOCABULARY))


def nnx_llama(dtype: Any = jnp.float32) -> Program:
    module = nnx.eval_shape(lambda: NnxLlama(dtype, nnx.Rngs(0)))
    graph, shapes = nnx.split(module)

    def fn(state: nnx.State, ids: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(ids)

    return fn, (random_like(shapes), tokens(2, LENGTH, VOCABULARY))


def scanned_llama() -> Program:
    layers = floats(
        scale1=(LAYERS, WIDTH),
        wq=(LAYERS, WIDTH, HEADS, HEAD),
        wk=(LAYERS, WIDTH, KV_HEADS, HEAD),
        wv=(LAYERS, WIDTH, KV_HEADS, HEAD),
        wo=(LAYERS, HEADS, HEAD, WIDTH),
        scale2=(LAYERS, WIDTH),
        w_gate=(LAYERS, WIDTH, HIDDEN),
        w_up=(LAYERS, WIDTH, HIDDEN),
        w_down=(LAYERS, HIDDEN, WIDTH),
    )
    outer = floats(embed=(VOCABULARY, WIDTH), scale=(WIDTH,), head=(WIDTH, VOCABULARY))
    params = random_like({**outer, "layers": layers})
    return _scanned_llama, (params, tokens(2, LENGTH, VOCABULARY))


def _scanned_llama(params: Any, ids: jax.Array) -> jax.Array:
    save = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    block = jax.checkpoint(_block, policy=save)

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return block(x, layer), None

    x, _ = jax.lax.scan(body, params["embed"][ids], params["layers"])
    return _rms_norm(x, params["scale"]) @ params["head"]


def _block(x: jax.Array, p: Any) -> jax.Array:
    y = _rms_norm(x, p["scale1"])
    q = jnp.einsum("btd,dhk->bthk", y, p["wq"])
    k = jnp.einsum("btd,dhk->bthk", y, p["wk"])
    v = jnp.einsum("btd,dhk->bthk", y, p["wv"])
    o = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", o, p["wo"])
    y = _rms_norm(x, p["scale2"])
    return x + (jax.nn.silu(y @ p["w_gate"]) * (y @ p["w_up"])) @ p["w_down"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * scale


# Of a layer: query, key, value and output projection, and the last of the MLP; gate and
# up are one site; one attention. The logits are one more.
_SITES = {
    "matmul": LAYERS * 5 + 1,
    "gated_matmul": LAYERS,
    "attention": LAYERS,
}
MODELS = (
    Model(name="llama_linen", build=linen_llama, sites=_SITES),
    Model(name="llama_nnx", build=nnx_llama, sites=_SITES, narrow=False),
    Model(
        name="llama_nnx_bf16",
        build=lambda: nnx_llama(jnp.bfloat16),
        sites=_SITES,
        exact="llama_nnx",
    ),
    # The body of the scan is one layer.
    Model(
        name="llama_scan",
        build=scanned_llama,
        sites={"matmul": 5 + 1, "gated_matmul": 1, "attention": 1},
    ),
)

"""A small GPT learns this project's documents: flax nnx, optax, the whole step.

    python gpt.py                        # plain against transformed
    tracea explain gpt:train_step        # what each site of the step runs on, and why

The model is nanoGPT's, on bytes. It computes in bfloat16 from float32 parameters, as
such models are trained on GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import optax
import side_by_side
from flax import nnx

import tracea_jax as tracea

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 192, 6, 3, 128, 8


class Block(nnx.Module):
    """Attention and an MLP on the residual stream, (batch, length, width)."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.norm_1 = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.norm_2 = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(batch, length, 3, HEADS, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    def __init__(self, *, dtype: Any = jnp.bfloat16, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(corpus.VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def loss(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, grads)
    return value


def learner() -> tuple[GPT, nnx.Optimizer]:
    model = GPT(rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train_step_args() -> tuple[Any, ...]:
    """Arguments for ``tracea explain gpt:train_step``."""
    return *learner(), next(corpus.batches(1, BATCH, LENGTH))


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=60)
    # transform goes around the whole step: it reaches into the gradient, so that
    # layers are recognised before JAX takes them apart. nnx.jit stays outermost.
    plain = nnx.jit(train_step)
    fast = nnx.jit(tracea.transform(train_step))
    outcome = side_by_side.compare(
        functools.partial(plain, *learner()),
        functools.partial(fast, *learner()),
        ((tokens,) for tokens in corpus.batches(options.steps, BATCH, LENGTH)),
    )
    print(outcome)


if __name__ == "__main__":
    main()

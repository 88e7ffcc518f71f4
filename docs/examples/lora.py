"""Low-rank fine-tuning (LoRA) of the small GPT: flax nnx, with frozen base weights.

    python lora.py                       # plain against transformed
    tracea explain lora:tune_step        # what each site of the step runs on, and why

gpt.py's model first learns the text, and then with few new parameters the same text
IN CAPITALS. Gradients are asked for the low-rank matrices alone, so that the products
for gradients of the base weights are not in the program at all.
"""

from __future__ import annotations

import functools
from typing import Any

import corpus
import gpt
import jax
import jax.numpy as jnp
import optax
import side_by_side
from flax import nnx

import tracea_jax as tracea

RANK = 8


def adapted(model: gpt.GPT) -> gpt.GPT:
    """The model with y = x @ w + b + (x @ down) @ up in its linear layers.

    ``up`` begins as zero, so that nothing changes yet.
    """
    rngs = nnx.Rngs(1)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            linear = getattr(block, name)
            lora = nnx.LoRA(
                linear.in_features,
                RANK,
                linear.out_features,
                base_module=linear,
                dtype=jnp.bfloat16,
                rngs=rngs,
            )
            setattr(block, name, lora)
    return model


def tune_step(model: gpt.GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    lora_only = nnx.DiffState(0, nnx.LoRAParam)
    value, grads = nnx.value_and_grad(gpt.loss, argnums=lora_only)(model, tokens)
    optimizer.update(model, grads)
    return value


def learner(base: gpt.GPT) -> tuple[gpt.GPT, nnx.Optimizer]:
    model = adapted(nnx.clone(base))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)


def tune_step_args() -> tuple[Any, ...]:
    """Arguments for ``tracea explain lora:tune_step``."""
    tokens = next(corpus.batches(1, gpt.BATCH, gpt.LENGTH))
    return *learner(gpt.GPT(rngs=nnx.Rngs(0))), tokens


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=50)
    base, optimizer = gpt.learner()
    learn = nnx.jit(tracea.transform(gpt.train_step))
    for tokens in corpus.batches(2 * options.steps, gpt.BATCH, gpt.LENGTH):
        learn(base, optimizer, tokens)

    plain = nnx.jit(tune_step)
    fast = nnx.jit(tracea.transform(tune_step))
    shouted = corpus.text().upper()
    tokens = corpus.batches(options.steps, gpt.BATCH, gpt.LENGTH, content=shouted)
    outcome = side_by_side.compare(
        functools.partial(plain, *learner(base)),
        functools.partial(fast, *learner(base)),
        ((t,) for t in tokens),
    )
    print(outcome)


if __name__ == "__main__":
    main()

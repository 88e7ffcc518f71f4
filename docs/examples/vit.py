"""A vision transformer reads handwritten digits: equinox, optax, vmap over the batch.

    python vit.py                        # plain against transformed
    tracea explain vit:train_step        # what each site of the step runs on, and why

In equinox a model is written for one image, and vmap makes a batch of it. transform
maps its sites in the same way: one product serves the whole batch.
"""

from __future__ import annotations

from typing import Any

import digits
import equinox as eqx
import jax
import optax
import side_by_side

import tracea_jax as tracea

WIDTH, HEADS, LAYERS, PATCH, BATCH = 128, 4, 3, 2, 64
PATCHES = (digits.SIZE // PATCH) ** 2
OPTIMIZER = optax.adamw(optax.linear_schedule(0, 1e-3, 20))


class Block(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.norm_1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.norm_2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(
            WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=keys[1]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm_1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm_2)(x))


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, LAYERS + 3)
        self.patches = eqx.nn.Conv2d(1, WIDTH, PATCH, PATCH, key=keys[0])
        self.positions = 0.5 * jax.random.normal(keys[1], (PATCHES, WIDTH))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, digits.CLASSES, key=keys[2])
        self.blocks = [Block(key) for key in keys[3:]]

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits of one image, (height, width, 1)."""
        x = self.patches(image.transpose(2, 0, 1)).reshape(WIDTH, PATCHES).T
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(0)))


# The model holds functions and numbers beside its arrays; only arrays are trained.
PARAMS, STATIC = eqx.partition(ViT(jax.random.key(0)), eqx.is_array)


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(eqx.combine(params, STATIC))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    """The next parameters and optimizer state, and the loss."""
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def start() -> Any:
    return PARAMS, OPTIMIZER.init(PARAMS)


def train_step_args() -> tuple[Any, ...]:
    return start(), *next(digits.batches(1, BATCH))


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=60)
    plain = jax.jit(train_step, donate_argnums=0)
    fast = jax.jit(tracea.transform(train_step), donate_argnums=0)
    outcome = side_by_side.compare(
        side_by_side.Carrying(step=plain, state=start()),
        side_by_side.Carrying(step=fast, state=start()),
        digits.batches(options.steps, BATCH),
    )
    print(outcome)


if __name__ == "__main__":
    main()

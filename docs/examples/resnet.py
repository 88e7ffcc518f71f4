"""A residual network reads handwritten digits: flax linen, batch norm, then inference.

    python resnet.py                     # plain against transformed
    tracea explain resnet:classify       # what each site runs on, and why

In training a batch norm needs the statistics of the convolution's result. At inference
it is a scale and a shift, which transform folds into the convolution where the weights
are smaller than the result: with relu and the shortcut that is one kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import side_by_side

import tracea_jax as tracea

WIDTHS, BATCH = (32, 64, 128), 64
OPTIMIZER = optax.sgd(0.01, momentum=0.9)


class Block(nn.Module):
    width: int
    stride: int
    is_training: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.width, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.is_training)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm()(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    is_training: bool

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTHS[0], (3, 3), use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(not self.is_training)(x))
        for i, width in enumerate(WIDTHS):
            x = Block(width, 2 if i else 1, self.is_training)(x)
            x = Block(width, 1, self.is_training)(x)
        return nn.Dense(digits.CLASSES)(x.mean((1, 2)))


def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    """The next variables and optimizer state, and the loss."""
    variables, moments = state

    def loss(params: Any) -> Any:
        logits, changed = ResNet(is_training=True).apply(
            {**variables, "params": params}, images, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed

    params = variables["params"]
    (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, moments = OPTIMIZER.update(grads, moments)
    variables = {"params": optax.apply_updates(params, updates), **changed}
    return (variables, moments), value


def classify(variables: Any, images: jax.Array) -> jax.Array:
    return ResNet(is_training=False).apply(variables, images)


def start() -> Any:
    images = jnp.zeros((1, digits.SIZE, digits.SIZE, 1))
    variables = jax.jit(ResNet(is_training=True).init)(jax.random.key(0), images)
    return variables, OPTIMIZER.init(variables["params"])


def train_step_args() -> tuple[Any, ...]:
    return start(), *next(digits.batches(1, BATCH))


def classify_args() -> tuple[Any, ...]:
    return start()[0], next(digits.batches(1, BATCH))[0]


def accuracy(variables: Any, classify: Any) -> float:
    images, labels = digits.images_and_labels()
    return float((classify(variables, images).argmax(-1) == labels).mean())


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=40)
    print("training")
    plain = side_by_side.Carrying(
        step=jax.jit(train_step, donate_argnums=0), state=start()
    )
    fast = side_by_side.Carrying(
        step=jax.jit(tracea.transform(train_step), donate_argnums=0), state=start()
    )
    # Rounding differs, and training amplifies it.
    batches = digits.batches(options.steps, BATCH)
    print(side_by_side.compare(plain, fast, batches, tolerance=0.05))

    variables, _ = fast.state
    images, labels = digits.images_and_labels()
    fast_classify = jax.jit(tracea.transform(classify))
    right = fast_classify(variables, images).argmax(-1) == labels
    print(f"\ninference, {right.mean():.1%} right")
    print(
        side_by_side.compare(
            jax.jit(classify),
            fast_classify,
            [(variables, x) for x, _ in digits.batches(options.steps, BATCH)],
            name="logits",
        )
    )


if __name__ == "__main__":
    main()

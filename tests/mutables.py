"""A network of flax nnx that changes as it is called, and comparisons of its states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tracea_jax as tracea

X = jax.random.normal(jax.random.key(1), (12, 8))
Y = jax.random.normal(jax.random.key(2), (12, 4))


class Net(nnx.Module):
    """Running statistics, random numbers and a counter change in every call."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] = self.count[...] + 1
        return self.hidden(x)

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def forward(module: Any, x: jax.Array) -> jax.Array:
    return module(x)


def loss(module: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(module(x) - y).mean()


def step(module: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(module, x, y)
    optimizer.update(module, grads)
    return value


def momentum(module: Any) -> nnx.Optimizer:
    return nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def plain(*trees: Any) -> Any:
    """Arrays in place of objects, keys of random numbers as numbers."""

    def leaf(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    pure = [
        nnx.to_pure_dict(nnx.state(t)) if isinstance(t, nnx.Pytree) else t
        for t in trees
    ]
    return jax.tree.map(leaf, pure)


def made() -> tuple[Any, Any]:
    net = Net(nnx.Rngs(0))
    return net, momentum(net)


def assert_near(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def assert_alike(
    run: Callable[[Any, Any], Any],
    make: Callable[[nnx.Rngs], Any] = Net,
    wrap: Any = tracea.transform,
) -> None:
    """run(wrap, module) gives the same and leaves the same state, wrapped or not."""
    ends = []
    for wrapped in (lambda f: f, wrap):
        module = make(nnx.Rngs(0))
        ends.append((plain(run(wrapped, module)), plain(module)))
    assert_near(ends[1], ends[0])

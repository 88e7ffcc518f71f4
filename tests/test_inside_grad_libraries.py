"""Steps of optax, flax and equinox that differentiate inside are transformed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx
from insides import HEADS, WIDTH, arguments, check, names
from transformed import assert_near, jit

import tracea_jax as tracea

pytestmark = pytest.mark.usefixtures("our_attention")

# --- libraries ------------------------------------------------------------------------


def test_an_optax_step():
    optimizer = optax.adam(1e-2)
    p, x, y = arguments()

    def make(loss):
        @jax.jit
        def step(p, state, x, y):
            value, grads = jax.value_and_grad(loss)(p, x, y)
            updates, state = optimizer.update(grads, state, p)
            return optax.apply_updates(p, updates), state, value

        return step

    check(make, p, optimizer.init(p), x, y, tolerance=1e-3)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(x)))


def test_flax_linen_with_state():
    model = Linen()
    _, x, y = arguments()
    variables = model.init(jax.random.key(0), x)

    def linen_loss(p, stats, x, y):
        both = {"params": p, "batch_stats": stats}
        out, updated = model.apply(both, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean(), updated

    def make(loss):
        def step(variables, x, y):
            p, stats = variables["params"], variables["batch_stats"]
            return jax.value_and_grad(loss, has_aux=True)(p, stats, x, y)

        return step

    check(make, variables, x, y, of=linen_loss, tolerance=1e-4)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(nnx.gelu(self.norm(x + self.attention(x))))


def test_flax_nnx_with_state_and_optimizer():
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    _, x, y = arguments()

    @nnx.jit
    def train(model, optimizer, x, y):
        def of_model(model):
            return ((model(x) - y) ** 2).mean()

        value, grads = nnx.value_and_grad(of_model)(model)
        optimizer.update(model, grads)
        return value

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        value = train(model, optimizer, x, y)
        return value, jax.tree.leaves(nnx.state((model, optimizer)))

    fast = tracea.transform(step)
    found = names(fast, state, x, y)
    assert found["tracea_attention"] == found["tracea_attention_backward"] == 1
    # Each on a state of its own: what a step changes in its arguments, both do.
    got, expected = (jit(f)(state, x, y) for f in (fast, step))
    assert_near(got, expected, 1e-3)


class Equinox(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    activation: Any

    def __call__(self, x):
        return self.activation(self.attention(x, x, x))


def test_equinox_filters():
    key = jax.random.key(0)
    model = Equinox(eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key), jax.nn.gelu)
    arrays, static = eqx.partition(model, eqx.is_array)
    _, x, y = arguments()

    def equinox_loss(model, x, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean(), {"name": "text", "x": x}

    @eqx.filter_jit
    def train(model, x, y):
        of_model = eqx.filter_value_and_grad(equinox_loss, has_aux=True)
        (value, aux), grads = of_model(model, x, y)
        assert aux["name"] == "text"
        return value, eqx.apply_updates(model, grads)

    def step(arrays, x, y):
        value, updated = train(eqx.combine(arrays, static), x, y)
        return value, eqx.filter(updated, eqx.is_array)

    fast = tracea.transform(step)
    assert names(fast, arrays, x, y)["tracea_attention_backward"] == 1
    got, expected = jit(lambda *args: (fast(*args), step(*args)))(arrays, x, y)
    assert_near(got, expected, 3e-5)


def test_equinox_vjp_and_checkpoint():
    mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(mlp, eqx.is_array)

    def step(arrays, x):
        model = eqx.combine(arrays, static)
        f = eqx.filter_checkpoint(lambda m, x: jax.vmap(jax.vmap(m))(x).sum())
        value, pull = eqx.filter_vjp(f, model, x)
        _, tangent = eqx.filter_jvp(lambda x: f(model, x), (x,), (x,))
        grads = eqx.filter_grad(f)(model, x)
        return (
            value,
            [eqx.filter(g, eqx.is_array) for g in (pull(value), grads)],
            tangent,
        )

    args = arrays, arguments()[1]
    fast = tracea.transform(step)
    assert names(fast, *args)["tracea_matmul"]
    got, expected = jit(lambda *args: (fast(*args), step(*args)))(*args)
    assert_near(got, expected, 3e-5)


# --- what cannot be reached -----------------------------------------------------------


def test_an_equinox_step_that_returns_its_model():
    """As equinox users write it, and with the layers' activation among the leaves."""
    mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(mlp, eqx.is_array))
    _, x, y = arguments()

    def loss(model, x, y):
        return ((jax.vmap(jax.vmap(model))(x) - y) ** 2).mean()

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    fast = tracea.transform(step)
    expected = eqx.filter_jit(step)(mlp, state, x, y)
    for made in (fast, eqx.filter_jit(fast), tracea.transform(eqx.filter_jit(step))):
        got = made(mlp, state, x, y)
        assert got[0].activation is mlp.activation
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        of_arrays = eqx.filter((got, expected), eqx.is_array)
        assert_near(of_arrays[0], of_arrays[1], 3e-5)
    assert tracea.explain(step)(mlp, state, x, y).ops["matmul"] >= 6

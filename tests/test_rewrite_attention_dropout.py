"""Dropout acts on the weights: they stay, and the products around them are sites."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from attention_spellings.base import SCALE, B, N, T, btnh
from jaxprs import equations
from transformed import assert_near, jit

import tracea_jax as tracea

KEY = jax.random.key(1)


def by_flax(q, k, v, key, **how):
    dropout = {"dropout_rng": key, "dropout_rate": 0.2, "deterministic": False}
    return nn.dot_product_attention(q, k, v, **dropout, **how)


def by_hand(q, k, v, key):
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * SCALE)
    keep = jax.random.bernoulli(key, 0.8, (B, N, T, T))
    return jnp.einsum("bhts,bshd->bthd", jnp.where(keep, p / 0.8, 0), v)


def by_layer(q, k, v, key):
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * SCALE)
    layer = nn.Dropout(0.2, broadcast_dims=(1,), deterministic=False)
    p = layer.apply({}, p, rngs={"dropout": key})
    return jnp.einsum("bhts,bshd->bthd", p, v)


def in_layers(q, k, v, key):
    """Two layers with a key each, recomputed in the backward pass."""

    @jax.checkpoint
    def layer(q, key):
        return by_hand(q, k, v, key), None

    return jax.lax.scan(layer, q, jax.random.split(key, 2))[0]


def of_keys(q, k, v, key):
    keys = jax.random.split(key, 2)
    return jax.vmap(by_hand, (None, None, None, 0))(q, k, v, keys)


def inside(q, k, v, key):
    """Differentiated by the program itself."""
    return jax.grad(lambda q: (by_hand(q, k, v, key) ** 2).sum())(q)


PROGRAMS = {
    "flax": by_flax,
    "flax, not shared": functools.partial(by_flax, broadcast_dropout=False),
    "by hand": by_hand,
    "layer": by_layer,
    "in layers": in_layers,
    "of keys": of_keys,
    "inside": inside,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_says_so_and_the_products_are_sites(name):
    fn, args = PROGRAMS[name], (*btnh(), KEY)
    text = str(tracea.explain(fn)(*args))
    # Weights that several keys share are repeated, which no attention does.
    assert ("dropout acts on the weights" in text) == (name != "of keys")
    fast = tracea.transform(fn)
    assert not equations(fast, *args, name="tracea_attention")
    assert len(equations(fast, *args, name="tracea_matmul")) >= 2


def test_values_and_gradients_are_the_programs():
    """With the very same entries dropped."""
    q, k, v = btnh()

    @jit
    def both(q, k, v):
        def of(f):
            loss = functools.partial(lambda f, *x: (f(*x, KEY) ** 2).sum(), f)
            return f(q, k, v, KEY), jax.grad(loss, (0, 1, 2))(q, k, v)

        return [
            {name: of(made(fn)) for name, fn in PROGRAMS.items()}
            for made in (tracea.transform, lambda fn: fn)
        ]

    found, expected = both(q, k, v)
    for name in PROGRAMS:
        assert_near(found[name], expected[name], 2e-5, name)

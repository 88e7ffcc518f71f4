"""Losses are found, however they are spelled, and are exactly the program's."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cross_entropies import assert_near
from losses import LOSSES, B, D, T, V, found, logits_of, misses, operands, take
from transformed import jit

import tracea_jax as tracea

pytestmark = pytest.mark.usefixtures("small_chunks")


def results(f, *args):
    """The value of f, and the gradients of its first two arguments."""
    loss, back = jax.vjp(lambda *some: f(*some, *args[2:]), *args[:2])
    ct = jnp.linspace(-1, 2, loss.size, dtype=loss.dtype).reshape(loss.shape)
    return loss, back(ct)


def assert_becomes_ours(f, *args, tolerance=1e-5):
    assert found(f, *args) == 1, misses(f, *args)
    pair = (tracea.transform(f), f)
    ours, plain = jit(lambda *args: [results(g, *args) for g in pair])(*args)
    assert [x.dtype for x in jax.tree.leaves(ours)] == [
        x.dtype for x in jax.tree.leaves(plain)
    ]
    assert_near(ours, plain, tolerance)


# --- spellings ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    x, w, labels = operands()
    assert_becomes_ours(lambda x, w, y: LOSSES[name](logits_of(x, w), y), x, w, labels)


HEADS = {
    "transposed": logits_of,
    "features first": lambda x, w: x @ jnp.reshape(w, (D, V)),
    "einsum": lambda x, w: jnp.einsum("btd,vd->btv", x, w),
    "einsum, exchanged": lambda x, w: jnp.einsum("vd,btd->btv", w, x),
    "einsum in float32": lambda x, w: jnp.einsum(
        "btd,vd->btv", x, w, preferred_element_type=jnp.float32
    ),
    "dot_general": lambda x, w: jax.lax.dot_general(x, w, (((2,), (1,)), ((), ()))),
    "bias": lambda x, w: x @ w.T + w[:, 0],
    "bias in float32": lambda x, w: logits_of(x, w) + w[:, 0].astype(jnp.float32),
    "flat before": lambda x, w: (x.reshape(-1, D) @ w.T).reshape(B, T, V),
    "highest precision": lambda x, w: jnp.matmul(
        x, w.T, precision="highest", preferred_element_type=jnp.float32
    ),
    "linen": lambda x, w: nn.Embed(V, D).bind({"params": {"embedding": w}}).attend(x),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, dtype):
    def loss(x, w, labels):
        z = HEADS[name](x, w).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(z, labels)

    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert_becomes_ours(loss, *operands(dtype), tolerance=tolerance)


def test_narrow_softmax():
    x, w, labels = operands("bfloat16")

    def loss(x, w, labels):
        return -take(jax.nn.log_softmax(x @ w.T), labels)

    assert_becomes_ours(loss, x, w, labels, tolerance=4e-2)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_label_dtypes(dtype):
    x, w, labels = operands()
    loss = lambda x, w, y: LOSSES["log_softmax, take"](logits_of(x, w), y)  # noqa: E731
    assert_becomes_ours(loss, x, w, labels.astype(dtype))


# --- values that are exactly the program's --------------------------------------------


SPECIAL = {
    "nan": {3: np.nan},
    "infinity": {39: np.inf},
    "minus infinity": {0: -np.inf},
    "all minus infinity": dict.fromkeys(range(V), -np.inf),
    "huge": {2: 3e38},
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name",
    ["log_softmax, take", "optax, integers", "by hand", "by hand, unstopped", "where"],
)
def test_special_logits(name, kind):
    x, w, labels = operands()
    bias = jnp.zeros(V)
    for column, value in SPECIAL[kind].items():
        bias = bias.at[column].set(value)

    def loss(x, w, labels, bias):
        return LOSSES[name](x @ w.T + bias, labels)

    args = (x, w, labels, bias)
    assert found(loss, *args) == 1
    ours, plain = (
        jax.jit(functools.partial(results, f))(*args)
        for f in (tracea.transform(loss), loss)
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [n for n in LOSSES if n not in ("perplexity", "weighted mean", "indices")]
)
def test_labels_outside_of_the_vocabulary(name):
    """What each spelling gives, which is NaN, nothing, or the nearest label."""
    x, w, labels = operands()
    for value in (-1, -V, -V - 1, V, 2**31 - 1):
        args = (x, w, labels.at[0, 2].set(value).at[1, 4].set(value))
        f = lambda x, w, y: LOSSES[name](logits_of(x, w), y)  # noqa: E731
        ours, plain = (
            jax.jit(functools.partial(results, g))(*args)
            for g in (tracea.transform(f), f)
        )
        np.testing.assert_allclose(ours[0], plain[0], rtol=1e-4, atol=1e-5)
        if "three" not in name and "vmap" != name:  # their gradients are undefined
            for a, b in zip(ours[1], plain[1], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

"""Uses of logits that are no cross entropy stay as they are, and are told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from cross_entropies import assert_near
from losses import D, V, by_hand, flat, found, logits_of, misses, operands, take
from numerics import normal

import tracea_jax as tracea

pytestmark = pytest.mark.usefixtures("small_chunks")


def smoothed(z, y):
    scores = jax.nn.log_softmax(z)
    return -0.9 * take(scores, y) - 0.1 * scores.mean(-1)


def with_z_loss(z, y):
    lse = jax.nn.logsumexp(z, -1)
    return lse - take(z, y) + 1e-4 * lse**2


def with_accuracy(z, y):
    return -take(jax.nn.log_softmax(z), y), (z.argmax(-1) == y).mean()


def with_entropy(z, y):
    scores = jax.nn.log_softmax(z)
    return -take(scores, y) + (jnp.exp(scores) * scores).sum(-1)


STAYS = {
    "accuracy": (with_accuracy, "the logits are also used by argmax"),
    "logits returned": (
        lambda z, y: (-take(jax.nn.log_softmax(z), y), z),
        "the logits are also a result of the program",
    ),
    "scores returned": (
        lambda z, y: (take(jax.nn.log_softmax(z), y), jax.nn.log_softmax(z)),
        "the logits are also",
    ),
    "z-loss": (with_z_loss, "what is made of logits is also used by"),
    "label smoothing": (smoothed, "the logits are also used by reduce_sum"),
    "entropy": (with_entropy, "the logits are also used by exp"),
    "soft labels": (
        lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, V) * 0.9),
        "the logits are also used by mul",
    ),
    "two labels": (
        lambda z, y: (
            -jnp.take_along_axis(jax.nn.log_softmax(z), jnp.stack([y, y], -1), -1)
        ),
        "the logits are also used by gather",
    ),
    "other rows": (
        flat(lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(len(y))[::-1], y]),
        "the logits are also used by gather",
    ),
    "one label for all": (
        lambda z, y: -jax.nn.log_softmax(z)[..., y[0, 0]],
        "the logits are also used by",
    ),
    "another fill value": (
        lambda z, y: (
            -jnp.take_along_axis(
                jax.nn.log_softmax(z), y[..., None], -1, mode="fill", fill_value=0
            )
        ),
        "the logits are also used by gather",
    ),
    "a constant normaliser": (
        lambda z, y: jax.lax.stop_gradient(jax.nn.logsumexp(z, -1)) - take(z, y),
        "what is made of logits is also used by stop_gradient",
    ),
    "two losses": (
        lambda z, y: (
            -take(jax.nn.log_softmax(z), y),
            -take(jax.nn.log_softmax(z), y[::-1]),
        ),
        "the logits are also",
    ),
    "a maximum with a gradient": (
        lambda z, y: (
            -take(shifted := z - z.max(-1, keepdims=True), y)
            + jnp.log(jnp.exp(shifted).sum(-1))
        ),
        "the logits are also used by gather",
    ),
    "a maximum with half a gradient": (
        lambda z, y: (
            -take(z - jax.lax.stop_gradient(z.max(-1, keepdims=True)), y)
            + jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1))
        ),
        "is also",
    ),
    "masked one-hot": (
        lambda z, y: (
            jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1))
            - (jax.nn.one_hot(y, V) * (z - z.max(-1, keepdims=True))).sum(-1)
        ),
        "the logits are also used by mul",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_else_uses_logits_is_told(name):
    x, w, labels = operands()
    loss, text = STAYS[name]
    f = lambda x, w, y: loss(logits_of(x, w), y)  # noqa: E731
    assert found(f, x, w, labels) == 0
    (reason,) = misses(f, x, w, labels)
    assert text in reason
    ours, plain = (jax.jit(g)(x, w, labels) for g in (tracea.transform(f), f))
    assert_near(ours, plain, 1e-5)


UNLIKE = {
    "not shifted": lambda z, y: jnp.log(jnp.exp(z).sum(-1)) - take(z, y),
    "over rows": lambda z, y: -take(jax.nn.log_softmax(z, axis=1), y),
    "scaled": lambda z, y: -take(jax.nn.log_softmax(z / 0.7), y),
    "capped": lambda z, y: -take(jax.nn.log_softmax(30 * jnp.tanh(z / 30)), y),
    "masked": lambda z, y: (
        -take(jax.nn.log_softmax(jnp.where(jnp.arange(V) < 30, z, -1e9)), y)
    ),
    "softmax, log": lambda z, y: -jnp.log(take(jax.nn.softmax(z), y)),
    "squared error": lambda z, y: jnp.log(((z - y[..., None]) ** 2).sum(-1)),
    "a floor": lambda z, y: by_hand(jnp.maximum(z, 0), y),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_alike_stays(name):
    x, w, labels = operands()
    f = lambda x, w, y: UNLIKE[name](logits_of(x, w), y)  # noqa: E731
    assert found(f, x, w, labels) == 0
    ours, plain = (jax.jit(g)(x, w, labels) for g in (tracea.transform(f), f))
    assert_near(ours, plain, 1e-5)


def test_sums_along_the_wrong_axis_stay():
    """Where there are as many rows as columns, shapes alone do not tell them apart."""
    x, w = normal(V, D), normal(V, D, seed=1)
    labels = jnp.arange(V)[::-1]

    def loss(x, w, labels):
        z = x @ w.T
        scores = z - jax.nn.logsumexp(z, -1)[None, :]
        return -take(scores, labels)

    assert found(loss, x, w, labels) == 0
    assert_near(tracea.transform(loss)(x, w, labels), loss(x, w, labels), 1e-5)


def test_products_with_batches_and_float64_stay():
    x, w, labels = operands()
    batched = lambda x, w, y: by_hand(jnp.einsum("btd,bvd->btv", x, w), y)  # noqa: E731
    assert found(batched, x, jnp.stack([w, w]), labels) == 0
    with jax.enable_x64(True):
        wide = x.astype("float64"), w.astype("float64"), labels
        assert found(lambda x, w, y: by_hand(x @ w.T, y), *wide) == 0


def test_few_logits_stay_with_a_reason(large_chunks):
    loss = lambda x, w, y: by_hand(logits_of(x, w), y).mean()  # noqa: E731
    args = operands()
    assert misses(loss, *args) == [
        "12 x 40 logits fit in 256 MiB, too few for chunks to help"
    ]
    assert "is not rewritten as linear_cross_entropy: 12 x 40" in str(
        tracea.explain(loss)(*args)
    )
    many = jax.ShapeDtypeStruct((1 << 20, D), jnp.float32)
    narrow = jax.ShapeDtypeStruct((100, D), jnp.float32)
    labels = jax.ShapeDtypeStruct((1 << 20,), jnp.int32)
    assert misses(loss, many, narrow, labels) == ["100 columns are too few for chunks"]


def test_ops_are_chosen_by_name():
    loss = lambda x, w, y: by_hand(logits_of(x, w), y).mean()  # noqa: E731
    args = operands()
    assert found(loss, *args, ops="matmul") == 0
    assert found(loss, *args, ops="linear_cross_entropy") == 1

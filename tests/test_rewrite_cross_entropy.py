"""Losses are found, however they are spelled, and are exactly the program's."""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cross_entropies import assert_near
from losses import LOSSES, B, D, T, V, found, logits_of, misses, operands, take
from numerics import array
from slow_cases import slow_unless
from transformed import jit

import tracea_jax as tracea

pytestmark = pytest.mark.usefixtures("small_chunks")


def results(f, *args):
    """The value of f, and the gradients of its first two arguments."""
    loss, back = jax.vjp(lambda *some: f(*some, *args[2:]), *args[:2])
    ct = jnp.linspace(-1, 2, loss.size, dtype=loss.dtype).reshape(loss.shape)
    return loss, back(ct)


def results_of_both(loss, of=results):
    """Results of the transformed loss and of the loss, compiled once."""
    pair = (tracea.transform(loss), loss)
    both = jit(lambda *args: [of(f, *args) for f in pair])
    return lambda *args: program(both.lower(*args))(*args)


_programs = {}


def program(lowered):
    """The compiled program; spellings that lower to the same are compiled once."""
    text = lowered.as_text()
    if text not in _programs:
        _programs[text] = lowered.compile()
    return _programs[text]


def assert_becomes_ours(f, *args, tolerance=1e-5, of=results):
    """Returns ``results_of_both``, for other operands."""
    assert found(f, *args) == 1, misses(f, *args)
    both = results_of_both(f, of)
    ours, plain = both(*args)
    assert [x.dtype for x in jax.tree.leaves(ours)] == [
        x.dtype for x in jax.tree.leaves(plain)
    ]
    assert_near(ours, plain, tolerance)
    return both


def assert_same_kinds(f, g, *args):
    """Shapes and dtypes of values and gradients; nothing is compiled."""
    of_f, of_g = (jax.eval_shape(functools.partial(results, h), *args) for h in (f, g))
    assert of_f == of_g


def assert_close(ours, plain, why):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(why))


# --- spellings ------------------------------------------------------------------------


# Of these, nobody says what a label outside of the vocabulary gives.
UNDEFINED = ("perplexity", "weighted mean", "indices")
UNDEFINED_GRADIENTS = ("three indices", "vmap")
# One of each way to take the logit of a label, and of each way to sum.
USUAL = (
    "log_softmax, take",
    "mean of kept dimension",
    "clipped labels",
    "optax, one-hot",
    "logsumexp, take",
    "subtracted before",
    "one-hot, batch mean",
    "where",
    "three indices",
    "vmap of take",
    "by hand, unstopped",
    "weighted mean",
)


@pytest.mark.parametrize("name", slow_unless(USUAL, LOSSES))
def test_losses(name):
    """Labels outside of the vocabulary give what they give in each spelling.

    That is NaN, nothing, or the nearest label.
    """
    x, w, labels = operands()
    loss = lambda x, w, y: LOSSES[name](logits_of(x, w), y)  # noqa: E731
    both = assert_becomes_ours(loss, x, w, labels)
    for value in (-1, -V, -V - 1, V, 2**31 - 1) if name not in UNDEFINED else ():
        wrong = np.array(labels)
        wrong[[0, 1], [2, 4]] = value
        parts = slice(1 if name in UNDEFINED_GRADIENTS else 2)
        ours, plain = both(x, w, array(wrong))
        assert_close(ours[parts], plain[parts], value)


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
    "features before rows": lambda x, w: jnp.einsum(
        "dbt,vd->btv", x.reshape(D, B, T), w
    ),
    "features of two dimensions": lambda x, w: jnp.einsum(
        "btij,vij->btv", x.reshape(B, T, 2, -1), w.reshape(V, 2, -1)
    ),
    "first of the rows": lambda x, w: jnp.einsum(
        "ibtj,ijv->btv", x.reshape(2, B, T, -1), w.reshape(2, -1, V)
    ),
    "highest precision": lambda x, w: jnp.matmul(
        x, w.T, precision="highest", preferred_element_type=jnp.float32
    ),
    "linen": lambda x, w: nn.Embed(V, D).bind({"params": {"embedding": w}}).attend(x),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_unless(
        [
            *itertools.product(HEADS, ["float32"]),
            *itertools.product(["bias", "einsum in float32", "linen"], ["bfloat16"]),
        ],
        [*itertools.product(HEADS, ["float32", "bfloat16"]), ("bias", "float16")],
    ),
)
def test_heads(name, dtype):
    """Gradients in float32; in narrow dtypes, values, and the dtypes of gradients.

    Narrow gradients are in test_linear_cross_entropy, and here with "bias".
    """

    def loss(x, w, labels):
        z = HEADS[name](x, w).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(z, labels)

    exact = dtype == "float32"
    of = results if exact or name == "bias" else lambda f, *args: f(*args)
    assert_becomes_ours(
        loss, *operands(dtype), tolerance=1e-5 if exact else 3e-2, of=of
    )
    assert_same_kinds(tracea.transform(loss), loss, *operands(dtype))


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


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ["log_softmax, take", "by hand, unstopped", "where"],
        ["log_softmax, take", "optax, integers", "by hand"]
        + ["by hand, unstopped", "where"],
    ),
)
def test_special_logits(name):
    def loss(x, w, labels, bias):
        return LOSSES[name](x @ w.T + bias, labels)

    x, w, labels = operands()
    assert found(loss, x, w, labels, array(np.zeros(V, np.float32))) == 1
    both = results_of_both(loss)
    for kind, values in SPECIAL.items():
        bias = np.zeros(V, np.float32)
        bias[[*values]] = [*values.values()]
        ours, plain = both(x, w, labels, array(bias))
        assert_close(ours, plain, kind)

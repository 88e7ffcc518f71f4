"""Cross entropies that transform puts on linear_cross_entropy, and those that stay.

Values and derivatives of the op itself: ``test_linear_cross_entropy``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cross_entropies import assert_near, temporaries
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import normal

import tracea_jax as tracea
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.ops.linear_cross_entropy import chunks

B, T, D, V = 2, 6, 8, 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, request):
    """Chunks of eight columns, as if tiny logits were many."""
    if "large_chunks" not in request.fixturenames:
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * B * T * 8)
        monkeypatch.setattr(chunks, "_ALIGNMENT", 8)


@pytest.fixture
def large_chunks():
    """As in programs: see ``small_chunks``."""


def operands(dtype: Any = "float32"):
    x, w = normal(B, T, D, dtype=dtype), normal(V, D, dtype=dtype)
    labels = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)), jnp.int32)
    return x, w, labels


def found(f, *args, **how) -> int:
    """How many cross entropies of f become ours."""
    return tracea.explain(f, **how)(*args).ops.get("linear_cross_entropy", 0)


def misses(f, *args) -> list[str]:
    every = tracea.explain(f)(*args).misses
    return [m.reason for m in every if m.op == "linear_cross_entropy"]


def results(f, *args):
    """The value of f, and the gradients of its first two arguments."""
    loss, back = jax.vjp(lambda *some: f(*some, *args[2:]), *args[:2])
    ct = jnp.linspace(-1, 2, loss.size, dtype=loss.dtype).reshape(loss.shape)
    return loss, back(ct)


def assert_becomes_ours(f, *args, tolerance=1e-5):
    assert found(f, *args) == 1, misses(f, *args)
    ours, plain = (
        jax.jit(functools.partial(results, g))(*args) for g in (tracea.transform(f), f)
    )
    assert [x.dtype for x in jax.tree.leaves(ours)] == [
        x.dtype for x in jax.tree.leaves(plain)
    ]
    assert_near(ours, plain, tolerance)


# --- spellings ------------------------------------------------------------------------


def logits_of(x, w):
    return (x @ w.T).astype(jnp.float32)


def take(scores, labels):
    return jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]


def by_hand(z, labels):
    shifted = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    return jnp.log(jnp.exp(shifted).sum(-1)) - take(shifted, labels)


def by_hand_unstopped(z, labels):
    largest = jnp.max(z, -1)
    lse = largest + jnp.log(jnp.sum(jnp.exp(z - largest[..., None]), -1))
    return lse - take(z, labels)


def flat(f):
    return lambda z, labels: f(z.reshape(-1, V), labels.reshape(-1))


LOSSES = {
    "log_softmax, take": lambda z, y: -take(jax.nn.log_softmax(z), y),
    "mean of kept dimension": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], axis=-1).mean()
    ),
    "clipped labels": lambda z, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], -1, mode="clip")
    ),
    "optax, integers": optax.softmax_cross_entropy_with_integer_labels,
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, V)),
    "logsumexp, take": lambda z, y: jax.nn.logsumexp(z, -1) - take(z, y),
    "logsumexp, kept": lambda z, y: (
        jax.nn.logsumexp(z, -1, keepdims=True)
        - jnp.take_along_axis(z, y[..., None], -1)
    ),
    "logsumexp, one-hot": lambda z, y: (
        jax.nn.logsumexp(z, -1) - (jax.nn.one_hot(y, V) * z).sum(-1)
    ),
    "subtracted before": lambda z, y: (
        -take(z - jax.nn.logsumexp(z, axis=-1, keepdims=True), y)
    ),
    "one-hot, summed": lambda z, y: (
        -(jax.nn.one_hot(y, V) * jax.nn.log_softmax(z)).sum()
    ),
    "one-hot, batch mean": lambda z, y: (
        -(jax.nn.log_softmax(z) * jax.nn.one_hot(y, V)).sum((-2, -1)).mean()
    ),
    "where": lambda z, y: (
        -jnp.where(jnp.arange(V) == y[..., None], jax.nn.log_softmax(z), 0).sum(-1)
    ),
    "indices": flat(lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(len(y)), y]),
    "three indices": lambda z, y: (
        -jax.nn.log_softmax(z)[jnp.arange(B)[:, None], jnp.arange(T)[None], y]
    ),
    "vmap": lambda z, y: jax.vmap(jax.vmap(lambda a, i: -jax.nn.log_softmax(a)[i]))(
        z, y
    ),
    "vmap of take": lambda z, y: jax.vmap(lambda a, i: -take(jax.nn.log_softmax(a), i))(
        z, y
    ),
    "by hand": by_hand,
    "by hand, unstopped": by_hand_unstopped,
    "flat rows": flat(optax.softmax_cross_entropy_with_integer_labels),
    "next token": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(
        z[:, :-1], y[:, 1:]
    ).mean(),
    "weighted mean": lambda z, y: (
        jnp.sum((y > 5) * by_hand(z, y)) / jnp.maximum(jnp.sum(y > 5), 1)
    ),
    "log-likelihood": lambda z, y: take(jax.nn.log_softmax(z), y).sum(-1),
    "perplexity": lambda z, y: jnp.exp(-take(jax.nn.log_softmax(z), y).mean()),
}


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


# --- what stays as it is --------------------------------------------------------------


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
        "12 x 40 logits fit in 256 MiB, where chunks do not pay"
    ]
    assert "is no linear_cross_entropy: 12 x 40" in str(tracea.explain(loss)(*args))
    many = jax.ShapeDtypeStruct((1 << 20, D), jnp.float32)
    narrow = jax.ShapeDtypeStruct((100, D), jnp.float32)
    labels = jax.ShapeDtypeStruct((1 << 20,), jnp.int32)
    assert misses(loss, many, narrow, labels) == ["100 columns are too few for chunks"]


def test_ops_are_chosen_by_name():
    loss = lambda x, w, y: by_hand(logits_of(x, w), y).mean()  # noqa: E731
    args = operands()
    assert found(loss, *args, ops="matmul") == 0
    assert found(loss, *args, ops="linear_cross_entropy") == 1


# --- whole programs -------------------------------------------------------------------


def assert_step_alike(loss, params, *rest, tolerance=1e-4, times=1):
    """Of a step that differentiates inside, transformed from outside."""
    step = jax.value_and_grad(loss)
    assert found(step, params, *rest) == times, misses(step, params, *rest)
    ours, plain = (jax.jit(f)(params, *rest) for f in (tracea.transform(step), step))
    assert_near(ours, plain, tolerance)


def test_a_language_model():
    model = LanguageModel(
        batch=B,
        tokens=T,
        layers=1,
        vocabulary=V,
        width=16,
        hidden=24,
        heads=2,
        kv_heads=1,
        dtype="float32",
    )
    assert_step_alike(model.loss, *model.inputs())


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.linear(self.embed(tokens))))


def test_nnx_attend():
    graph, state = nnx.split(Tied(nnx.Rngs(0)))
    labels = operands()[2]

    def loss(state, labels):
        z = nnx.merge(graph, state)(labels)[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(z, labels[:, 1:]).mean()

    assert_step_alike(loss, state, labels)


def test_scan_over_microbatches_and_checkpoint():
    x, w, labels = normal(3, B, T, D), operands()[1], operands()[2]
    every = jnp.stack([labels, labels[::-1], labels])

    def loss(w, x, y):
        @jax.checkpoint
        def step(total, rows):
            z = logits_of(jnp.sin(rows[0]), w)
            return total + LOSSES["optax, integers"](z, rows[1]).sum(), None

        return jax.lax.scan(step, 0.0, (x, y))[0]

    assert_step_alike(loss, w, x, every, times=2)  # once more in the backward pass


def test_jitted_losses_and_vmap():
    x, w, labels = operands()

    @jax.jit
    def cross_entropy(z, y):
        return LOSSES["log_softmax, take"](z, y).mean()

    assert_step_alike(lambda w, x, y: cross_entropy(logits_of(x, w), y), w, x, labels)

    def of_examples(w, x, y):
        each = jax.vmap(lambda x, y: by_hand(logits_of(x, w), y).mean())
        return each(x, y).sum()

    assert_step_alike(of_examples, w, x, labels)


def test_shard_map():
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    x, w, labels = normal(4, T, D), operands()[1], jnp.tile(operands()[2], (2, 1))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P()
    )
    def loss(w, x, y):
        z = logits_of(x, w)
        return jax.lax.pmean(LOSSES["log_softmax, take"](z, y).mean(), "batch")

    assert_step_alike(loss, w, x, labels)


def test_second_derivatives_of_a_transformed_loss():
    x, w, labels = operands()

    def product(f):
        grad = jax.grad(lambda w: (f(x, w, labels) ** 2).sum())
        return jax.jvp(grad, (w,), (jnp.cos(w),))

    loss = lambda x, w, y: by_hand(logits_of(x, w), y)  # noqa: E731
    assert_near(product(tracea.transform(loss)), product(loss), 1e-4)


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int = 512
    features: int = 16
    vocabulary: int = 8192


def test_memory_of_a_step(optimizations, monkeypatch):
    """The logits of a whole step are never there at once."""
    sizes = Sizes()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", sizes.rows * sizes.vocabulary // 2)

    def loss(w, x, y):
        return LOSSES["log_softmax, take"](logits_of(x, w), y).mean()

    args = (
        jax.ShapeDtypeStruct((sizes.vocabulary, sizes.features), jnp.float32),
        jax.ShapeDtypeStruct((sizes.rows, sizes.features), jnp.float32),
        jax.ShapeDtypeStruct((sizes.rows,), jnp.int32),
    )
    step = jax.value_and_grad(loss)
    ours, plain = (temporaries(f, *args) for f in (tracea.transform(step), step))
    assert ours < plain / 4


def test_the_head_of_gpt2(large_chunks):
    """Its chunks, at the size that people train it with."""

    def loss(w, x, y):
        return LOSSES["log_softmax, take"](logits_of(x, w), y).mean()

    args = (
        jax.ShapeDtypeStruct((50257, 768), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 1024, 768), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 1024), jnp.int32),
    )
    explained = tracea.explain(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    site = explained.sites[0]
    assert site.reason.startswith("7168 of 50257 columns at a time: 112 MiB")
    products = {s.problem.to_json()["layout"] for s in explained.sites[1:] if s.problem}
    assert products == {"nt", "nn", "tn"}

"""Cross entropies in whole programs: language models, scans, meshes, memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from cross_entropies import assert_near, temporaries
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from losses import LOSSES, B, D, T, V, by_hand, found, logits_of, misses, operands
from numerics import normal

import tracea_jax as tracea
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.ops.linear_cross_entropy import chunks

pytestmark = pytest.mark.usefixtures("small_chunks")


def assert_step_alike(loss, params, *rest, tolerance=1e-4, times=1):
    """Compares a step that differentiates inside with the transformed step."""
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

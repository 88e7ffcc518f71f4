"""Training on real data gives the same loss curve with and without ``transform``."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations

import tracea_jax as tracea

pytestmark = pytest.mark.once

datasets = pytest.importorskip("sklearn.datasets")
STEPS, BATCH = 120, 64


class Classifier(nn.Module):
    """A convolutional stem, one attention block over the patches, and a gated MLP."""

    dtype: str

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (3, 3), strides=(2, 2), dtype=self.dtype)(images)
        x = nn.relu(x).reshape(len(images), 16, 32)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, dtype=self.dtype)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        gate = nn.Dense(64, use_bias=False, dtype=self.dtype)(y)
        up = nn.Dense(64, use_bias=False, dtype=self.dtype)(y)
        x = x + nn.Dense(32, dtype=self.dtype)(nn.silu(gate) * up)
        return nn.Dense(10, dtype=self.dtype)(x.mean(1)).astype(jnp.float32)


def curve(dtype, wrap):
    """The losses of every step, and the trained classifier's accuracy."""
    data = datasets.load_digits()
    images = jnp.asarray(data.images[..., None] / 16.0, jnp.float32)
    labels = jnp.asarray(data.target)
    model = Classifier(dtype=dtype)
    params = jax.jit(model.init)(jax.random.key(0), images[:1])
    optimiser = optax.adam(3e-3)
    forward = wrap(model.apply)

    def loss(params, x, y):
        logits = forward(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state = optimiser.init(params)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        batch = rng.choice(len(images), BATCH, replace=False)
        params, state, value = step(params, state, images[batch], labels[batch])
        losses.append(float(value))
    logits = jax.jit(forward)(params, images)
    accuracy = float((logits.argmax(-1) == labels).mean())
    return np.array(losses), accuracy


def compare(dtype, tolerance):
    plain, plain_accuracy = curve(dtype, lambda f: f)
    ours, accuracy = curve(dtype, tracea.transform)
    assert plain[0] > 2 and plain[-5:].mean() < 0.5  # it has learnt something
    np.testing.assert_allclose(ours, plain, atol=tolerance)
    assert abs(accuracy - plain_accuracy) < 0.02
    return ours


def test_the_model_runs_on_our_ops():
    model = Classifier(dtype="float32")
    images = jnp.zeros((2, 8, 8, 1))
    params = jax.jit(model.init)(jax.random.key(0), images)
    found = {
        name: len(equations(tracea.transform(model.apply), params, images, name=name))
        for name in (
            "tracea_conv2d",
            "tracea_attention",
            "tracea_gated_matmul",
            "tracea_matmul",
            "dot_general",
        )
    }
    assert list(found.values()) == [1, 1, 1, 6, 0]


def test_training_gives_the_same_curve():
    compare("float32", 2e-3)


@pytest.mark.gpu
def test_training_gives_the_same_curve_on_a_gpu():
    compare("bfloat16", 0.1)

"""Both sums of each channel on a GPU, against float64, and in programs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_sums import KINDS, check, sums
from jax import lax
from numerics import normal
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax.ops.channel_sums.primitive import bind
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.channel_sums import CHANNEL_SUMS_CUDA, ChannelSumsConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

DTYPES = ("bfloat16", "float16", "float32")


def ours(problem: Any, config: Any = None) -> Choice:
    device = device_for("cuda")
    assert CHANNEL_SUMS_CUDA.why_not(problem, device) is None
    config = config or CHANNEL_SUMS_CUDA.heuristic(problem, device)
    return Choice(variant="channel_sums_cuda", config=config)


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("unroll", [2, 4, 8])
def test_every_config_at_an_awkward_shape(blocks, unroll):
    config = ChannelSumsConfig(blocks=blocks, unroll=unroll)
    for kind in KINDS:
        problem = sums(20_011, 72, kind, "bfloat16")
        check(problem, ours(problem, config))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 127, 128, 129, 4099])
def test_one_config_at_every_number_of_rows(rows, dtype):
    for kind in KINDS:
        problem = sums(rows, 24, kind, dtype)
        check(problem, ours(problem))


@pytest.mark.parametrize("channels", [8, 16, 504, 512, 520, 1032, 2048, 8 * 509])
def test_one_config_at_every_number_of_channels(channels):
    for kind in KINDS:
        problem = sums(331, channels, kind, "bfloat16")
        check(problem, ours(problem))


def test_images_keep_their_shape():
    problem = sums(3 * 5 * 7, 16, "argument", "bfloat16")
    check(problem, ours(problem), shape=(3, 5, 7, 16))


def test_two_runs_have_the_same_bits():
    x = normal(50_000, 64, dtype="bfloat16")
    run = jax.jit(lambda x: bind(x, implementation="channel_sums_cuda"))
    first = run(x)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(x), first)


def test_special_values_stay_in_their_channels():
    """Values that relu cuts off may be anything; those it passes are summed."""
    x = np.full((300, 8), 1.0, "float32")
    dy = np.ones_like(x)
    dy[::2], x[::2] = np.nan, -1.0  # cut off
    dy[7, 1], x[9, 2], dy[11, 3], x[13, 4] = np.inf, np.nan, np.nan, np.inf
    each = np.zeros(8, "float32"), np.ones(8, "float32"), np.zeros(8, "float32")
    operands = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16), *each
    found = bind(*operands, relu="argument", implementation="channel_sums_cuda")
    plain = bind(*operands, relu="argument", implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert np.isfinite(np.asarray(found[0])[[0, 2, 4, 5, 6, 7]]).all()


def norm(x, scale, bias):
    wide = x.astype(jnp.float32)
    mean, square = wide.mean((0, 1, 2)), (wide * wide).mean((0, 1, 2))
    variance = jnp.maximum(square - mean * mean, 0)
    y = (wide - mean) * (lax.rsqrt(variance + 1e-5) * scale) + bias
    return jax.nn.relu(y.astype(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_and_its_gradients_take_two_kernels(dtype):
    x = normal(16, 28, 28, 64, dtype=dtype) + jnp.ones(64, dtype)
    args = x, normal(64, seed=1) + 2, normal(64, seed=2)
    weights = normal(16, 28, 28, 64, seed=3).astype(dtype)

    def step(f):
        def loss(*args):
            return (f(*args) * weights).astype(jnp.float32).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    found = step(tracea.transform(norm))
    text = found.lower(*args).compile().as_text() or ""
    assert len(re.findall(r"custom-call\(.*tracea_cuda", text)) == 2
    exact = step(norm)(*(a.astype(jnp.float32) for a in args))
    plain = step(norm)(*args)
    assert_close(
        found(*args)[1][1:], exact[1][1:], 2e-2 if dtype != "float32" else 1e-4
    )
    assert_close(found(*args), plain, 3e-2 if dtype != "float32" else 1e-4)

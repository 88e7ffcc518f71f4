"""Max pooling on a GPU, against float64."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import f64, normal
from pools import WINDOWS, check, pool

import tracea_jax as tracea
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.max_pool import MAX_POOL_CUDA, MaxPoolConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def ours(problem: Any, threads: int = 128) -> Choice:
    assert MAX_POOL_CUDA.why_not(problem, device_for("cuda")) is None
    return Choice(variant="max_pool_cuda", config=MaxPoolConfig(threads=threads))


@pytest.mark.parametrize("threads", [64, 128, 256])
def test_every_config_at_an_awkward_shape(threads):
    for direction in ("forward", "gradient"):
        problem = pool(direction, "bfloat16", **WINDOWS["resnet"])
        check(problem, ours(problem, threads))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", WINDOWS)
def test_one_config_at_all_windows(name, dtype):
    for direction in ("forward", "gradient"):
        problem = pool(direction, dtype, **WINDOWS[name])
        check(problem, ours(problem))


@pytest.mark.parametrize(("height", "width"), [(3, 3), (4, 3), (29, 31), (1, 64)])
def test_one_config_at_awkward_images(height, width):
    for direction in ("forward", "gradient"):
        how = {**WINDOWS["torch"], "height": height, "width": width, "channels": 8}
        problem = pool(direction, "bfloat16", **how)
        check(problem, ours(problem))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_special_values_go_where_jax_has_them(dtype):
    x = np.array(normal(2, 9, 9, 8))
    x[0, 3:5, 2], x[0, 6, 6], x[1, 2, 5], x[1, 8, 8] = np.nan, np.inf, -np.inf, 0.0
    x[1, 8, 7] = -0.0
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x[1, :3, :3, :4], x[1, 1, 1, :4], x[1, 0, 1, :4] = -1.0, tiny, 2 * tiny
    x = jnp.asarray(x, dtype)

    def f(x, **how):
        with tracea.options(**how):
            pooled = tracea.transform(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"))
            y, pull = jax.vjp(pooled, x)
            # Sums of few small integers are exact.
            return y, pull(jnp.arange(y.size, dtype=dtype).reshape(y.shape) % 7 - 3)

    found, plain = f(x, implementation="tracea"), f(x, implementation="xla")
    np.testing.assert_array_equal(f64(found[0]), f64(plain[0]))
    np.testing.assert_array_equal(f64(found[1][0]), f64(plain[1][0]))


def test_a_program_takes_both_kernels():
    x = normal(16, 112, 112, 64, dtype="bfloat16")

    def loss(x):
        return nn.max_pool(x, (3, 3), (2, 2), "SAME").astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(tracea.transform(loss)))
    with tracea.options(implementation="tracea"):
        text = step.lower(x).compile().as_text() or ""
        _, gradient = step(x)
    assert len(re.findall(r"custom-call\(.*tracea_cuda", text)) == 2
    assert float(gradient.astype(jnp.float32).sum()) == 16 * 56 * 56 * 64

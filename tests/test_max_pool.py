"""Max pooling without a GPU: refusals, compiling, sites in programs, derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from numerics import normal
from pools import WINDOWS, check, pool

import tracea_jax as tracea
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.policy import Choice
from tracea_jax.problem import MaxPoolProblem, problem_from_json
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import kernels_in
from tracea_jax.variants.max_pool import MAX_POOL_CUDA, MaxPoolConfig

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
STEM = MaxPoolProblem.examples("bfloat16")["gradient"]


def changed(**changes: Any) -> MaxPoolProblem:
    return dataclasses.replace(STEM, **changes)


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (STEM, CPU, "the device is cpu"),
        (STEM, dataclasses.replace(A100, capability=(7, 5)), "capability 8.0"),
        (changed(dtype="float64"), H200, "dtype float64"),
        (changed(channels=12), H200, "multiple of 16 bytes"),
        (changed(batch=0), H200, "empty"),
        (changed(kernel=(3, 5)), H200, "windows of 3x5"),
        (changed(strides=(2, 1)), H200, "overlap by more than half"),
        (changed(kernel=(2, 2), strides=(3, 3)), H200, "gaps"),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (MAX_POOL_CUDA.why_not(asked, device) or "")


def test_problems_are_plain_data():
    assert problem_from_json(STEM.to_json()) == STEM
    with pytest.raises(ValueError, match="direction='back' must be one of"):
        changed(direction="back")


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["A100", "H200"])
def test_kernels_compile_without_spills(name):
    for dtype in ("bfloat16", "float32"):
        for how in WINDOWS.values():
            for direction in ("forward", "gradient"):
                problem = pool(direction, dtype, **how)
                if MAX_POOL_CUDA.why_not(problem, NAMED[name]):
                    continue
                config = MaxPoolConfig(threads=256)
                call = MAX_POOL_CUDA.call(problem, config, NAMED[name])
                (kernel,) = kernels_in(call)
                cubin = nvrtc.compile(kernel)
                assert (cubin.spill_bytes, cubin.stack_bytes) == (0, 0), problem


def test_the_reference_has_the_sums_of_float64():
    for how in WINDOWS.values():
        for direction in ("forward", "gradient"):
            problem = pool(direction, "float32", **how)
            check(problem, Choice(variant="xla", config=None))


PROGRAMS = {
    "flax": lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"),
    "lax": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 2, 1), "VALID"
    ),
}
LEFT = {
    "mean": lambda x: nn.avg_pool(x, (3, 3), (2, 2)),
    "channels": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 1, 1, 2), (1, 1, 1, 2), "VALID"
    ),
    "dilated": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID", None, (1, 2, 1, 1)
    ),
    "a line": lambda x: nn.max_pool(x[0], (3,), (2,)),
}


def sites(f, *args):
    return len(equations(tracea.transform(f), *args, name="tracea_max_pool"))


@pytest.mark.usefixtures("calls_only")
def test_sites_and_their_derivatives():
    x, direction = normal(2, 7, 9, 8), normal(2, 7, 9, 8, seed=1)
    for name, f in PROGRAMS.items():
        assert sites(f, x) == 1, name

    def made(f):
        def loss(x):
            return (f(x) * jnp.cos(f(x))).sum()

        along = functools.partial(jax.jvp, primals=(x,), tangents=(direction,))
        return {
            "value": f(x),
            "gradient": jax.grad(loss)(x),
            "jvp": along(f),
            "forward over reverse": along(jax.grad(loss)),
            "map": jax.vmap(jax.grad(loss), 1)(jnp.stack([x, direction], 1)),
        }

    def all_(wrap):
        return {name: made(wrap(f)) for name, f in PROGRAMS.items()}

    found, plain = jax.jit(lambda: (all_(tracea.transform), all_(lambda f: f)))()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        found,
        plain,
    )


@pytest.mark.usefixtures("calls_only")
def test_what_is_no_pooling_of_images_is_left():
    for name, f in LEFT.items():
        assert sites(f, normal(2, 8, 8, 8)) == 0, name

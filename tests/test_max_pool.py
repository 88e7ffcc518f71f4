"""Max pooling without a GPU: refusals, compiling, sites in programs, derivatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
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
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.diagnosis import diagnose
from tracea_jax.policy import Choice, decide
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
        (changed(kernel=(2, 2), strides=(3, 3)), H200, "gaps"),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (MAX_POOL_CUDA.why_not(asked, device) or "")


def test_problems_are_plain_data():
    assert problem_from_json(STEM.to_json()) == STEM
    with pytest.raises(ValueError, match="direction='back' must be one of"):
        changed(direction="back")


@pytest.mark.parametrize(
    ("asked", "device", "is_default"),
    [
        (STEM, H200, True),
        (STEM, A100, False),
        (changed(batch=1, dtype="float32"), H200, True),
        (changed(strides=(1, 1)), H200, True),
        (changed(strides=(1, 1), dtype="float32"), H200, False),
        (changed(direction="forward"), H200, True),
        (changed(direction="forward", batch=1), H200, False),
        (changed(direction="forward", dtype="float32"), H200, False),
        (changed(direction="forward", kernel=(2, 2)), H200, False),
    ],
)
def test_it_is_the_default_where_it_was_measured_to_win(asked, device, is_default):
    variant = decide(diagnose(asked, device)).choice.variant
    assert variant == ("max_pool_cuda" if is_default else "xla")


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["A100", "H200"])
def test_kernels_compile_without_spills(name):
    kinds = ("resnet", "bfloat16"), ("inception", "bfloat16"), ("uneven", "float32")
    for windows, dtype in kinds:
        for direction in ("forward", "gradient"):
            problem = pool(direction, dtype, **WINDOWS[windows])
            config = MaxPoolConfig(threads=256)
            (kernel,) = kernels_in(MAX_POOL_CUDA.call(problem, config, NAMED[name]))
            cubin = nvrtc.compile(kernel)
            assert (cubin.spill_bytes, cubin.stack_bytes) == (0, 0), problem


def test_the_reference_has_the_sums_of_float64():
    for direction in ("forward", "gradient"):
        problem = pool(direction, "float32", **WINDOWS["uneven"])
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


@pytest.fixture
def a_gpu() -> Iterator[None]:
    """Programs are traced as for a GPU: elsewhere there is no kernel, and no site."""
    with tracea.options(device="H200"):
        yield


def sites(f, *args):
    return len(equations(tracea.transform(f), *args, name="tracea_max_pool"))


@pytest.mark.usefixtures("calls_only", "a_gpu")
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


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_a_program_that_differentiates_inside():
    x = normal(2, 9, 9, 8)
    step = jax.jit(jax.grad(lambda x: (nn.relu(PROGRAMS["flax"](x)) ** 2).sum()))
    assert sites(step, x) == 1
    assert_close(tracea.transform(step)(x), step(x))


@pytest.mark.usefixtures("calls_only")
def test_programs_keep_their_pools_where_no_kernel_can_run():
    x = normal(2, 9, 9, 8)
    with tracea.options(implementation="tracea"):
        assert sites(PROGRAMS["flax"], x) == 0


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_what_is_no_pooling_of_images_is_left():
    for name, f in LEFT.items():
        assert sites(f, normal(2, 8, 8, 8)) == 0, name


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_symbolic_shapes_are_left():
    n, h = jax.export.symbolic_shape("n, h")
    assert sites(PROGRAMS["flax"], jax.ShapeDtypeStruct((n, h, h, 8), jnp.float32)) == 0


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("shape", [(0, 3, 9, 9, 8), (3, 0, 9, 9, 8)])
def test_maps_of_nothing(shape):
    def loss(x):
        return (PROGRAMS["flax"](x) ** 2).sum()

    for f in (PROGRAMS["flax"], jax.grad(loss)):
        found = jax.eval_shape(jax.vmap(tracea.transform(f)), jnp.zeros(shape))
        assert found.shape == jax.vmap(f)(jnp.zeros(shape)).shape

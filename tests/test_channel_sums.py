"""Two sums of each channel without a GPU: refusals, compiling, moments in programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_sums import check, sums
from jaxprs import equations
from numerics import normal
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.ops.channel_sums.primitive import bind
from tracea_jax.policy import Choice
from tracea_jax.problem import ChannelSumsProblem, problem_from_json
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import kernels_in
from tracea_jax.variants.channel_sums import CHANNEL_SUMS_CUDA, ChannelSumsConfig

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
STAGE = sums(200_704, 256, "moments", "bfloat16")


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (STAGE, CPU, "the device is cpu"),
        (STAGE, dataclasses.replace(A100, capability=(7, 5)), "capability 8.0"),
        (dataclasses.replace(STAGE, dtype="float64"), H200, "dtype float64"),
        (dataclasses.replace(STAGE, channels=12), H200, "a multiple of 8"),
        (dataclasses.replace(STAGE, rows=0), H200, "empty"),
        (dataclasses.replace(STAGE, rows=2**31 - 9), H200, "32 bits"),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (CHANNEL_SUMS_CUDA.why_not(asked, device) or "")


def test_problems_and_configs_refuse_what_is_none():
    with pytest.raises(ValueError, match="kind='means' must be one of"):
        ChannelSumsProblem(kind="means", rows=1, channels=8)
    with pytest.raises(ValueError, match="relu must be none"):
        ChannelSumsProblem(kind="moments", rows=1, channels=8, relu="argument")
    with pytest.raises(ValueError, match="blocks=3 must be one of"):
        CHANNEL_SUMS_CUDA.check(STAGE, ChannelSumsConfig(blocks=3, unroll=4), H200)
    assert problem_from_json(STAGE.to_json()) == STAGE


def test_runs_unmeasured_only_where_it_was_measured_to_win():
    for problem, device, wins in (
        (STAGE, H200, True),
        (STAGE, A100, False),
        (dataclasses.replace(STAGE, rows=127), H200, False),
    ):
        assert CHANNEL_SUMS_CUDA.expects_to_win(problem, device) == wins


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["A100", "H200"])
@pytest.mark.parametrize(
    ("kind", "dtype", "unroll"),
    [
        ("moments", "float16", 2),
        ("gradient", "float32", 4),
        ("argument", "bfloat16", 8),
    ],
)
def test_kernels_compile_without_spills(kind, dtype, unroll, name):
    config = ChannelSumsConfig(blocks=4, unroll=unroll)
    for channels in (72, 2048):
        problem = sums(999, channels, kind, dtype)
        (kernel,) = kernels_in(CHANNEL_SUMS_CUDA.call(problem, config, NAMED[name]))
        cubin = nvrtc.compile(kernel)
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())


def test_the_reference_has_the_sums_of_float64():
    for kind in ("moments", "argument", "two"):
        check(sums(101, 8, kind, "bfloat16"), Choice(variant="xla", config=None))


@pytest.fixture
def a_gpu() -> Iterator[None]:
    """Programs are traced as for a GPU: elsewhere there is no kernel, and no site."""
    with tracea.options(device="H200"):
        yield


def moments(x, square=jnp.square):
    wide = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    return wide.mean(axes), square(wide).mean(axes)


SPELLINGS = {
    "square": moments,
    "product": lambda x: moments(x, lambda y: y * y),
    "power": lambda x: moments(x, lambda y: y**2),
    "two conversions": lambda x: (
        x.astype(jnp.float32).sum((0, 1)),
        jnp.square(x.astype(jnp.float32)).sum((0, 1)),
    ),
}
LEFT = {
    "one sum": lambda x: moments(x)[0],
    "squares alone": lambda x: moments(x)[1],
    "rows": lambda x: (x.sum(-1), (x * x).sum(-1)),
    "other axes": lambda x: (x.sum(1), (x * x).sum(1)),
    "variance": lambda x: (x.mean((0, 1)), x.var((0, 1))),
}


def sites(f, *args):
    return len(equations(tracea.transform(f), *args, name="tracea_channel_sums"))


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_spellings_of_moments():
    x = normal(5, 7, 8, dtype="bfloat16")
    for name, f in SPELLINGS.items():
        assert sites(f, x) == 2, name
        if name == "square":
            step = jax.jit(lambda x, f=f: jax.vjp(f, x)[1](f(x)))
            assert_close(tracea.transform(step)(x), step(x), 1e-2)
    assert sites(moments, x.astype(jnp.float32)) == 2


@pytest.mark.usefixtures("calls_only")
def test_programs_keep_their_sums_where_no_kernel_can_run():
    x = normal(5, 7, 8)
    with tracea.options(implementation="tracea"):
        assert sites(moments, x) == 0
    with tracea.options(device="H200"):
        assert (sites(moments, x), sites(moments, x[..., :6])) == (2, 0)


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_what_is_no_pair_of_moments_is_left():
    for name, f in LEFT.items():
        assert sites(f, normal(5, 7, 8)) == 0, name


@pytest.mark.usefixtures("calls_only", "a_gpu")
def test_derivatives_of_moments_are_not_rounded_on_the_way():
    """A gradient is rounded to the dtype of x once, as in the plain program."""
    x = normal(40, 8, dtype="bfloat16")

    def loss(x):
        mean, square = moments(x)
        return (mean * 3.3 + square * 0.7 + x.astype(jnp.float32)).sum()

    step = jax.jit(jax.grad(loss))
    np.testing.assert_array_equal(tracea.transform(step)(x), step(x))
    direction = jnp.ones_like(x)
    along = functools.partial(jax.jvp, primals=(x,), tangents=(direction,))
    assert_close(along(tracea.transform(loss)), along(loss), 1e-5)


def test_sums_have_derivatives_and_are_mapped():
    x, dy = normal(2, 9, 8), normal(2, 9, 8, seed=1)
    center, factor, shift = normal(3, 8, seed=2)

    def f(x, dy):
        first, second = bind(x, dy, center, factor, shift, relu="argument")
        return (first * jnp.cos(second)).sum()

    def plain(x, dy):
        v = x - center
        dz = jnp.where(v * factor + shift > 0, dy, 0)
        return (dz.sum(0) * jnp.cos((dz * v).sum(0))).sum()

    def made(f):
        return jax.vmap(jax.value_and_grad(f, (0, 1)))(x, dy)

    found, wanted = jax.jit(lambda: (made(f), made(plain)))()
    assert_close(found, wanted, 1e-4)

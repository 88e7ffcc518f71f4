"""gemm_sm80 on any GPU since sm_80, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from numerics import exact_gemm, normal
from spaces import one_of_each

from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.ops import matmul
from tracea_jax.ops.matmul import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.variants.gemm_sm80 import GEMM_SM80

pytestmark = pytest.mark.gpu

LAYOUTS = ("nn", "nt", "tn", "tt")
FIELDS = ("tile_m", "tile_n", "warps_m", "warps_n")  # the other ones take turns
USUAL = GemmSm80Config(
    tile_m=64, tile_n=128, tile_k=32, warps_m=2, warps_n=4, stages=3, raster_band=2
)
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
TF32_UNIT = 2.0**-13  # 16 of them: twice the two roundings of a product


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := GEMM_SM80.why_not(gemm(8, 8, 8), device):
        pytest.skip(why)
    return device


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", **changes) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **changes}
    return GemmProblem(m=m, n=n, k=k, **fields)


def usual(problem: GemmProblem) -> GemmSm80Config:
    return dataclasses.replace(USUAL, tile_k=16) if problem.lhs == "float32" else USUAL


def executed(problem: GemmProblem, config: Any = None) -> tuple[Any, Any]:
    """Operands, and the results of the kernel run in buffers full of NaN."""
    config = config or usual(problem)
    GEMM_SM80.check(problem, config, device_for("cuda"))
    inputs = bench.operands(problem, seed=3)
    choice = Choice(variant="gemm_sm80", config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    return inputs, call(poison, *inputs)


def run_and_check(problem: GemmProblem, config: Any = None) -> None:
    """Compares every entry of the results with float64."""
    inputs, found = executed(problem, config)
    unit = TF32_UNIT if problem.lhs == "float32" else 2.0**-24
    expected = exact_gemm(problem.layout, problem.epilogue, *inputs)
    for y, x in zip(expected, found, strict=True):
        y.assert_near(x, unit=unit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(328, 520, 200), (331, 517, 203)])
def test_every_tile_at_one_awkward_shape(shape, dtype, gpu):
    layouts = itertools.cycle(LAYOUTS)
    space = GEMM_SM80.space(gemm(4096, 4096, 4096, dtype), gpu)
    tried = 0
    for config in one_of_each(space, *FIELDS):
        problem = gemm(*shape, dtype=dtype, layout=next(layouts))
        try:
            GEMM_SM80.check(problem, config, gpu)
        except ValueError:
            continue
        run_and_check(problem, config)
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("m", [1, 2, 63, 65, 131])
@pytest.mark.parametrize("n", [1, 7, 64, 129])
def test_one_config_at_every_awkward_shape(m, n):
    for k in (1, 31, 64, 97, 331):
        run_and_check(gemm(m, n, k))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [136, 132, 134, 133])
def test_every_alignment(size, layout):
    for m, n, k in ((size, size, size), (size, 136, 133)):
        run_and_check(gemm(m, n, k, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_layout_and_dtype(layout, dtype):
    for shape in ((72, 136, 200), (67, 131, 75)):
        run_and_check(gemm(*shape, dtype, layout=layout, epilogue=FULL))


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
@pytest.mark.parametrize("joined", ["", "add", "multiply"])
def test_every_epilogue(joined, activation):
    outs = itertools.cycle(("bfloat16", "float32", "float16"))
    others = itertools.cycle((None, "float32", "float16"))
    for n, saves in ((74, True), (75, False)):
        epilogue = Epilogue(
            bias="row",
            bias_dtype=next(others),
            activation=activation,
            residual=bool(joined),
            residual_op=joined or "add",
            residual_dtype=next(others) if joined else None,
            save_preactivation=saves,
        )
        run_and_check(gemm(67, n, 72, out=next(outs), epilogue=epilogue))


@pytest.mark.parametrize("bias", ["row", "batched_row"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_shared_operands(layout, bias):
    epilogue = dataclasses.replace(FULL, bias=bias)
    for lhs, rhs in ((True, True), (True, False), (False, True)):
        flags = {"batch": 5, "lhs_batched": lhs, "rhs_batched": rhs}
        problem = gemm(67, 75, 45, layout=layout, epilogue=epilogue, **flags)
        run_and_check(problem)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_are_equal_from_run_to_run(dtype):
    problem = gemm(1031, 517, 2053, dtype, epilogue=FULL)
    _, first = executed(problem)
    for _ in range(3):
        _, again = executed(problem)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("n", [64, 63])
def test_there_is_one_rounding(n):
    a, b = normal(64, 128, dtype="bfloat16"), normal(128, n, dtype="bfloat16")
    residual = normal(64, n, dtype="bfloat16")
    call = functools.partial(
        matmul, a, b, activation="gelu", residual=residual, implementation="gemm_sm80"
    )
    wide = call(preferred_element_type="float32")
    np.testing.assert_array_equal(call(), wide.astype("bfloat16"), strict=True)


def test_not_a_number_stays_where_it_is():
    """In its row or column of the result, also beside the zeros of what is outside."""
    a, b = normal(67, 45, dtype="float32"), normal(45, 75, dtype="float32")
    a = a.at[66, 44].set(jnp.nan)
    b = b.at[44, 74].set(jnp.inf)
    for dtype in ("bfloat16", "float32"):
        y = matmul(a.astype(dtype), b.astype(dtype), implementation="gemm_sm80")
        finite = np.ones((67, 75), bool)
        finite[66], finite[:, 74] = False, False
        np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), finite)


def test_the_heuristics_choice_runs(gpu):
    for shape in ((512, 768, 1024), (1, 4096, 512), (511, 769, 1023)):
        problem = gemm(*shape, epilogue=FULL)
        run_and_check(problem, GEMM_SM80.heuristic(problem, gpu))

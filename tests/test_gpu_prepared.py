"""gemm_sm90_padded and gemm_sm90_split on an H100 or H200, against float64 and XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from numerics import exact, f64, normal
from prepared import (
    BATCHED,
    EPILOGUES,
    FULL,
    KINDS,
    LAYOUTS,
    OWN_BIAS,
    assert_right,
    factors,
    gemm,
    parts,
    relative_error,
    unlike_numbers,
)
from spaces import one_of_each

import tracea_jax as tracea
from tracea_jax import variants
from tracea_jax.device import CudaDevice
from tracea_jax.dispatch import plan
from tracea_jax.emit import relayout
from tracea_jax.ops import matmul
from tracea_jax.ops.matmul import workload as bench
from tracea_jax.options import current, device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import cubins, launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

NAMES = {"bfloat16": "gemm_sm90_padded", "float32": "gemm_sm90_split"}
DTYPES = tuple(NAMES)
split = functools.partial(matmul, implementation="gemm_sm90_split", precision="highest")
padded = functools.partial(matmul, implementation="gemm_sm90_padded")
plain = jax.jit(functools.partial(jnp.matmul, precision="highest"))


def variant_of(problem: GemmProblem) -> Any:
    return variants.get("matmul", NAMES.get(problem.lhs, "gemm_sm90_padded"))


def run_and_check(problem: GemmProblem, config=None) -> None:
    """Runs the kernel twice, in memory full of NaN, and compares all with float64."""
    variant = variant_of(problem)
    config = config or variant.heuristic(problem, device_for("cuda"))
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    inputs = bench.operands(problem, seed=3)
    shapes = jax.eval_shape(run, *inputs)
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    results = []
    for _ in range(2):
        poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in shapes]
        # Freed at once, for what the program allocates.
        jax.block_until_ready(jnp.full(4 * problem.m * problem.n + 4096, jnp.nan))
        results.append(call(poison, *inputs))
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second, strict=True)
    assert_right(problem, inputs, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 63, 129])
def test_awkward_shapes(m, layout, dtype):
    for n, k in ((1, 31), (13, 1), (65, 1009), (255, 65), (257, 9)):
        problem = gemm(m, n, k, dtype, layout=layout, epilogue=FULL)
        assert variant_of(problem).why_not(problem, device_for("cuda")) is None
        run_and_check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_every_tile_and_cluster_at_one_awkward_shape(layout, dtype, hopper):
    fields = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n")
    problem = gemm(331, 521, 203, dtype, layout=layout, epilogue=FULL)
    variant = variant_of(problem)
    configs = one_of_each(variant.space(problem, hopper), *fields)
    choices = [Choice(variant=variant.name, config=config) for config in configs]
    with compiled_ahead(problem, choices, hopper):
        for config in configs:
            run_and_check(problem, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_epilogues(layout, dtype):
    for epilogue in EPILOGUES:
        run_and_check(gemm(130, 137, 73, dtype, layout=layout, epilogue=epilogue))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_shared_operands(layout, batched, dtype):
    flags = dict(zip(("lhs_batched", "rhs_batched"), batched, strict=True))
    for epilogue in (FULL, OWN_BIAS):
        run_and_check(
            gemm(
                135, 73, 201, dtype, batch=5, layout=layout, epilogue=epilogue, **flags
            )
        )


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_of_other_dtypes(dtype, out):
    for n in (130, 132, 137):  # where results are stored in different ways
        run_and_check(gemm(130, n, 71, dtype, out=out, layout="nt", epilogue=FULL))


# --- operands written anew ------------------------------------------------------------


def relaid(*matrices: jax.Array, is_split: bool = False) -> list[np.ndarray]:
    """Matrices as the kernel writes them, without the padding of their rows."""
    device = device_for("cuda")
    assert isinstance(device, CudaDevice)
    dtype = matrices[0].dtype.name
    sizes = [(x.shape[0], x.shape[1]) for x in matrices]
    kernel = relayout.kernel(sizes, dtype, device, split=is_split)
    cubin = cubins.get_or_compile(kernel, current().directory)
    out = "bfloat16" if is_split else dtype
    results = [
        jax.ShapeDtypeStruct(
            (3, rows, relayout.stride(columns, out))[not is_split :], out
        )
        for rows, columns in sizes
    ]

    def run(*matrices):
        how = {"kernel": kernel, "cubin": cubin, "embed": False}
        return launch.cuda_call(*matrices, results=results, **how)

    found = jax.jit(run)(*matrices)
    return [
        np.asarray(x)[..., :columns]
        for x, (_, columns) in zip(found, sizes, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_relayout_copies_every_element(rows, dtype):
    for columns in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 4099):
        x = normal(rows, columns).astype(dtype)
        (found,) = relaid(x)
        np.testing.assert_array_equal(found, np.asarray(x))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [((3, 5), (700, 1001)), ((5000, 2047), (3, 9))])
def test_relayout_copies_two_matrices(sizes, dtype):
    matrices = [normal(rows, columns).astype(dtype) for rows, columns in sizes]
    for found, x in zip(relaid(*matrices), matrices, strict=True):
        np.testing.assert_array_equal(found, np.asarray(x))


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 1001])
def test_relayout_splits_every_element(columns):
    x = unlike_numbers()
    x = x[: x.size // columns * columns].reshape(-1, columns)
    (found,), expected = relaid(jnp.asarray(x), is_split=True), parts(x)
    nan = np.isnan(x)
    assert np.isnan(found[0][nan].astype(np.float32)).all()
    np.testing.assert_array_equal(found[:, ~nan], expected[:, ~nan])
    np.testing.assert_array_equal(found[1:], expected[1:])


# --- float32 --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_error_of_xla_at_most(kind):
    a, b = factors(kind)
    for layout in ("nn", "tt"):
        x, y = (jnp.asarray(f.T if layout == "tt" else f) for f in (a, b))
        problem = gemm(120, 130, 333, "float32", layout=layout)
        found = forced(problem, x, y)
        assert relative_error(found, a, b) <= 2 * relative_error(plain(a, b), a, b)


def forced(problem: GemmProblem, *operands: jax.Array) -> jax.Array:
    variant = variant_of(problem)
    config = variant.heuristic(problem, device_for("cuda"))
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    return jax.jit(run)(*operands)[0]


@pytest.mark.parametrize("k", [1, 2, 17, 8192])
@pytest.mark.parametrize("sign", ["any", "positive"])
def test_the_error_at_every_depth(sign, k):
    a, b = normal(256, k), normal(k, 264)
    if sign == "positive":
        a, b = abs(a), abs(b)
    bound = 2 * max(relative_error(plain(a, b), a, b), 2.0**-25)
    assert relative_error(split(a, b), a, b) <= bound


def test_denormal_factors():
    # Every bit that the parts have, and no more.
    a = (normal(64, 40) * 2.0**-100 * 2.0**-28).astype("float32")
    b = normal(40, 72) * 2.0**60
    error = np.abs(f64(split(a, b)) - f64(a) @ f64(b))
    lost = 2.0**-133 * np.ones((64, 40)) @ np.abs(f64(b))
    assert (error <= lost + 2.0**-20 * np.abs(f64(a)) @ np.abs(f64(b))).all()


def test_what_is_not_finite_stays_where_it_is():
    largest = float(jnp.finfo("float32").max)
    a, b = (x.copy() for x in factors("normal"))
    a[3, 5], a[4, 6], a[5, 7] = np.inf, -np.inf, np.nan
    b[7, 2] = np.inf
    a[9] = 0
    a[9, 0] = largest
    b[0] = np.where(np.arange(130) % 2, 0.9, 1.1)
    found, expected = split(a, b), plain(a, b)
    assert not np.isfinite(expected)[[3, 4, 5]].any()
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))


# --- as users meet them ---------------------------------------------------------------


@pytest.mark.parametrize(("mm", "dtype"), [(padded, "bfloat16"), (split, "float32")])
def test_derivatives_and_vmap(mm, dtype):
    tolerance = {"bfloat16": 3e-2, "float32": 1e-5}[dtype]
    args = [x.astype(dtype) for x in (normal(3, 129, 67), normal(67, 73), normal(73))]

    def gradients(mm, args):
        def loss(x, w, b):
            y = jax.vmap(functools.partial(mm, activation="gelu"), (0, None))(x, w)
            return ((y + b).astype("float32") ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(*args)

    wide = [x.astype("float32") for x in args]
    xla = functools.partial(matmul, implementation="xla", precision="highest")
    found = jax.jit(functools.partial(gradients, mm))(args)
    for x, y in zip(found, gradients(xla, wide), strict=True):
        assert x.dtype == dtype
        assert abs(x.astype("float32") - y).max() <= tolerance * abs(y).max()


def test_transform_takes_the_highest_precision():
    x, w = normal(2048, 1536), normal(1536, 2047)

    def layer(x, w):
        return jax.nn.relu(jnp.matmul(x, w, precision="highest"))

    fast = jax.jit(tracea.transform(layer))
    text = fast.lower(x, w).compile().as_text()
    assert text and text.count('"tracea_cuda_launch_v1"') == 2
    exact(x, w, None, "relu").assert_near(fast(x, w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_run_unmeasured_where_xla_is_slow(dtype, hopper):
    problem = gemm(4095, 4097, 4099, dtype)
    assert plan(problem, hopper).variant == NAMES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tuning_finds_a_correct_answer(dtype):
    problem = gemm(1023, 1025, 1027, dtype)
    entry = tracea.tune(problem, effort="quick", budget_s=20).entry
    # Who is faster is not tested: the GPU may be shared.
    assert entry.best.variant == "xla" or entry.verified["ok"]
    assert entry.best.time_us and entry.best.xla_us
    seen = {o.variant for o in entry.observations if o.failure is None}
    assert {NAMES[dtype], "xla"} <= seen

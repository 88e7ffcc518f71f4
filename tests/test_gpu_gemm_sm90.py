"""gemm_sm90 on an H100 or H200: a config of every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from gpu_products import FULL, GATE, GRADIENT, LAYOUTS, gemm, sweep
from numerics import ACTIVATED

from tracea_jax.device import CudaDevice
from tracea_jax.ops.matmul import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def is_whole(tile_n: int) -> bool:
    """Whether a tile is a number of slabs; the others have a test of their own."""
    return tile_n % 64 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_and_cluster_at_one_awkward_shape(layout):
    problem = gemm(331, 520, 200, layout=layout, epilogue=FULL)
    if layout[0] == "t":
        problem = dataclasses.replace(problem, m=328)
    gated = dataclasses.replace(problem, epilogue=GATE)
    fields = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n")
    for each in (problem, gated):
        sweep(each, *fields, cluster_k=lambda k: k == 1, tile_n=is_whole)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(331, 520, 200), (2056, 4104, 72)])
def test_residuals_that_the_result_takes_the_place_of(shape, out):
    added = dataclasses.replace(FULL, save_preactivation=False)
    problem = gemm(*shape, layout="nt", out=out, epilogue=added)
    fields = ("tile_m", "tile_n", "consumers", "ping_pong", "cluster_m")
    assert sweep(
        problem, *fields, cluster_n=lambda n: n == 1, cluster_k=lambda k: k == 1
    )


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_results_whose_rows_start_anywhere(out):
    """Written from one sub-tile or two, to the last column and not beyond."""
    epilogue = Epilogue(bias="row", activation="relu")
    problem = gemm(331, 1035, 200, layout="nt", out=out, batch=2, epilogue=epilogue)
    assert sweep(problem, "tile_m", "tile_n", "consumers", "ping_pong", "cluster_k")


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_share_the_work_of_a_tile(layout, out):
    problem = gemm(136, 200, 1000, layout=layout, out=out, epilogue=FULL)
    fields = ("tile_m", "tile_n", "consumers", "cluster_k")
    assert sweep(problem, *fields, cluster_k=lambda k: k > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_consumers_that_take_turns(layout):
    """Some have a tile more than their partners; the ring wraps inside of tiles."""
    for epilogue in (Epilogue(), FULL, GATE, GRADIENT):
        problem = gemm(1032, 4616, 200, layout=layout, epilogue=epilogue)
        assert sweep(problem, "tile_m", "tile_n", "ping_pong", ping_pong=bool)


@pytest.mark.parametrize(
    "problem",
    [
        gemm(1032, 4617, 200, layout="nt", epilogue=FULL),  # no map has its results
        gemm(1032, 4616, 72, out="float32", epilogue=GATE),
        gemm(1032, 4616, 200, "float32", layout="nt", epilogue=FULL),
        gemm(1032, 4616, 2048, "float8_e4m3fn", out="bfloat16", layout="nt"),
        gemm(264, 1160, 8, batch=9, lhs_batched=True, epilogue=FULL),
    ],
    ids=str,
)
def test_other_products_of_consumers_that_take_turns(problem):
    unit = {"float32": 2.0**-11, "float8_e4m3fn": 2.0**-13}.get(problem.lhs, 2.0**-24)
    assert sweep(problem, "tile_n", "ping_pong", unit=unit, ping_pong=bool)


@pytest.mark.parametrize("tile", [(64, 64), (128, 160), (128, 256), (256, 128)])
@pytest.mark.parametrize("epilogue", [FULL, GATE])
def test_blocks_that_share_what_is_left_for_the_last_round(epilogue, tile):
    rows, columns = tile
    device = device_for("cuda")
    assert isinstance(device, CudaDevice)
    tiles = -(-(device.sm_count + 1) // 6)  # in each of 6 rows: a whole round and a few
    problem = gemm(6 * rows - 5, tiles * columns - 8, 328, epilogue=epilogue)
    fields = ("tile_m", "tile_n", "consumers", "cluster_k")
    assert sweep(
        problem,
        *fields,
        tile_m=lambda m: m == rows,
        tile_n=lambda n: n == columns,
        cluster_k=lambda k: k > 1,
    )


@pytest.mark.parametrize(
    ("layout", "out"),
    [("nn", "bfloat16"), ("nt", "float32"), ("tn", "float32"), ("tt", "bfloat16")],
)
def test_tiles_that_are_no_whole_number_of_slabs(layout, out):
    problem = gemm(136, 456, 328, layout=layout, out=out, epilogue=FULL)
    fields = ("tile_m", "tile_n", "cluster_m", "cluster_n")
    assert sweep(problem, *fields, tile_n=lambda n: not is_whole(n))


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("m", [1, 8, 9, 17, 32])
def test_rows_that_do_not_fill_a_slab(m, layout):
    problem = gemm(m, 264, 776, layout=layout, epilogue=FULL)
    sweep(problem, "tile_n", "cluster_n", "cluster_k")


@pytest.mark.parametrize("shape", [(1, 4, 4), (200, 136, 100), (331, 520, 200)])
def test_float32_as_tf32(shape):
    m, n, k = shape
    problem = gemm(m, n, k, "float32", layout="nt", epilogue=FULL)
    fields = ("tile_m", "tile_n", "cluster_m", "cluster_n", "cluster_k")
    sweep(problem, *fields, unit=2.0**-11, tile_n=is_whole)


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_float32_that_passes_through_registers(layout, out):
    fields = ("tile_m", "tile_n", "consumers")  # the other ones take turns
    problem = gemm(332, 520, 200, "float32", layout=layout, out=out, epilogue=FULL)
    sweep(problem, *fields, unit=2.0**-11)


@pytest.mark.parametrize("layout", ["nn", "tt"])
@pytest.mark.parametrize("shape", [(4, 4, 4), (60, 72, 1000), (260, 132, 36)])
def test_awkward_shapes_of_float32_through_registers(shape, layout):
    for epilogue in (FULL, GATE):
        m, n, k = shape
        problem = gemm(m, n, k, "float32", layout=layout, epilogue=epilogue)
        sweep(problem, "tile_m", "tile_n", unit=2.0**-11)


@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_batches_of_float32_through_registers(layout, batched):
    flags = {"lhs_batched": batched[0], "rhs_batched": batched[1]}
    epilogue = dataclasses.replace(FULL, bias="batched_row")
    problem = gemm(
        136, 72, 200, "float32", layout=layout, batch=5, epilogue=epilogue, **flags
    )
    sweep(problem, "tile_m", "cluster_k", unit=2.0**-11)


@pytest.mark.parametrize("out", ["bfloat16", "float16"])
@pytest.mark.parametrize("epilogue", [FULL, GATE])
def test_transposed_rows_of_results_that_no_tensor_map_has(epilogue, out):
    problem = gemm(331, 524, 200, "float32", out=out, epilogue=epilogue)
    sweep(problem, "tile_m", "tile_n", unit=2.0**-11)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("rhs", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("lhs", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_operands(lhs, rhs, out):
    problem = gemm(331, 520, 208, lhs, rhs=rhs, out=out, layout="nt")
    fields = ("tile_m", "tile_n", "cluster_m", "cluster_n", "cluster_k")
    sweep(problem, *fields, unit=2.0**-13, tile_n=is_whole)  # what their sums keep


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, 521])
@pytest.mark.parametrize("epilogue", [FULL, GATE])
def test_rows_of_results_that_no_tensor_map_has(epilogue, n, out):
    problem = gemm(331, n, 200, layout="nt", out=out, epilogue=epilogue)
    sweep(problem, "tile_m", "tile_n", "cluster_k")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_derivative_and_its_column_sums(layout):
    problem = gemm(328, 520, 200, layout=layout, epilogue=GRADIENT)
    fields = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n")
    sweep(problem, *fields, cluster_k=lambda k: k == 1)


def test_column_sums_of_consumers_that_take_turns():
    """The last rows are of no whole tile."""
    problem = gemm(1031, 4616, 200, layout="nt", epilogue=GRADIENT)
    assert sweep(problem, "tile_m", "tile_n", "ping_pong", ping_pong=bool)


@pytest.mark.parametrize("m", [1, 17, 331])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_column_sums_of_shared_tiles_and_of_rows_that_no_tensor_map_has(m, out):
    for n, k in ((264, 1000), (521, 200)):
        problem = gemm(m, n, k, layout="nt", out=out, epilogue=GRADIENT)
        sweep(problem, "tile_m", "tile_n", "cluster_k")


@pytest.mark.parametrize("activation", ACTIVATED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_derivative(dtype, activation):
    epilogue = dataclasses.replace(GRADIENT, activation=activation)
    unit = 2.0**-11 if dtype == "float32" else 2.0**-24
    for layout in ("nt", "tt"):
        problem = gemm(328, 136, 200, dtype, layout=layout, epilogue=epilogue)
        sweep(problem, "consumers", unit=unit)
    plain = dataclasses.replace(epilogue, column_sums=False)
    problem = gemm(332, 136, 200, dtype, layout="nn", epilogue=plain)
    sweep(problem, "consumers", unit=unit)


def test_column_sums_of_all_batches():
    flags = {"batch": 5, "lhs_batched": True, "rhs_batched": True}
    problem = gemm(72, 136, 200, layout="nt", epilogue=GRADIENT, **flags)
    sweep(problem, "tile_m", "consumers", "cluster_n")


def test_rows_past_the_edge_do_not_reach_the_column_sums():
    """They are zeros times an operand that is infinite in one column."""
    problem = gemm(70, 136, 200, layout="nt", epilogue=GRADIENT)
    config = GEMM_SM90.heuristic(problem, device_for("cuda"))
    lhs, rhs, z = bench.operands(problem, seed=0)
    choice = Choice(variant="gemm_sm90", config=config)
    inputs = abs(lhs), rhs.at[5, 3].set(jnp.inf), abs(z)
    y, sums = bench.execute(*inputs, problem=problem, choice=choice)
    assert (jnp.flatnonzero(~jnp.isfinite(sums)) == 5).all()
    assert jnp.isposinf(y[:, 5]).all() and jnp.isposinf(sums[5])

"""gemm_sm90 on an H100 or H200: a config of every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses

import pytest
from gpu_products import FULL, GATE, LAYOUTS, gemm, sweep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_and_cluster_at_one_awkward_shape(layout):
    problem = gemm(331, 520, 200, layout=layout, epilogue=FULL)
    if layout[0] == "t":
        problem = dataclasses.replace(problem, m=328)
    gated = dataclasses.replace(problem, epilogue=GATE)
    fields = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n")
    for each in (problem, gated):
        sweep(each, *fields, cluster_k=lambda k: k == 1)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_share_the_work_of_a_tile(layout, out):
    problem = gemm(136, 200, 1000, layout=layout, out=out, epilogue=FULL)
    fields = ("tile_m", "tile_n", "consumers", "cluster_k")
    assert sweep(problem, *fields, cluster_k=lambda k: k > 1)


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
    sweep(problem, *fields, unit=2.0**-11)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("rhs", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("lhs", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_operands(lhs, rhs, out):
    problem = gemm(331, 520, 208, lhs, rhs=rhs, out=out, layout="nt")
    fields = ("tile_m", "tile_n", "cluster_m", "cluster_n", "cluster_k")
    sweep(problem, *fields, unit=2.0**-13)  # what their sums keep


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, 521])
@pytest.mark.parametrize("epilogue", [FULL, GATE])
def test_rows_of_results_that_no_tensor_map_has(epilogue, n, out):
    problem = gemm(331, n, 200, layout="nt", out=out, epilogue=epilogue)
    sweep(problem, "tile_m", "tile_n", "cluster_k")

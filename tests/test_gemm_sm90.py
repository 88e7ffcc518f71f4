"""gemm_sm90 in numbers: its refusals, and values derived from problem and config."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest
from device_code import compiles_device_code
from sm90_problems import (
    BITS_16,
    GRADIENT,
    GRADIENT_EXACT,
    H200,
    SHAPE_FIELDS,
    WIDE,
    problem,
)
from spaces import one_of_each
from tile_order import deal, raster

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit import gemm_sm90_kernel
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.emit.gemm_sm90_kernel import OUT_DTYPES
from tracea_jax.problem import Epilogue, GatedMatmulProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.gated_sm90 import GATED_SM90
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_space import LEGAL, block_steps, waves

pytestmark = pytest.mark.once

CPU = CpuDevice(name="cpu", isa="avx2", cores=8)


# ---- what it refuses ----------------------------------------------------------------


BITS_8 = ("float8_e4m3fn", "float8_e5m2")


def test_serves_aligned_operands_and_any_output():
    for dtype, out in itertools.product(BITS_16, OUT_DTYPES):
        assert GEMM_SM90.reasons(problem(1, 8, 8, dtype, out=out), H200) == ()
        odd = problem(1, 7, 8, dtype, out=out, layout="nt")
        assert GEMM_SM90.reasons(odd, H200) == ()
    assert GEMM_SM90.why_not(problem(precision="highest"), H200) is None
    for lhs, rhs in itertools.product(BITS_8, repeat=2):
        asked = problem(dtype=lhs, rhs=rhs, out="bfloat16", layout="nt")
        assert GEMM_SM90.reasons(asked, H200) == ()
    for layout in ("nn", "nt", "tt"):
        asked = problem(dtype="float32", layout=layout)
        assert GEMM_SM90.reasons(asked, H200) == ()


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (problem(), CPU, "runs on NVIDIA GPUs; the device is cpu"),
        (problem(), NAMED["A100"], "only on sm_90a; the device is sm_80"),
        (problem(rhs="float16"), H200, "they are bfloat16 and float16"),
        (problem(rhs="float8_e5m2"), H200, "they are bfloat16 and float8_e5m2"),
        (problem(dtype="float64"), H200, "it takes bfloat16, float16, float32"),
        (
            problem(dtype="float32", layout="tn"),
            H200,
            "must be stored with k contiguous, layout nn, nt or tt; it is tn",
        ),
        (
            problem(dtype="float8_e5m2", out="bfloat16", layout="tt"),
            H200,
            "with k contiguous, layout nt; it is tt",
        ),
        (
            problem(dtype="float32", layout="nt", precision="highest"),
            H200,
            "float32 as TF32; precision is highest",
        ),
        (problem(out="float64"), H200, "output of dtype float64"),
        (problem(precision="BF16_BF16_F32_X3"), H200, "precision BF16_BF16_F32_X3"),
        (problem(k=0), H200, "an extent is 0"),
        (problem(k=1001), H200, "left operand .* k=1001 is not a multiple of 8"),
        (problem(n=12), H200, "right operand .* n=12 is not a multiple of 8"),
        (problem(m=12, layout="tn"), H200, "left operand .* m=12 is not a multiple"),
        (problem(k=12, layout="tt"), H200, "right operand .* k=12 is not a multiple"),
        (
            problem(k=24, dtype="float8_e5m2", out="bfloat16", layout="nt"),
            H200,
            "k=24 is not a multiple of 16",
        ),
        (problem(m=2**31), H200, "m=2147483648 is above"),
        (
            problem(epilogue=Epilogue(bias="row", bias_dtype="float64")),
            H200,
            "bias of dtype float64; it takes bfloat16",
        ),
        (
            problem(epilogue=Epilogue(residual=True, residual_dtype="float32")),
            H200,
            "residual of dtype float32; it must not be wider than the output's",
        ),
        (
            problem(dtype="float32", epilogue=GRADIENT),
            H200,
            "columns of float32 in layout nn are summed only by XLA",
        ),
        (problem(dtype="float32", layout="nt", epilogue=GRADIENT), H200, None),
        (problem(1, 8, 8, batch=2**31 - 2048), H200, None),
        (problem(65, 8, 8, batch=2**31 - 2048), H200, "more than 2\\^31 - 1 tiles"),
    ],
)
def test_says_why_not(asked, device, words):
    reason = GEMM_SM90.why_not(asked, device)
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(reason)


def test_collects_all_reasons():
    asked = problem(9, 13, 21, dtype="float32", precision="F8", layout="tn")
    reasons = GEMM_SM90.reasons(asked, NAMED["A100"])
    assert len(reasons) == 5 and len(set(reasons)) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_m": 96}, "tile_m=96 must be one of 64, 128, 256"),
        ({"stages": 0}, "stages=0 must be an integer from 1 to 12"),
        ({"stages": 5}, "exceed 232448 bytes of shared memory; at most 4 fit"),
        ({"stages": 1}, "stages=1 must exceed wait_depth=1"),
        ({"tile_m": 64}, "tile_m=64 must be a multiple of 64 for each of 2"),
        ({"tile_m": 256}, "needs 256 accumulators a thread with 2 consumers"),
        ({"consumers": 1}, "needs 256 accumulators a thread with 1 consumers"),
        ({"cluster_n": 2}, "at most 2 blocks"),
        ({"cluster_k": 2}, "at most 2 blocks"),
        ({"cluster_m": 1, "cluster_k": 2}, "cluster_k=2 needs as many steps of k"),
    ],
)
def test_refuses_illegal_configs(changes, words):
    GEMM_SM90.check(problem(), WIDE, H200)
    with pytest.raises(ValueError, match=words):
        GEMM_SM90.check(problem(), dataclasses.replace(WIDE, **changes), H200)


@pytest.mark.parametrize("epilogue", [GRADIENT, GRADIENT_EXACT], ids=str)
def test_derivatives_of_gelu_take_the_registers_of_most_accumulators(epilogue):
    tall = GemmSm90Config(tile_m=256, tile_n=128, stages=3)
    GEMM_SM90.check(problem(epilogue=epilogue), tall, H200)
    in_turns = GemmSm90Config(tile_m=128, tile_n=160, stages=3, ping_pong=True)
    GEMM_SM90.check(problem(), in_turns, H200)
    with pytest.raises(ValueError, match="160 accumulators a thread leave too few"):
        GEMM_SM90.check(problem(epilogue=epilogue), in_turns, H200)


def test_gated_products_are_not_computed_transposed():
    gated = GatedMatmulProblem(
        m=64, n=64, k=64, lhs="float32", rhs="float32", out="float32"
    )
    reason = GATED_SM90.why_not(gated, H200)
    assert reason and "transposed product, which cannot be gated" in reason
    along_k = dataclasses.replace(gated, layout="nt")
    assert GATED_SM90.why_not(along_k, H200) is None


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_fragments_are_waited_for_at_each_stage(layout):
    asked = problem(dtype="float32", layout=layout)
    assert {c.wait_depth for c in GEMM_SM90.space(asked, H200).configs()} == {0}
    with pytest.raises(ValueError, match="waited for at each step: wait_depth=0"):
        GEMM_SM90.check(asked, WIDE, H200)


# ---- what it derives ----------------------------------------------------------------


SHAPES = (
    (4096, 4096, 4096),
    (1, 8, 8),
    (16, 8192, 8192),
    (65536, 256, 256),
    (200, 8, 56),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_space_holds_the_heuristics_choice(shape):
    asked = problem(*shape, out="float32", epilogue=Epilogue(bias="row", residual=True))
    space = GEMM_SM90.space(asked, H200)
    assert space.index(GEMM_SM90.heuristic(asked, H200)) is not None
    for config in one_of_each(space, *SHAPE_FIELDS):
        kernel = gemm_sm90_kernel.kernel(asked, config, H200)
        assert kernel.smem_bytes <= H200.smem_per_block_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_the_grid_is_whole_clusters_within_the_device(shape):
    for config in one_of_each(GEMM_SM90.space(problem(), H200), *SHAPE_FIELDS):
        blocks = emit.grid(problem(*shape), config, H200.sm_count)
        assert blocks % config.cluster_size == 0
        assert config.cluster_size <= blocks <= H200.sm_count
        assert blocks // config.cluster_size <= emit.tile_count(problem(*shape), config)


def test_tiles_of_a_transposed_product_count_its_own_rows():
    tall = GemmSm90Config(tile_m=256, tile_n=64, stages=3, wait_depth=0)
    assert emit.tile_grid(problem(100, 1000, 64, "float32"), tall) == (4, 2, 1)
    assert emit.tile_grid(problem(100, 1000, 64), tall) == (1, 16, 1)
    asked = problem(64, 4096, 4096, "float32")
    narrow = {c.tile_n for c in GEMM_SM90.space(asked, H200).configs()}
    assert narrow == {64}  # whose 64 rows are columns of what is computed


def test_clusters_share_only_what_is_left_for_a_last_round():
    deep = problem(256, 256, 65536)
    space = GEMM_SM90.space(deep, H200)
    assert {c.cluster_k for c in space.configs()} == {1, 2, 4}
    # 1024 tiles of 256 x 256 leave 100 for the 8th round, more than clusters.
    one_size = [c for c in GEMM_SM90.space(problem(8192, 8192), H200).configs()
                if c.tile_m * c.tile_n == 1 << 15]  # fmt: skip
    assert {c.cluster_k for c in one_size} == {1}
    # 160 tiles of 128 x 256 leave 28.
    uneven = [c for c in GEMM_SM90.space(problem(512, 10240), H200).configs()
              if (c.tile_m, c.tile_n) == (128, 256)]  # fmt: skip
    assert {c.cluster_k for c in uneven} == {1, 2}
    shallow = problem(64, 64, 100)
    assert {c.cluster_k for c in GEMM_SM90.space(shallow, H200).configs()} == {1, 2}


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"tile_m": 256}, 3),
        ({"tile_m": 128, "consumers": 1}, 3),
        ({"tile_m": 128, "ping_pong": True}, 3),
        ({"tile_m": 64, "ping_pong": True}, 6),
        ({"tile_m": 128, "tile_n": 160, "ping_pong": True}, 6),  # most accumulators
        ({"tile_m": 256, "consumers": 1}, 3),  # two sums of two slabs each
        ({"tile_m": 256, "cluster_k": 2}, 6),  # blocks own slabs of a tile
    ],
    ids=str,
)
def test_a_warp_sums_two_slabs_if_both_are_its_own(fields, groups):
    config = GemmSm90Config(**{"tile_n": 64, "stages": 3, **fields})
    asked = problem(331, 264, 136, batch=3, lhs_batched=True, epilogue=GRADIENT)
    assert emit.sum_rows(asked, config) == 3 * 4 * groups


# ---- the order of tiles, here and on the device -------------------------------------


@pytest.mark.parametrize(
    ("m_tiles", "n_tiles", "band"), [(1, 1, 8), (5, 4, 3), (16, 7, 8), (3, 50, 8)]
)
def test_raster_visits_every_tile_of_every_batch_once(m_tiles, n_tiles, band):
    count = 3 * m_tiles * n_tiles
    visited = [raster(i, m_tiles, n_tiles, band) for i in range(count)]
    everything = itertools.product(range(m_tiles), range(n_tiles), range(3))
    assert sorted(visited) == sorted(everything)


def test_raster_goes_down_a_band_before_it_goes_right():
    order = [raster(i, 5, 4, 3)[:2] for i in range(14)]
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert order[12:] == [(3, 0), (4, 0)]


@pytest.mark.nvrtc
def test_device_walks_tiles_in_the_order_of_the_model():
    """The compiler evaluates the device's raster and compares it with Python's."""
    lines = []
    for m_tiles, n_tiles, band in ((1, 1, 8), (5, 4, 3), (9, 7, 4), (2, 11, 16)):
        lines.append(
            f"constexpr BandedRaster<{band}> at_{band}{{{m_tiles}, {n_tiles}}};"
        )
        for tile in range(2 * m_tiles * n_tiles):
            m, n, batch = raster(tile, m_tiles, n_tiles, band)
            here = f"at_{band}.at({tile}u)"
            equal = f"{here}.m == {m} && {here}.n == {n} && {here}.batch == {batch}"
            lines.append(f'static_assert({equal}, "tile {tile}");')
    assert compiles_device_code("tile/scheduler.cuh", lines)
    wrong = [line.replace(".m == 0", ".m == 1", 1) for line in lines]
    with pytest.raises(nvrtc.CompileError, match="tile 0"):
        compiles_device_code("tile/scheduler.cuh", wrong)


def clustered(m: int = 1, n: int = 1, k: int = 1) -> GemmSm90Config:
    return GemmSm90Config(
        tile_m=64, tile_n=64, stages=8, consumers=1,
        cluster_m=m, cluster_n=n, cluster_k=k,
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [1, 5, 32, 33, 34, 132, 160, 165, 166, 300])
@pytest.mark.parametrize("cluster_k", [1, 2, 4])
def test_every_tile_is_dealt_once_or_to_a_whole_cluster(cluster_k, tiles):
    asked, config = problem(64, 64 * tiles, 6400), clustered(k=cluster_k)
    blocks = emit.grid(asked, config, H200.sm_count)
    dealt = deal(tiles, blocks, config)
    left = tiles % blocks
    rules = [rule.code for rule in LEGAL if np.any(rule.refuses(asked, config, H200))]
    if cluster_k > 1 and not 0 < left <= blocks // cluster_k:
        assert rules == ["split"]
        return
    assert rules == []
    owners = collections.Counter(tile for mine in dealt for tile in mine)
    shared = range(tiles - left, tiles) if cluster_k > 1 else ()
    for tile in range(tiles):
        assert owners[tile] == (cluster_k if tile in shared else 1)
    for tile in shared:
        assert [mine[-1] for mine in dealt].count(tile) == cluster_k
    # The formulas of the space count what the busiest block reads.
    steps = [sum(100 // owners[tile] for tile in mine) for mine in dealt]
    assert block_steps(asked, config, H200) == max(steps)
    assert waves(asked, config, H200) == max(map(len, dealt))


@pytest.mark.nvrtc
def test_device_deals_tiles_as_the_model_does():
    lines = []
    for config, tiles, blocks in (
        (clustered(), 7, 3), (clustered(m=2), 7, 6), (clustered(k=2), 2, 4),
        (clustered(k=2), 11, 8), (clustered(k=4), 26, 8), (clustered(k=4), 16, 8),
    ):  # fmt: skip
        sharers, cluster_k = config.sharers, config.cluster_k
        on_device = f"TileDeal<{sharers}, {cluster_k}>{{{tiles}u, {blocks}u}}"
        for block, mine in enumerate(deal(tiles, blocks, config)):
            last = blocks // sharers * (len(mine) - 1)
            for turn, tile in enumerate(mine):
                here = f"{on_device}.tile({blocks // sharers * turn}u, {block}u)"
                lines.append(f'static_assert({here} == {tile}, "block {block}");')
            others = (
                f"{on_device}.tile({last + blocks // sharers}u, {block}u) >= {tiles}"
            )
            lines.append(f'static_assert({others}, "block {block}");')
            is_shared = cxx(cluster_k > 1 and tiles - last < blocks)
            shares = f"{on_device}.shares_tile({block}u) == {is_shared}"
            lines.append(f'static_assert({shares}, "block {block} shares");')
    assert compiles_device_code("tile/scheduler.cuh", lines)
    wrong = [lines[0].replace("== 0", "== 1")]
    with pytest.raises(nvrtc.CompileError, match="block 0"):
        compiles_device_code("tile/scheduler.cuh", wrong)

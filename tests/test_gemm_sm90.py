"""gemm_sm90 without a GPU: what it refuses, what it derives, that it compiles."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from spaces import one_of_each

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar, TensorMap
from tracea_jax.emit.wgmma import PTX_TYPE, Wgmma
from tracea_jax.problem import (
    ACTIVATIONS,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Layout,
)
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import Prepared
from tracea_jax.variants.gated_sm90 import GATED_SM90
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED
from tracea_jax.variants.gemm_sm90_space import LEGAL, block_steps, waves

H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
WIDE = GemmSm90Config(tile_m=128, tile_n=256, stages=4, cluster_m=2)
GATE = Epilogue(
    activation="silu", residual=True, residual_op="multiply", save_preactivation=True
)
GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)
# The derivative with most constants.
GRADIENT_EXACT = dataclasses.replace(GRADIENT, activation="gelu_exact")


def problem(
    m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "bfloat16", **fields: Any
) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype} | fields
    return GemmProblem(m=m, n=n, k=k, **fields)


# ---- what it refuses ----------------------------------------------------------------


BITS_16 = ("bfloat16", "float16")
BITS_8 = ("float8_e4m3fn", "float8_e5m2")


def test_serves_aligned_operands_and_any_output():
    for dtype, out in itertools.product(BITS_16, emit.OUT_DTYPES):
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


# ---- what it derives ----------------------------------------------------------------

SHAPES = (
    (4096, 4096, 4096),
    (1, 8, 8),
    (16, 8192, 8192),
    (65536, 256, 256),
    (200, 8, 56),
)
SHAPE_FIELDS = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_space_holds_the_heuristics_choice(shape):
    asked = problem(*shape, out="float32", epilogue=Epilogue(bias="row", residual=True))
    space = GEMM_SM90.space(asked, H200)
    assert space.index(GEMM_SM90.heuristic(asked, H200)) is not None
    for config in one_of_each(space, *SHAPE_FIELDS):
        assert emit.kernel(asked, config, H200).smem_bytes <= H200.smem_per_block_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_the_grid_is_whole_clusters_within_the_device(shape):
    for config in one_of_each(GEMM_SM90.space(problem(), H200), *SHAPE_FIELDS):
        blocks = emit.grid(problem(*shape), config, H200.sm_count)
        assert blocks % config.cluster_size == 0
        assert config.cluster_size <= blocks <= H200.sm_count
        assert blocks // config.cluster_size <= emit.tile_count(problem(*shape), config)


@pytest.mark.parametrize(
    ("m_tiles", "n_tiles", "band"), [(1, 1, 8), (5, 4, 3), (16, 7, 8), (3, 50, 8)]
)
def test_raster_visits_every_tile_of_every_batch_once(m_tiles, n_tiles, band):
    count = 3 * m_tiles * n_tiles
    visited = [emit.raster(i, m_tiles, n_tiles, band) for i in range(count)]
    everything = itertools.product(range(m_tiles), range(n_tiles), range(3))
    assert sorted(visited) == sorted(everything)


def test_raster_goes_down_a_band_before_it_goes_right():
    order = [emit.raster(i, 5, 4, 3)[:2] for i in range(14)]
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert order[12:] == [(3, 0), (4, 0)]


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
    dealt = emit.deal(tiles, blocks, config)
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
        deal = f"TileDeal<{sharers}, {cluster_k}>{{{tiles}u, {blocks}u}}"
        for block, mine in enumerate(emit.deal(tiles, blocks, config)):
            last = blocks // sharers * (len(mine) - 1)
            for turn, tile in enumerate(mine):
                here = f"{deal}.tile({blocks // sharers * turn}u, {block}u)"
                lines.append(f'static_assert({here} == {tile}, "block {block}");')
            others = f"{deal}.tile({last + blocks // sharers}u, {block}u) >= {tiles}"
            lines.append(f'static_assert({others}, "block {block}");')
            is_shared = cxx(cluster_k > 1 and tiles - last < blocks)
            shares = f"{deal}.shares_tile({block}u) == {is_shared}"
            lines.append(f'static_assert({shares}, "block {block} shares");')
    assert compiles_device_code("tile/scheduler.cuh", lines)
    wrong = [lines[0].replace("== 0", "== 1")]
    with pytest.raises(nvrtc.CompileError, match="block 0"):
        compiles_device_code("tile/scheduler.cuh", wrong)


def compiles_device_code(header: str, lines: list[str]) -> bytes:
    """The image of a kernel that does nothing behind these lines of device code."""
    source = "\n".join(
        [
            f'#include "{header}"',
            "namespace tracea {",
            *lines,
            "}",
            'extern "C" __global__ void nothing() {}',
        ]
    )
    kernel = dataclasses.replace(
        emit.kernel(problem(), WIDE, H200),
        entry="nothing",
        source=source,
        headers=sources.headers(header),
    )
    return nvrtc.compile(kernel).image


def maps(kernel: Kernel) -> list[TensorMap]:
    return [p for p in kernel.params if isinstance(p, TensorMap)]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_tensor_maps_follow_the_stored_layout(layout):
    asked = problem(200, 264, 136, layout=layout, batch=3, lhs_batched=True)
    lhs, rhs, out = maps(emit.kernel(asked, WIDE, H200))
    assert lhs.dims == ((136, 200, 3) if layout[0] == "n" else (200, 136, 3))
    assert rhs.dims == ((264, 136, 1) if layout[1] == "n" else (136, 264, 1))
    assert out.dims == (264, 200, 3)
    for m in (lhs, rhs, out):
        assert m.strides == (m.dims[0] * 2, m.dims[0] * m.dims[1] * 2)
        assert m.box[0] * 2 == 128 and m.box[2] == 1 and m.box[1] <= 256
    # A pair of blocks along m shares B: each copies half of its 256 columns.
    assert rhs.box[1] == (64 if layout[1] == "n" else 128)
    assert lhs.box[1] == (128 if layout[0] == "n" else 64)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("tile_n", "tail"), [(160, 32), (224, 32), (192, 0)])
def test_no_columns_are_copied_that_no_tile_has(layout, tile_n, tail):
    config = dataclasses.replace(WIDE, tile_n=tile_n, stages=3, cluster_m=1)
    asked = problem(200, 264, 136, layout=layout)
    lhs, rhs, *narrow, out = maps(emit.kernel(asked, config, H200))
    if layout[1] == "t":
        assert not narrow and rhs.box == (64, tile_n, 1)
    else:
        assert [m.box[0] for m in narrow] == [tail] * bool(tail)
        slabs = tile_n // rhs.box[0]
        assert slabs * rhs.box[0] + sum(m.box[0] for m in narrow) == tile_n


def test_operands_are_numbered_arguments_first():
    steps = Epilogue(bias="row", residual=True, save_preactivation=True)
    kernel = emit.kernel(problem(epilogue=steps), WIDE, H200)
    assert [m.operand for m in maps(kernel)] == [0, 1, 4, 5]
    assert [p.operand for p in kernel.params if isinstance(p, Pointer)] == [2, 3]
    plain = emit.kernel(problem(epilogue=Epilogue(residual=True)), WIDE, H200)
    assert [m.operand for m in maps(plain)] == [0, 1, 3]
    assert [p.operand for p in plain.params if isinstance(p, Pointer)] == [2]


def test_sums_come_from_a_row_for_each_warp():
    asked = problem(331, 264, 136, batch=3, lhs_batched=True, epilogue=GRADIENT)
    call = GEMM_SM90.call(asked, WIDE, H200)
    assert isinstance(call, Prepared)
    assert call.operands == () and call.partial_sums == 3 * 21
    assert [m.operand for m in maps(call.kernel)] == [0, 1, 3]
    assert [p.operand for p in call.kernel.params if isinstance(p, Pointer)] == [2, 4]
    padded = dataclasses.replace(asked, k=137)
    call = GEMM_SM90_PADDED.call(padded, WIDE, H200)
    assert isinstance(call, Prepared) and call.partial_sums == 3 * 21


def test_most_constants_and_sums_take_the_registers_of_a_second_slab():
    tall = GemmSm90Config(tile_m=256, tile_n=128, stages=3)
    GEMM_SM90.check(problem(epilogue=GRADIENT), tall, H200)
    with pytest.raises(ValueError, match="gelu_exact' &sums takes the registers"):
        GEMM_SM90.check(problem(epilogue=GRADIENT_EXACT), tall, H200)


def test_kernels_that_add_and_that_multiply_are_not_mistaken_for_each_other():
    added = dataclasses.replace(GATE, residual_op="add")
    kernels = [emit.kernel(problem(epilogue=e), WIDE, H200) for e in (GATE, added)]
    assert kernels[0].params == kernels[1].params
    assert kernels[0].entry != kernels[1].entry
    assert "mul" in kernels[0].entry and kernels[0].source != kernels[1].source


def test_shapes_share_a_source():
    def source(**fields):
        return emit.kernel(problem(**fields), WIDE, H200).source

    assert source() == source(m=8, n=16, k=24, batch=7, rhs_batched=True)
    assert source() != source(dtype="float16") != source(out="float32")


def test_sizes_and_batching_are_run_time_parameters():
    asked = problem(24, 32, 40, batch=7, rhs_batched=True)
    params = emit.kernel(asked, WIDE, H200).params
    scalars = [p.value for p in params if isinstance(p, Scalar)]
    assert scalars == [24, 32, 40, 7, 0, 1]


def test_wgmma_refuses_shapes_the_instruction_does_not_have():
    with pytest.raises(ValueError, match="n=20 must be a multiple of 8"):
        Wgmma(n=20, lhs="bfloat16", rhs="bfloat16")
    with pytest.raises(ValueError, match="rhs='float32'"):
        Wgmma(n=64, lhs="tfloat32", rhs="float32")
    with pytest.raises(ValueError, match="must be equal or have 8 bits"):
        Wgmma(n=64, lhs="bfloat16", rhs="float16")


def test_wgmma_contracts_32_bytes():
    ks = {t: Wgmma(n=64, lhs=t, rhs=t).k for t in PTX_TYPE}
    assert ks == {
        "bfloat16": 16,
        "float16": 16,
        "tfloat32": 8,
        "float8_e4m3fn": 32,
        "float8_e5m2": 32,
    }


# ---- narrow operands and split sums --------------------------------------------------


@pytest.mark.parametrize(("m", "rows"), [(1, 8), (8, 8), (9, 16), (32, 32), (33, 64)])
def test_few_rows_are_loaded_without_the_slab_around_them(m, rows):
    small = GemmSm90Config(tile_m=64, tile_n=64, stages=8, consumers=1)
    lhs, *_ = maps(emit.kernel(problem(m), small, H200))
    assert lhs.box == (64, rows, 1)
    # Stored along m, a tile has its 64 columns of it in each row of 128 bytes.
    lhs, *_ = maps(emit.kernel(problem(m + -m % 8, layout="tn"), small, H200))
    assert lhs.box == (64, 64, 1)


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


# ---- float32 operands that are stored along m or n ----------------------------------


def test_a_plain_float32_product_is_computed_transposed():
    asked = problem(200, 264, 136, "float32", batch=3, lhs_batched=True)
    pair = GemmSm90Config(tile_m=128, tile_n=256, stages=4, cluster_n=2, wait_depth=0)
    kernel = emit.kernel(asked, pair, H200)
    # The stored (k, n) is the left operand: along its rows, which both blocks copy.
    rhs, lhs, out = maps(kernel)
    assert [m.operand for m in (rhs, lhs, out)] == [1, 0, 2]
    assert (rhs.dims, rhs.box) == ((264, 136, 1), (32, 32, 1))
    assert (lhs.dims, lhs.box) == ((136, 200, 3), (32, 256, 1))
    assert (out.dims, out.box) == ((264, 200, 3), (32, 32, 1))
    assert [p.value for p in kernel.params if isinstance(p, Scalar)] == [
        264, 200, 136, 3, 0, 1,
    ]  # fmt: skip
    narrow = dataclasses.replace(asked, out="bfloat16")
    assert maps(emit.kernel(narrow, pair, H200))[2].box == (64, 64, 1)


def test_tiles_of_a_transposed_product_count_its_own_rows():
    tall = GemmSm90Config(tile_m=256, tile_n=64, stages=3, wait_depth=0)
    assert emit.tile_grid(problem(100, 1000, 64, "float32"), tall) == (4, 2, 1)
    assert emit.tile_grid(problem(100, 1000, 64), tall) == (1, 16, 1)
    asked = problem(64, 4096, 4096, "float32")
    narrow = {c.tile_n for c in GEMM_SM90.space(asked, H200).configs()}
    assert narrow == {64}  # whose 64 rows are columns of what is computed


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_fragments_are_waited_for_at_each_stage(layout):
    asked = problem(dtype="float32", layout=layout)
    assert {c.wait_depth for c in GEMM_SM90.space(asked, H200).configs()} == {0}
    with pytest.raises(ValueError, match="waited for at each step: wait_depth=0"):
        GEMM_SM90.check(asked, WIDE, H200)


def test_gated_products_are_not_computed_transposed():
    gated = GatedMatmulProblem(
        m=64, n=64, k=64, lhs="float32", rhs="float32", out="float32"
    )
    reason = GATED_SM90.why_not(gated, H200)
    assert reason and "gated ones are not stored transposed" in reason
    along_k = dataclasses.replace(gated, layout="nt")
    assert GATED_SM90.why_not(along_k, H200) is None


def test_parts_are_read_one_after_another():
    asked = problem(200, 264, 136, "bfloat16x3", out="float32", batch=5)
    asked = dataclasses.replace(asked, lhs_batched=True)
    config = GEMM_SM90.heuristic(asked, H200)
    lhs, rhs, out = maps(emit.kernel(asked, config, H200))
    assert (lhs.dims, rhs.dims) == ((136, 200, 15), (264, 136, 3))
    assert {lhs.dtype, rhs.dtype} == {"bfloat16"} and out.dtype == "float32"
    assert config.wait_depth == 0 and config.accumulators <= 64


# ---- that all of it compiles --------------------------------------------------------


def check_compiles(asked: GemmProblem, config: GemmSm90Config) -> None:
    """Compiles without local memory and without a wgmma or setmaxnreg complaint.

    The Traits' assertions prove shared memory, boxes, parities and arrivals.
    """
    cubin = nvrtc.compile(emit.kernel(asked, config, H200))
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())
    assert cubin.smem_static_bytes == 0


ALL_STEPS = Epilogue(bias="row", activation="gelu", residual=True)
# One config of every tile and cluster shape that the search may ever propose.
PROPOSED = one_of_each(GEMM_SM90.space(problem(), H200), *SHAPE_FIELDS)


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", PROPOSED, ids=str)
def test_every_shape_of_the_space_compiles(config):
    check_compiles(problem(epilogue=ALL_STEPS), config)
    if config.accumulators == max(c.accumulators for c in PROPOSED):
        check_compiles(problem(epilogue=GATE), config)  # registers run out here first


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("config", PROPOSED, ids=str)
def test_every_shape_of_the_space_compiles_with_a_gate(config):
    check_compiles(problem(epilogue=GATE), config)


# Kernels of every other kind, with the epilogues that need most registers.
SAVED = dataclasses.replace(ALL_STEPS, save_preactivation=True)
KINDS = (
    problem(17, 264, 776, epilogue=SAVED),
    problem(136, 200, 1000, epilogue=SAVED),
    problem(136, 200, 1000, out="float32", epilogue=SAVED),
    problem(331, 521, 200, layout="nt", epilogue=SAVED),
    problem(331, 521, 200, layout="nt", out="float32", epilogue=GATE),
    problem(dtype="bfloat16x3", out="float32", epilogue=SAVED),
    problem(dtype="float32", layout="nt", epilogue=SAVED),
    problem(dtype="float32", layout="tt", epilogue=SAVED),
    problem(dtype="float32", layout="tt", out="bfloat16", epilogue=GATE),
    problem(dtype="float32", epilogue=SAVED),
    problem(dtype="float32", out="bfloat16", epilogue=SAVED),
    problem(136, 200, 1000, "float32", epilogue=GATE),
    problem(331, 524, 200, "float32", out="float16", epilogue=SAVED),
    problem(331, 521, 200, "float32", epilogue=SAVED),  # as if rows were relaid
    problem(dtype="float8_e4m3fn", rhs="float8_e5m2", out="bfloat16", layout="nt"),
    problem(331, 521, 200, layout="nt", out="float32", epilogue=GRADIENT_EXACT),
)


@pytest.mark.nvrtc
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", KINDS, ids=str)
def test_every_kind_of_kernel_compiles(asked, every):
    fields = ("tile_m", "tile_n", "consumers", "cluster_k")
    for config in one_of_each(GEMM_SM90.space(asked, H200), *fields)[::every]:
        check_compiles(asked, config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("out", emit.OUT_DTYPES)
@pytest.mark.parametrize("n", [4096, 4095])
def test_gated_kernels_compile(n, out):
    forms: tuple[tuple[Layout, bool], ...] = (("nn", False), ("nt", True))
    for layout, saves in forms:
        asked = GatedMatmulProblem(
            m=4096, n=n, k=4096, lhs="bfloat16", rhs="bfloat16", out=out,
            layout=layout, save_products=saves,
        )  # fmt: skip
        for config in one_of_each(GATED_SM90.space(asked, H200), "tile_m", "tile_n"):
            kernel = GATED_SM90.call(asked, config, H200)
            assert isinstance(kernel, Kernel)
            cubin = nvrtc.compile(kernel)
            assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())


@pytest.mark.nvrtc
@pytest.mark.parametrize("out", emit.OUT_DTYPES)
def test_bias_and_residual_of_another_dtype_compile(out):
    for bias, residual in itertools.product(emit.OUT_DTYPES, repeat=2):
        steps = Epilogue(
            bias="row",
            activation="gelu",
            residual=True,
            bias_dtype=bias,
            residual_dtype=residual,
        )
        if GEMM_SM90.why_not(problem(out=out, epilogue=steps), H200) is None:
            check_compiles(problem(out=out, epilogue=steps), WIDE)


# The residual's place says how it joins, if there is one.
EPILOGUE_FIELDS = ("bias", "activation", "residual", "save_preactivation")
# Between them the rows name most pairs of values of any two columns.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("bfloat16", "bfloat16", "nn", "none", "none", False, False),
    ("bfloat16", "bfloat16", "nt", "row", "gelu", True, True),
    ("bfloat16", "float32", "tn", "batched_row", "silu", True, False),
    ("bfloat16", "float32", "tt", "row", "gelu_exact", False, True),
    ("bfloat16", "float16", "nn", "batched_row", "relu", True, True),
    ("float16", "float16", "tt", "none", "silu", True, True),
    ("float16", "float16", "tn", "row", "none", True, True),
    ("float16", "float16", "nn", "batched_row", "gelu_exact", True, False),
    ("float16", "float32", "nt", "none", "relu", True, False),
    ("float16", "float32", "nn", "row", "silu", False, True),
    ("float16", "bfloat16", "tn", "none", "gelu", False, True),
    ("float16", "bfloat16", "tt", "batched_row", "none", False, False),
    ("bfloat16", "bfloat16", "nt", "none", "gelu_exact", False, True),
    ("bfloat16", "float32", "nn", "none", "gelu", True, True),
    ("float16", "float16", "nt", "batched_row", "gelu", False, False),
    ("bfloat16", "bfloat16", "tn", "row", "relu", False, False),
    ("bfloat16", "bfloat16", "nn", "none", "silu", "multiply", False),
    ("bfloat16", "bfloat16", "nt", "none", "silu", "multiply", True),
    ("float16", "float16", "tn", "batched_row", "gelu", "multiply", True),
    ("float16", "float32", "tt", "none", "none", "multiply", False),
    ("bfloat16", "float16", "nn", "row", "gelu_exact", "multiply", True),
    ("bfloat16", "float32", "nn", "none", "relu", "multiply", True),
    ("bfloat16", "bfloat16", "nt", "none", "gelu", "derivative", False),
    ("float16", "float32", "nn", "none", "gelu_exact", "derivative", False),
    ("bfloat16", "float16", "nt", "none", "relu", "derivative", False),
    ("float16", "float16", "tn", "none", "silu", "derivative", False),
)


def epilogue_of(*values: Any) -> Epilogue:
    fields: dict[str, Any] = dict(zip(EPILOGUE_FIELDS, values, strict=True))
    if fields["residual"] in ("multiply", "derivative"):
        fields |= {"residual": True, "residual_op": fields["residual"]}
    fields["column_sums"] = fields.get("residual_op") == "derivative"
    return Epilogue(**fields)


COMBINATIONS = [(*row[:3], epilogue_of(*row[3:])) for row in ROWS]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("dtype", "out", "layout", "epilogue"), COMBINATIONS, ids=str)
def test_dtypes_layouts_and_epilogues_compile(dtype, out, layout, epilogue):
    check_compiles(
        problem(dtype=dtype, out=out, layout=layout, epilogue=epilogue), WIDE
    )


def test_combinations_name_every_value():
    dtypes, outs, layouts, epilogues = map(set, zip(*COMBINATIONS, strict=True))
    assert dtypes == set(BITS_16) and outs == set(emit.OUT_DTYPES)
    assert layouts == {"nn", "nt", "tn", "tt"}
    assert {e.activation for e in epilogues} == set(ACTIVATIONS)
    assert {e.residual_op for e in epilogues} == {"add", "multiply", "derivative"}


@pytest.mark.nvrtc
def test_device_walks_tiles_in_the_order_of_the_model():
    """The compiler evaluates the device's raster and compares it with Python's."""
    lines = []
    for m_tiles, n_tiles, band in ((1, 1, 8), (5, 4, 3), (9, 7, 4), (2, 11, 16)):
        lines.append(
            f"constexpr BandedRaster<{band}> at_{band}{{{m_tiles}, {n_tiles}}};"
        )
        for tile in range(2 * m_tiles * n_tiles):
            m, n, batch = emit.raster(tile, m_tiles, n_tiles, band)
            here = f"at_{band}.at({tile}u)"
            equal = f"{here}.m == {m} && {here}.n == {n} && {here}.batch == {batch}"
            lines.append(f'static_assert({equal}, "tile {tile}");')
    assert compiles_device_code("tile/scheduler.cuh", lines)
    wrong = [line.replace(".m == 0", ".m == 1", 1) for line in lines]
    with pytest.raises(nvrtc.CompileError, match="tile 0"):
        compiles_device_code("tile/scheduler.cuh", wrong)


@pytest.mark.nvrtc
def test_a_wrong_total_of_shared_memory_does_not_compile():
    kernel = emit.kernel(problem(), WIDE, H200)
    wrong = kernel.source.replace(
        f"kSmemBytes = {kernel.smem_bytes}", "kSmemBytes = 1024"
    )
    assert wrong != kernel.source
    with pytest.raises(nvrtc.CompileError, match="exactly the shared memory"):
        nvrtc.compile(dataclasses.replace(kernel, source=wrong))

"""gemm_sm80 without a GPU: its refusals, its derived numbers, and that it compiles."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from compiled import assert_clean
from gpus import A100, DEVICES, H200, small_gpu
from spaces import one_of_each

from tracea_jax.device import CpuDevice, CudaDevice
from tracea_jax.emit import gemm_sm80 as emit
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.kernel import Pointer, Scalar
from tracea_jax.problem import ACTIVATIONS, ITEMSIZE, Epilogue, GemmProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import gemm_sm80 as variant
from tracea_jax.variants.gemm_sm80 import GEMM_SM80
from tracea_jax.variants.space import first_refusal

pytestmark = pytest.mark.once

CPU = CpuDevice(name="cpu", isa="avx2", cores=8)


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
USUAL = GemmSm80Config(
    tile_m=128, tile_n=128, tile_k=32, warps_m=2, warps_n=2, stages=4
)
TF32 = dataclasses.replace(USUAL, tile_k=16)
ODD = dataclasses.replace(USUAL, warps_n=4)
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
# The most registers: everything in f32, and the longest activation.
WIDEST = Epilogue(
    bias="row",
    bias_dtype="float32",
    activation="gelu_exact",
    residual=True,
    residual_dtype="float32",
    save_preactivation=True,
)
# Sizes whose rows are multiples of 16, 8, 4 and 2 bytes of 16-bit elements.
ALIGNED = {16: 4096, 8: 4100, 4: 4098, 2: 4097}
FIELDS = ("tile_m", "tile_n", "warps_m", "warps_n")  # the other ones take turns


def problem(
    m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "bfloat16", **fields: Any
) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype} | fields
    return GemmProblem(m=m, n=n, k=k, **fields)


# ---- what it refuses -----------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_serves_every_shape_and_dtype(device):
    shapes = ((1, 1, 1), (4095, 4097, 4099), (3, 70000, 2))
    for dtype, out, shape in itertools.product(emit.DTYPES, emit.OUT_DTYPES, shapes):
        for layout in ("nn", "nt", "tn", "tt"):
            asked = problem(*shape, dtype, out=out, layout=layout, epilogue=WIDEST)
            assert GEMM_SM80.reasons(asked, device) == ()
    assert GEMM_SM80.why_not(problem(precision="highest"), device) is None


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (problem(), CPU, "runs on NVIDIA GPUs; the device is cpu"),
        (problem(), small_gpu(7, 5), "sm_80 or newer; the device is sm_75"),
        (problem(rhs="float16"), A100, "they are bfloat16 and float16"),
        (problem(dtype="float64"), A100, "it takes bfloat16, float16, float32"),
        (problem(out="float64"), A100, "output of dtype float64"),
        (problem(precision="BF16_BF16_F32_X3"), A100, "precision BF16_BF16_F32_X3"),
        (
            problem(dtype="float32", precision="highest"),
            A100,
            "precision highest of float32 operands; it multiplies them as TF32",
        ),
        (problem(k=0), A100, "an extent is 0"),
        (problem(m=2**31), A100, "m=2147483648 is above"),
        (problem(33, 8, 8, batch=2**30), A100, "more than 2\\^31 - 1 tiles of 32"),
        (
            problem(epilogue=Epilogue(bias="row", bias_dtype="float64")),
            A100,
            "bias of dtype float64; it takes bfloat16",
        ),
        (
            problem(epilogue=Epilogue(residual=True, residual_dtype="float64")),
            A100,
            "residual of dtype float64; it takes bfloat16",
        ),
    ],
)
def test_says_why_not(asked, device, words):
    reason = GEMM_SM80.why_not(asked, device)
    assert reason is not None and re.search(words, reason), reason


def test_collects_all_reasons():
    asked = problem(8, 12, 20, dtype="float64", precision="F8")
    reasons = GEMM_SM80.reasons(asked, CPU)
    assert len(reasons) == 4 and len(set(reasons)) == 4


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"tile_m": 96}, problem(), "tile_m=96 must be one of 32, 64, 128, 256"),
        ({"warps_n": 8}, problem(), "warps_n=8 must be one of 1, 2, 4"),
        ({"stages": 1}, problem(), "stages=1 must be an integer from 2 to 16"),
        ({"raster_band": 0}, problem(), "raster_band=0 must be an integer from 1 to"),
        ({"tile_k": 16}, problem(), "tile_k=16 must be one of 32, 64 for bfloat16"),
        ({"tile_k": 64}, problem(dtype="float32"), "must be one of 16, 32 for float32"),
        ({"warps_m": 4, "warps_n": 4}, problem(), "at most 8 do not"),
        ({"warps_m": 1}, problem(), "into 128x64; the sides must be from 16 to 64"),
        (
            {"tile_m": 32, "tile_n": 32, "warps_n": 4, "warps_m": 2},
            problem(),
            "into 16x8; the sides",
        ),
        (
            {"tile_m": 32, "tile_n": 64, "warps_n": 4, "warps_m": 2},
            problem(),
            "256 threads have no 16 bytes each to copy of a side of 32",
        ),
        ({}, problem(k=4097), "128 accumulators a thread leave no room for"),
        ({"stages": 11}, problem(), "exceed 166912 bytes of shared memory; at most 10"),
    ],
)
def test_refuses_illegal_configs(changes, asked, words):
    GEMM_SM80.check(problem(), USUAL, A100)
    with pytest.raises(ValueError, match=words):
        GEMM_SM80.check(asked, dataclasses.replace(USUAL, **changes), A100)


# ---- what it derives -----------------------------------------------------------------

sizes = st.one_of(st.integers(1, 70), st.integers(1, 10**5))
problems = st.builds(
    lambda dtype, layout, **fields: problem(dtype=dtype, layout=layout, **fields),
    dtype=st.sampled_from(emit.DTYPES),
    layout=st.sampled_from(("nn", "nt", "tn", "tt")),
    m=sizes,
    n=sizes,
    k=sizes,
    batch=st.sampled_from((1, 3, 64)),
)


def accepts(asked: GemmProblem, config: Any, device: Any) -> bool:
    try:
        GEMM_SM80.check(asked, config, device)
    except ValueError:
        return False
    return True


@hypothesis.given(asked=problems, device=st.sampled_from(DEVICES), data=st.data())
@hypothesis.settings(max_examples=40)
def test_the_space_is_what_check_accepts_less_what_repeats(asked, device, data):
    space = GEMM_SM80.space(asked, device)
    grid = variant.GRID
    assert 0 < len(space) <= 200  # few enough to measure all
    assert len(set(space.configs())) == len(space)
    assert len(space) + sum(space.pruned.values()) == np.prod(
        [len(values) for values in grid.values()]
    )
    for _ in range(20):
        fields = {name: data.draw(st.sampled_from(v)) for name, v in grid.items()}
        config = GemmSm80Config(**fields)
        legal = accepts(asked, config, device)
        rule = first_refusal(variant.WORTH, asked, config, device) if legal else None
        assert (space.index(config) is not None) == (legal and rule is None)
        assert rule is None or rule.why(asked, config, device)
    for index in data.draw(st.lists(st.integers(0, len(space) - 1), max_size=10)):
        config = space.config(index)
        assert accepts(asked, config, device)
        assert space.modelled_us is not None
        assert space.modelled_us[index] == pytest.approx(
            variant.modelled_us(asked, config, device), rel=1e-12
        )


@hypothesis.given(asked=problems, device=st.sampled_from(DEVICES))
@hypothesis.settings(max_examples=40)
def test_the_heuristics_choice_is_of_the_least_modelled_time(asked, device):
    space = GEMM_SM80.space(asked, device)
    index = space.index(GEMM_SM80.heuristic(asked, device))
    assert index is not None and space.modelled_us is not None
    assert np.isfinite(space.modelled_us).all()
    assert space.modelled_us[index] <= 1.002 * space.modelled_us.min()
    assert all(np.isfinite(values).all() for values in space.derived.values())


def test_large_problems_get_large_tiles_and_small_ones_small():
    large = GEMM_SM80.heuristic(problem(), A100)
    assert large.tile_m * large.tile_n == 128 * 256 and large.stages == 4
    small = GEMM_SM80.heuristic(problem(256, 256, 4096), A100)
    assert small.tile_m * small.tile_n <= 64 * 64
    assert GEMM_SM80.heuristic(problem(), small_gpu(8, 6)).stages >= 3
    assert not GEMM_SM80.expects_to_win(problem(), H200)


@pytest.mark.parametrize("dtype", emit.DTYPES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_tiles_follow_the_stored_layout(layout, dtype):
    size = ITEMSIZE[dtype]
    config = dataclasses.replace(USUAL, tile_n=256, tile_k=64 // size, warps_n=4)
    asked = problem(200, 264, 136, dtype, layout=layout)
    left, right = (f(asked, config) for f in (emit.lhs_tiles, emit.rhs_tiles))
    assert (left.mn_major, right.mn_major) == (layout[0] == "t", layout[1] == "n")
    for tiles, side in ((left, 128), (right, 256)):
        rows, columns = (64 // size, side) if tiles.mn_major else (side, 64 // size)
        assert (tiles.rows, tiles.row_bytes) == (rows, columns * size)
        assert rows * tiles.row_bytes % tiles.swizzle.period_bytes == 0
    total = sum(t.rows * t.row_bytes for t in (left, right)) * config.stages
    assert emit.smem_bytes(asked, config) == total == (128 + 256) * 64 * 4
    assert emit.most_stages(asked, config, A100.smem_per_block_bytes) == 6


@pytest.mark.parametrize(
    ("row", "itemsize", "align"),
    [(64, 2, 16), (12, 2, 8), (6, 2, 4), (7, 2, 2), (7, 4, 4), (6, 4, 8), (4, 4, 16)],
)
def test_alignment_is_what_rows_are_multiples_of(row, itemsize, align):
    assert emit.align_bytes(row, itemsize) == align


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_copies_are_counted_as_they_are_made(layout):
    for m, n, k in itertools.product(ALIGNED.values(), repeat=3):
        asked = problem(m, n, k, layout=layout)
        tiles = [f(asked, ODD) for f in (emit.lhs_tiles, emit.rhs_tiles)]
        units = [t.rows * t.row_bytes // t.unit_bytes for t in tiles]
        assert emit.copies(asked, ODD) * ODD.threads == sum(units)
        odd = [2 * u for u, t in zip(units, tiles, strict=True) if t.align_bytes == 2]
        assert emit.staged_registers(asked, ODD) * ODD.threads == sum(odd)


def test_operands_are_numbered_arguments_first():
    kernel = emit.kernel(problem(epilogue=FULL), USUAL, A100)
    assert [p.operand for p in kernel.params if isinstance(p, Pointer)] == [*range(6)]
    assert "residual, void* out, void* z, int m" in kernel.source
    plain = emit.kernel(problem(), USUAL, A100)
    assert [p.operand for p in plain.params if isinstance(p, Pointer)] == [0, 1, 2]


def test_sizes_and_batching_are_run_time_parameters():
    asked = problem(24, 32, 40, batch=7, rhs_batched=True)
    kernel = emit.kernel(asked, USUAL, A100)
    scalars = [p.value for p in kernel.params if isinstance(p, Scalar)]
    assert scalars == [24, 32, 40, 0, 1]
    assert kernel.grid == (7, 1, 1) and kernel.block == (128, 1, 1)
    assert emit.kernel(problem(129, 257, 8), USUAL, A100).grid == (2 * 3, 1, 1)


def test_shapes_of_one_alignment_share_a_source():
    def kernel(**fields):
        return emit.kernel(problem(**fields), ODD, H200)

    assert kernel().source == kernel(m=7, n=16, k=24, batch=7, rhs_batched=True).source
    different = [
        kernel(),
        kernel(k=4100),
        kernel(k=4098),
        kernel(k=4097),
        kernel(n=4097),
        kernel(dtype="float16"),
        kernel(out="float32"),
        kernel(layout="nt"),
        kernel(epilogue=FULL),
        kernel(epilogue=dataclasses.replace(FULL, residual_op="multiply")),
        kernel(epilogue=dataclasses.replace(FULL, residual_dtype="float32")),
    ]
    assert len({k.source for k in different}) == len(different)
    assert len({k.entry for k in different}) == len(different)
    assert all(re.fullmatch(r"\w+", k.entry) for k in different)
    assert different[1].entry == "gemm_sm80_bf16_bf16_nn_v8x16x2_128x128x32_w2x4_s4_r8"


# ---- that all of it compiles ---------------------------------------------------------


def check_compiles(
    asked: GemmProblem, config: GemmSm80Config, device: CudaDevice = A100
) -> None:
    """Compiles without local memory; the assertions prove the shared memory."""
    GEMM_SM80.check(asked, config, device)
    assert_clean(emit.kernel(asked, config, device))


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", DEVICES, ids=ARCHS)
def test_every_architecture_compiles(device, dtype):
    usual = USUAL if dtype == "bfloat16" else TF32
    assert device.arch in ARCHS
    shallow = dataclasses.replace(usual, warps_n=4, stages=3)
    odd = problem(4095, 4097, 4099, dtype, epilogue=FULL)
    check_compiles(problem(dtype=dtype, epilogue=FULL), usual, device)
    if dtype == "bfloat16":  # float32's odd rows: with the other combinations below
        check_compiles(odd, shallow, device)


# One config of every split of a tile that the search may ever propose, by dtype.
PROPOSED = [
    (dtype, config)
    for dtype in ("bfloat16", "float32")
    for config in one_of_each(GEMM_SM80.space(problem(dtype=dtype), H200), *FIELDS)
]


# Two of three are slow tests.
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * bool(i % 3))
        for i, case in enumerate(PROPOSED)
    ],
    ids=str,
)
def test_every_split_of_the_space_compiles(dtype, config):
    # Odd rows take more registers; not every config may have them.
    layout = ("nn", "nt", "tn", "tt")[PROPOSED.index((dtype, config)) % 4]
    fields = {"layout": layout, "epilogue": WIDEST}
    odd = problem(4095, 4097, 4099, dtype, **fields)
    usual = problem(dtype=dtype, **fields)
    check_compiles(odd if accepts(odd, config, H200) else usual, config, H200)


# Two layouts have both operands stored either way; the others are slow tests.
OTHER_LAYOUTS = [pytest.param(x, marks=pytest.mark.slow) for x in ("nt", "tn")]


@pytest.mark.nvrtc
@pytest.mark.parametrize("layout", ["nn", "tt", *OTHER_LAYOUTS])
def test_every_alignment_compiles(layout):
    asked = {}  # one problem for each source: of some layouts m and n do not matter
    for size in ALIGNED.values():
        for p, config in (
            (problem(size, size, 4096, layout=layout), ODD),
            (problem(4096, 4096, size, "float16", layout=layout), ODD),
            (
                problem(size, size, size, "float32", layout=layout),
                dataclasses.replace(ODD, tile_k=16),
            ),
        ):
            asked.setdefault(emit.kernel(p, config, A100).source, (p, config))
    for p, config in asked.values():
        check_compiles(p, config)


# Operands, output, layout, bias, its dtype, activation, residual, its dtype, z. Between
# them the rows name most pairs of values of any two columns.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("bfloat16", "bfloat16", "nn", "none", None, "none", "", None, False),
    ("bfloat16", "float32", "tt", "row", None, "gelu_exact", "", None, True),
    ("bfloat16", "float16", "nt", "batched_row", "float32", "relu", "add", None, True),
    ("bfloat16", "bfloat16", "tn", "row", "float16", "silu", "multiply", None, False),
    ("bfloat16", "bfloat16", "nt", "none", None, "gelu", "multiply", "float32", True),
    ("float16", "float16", "tt", "none", None, "silu", "add", "bfloat16", True),
    ("float16", "float32", "nn", "batched_row", None, "gelu", "add", None, False),
    ("float16", "bfloat16", "tn", "row", "float32", "none", "multiply", None, True),
    ("float16", "float16", "nt", "row", None, "relu", "", None, False),
    ("float32", "float32", "nn", "row", None, "silu", "add", None, True),
    ("float32", "bfloat16", "nt", "none", None, "gelu_exact", "add", "float32", False),
    ("float32", "float16", "tn", "batched_row", "bfloat16", "gelu", "", None, True),
    ("float32", "float32", "tt", "none", None, "relu", "multiply", "bfloat16", False),
)


def combination(*row: Any) -> GemmProblem:
    dtype, out, layout, bias, bias_dtype, activation, joined, other, saves = row
    epilogue = Epilogue(
        bias=bias,
        bias_dtype=bias_dtype,
        activation=activation,
        residual=bool(joined),
        residual_op=joined or "add",
        residual_dtype=other,
        save_preactivation=saves,
    )
    return problem(dtype=dtype, out=out, layout=layout, epilogue=epilogue)


COMBINATIONS = [combination(*row) for row in ROWS]


@pytest.mark.nvrtc
@pytest.mark.parametrize("asked", COMBINATIONS, ids=str)
def test_dtypes_layouts_and_epilogues_compile(asked):
    """Whole and odd rows in turns."""
    config = TF32 if asked.lhs == "float32" else USUAL
    if COMBINATIONS.index(asked) % 2 == 0:
        check_compiles(asked, config)
    else:
        odd = dataclasses.replace(asked, m=4095, n=4097, k=4099)
        check_compiles(odd, dataclasses.replace(config, warps_n=4))


def test_combinations_name_every_value():
    assert {p.lhs for p in COMBINATIONS} == set(emit.DTYPES)
    assert {p.out for p in COMBINATIONS} == set(emit.OUT_DTYPES)
    assert {p.layout for p in COMBINATIONS} == {"nn", "nt", "tn", "tt"}
    assert {p.epilogue.activation for p in COMBINATIONS} == set(ACTIVATIONS)
    assert {p.epilogue.residual_op for p in COMBINATIONS} == {"add", "multiply"}


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("kSmemBytes = 65536", "kSmemBytes = 1024", "exactly the shared memory"),
        ("kThreads = 128", "kThreads = 256", "all the warps"),
        ("kWarpsM = 2, kWarpsN = 2", "kWarpsM = 1, kWarpsN = 16", "whole blocks"),
    ],
)
def test_wrong_traits_do_not_compile(right, wrong, message):
    kernel = emit.kernel(problem(), USUAL, A100)
    assert kernel.source.count(right) == 1
    source = kernel.source.replace(right, wrong)
    with pytest.raises(nvrtc.CompileError, match=message):
        nvrtc.compile(dataclasses.replace(kernel, source=source))

"""gemm_sm90 as text, without a GPU: its parameters, and that every kernel compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from compiled import assert_clean
from sm90_problems import (
    BITS_16,
    GATE,
    GRADIENT,
    GRADIENT_EXACT,
    H200,
    SHAPE_FIELDS,
    WIDE,
    problem,
)
from spaces import one_of_each

from tracea_jax.emit import gemm_sm90_kernel as emit
from tracea_jax.emit.gemm_sm90 import USUAL_ACCUMULATORS, GemmSm90Config
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar, TensorMap
from tracea_jax.problem import (
    ACTIVATIONS,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Layout,
)
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import Buffer, Launch, Space, Steps
from tracea_jax.variants.gated_sm90 import GATED_SM90
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED

pytestmark = pytest.mark.once

# ---- its parameters and its text ----------------------------------------------------


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


@pytest.mark.parametrize(("m", "rows"), [(1, 8), (8, 8), (9, 16), (32, 32), (33, 64)])
def test_few_rows_are_loaded_without_the_slab_around_them(m, rows):
    small = GemmSm90Config(tile_m=64, tile_n=64, stages=8, consumers=1)
    lhs, *_ = maps(emit.kernel(problem(m), small, H200))
    assert lhs.box == (64, rows, 1)
    # Stored along m, a tile has its 64 columns of it in each row of 128 bytes.
    lhs, *_ = maps(emit.kernel(problem(m + -m % 8, layout="tn"), small, H200))
    assert lhs.box == (64, 64, 1)


def test_operands_are_numbered_arguments_first():
    steps = Epilogue(bias="row", residual=True, save_preactivation=True)
    kernel = emit.kernel(problem(epilogue=steps), WIDE, H200)
    assert [m.operand for m in maps(kernel)] == [0, 1, 4, 5]
    assert [p.operand for p in kernel.params if isinstance(p, Pointer)] == [2, 3]
    plain = emit.kernel(problem(epilogue=Epilogue(residual=True)), WIDE, H200)
    assert [m.operand for m in maps(plain)] == [0, 1, 3, 2]
    assert not any(isinstance(p, Pointer) for p in plain.params)


@pytest.mark.parametrize(
    ("out", "of_residual"), [("float16", "bfloat16"), ("float32",) * 2]
)
def test_a_residual_is_copied_in_the_boxes_of_the_result(out, of_residual):
    added = Epilogue(residual=True, residual_dtype=of_residual)
    asked = problem(200, 264, 136, out=out, batch=3, lhs_batched=True, epilogue=added)
    *_, result, residual = maps(emit.kernel(asked, WIDE, H200))
    assert (result.operand, residual.operand) == (3, 2)
    assert residual == dataclasses.replace(result, operand=2, dtype=of_residual)


SPLIT = GemmSm90Config(tile_m=128, tile_n=256, stages=4, cluster_k=2)


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        (problem(epilogue=Epilogue(residual=True, save_preactivation=True)), WIDE),
        (
            problem(
                out="float32",
                epilogue=Epilogue(residual=True, residual_dtype="bfloat16"),
            ),
            WIDE,
        ),
        (problem(n=4095, layout="nt", epilogue=Epilogue(residual=True)), WIDE),
        (problem(512, 10240, epilogue=Epilogue(residual=True)), SPLIT),
        (
            problem(dtype="float32", epilogue=Epilogue(residual=True)),
            dataclasses.replace(WIDE, wait_depth=0),
        ),
    ],
    ids=["beside z", "narrower", "odd rows", "shared tiles", "transposed"],
)
def test_other_residuals_are_read_by_their_address(asked, config):
    kernel = emit.kernel(asked, config, H200)
    assert [p.operand for p in kernel.params if isinstance(p, Pointer)][-1] == 2
    assert 2 not in [m.operand for m in maps(kernel)]


def test_sums_come_from_a_row_for_each_warp_of_a_consumer():
    asked = problem(331, 264, 136, batch=3, lhs_batched=True, epilogue=GRADIENT)
    call = GEMM_SM90.call(asked, WIDE, H200)
    assert isinstance(call, Steps)
    partial = Buffer(name="partial_sums", shape=(3 * 4 * 6, 264), dtype="float32")
    assert call.scratch == (partial,)
    product, total = call.steps
    assert isinstance(product, Launch)
    assert product.reads == call.operands == ("lhs", "rhs", "residual")
    assert product.writes == ("y", "partial_sums")
    assert (total.reads, total.writes) == (("partial_sums",), ("sums",))
    assert [m.operand for m in maps(product.kernel)] == [0, 1, 3, 2]
    assert [p.operand for p in product.kernel.params if isinstance(p, Pointer)] == [4]
    padded = dataclasses.replace(asked, k=137)
    call = GEMM_SM90_PADDED.call(padded, WIDE, H200)
    assert isinstance(call, Steps) and call.scratch[-1] == partial
    assert [step.name for step in call.steps] == ["relayout", "product", "sum"]


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
    assert_clean(emit.kernel(asked, config, H200))


ALL_STEPS = Epilogue(bias="row", activation="gelu", residual=True)
# One config of every tile that the search may ever propose; clusters take turns.
TILES = one_of_each(
    GEMM_SM90.space(problem(epilogue=ALL_STEPS), H200),
    *("tile_m", "tile_n", "consumers", "ping_pong"),
)


# Every second tile, and every third of other lists, is compiled by default; the whole
# lists are slow tests.
def some_by_default(params: Sequence[Any], every: int) -> list[Any]:
    return [
        param if i % every == 0 else pytest.param(param, marks=pytest.mark.slow)
        for i, param in enumerate(params)
    ]


# One of every tile and cluster shape.
PROPOSED = one_of_each(
    GEMM_SM90.space(problem(epilogue=ALL_STEPS), H200), *SHAPE_FIELDS
)
# Those that need the more registers, a residual is too much for.
WIDEST = [
    config
    for config in one_of_each(GEMM_SM90.space(problem(), H200), *SHAPE_FIELDS)
    if config.accumulators > USUAL_ACCUMULATORS
]


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", some_by_default(TILES, 2), ids=str)
def test_every_tile_of_the_space_compiles(config):
    check_compiles(problem(epilogue=ALL_STEPS), config)
    if config.accumulators == max(c.accumulators for c in TILES):
        check_compiles(problem(epilogue=GATE), config)  # registers run out here first


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("config", PROPOSED, ids=str)
def test_every_shape_of_the_space_compiles(config):
    check_compiles(problem(epilogue=ALL_STEPS), config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", some_by_default(WIDEST, 3), ids=str)
def test_the_widest_tiles_compile(config):
    saved = dataclasses.replace(ALL_STEPS, residual=False, save_preactivation=True)
    check_compiles(problem(epilogue=saved), config)


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


def widest(space: Space) -> GemmSm90Config:
    """That of the most accumulators: registers run out there first."""
    return max(space.configs(), key=lambda config: config.accumulators)


@pytest.mark.nvrtc
@pytest.mark.parametrize("asked", KINDS, ids=str)
def test_every_kind_of_kernel_compiles(asked):
    """The default, and the widest of the space."""
    default, most = GEMM_SM90.heuristic(asked, H200), GEMM_SM90.space(asked, H200)
    for config in {default, widest(most)}:
        check_compiles(asked, config)


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("asked", KINDS, ids=str)
def test_every_tile_of_every_kind_compiles(asked):
    fields = ("tile_m", "tile_n", "consumers", "cluster_k")
    for config in one_of_each(GEMM_SM90.space(asked, H200), *fields):
        check_compiles(asked, config)


GATED_FORMS: tuple[tuple[Layout, bool], ...] = (("nn", False), ("nt", True))
GATED = [
    GatedMatmulProblem(
        m=4096, n=n, k=4096, lhs="bfloat16", rhs="bfloat16", out=out,
        layout=layout, save_products=saves,
    )
    for n in (4096, 4095)
    for out in emit.OUT_DTYPES
    for layout, saves in GATED_FORMS
]  # fmt: skip


def check_gated(asked: GatedMatmulProblem, config: GemmSm90Config) -> None:
    kernel = GATED_SM90.call(asked, config, H200)
    assert isinstance(kernel, Kernel)
    assert_clean(kernel)


@pytest.mark.nvrtc
@pytest.mark.parametrize("asked", GATED, ids=str)
def test_gated_kernels_compile(asked):
    """The default or, of every third, the widest of the space."""
    config = GATED_SM90.heuristic(asked, H200)
    if GATED.index(asked) % 3 == 0:
        config = widest(GATED_SM90.space(asked, H200))
    check_gated(asked, config)


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("asked", GATED, ids=str)
def test_every_tile_of_gated_kernels_compiles(asked):
    for config in one_of_each(GATED_SM90.space(asked, H200), "tile_m", "tile_n"):
        check_gated(asked, config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("out", emit.OUT_DTYPES)
def test_bias_and_residual_of_another_dtype_compile(out):
    """Between the dtypes of results, each dtype of a bias meets each of a residual."""
    dtypes = emit.OUT_DTYPES
    for i, bias in enumerate(dtypes):
        residual = dtypes[(i + dtypes.index(out)) % len(dtypes)]
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
def test_a_wrong_total_of_shared_memory_does_not_compile():
    kernel = emit.kernel(problem(), WIDE, H200)
    wrong = kernel.source.replace(
        f"kSmemBytes = {kernel.smem_bytes}", "kSmemBytes = 1024"
    )
    assert wrong != kernel.source
    with pytest.raises(nvrtc.CompileError, match="exactly the shared memory"):
        nvrtc.compile(dataclasses.replace(kernel, source=wrong))

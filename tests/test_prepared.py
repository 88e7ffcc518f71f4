"""gemm_sm90_padded and gemm_sm90_split without a GPU: which kernels run, and when."""

from __future__ import annotations

import dataclasses
import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from prepared import (
    FULL,
    KINDS,
    LAYOUTS,
    factors,
    gemm,
    parts,
    relative_error,
    unlike_numbers,
)

import tracea_jax as tracea
from tracea_jax import knowledge
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.dispatch import plan
from tracea_jax.emit import relayout
from tracea_jax.emit.kernel import Kernel, TensorMap
from tracea_jax.ops import export_checks, matmul
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.policy import Choice
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab.ahead import kernels_of
from tracea_jax.variants import Launch, Steps
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED, GEMM_SM90_SPLIT

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)

# --- what is launched -----------------------------------------------------------------

extents = st.integers(1, 300)
shapes = {
    "m": extents,
    "n": extents,
    "k": extents,
    "batch": st.sampled_from([1, 3]),
    "lhs_batched": st.booleans(),
    "rhs_batched": st.booleans(),
    "layout": st.sampled_from(LAYOUTS),
}
narrow = st.builds(gemm, dtype=st.sampled_from(["bfloat16", "float16"]), **shapes)
wide = st.builds(gemm, dtype=st.just("float32"), **shapes)


def steps_of(variant, problem: GemmProblem) -> tuple[Steps, Launch, Launch]:
    """The call, which is relayout and then the product."""
    call = variant.call(problem, variant.heuristic(problem, H200), H200)
    assert isinstance(call, Steps)
    relayout, product = call.steps
    assert isinstance(relayout, Launch) and isinstance(product, Launch)
    return call, relayout, product


def map_of(kernel: Kernel, operand: int) -> TensorMap:
    maps = [p for p in kernel.params if isinstance(p, TensorMap)]
    (found,) = (p for p in maps if p.operand == operand)
    return found


def row_sizes(problem: GemmProblem) -> list[int]:
    """Bytes of a stored row of each factor."""
    stored = matmul_workload.factor_shapes(problem)
    return [shape[-1] * ITEMSIZE[dtype] for shape, dtype in stored]


@hypothesis.given(narrow)
def test_only_rows_that_are_not_aligned_are_written_anew(problem):
    odd = [size % 16 != 0 for size in row_sizes(problem)]
    assert (GEMM_SM90.why_not(problem, H200) is None) == (not any(odd))
    assert (GEMM_SM90_PADDED.why_not(problem, H200) is None) == any(odd)
    hypothesis.assume(any(odd))
    _, relayout, product = steps_of(GEMM_SM90_PADDED, problem)
    assert [name in relayout.reads for name in ("lhs", "rhs")] == odd
    assert [name not in product.reads for name in ("lhs", "rhs")] == odd


@hypothesis.given(st.one_of(narrow, wide))
def test_the_product_reads_what_was_written(problem):
    is_split = problem.lhs == "float32"
    variant = GEMM_SM90_SPLIT if is_split else GEMM_SM90_PADDED
    hypothesis.assume(variant.why_not(problem, H200) is None)
    call, relayout, product = steps_of(variant, problem)
    stored = matmul_workload.factor_shapes(problem)
    assert relayout.writes == tuple(buffer.name for buffer in call.scratch)
    for name, buffer in zip(relayout.reads, call.scratch, strict=True):
        i = call.operands.index(name)
        assert product.reads[i] == buffer.name
        (batch, rows, stride), dtype = buffer.shape, buffer.dtype
        shape, _ = stored[i]
        assert batch == (3 if is_split else 1) * math.prod(shape[:-2])
        assert (rows, dtype) == (shape[-2], "bfloat16" if is_split else problem.lhs)
        assert 0 <= stride - shape[-1] < 64 and stride % 64 == 0
        read = map_of(product.kernel, i)
        assert read.dims == (shape[-1], rows, batch)
        assert read.strides == (2 * stride, 2 * stride * rows)


def test_split_products_are_of_parts():
    problem = gemm(64, 72, 40, "float32")
    call, _, product = steps_of(GEMM_SM90_SPLIT, problem)
    assert [buffer.shape for buffer in call.scratch] == [(3, 64, 64), (3, 40, 128)]
    assert [map_of(product.kernel, i).dtype for i in (0, 1)] == ["bfloat16"] * 2


def test_all_kernels_are_compiled_ahead():
    problem = gemm(4095, 4097, 4099)
    config = GEMM_SM90_PADDED.heuristic(problem, H200)
    choice = Choice(variant="gemm_sm90_padded", config=config)
    kernels = kernels_of(problem, choice, H200)
    assert [k.entry.partition("_")[0] for k in kernels] == ["relayout", "gemm"]


def test_the_space_is_the_kernels():
    problem = gemm(4095, 4097, 4099)
    space = GEMM_SM90_PADDED.space(problem, H200)
    assert space.configs() == GEMM_SM90.space(problem, H200).configs()
    config = GEMM_SM90_PADDED.heuristic(problem, H200)
    GEMM_SM90_PADDED.check(problem, config, H200)
    with pytest.raises(ValueError, match="stages=0"):
        wrong = dataclasses.replace(config, stages=0)
        GEMM_SM90_PADDED.check(problem, wrong, H200)


@hypothesis.given(
    sizes=st.lists(
        st.tuples(st.integers(1, 1 << 16), st.integers(1, 1 << 14)),
        min_size=1,
        max_size=2,
    ),
    dtype=st.sampled_from(["float8_e4m3fn", "bfloat16", "float32"]),
)
def test_relayout_has_a_thread_for_every_16_bytes(sizes, dtype):
    kernel = relayout.kernel(sizes, dtype, H200)
    each = int(kernel.entry.rpartition("x")[2])
    together = each * kernel.block[0]
    blocks = 0
    for rows, columns in sizes:
        row = relayout.stride(columns, dtype) * ITEMSIZE[dtype]
        assert row % 128 == 0 and 0 <= row - columns * ITEMSIZE[dtype] < 128
        blocks += math.ceil(rows * row // 16 / together)
    assert kernel.grid == (blocks, 1, 1)


@pytest.mark.nvrtc
@pytest.mark.parametrize("sizes", [[(64, 65)], [(64, 65), (4096, 4097)]])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "float32", "split"])
def test_relayout_compiles_without_spills(dtype, sizes):
    is_split = dtype == "split"
    dtype = "float32" if is_split else dtype
    cubin = nvrtc.compile(relayout.kernel(sizes, dtype, H200, split=is_split))
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())


# --- float32 in parts -----------------------------------------------------------------


def test_parts_sum_to_the_number():
    x = unlike_numbers()
    x = x[np.isfinite(x)]
    found = parts(x).astype(np.float64)
    error = np.abs(found.sum(0) - x)
    assert error.max() <= 2.0**-134 and not error[np.abs(x) >= 2.0**-110].any()


@pytest.mark.parametrize("kind", KINDS)
def test_six_products_are_as_accurate_as_float32(kind):
    a, b = factors(kind)
    x, y = parts(a).astype(np.float32), parts(b).astype(np.float32)
    order = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))
    found = functools.reduce(np.add, (x[i] @ y[j] for i, j in order))
    assert relative_error(found, a, b) <= 2 * relative_error(a @ b, a, b)


# --- when they run --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "problem", "device", "words"),
    [
        (GEMM_SM90_PADDED, gemm(8, 8, 7), CPU, "runs on NVIDIA GPUs"),
        (GEMM_SM90_PADDED, gemm(8, 8, 7), NAMED["A100"], "only on sm_90a"),
        (GEMM_SM90_PADDED, gemm(8, 8, 8), H200, "it is only for rows whose size"),
        (GEMM_SM90_PADDED, gemm(7, 8, 8), H200, "it is only for rows whose size"),
        (GEMM_SM90_PADDED, gemm(8, 8, 0), H200, "an extent is 0"),
        (GEMM_SM90_PADDED, gemm(8, 8, 7, out="float64"), H200, "output of dtype"),
        (GEMM_SM90_PADDED, gemm(70000, 8, 70001), H200, "left operand has more than"),
        (GEMM_SM90_PADDED, gemm(8, 8, 7), H200, None),
        (GEMM_SM90_SPLIT, gemm(8, 8, 7, "float32"), CPU, "runs on NVIDIA GPUs"),
        (GEMM_SM90_SPLIT, gemm(8, 8, 7), NAMED["A100"], "only on sm_90a"),
        (GEMM_SM90_SPLIT, gemm(8, 8, 7), H200, "it takes float32 operands"),
        (
            GEMM_SM90_SPLIT,
            gemm(8, 8, 8, "float32", precision="default"),
            H200,
            "precision default; .* for precision high or highest",
        ),
        (GEMM_SM90_SPLIT, gemm(8, 8, 0, "float32"), H200, "an extent is 0"),
        (GEMM_SM90_SPLIT, gemm(8, 8, 7, "float32", precision="high"), H200, None),
        (GEMM_SM90_SPLIT, gemm(8, 8, 7, "float32"), H200, None),
    ],
)
def test_says_why_not(variant, problem, device, words):
    reason = variant.why_not(problem, device)
    if words is None:
        assert reason is None
    else:
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(reason)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (gemm(4095, 4097, 4099), "gemm_sm90_padded"),
        (gemm(8191, 8193, 2047, layout="tt"), "gemm_sm90_padded"),
        (gemm(1023, 1023, 1023), "gemm_sm90_padded"),
        (gemm(511, 511, 511), "xla"),
        (gemm(1, 1 << 20, 2047), "xla"),  # padding would be most of the work
        (gemm(2048, 2048, 2048, "float32"), "gemm_sm90_split"),
        (gemm(2047, 2049, 2051, "float32", layout="tn"), "gemm_sm90_split"),
        (gemm(256, 256, 256, "float32"), "xla"),
        (gemm(16, 8192, 8192, "float32"), "xla"),
        (gemm(2048, 2048, 2048, "float32", precision="high"), "xla"),
    ],
)
def test_where_they_run_unmeasured(problem, variant, monkeypatch, tmp_path):
    monkeypatch.setattr(knowledge, "SHIPPED", tmp_path)
    found = plan(problem, H200)
    assert (found.variant, found.origin) == (variant, "policy")
    ours = plan(problem, H200, implementation="tracea").variant
    wanted = {"bfloat16": "gemm_sm90_padded", "float32": "gemm_sm90_split"}
    assert ours == wanted[problem.lhs]


# --- lowering -------------------------------------------------------------------------

CALL = "@tracea_cuda_launch_v1"
padded_matmul = functools.partial(matmul, implementation="gemm_sm90_padded")
split_matmul = functools.partial(
    matmul, implementation="gemm_sm90_split", precision="highest"
)


def lowered(f, *args) -> str:
    with tracea.options(device="H200"):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.nvrtc
def test_lowering_of_padding():
    args = arrays((63, 65), (65, 67), (67,))
    text = lowered(lambda a, b, c: padded_matmul(a, b, bias=c), *args)
    assert text.count(CALL) == 2
    written = "tensor<1x63x128xbf16>, tensor<1x65x128xbf16>"
    assert f"(tensor<63x65xbf16>, tensor<65x67xbf16>) -> ({written})" in text
    assert f"({written}, tensor<67xbf16>) -> tensor<63x67xbf16>" in text
    assert lowered(padded_matmul, *arrays((63, 64), (64, 67))).count(CALL) == 2


@pytest.mark.nvrtc
def test_lowering_of_parts():
    text = lowered(split_matmul, *arrays((64, 40), (40, 72), dtype="float32"))
    assert text.count(CALL) == 2
    assert "(tensor<3x64x64xbf16>, tensor<3x40x128xbf16>) -> tensor<64x72xf32>" in text


@pytest.mark.nvrtc
def test_derivatives_and_batches_are_prepared_as_well():
    def loss(a, b):
        return padded_matmul(a, b, activation="relu").astype("float32").sum()

    text = lowered(jax.grad(loss, (0, 1)), *arrays((5, 63, 65), (65, 67)))
    assert "dot_general" not in text and text.count(CALL) >= 6
    text = lowered(jax.vmap(padded_matmul), *arrays((5, 63, 65), (5, 65, 67)))
    assert (
        "(tensor<5x63x128xbf16>, tensor<5x65x128xbf16>) -> tensor<5x63x67xbf16>" in text
    )


@pytest.mark.nvrtc
def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        padded_matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    text = lowered(f, *arrays((8 * 7, 65), (65, 67)))
    assert "(tensor<1x7x128xbf16>, tensor<1x65x128xbf16>) -> tensor<7x67xbf16>" in text


@pytest.mark.nvrtc
def test_an_exported_program_carries_all_kernels():
    with tracea.options(device="H200"):
        program = export.export(
            jax.jit(padded_matmul), platforms=["cuda"], disabled_checks=export_checks()
        )(*arrays((63, 65), (65, 67)))
    text = program.mlir_module()
    assert text.count(CALL) == text.count("cubin = ") == 2


@pytest.mark.nvrtc
@pytest.mark.parametrize("refused", ["gemm_sm90", "relayout"])
def test_a_kernel_that_does_not_compile_leaves_the_problem_to_xla(monkeypatch, refused):
    compile = cubins.get_or_compile

    def refuse(kernel, *places):
        if kernel.entry.startswith(refused):
            raise nvrtc.CompileError("NVRTC cannot compile", "line 1: error")
        return compile(kernel, *places)

    monkeypatch.setattr(cubins, "get_or_compile", refuse)
    args = arrays((63, 65), (65, 67), (63, 67))
    with pytest.warns(UserWarning, match="matmul 63x67x65.*left to XLA"):
        text = lowered(lambda a, b, r: padded_matmul(a, b, residual=r), *args)
    assert "dot_general" in text and CALL not in text


@pytest.mark.nvrtc
def test_the_epilogue_reads_its_operands_as_they_are():
    problem = gemm(63, 67, 65, epilogue=FULL)
    call, relayout, product = steps_of(GEMM_SM90_PADDED, problem)
    assert relayout.reads == ("lhs", "rhs")
    assert product.reads[2:] == call.operands[2:] == ("bias", "residual")
    nvrtc.compile(product.kernel)

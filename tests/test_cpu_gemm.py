"""gemm_cpu through XLA: every ISA, layout, config and epilogue, in poisoned buffers."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from cpu_gemms import (
    FULL,
    GATE,
    ISAS,
    SMALL,
    call_of,
    gemm,
    operands,
    results,
    run_and_check,
)
from numerics import Exact
from processes import run_forked
from slow_cases import slow_unless
from spaces import one_of_each

from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.problem import Epilogue
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants.cpu import DTYPES
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig

pytestmark = pytest.mark.once

# With products of bfloat16 of their own, or the best one.
BF16_ISAS = [i for i in ISAS if i in ("avx512_bf16", "amx", "bfmmla")] or ISAS[-1:]
LAYOUTS = ("nn", "nt", "tn", "tt")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_isa(layout, dtype, isa):
    shape = 37, 53, 67
    both = [gemm(*shape, dtype, layout=layout, epilogue=e) for e in (FULL, GATE)]
    run_and_check(*both, isa=isa)


def test_the_isa_is_the_one_that_was_asked_for():
    dtype = "bfloat16" if "bfmmla" in ISAS else "float32"
    problem = gemm(8, 64, 64, dtype, out="float32")
    inputs = operands(problem)
    bits = {
        isa: np.asarray(results(problem, inputs, isa=isa)[0]).tobytes() for isa in ISAS
    }
    # The baseline of x86, unlike all others, cannot fuse multiplication and addition;
    # BFMMLA, unlike the baseline of Arm, does not round to nearest.
    assert bits["baseline"] not in [bits[isa] for isa in ISAS[1:]]


WIDEST = GEMM_CPU.space(gemm(4096, 4096, 4096), local_cpu())
WIDEST_BF16 = GEMM_CPU.space(gemm(4096, 4096, 4096, "bfloat16"), local_cpu())


@pytest.mark.parametrize("config", one_of_each(WIDEST, "kc", "nc"), ids=str)
def test_every_config_at_one_awkward_shape(config):
    run_and_check(gemm(29, 771, 521, epilogue=FULL), config=config)


@pytest.mark.parametrize("config", one_of_each(WIDEST_BF16, "kc", "nc"), ids=str)
def test_every_config_of_bfloat16_at_one_awkward_shape(config):
    run_and_check(gemm(71, 771, 521, "bfloat16", epilogue=FULL), config=config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_strips_use_a_packed_rhs_again(layout):
    """bfloat16 on AMX, with more rows than there is room in L2 for partial sums."""
    rows = local_cpu().l2_bytes // 4 // (4 * 1024) + 40
    config = GemmCpuConfig(kc=48, nc=1024, tasks=1)
    problem = gemm(rows, 1050, 130, "bfloat16", layout=layout, epilogue=FULL)
    run_and_check(problem, config=config)
    run_and_check(dataclasses.replace(problem, m=rows - 72), config=config)


@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("depth", [32, 96, 160])
def test_whole_rows_of_lhs_are_used_as_they_are_stored(depth, isa):
    """bfloat16 on AMX, up to the last rows; packed rows give the same bits."""
    problem = gemm(77, 90, depth, "bfloat16")
    lhs, rhs = operands(problem)
    config = GemmCpuConfig(kc=64, nc=64, tasks=1)
    (stored,) = results(problem, [lhs, rhs], config, isa)
    columns = dataclasses.replace(problem, layout="tn")
    (packed,) = results(columns, [lhs.T, rhs], config, isa)
    np.testing.assert_array_equal(stored, packed)
    run_and_check(problem, config=config, isa=isa)


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_rows_of_lhs_that_share_sets_of_l1(layout):
    """AMX packs them if there are many columns, which changes no bits."""
    problem = gemm(77, 1030, 1024, "bfloat16", layout=layout)
    config = GemmCpuConfig(kc=512, nc=512, tasks=1)
    run_and_check(problem, config=config)
    lhs, rhs = operands(problem)
    (many,) = results(problem, [lhs, rhs], config)
    few = dataclasses.replace(problem, n=90)
    (stored,) = results(few, [lhs, rhs[:, :90]], config)
    np.testing.assert_array_equal(many[:, :90], stored)


@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize(
    "shape",
    [(5, 16, 32), (16, 17, 33), (17, 48, 31), (32, 32, 2), (14, 31, 1), (29, 65, 95)],
)
def test_parts_of_tiles(shape, isa):
    m, n, k = shape
    forms = itertools.product(LAYOUTS, (FULL, Epilogue()))
    run_and_check(
        *(gemm(m, n, k, "bfloat16", layout=x, epilogue=e) for x, e in forms), isa=isa
    )


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="the processor has no VDPBF16PS")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_of_bfloat16_are_multiplied_where_they_are_faster(layout):
    """VDPBF16PS adds a pair's products one by one, but not in the order of k."""
    least = 12 if layout[1] == "n" else 9
    enough = {(least - 1, 32): False, (least, 32): True, (32, 8): False, (32, 9): True}
    for (rows, columns), expected in enough.items():
        problem = gemm(rows, columns, 256, "bfloat16", layout=layout, out="float32")
        inputs = operands(problem)
        (pairs,) = results(problem, inputs, isa="avx512_bf16")
        (vectors,) = results(problem, inputs, isa="avx512")
        assert np.array_equal(pairs, vectors) != expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", slow_unless(["nt", "tn"], LAYOUTS))
def test_few_rows_or_columns_of_every_number(layout, isa):
    """Past a strip of the operand that is streamed, and past a block of k."""
    small = [
        gemm(m, n, 71, DTYPES[few % len(DTYPES)], layout=layout, epilogue=FULL)
        for few in range(1, 18)
        for m, n in ((few, 37), (37, few), (few, 18 - few))
    ]
    shapes = (3, 1045, 1030), (1045, 3, 1030), (6, 133, 2050), (133, 6, 2050)
    large = [gemm(*shape, layout=layout, epilogue=GATE) for shape in shapes]
    run_and_check(*small, *large, isa=isa)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_columns_are_the_few_rows_of_the_transposed_product(layout):
    """To the last bit: both sum the same products in the same order."""
    turned = layout[::-1].translate(str.maketrans("nt", "tn"))
    problem = gemm(210, 5, 1100, layout=layout)
    lhs, rhs = operands(problem)
    (y,) = results(problem, [lhs, rhs])
    mirrored = dataclasses.replace(problem, m=5, n=210, layout=turned)
    (x,) = results(mirrored, [rhs, lhs])
    np.testing.assert_array_equal(y, np.asarray(x).T)


@pytest.mark.parametrize("isa", BF16_ISAS)
def test_a_nan_stays_in_its_row(isa):
    lhs = np.ones((40, 70), np.float32)
    lhs[3, 69], lhs[35, 0] = np.nan, np.inf
    problem = gemm(40, 50, 70, "bfloat16")
    rhs = jnp.ones((70, 50), jnp.bfloat16)
    (y,) = results(problem, [jnp.asarray(lhs, jnp.bfloat16), rhs], isa=isa)
    want = np.where(np.isfinite(lhs).all(1), 70, lhs.sum(1))[:, None]
    np.testing.assert_array_equal(np.asarray(y, np.float32), want.repeat(50, 1))


@pytest.mark.parametrize("shape", [(37, 71, 300), (37, 71, 521), (3, 71, 300)])
def test_a_depth_that_the_space_leaves_out_changes_nothing(shape):
    """One depth stands for others that cut k alike: then the sums round alike."""
    problem = gemm(*shape)
    inputs = operands(problem)

    def result(kc: int) -> bytes:
        config = GemmCpuConfig(kc=kc, nc=512, tasks=2)
        return np.asarray(results(problem, inputs, config)[0]).tobytes()

    kept = {c.kc: result(c.kc) for c in GEMM_CPU.space(problem, local_cpu()).configs()}
    left_out = {c.kc: result(c.kc) for c in WIDEST.configs() if c.kc not in kept}
    assert left_out and set(left_out.values()) <= set(kept.values())
    assert len(set(kept.values())) == len(kept)


AWKWARD = (
    *((m, 9, 5) for m in (1, 2, 3, 4, 5, 7, 11, 14, 15, 16, 17, 18, 27, 29, 31, 97)),
    *(
        (m, n, 5)
        for m in (6, 20)
        for n in (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 41, 101)
    ),
    *((m, 9, k) for m in (6, 20) for k in (1, 2, 15, 16, 17, 23, 24, 25, 48, 103)),
    *itertools.product((1, 13), (1, 41), (1, 25)),
    *((1, 1031, 3), (2, 3, 1033), (1033, 2, 3), (4, 1100, 1030), (16, 300, 1030)),
)


@pytest.mark.parametrize("shape", AWKWARD, ids=lambda s: "x".join(map(str, s)))
def test_one_config_at_every_awkward_shape(shape):
    layout = LAYOUTS[sum(shape) % 4]
    dtype = DTYPES[sum(shape) % 3]
    m, n, k = shape
    run_and_check(gemm(m, n, k, dtype, layout=layout, epilogue=FULL))


@pytest.mark.parametrize("shape", [(1, 41, 24), (4, 101, 25), (13, 1, 49), (97, 48, 1)])
def test_a_multiplied_residual_at_awkward_shapes(shape):
    m, n, k = shape
    run_and_check(*(gemm(m, n, k, d, layout="nt", epilogue=GATE) for d in DTYPES))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_operands(batch, shape):
    batched = {"batch": batch, "lhs_batched": True}
    run_and_check(
        gemm(*shape, epilogue=FULL),
        gemm(*shape, **batched, epilogue=FULL),
        gemm(*shape, **batched, epilogue=GATE),
    )


@pytest.mark.parametrize("bias", ["row", "batched_row"])
@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_shared_operands(layout, batched, bias):
    epilogue = dataclasses.replace(FULL, bias=bias)
    run_and_check(
        gemm(
            7,
            19,
            26,
            batch=5,
            lhs_batched=batched[0],
            rhs_batched=batched[1],
            layout=layout,
            epilogue=epilogue,
        )
    )


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
@pytest.mark.parametrize(
    ("residual", "save"),
    [("", False), ("add", False), ("", True), ("multiply", False), ("multiply", True)],
)
def test_every_epilogue(residual, save, activation):
    epilogue = Epilogue(
        activation=activation,
        residual=bool(residual),
        residual_op=residual or "add",
        save_preactivation=save,
    )
    biased = dataclasses.replace(epilogue, bias="row")
    run_and_check(*(gemm(13, 35, 50, epilogue=e) for e in (epilogue, biased)))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_every_dtype_beside_every_other(other, out):
    fields = {"bias_dtype": other, "residual_dtype": other}
    run_and_check(
        *(
            gemm(9, 35, 30, d, out=out, epilogue=dataclasses.replace(e, **fields))
            for e in (FULL, GATE)
            for d in DTYPES
        )
    )


@pytest.mark.parametrize("activation", numerics.ACTIVATED)
def test_activations_everywhere(activation):
    # One column at a time through the kernel: z = x * 1, exactly.
    x = np.concatenate([np.linspace(-30, 30, 6001), np.geomspace(1e-38, 1e38, 500)])
    x = np.concatenate([x, -x]).astype(np.float32)
    problem = gemm(1, x.size, 1, epilogue=Epilogue(activation=activation))
    (y,) = results(problem, [jnp.ones((1, 1)), jnp.asarray(x[None])])
    with np.errstate(over="ignore"):
        value = np.nan_to_num(numerics.activate(numerics.f64(x), activation))
    # Far out on the left side the value is a difference of nearly equal numbers.
    Exact(value=value[None], scale=np.minimum(np.abs(x), 4)[None]).assert_near(y)


def test_tasks_do_not_change_bits():
    problem = gemm(
        61, 147, 90, batch=3, lhs_batched=True, rhs_batched=True, epilogue=FULL
    )
    inputs = operands(problem)
    first, *rest = (
        results(problem, inputs, dataclasses.replace(SMALL, tasks=tasks))
        for tasks in (1, 2, 3, 7, 64)
    )
    for other in rest:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_threads_do_not_change_bits():
    program = """
        import hashlib, jax, jax.numpy as jnp, numpy as np
        from tracea_jax.ops import matmul
        rng = np.random.default_rng(0)
        for shape in (61, 147, 290), (1, 300, 400), (400, 300, 3), (130, 17, 600):
            m, n, k = shape
            shapes = (m, k), (k, n), (m, n)
            for dtype in "float32", "bfloat16":
                a, b, r = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
                y = matmul(
                    a, b, activation="gelu", residual=r, implementation="gemm_cpu"
                )
                print(hashlib.sha256(np.asarray(y).tobytes()).hexdigest())
    """
    one, many = (run_forked(program, NPROC=count) for count in ("1", "5"))
    assert one == many and len(set(one.split())) == 8


def test_the_handler_refuses_what_is_not_its_own():
    call = call_of(gemm(2, 3, 4), SMALL, cpu_isa())
    kernel = jax.ffi.ffi_call(call.target, [jax.ShapeDtypeStruct((2, 3), jnp.float32)])

    def run(a=(2, 4), b=(4, 3), **attributes):
        return jax.block_until_ready(
            kernel(
                jnp.zeros(a), jnp.zeros(b), **{**dict(call.attributes), **attributes}
            )
        )

    run()
    for change, message in (
        ({"isa": "mmx"}, f"isa is 'mmx'.*{', '.join(CPU_ISAS)}"),
        ({"abi": 9}, "abi 9.*clear the compilation cache"),
        ({"activation": "swish"}, "'swish'.*none, relu, gelu, gelu_exact, silu"),
        ({"bias": "column"}, "'column'.*none, row, batched_row"),
        ({"residual": "subtract"}, "'subtract'.*none, add, multiply"),
        ({"residual": "add"}, "2 operands.*takes 3 operands"),
        ({"kc": -1}, "kc=-1 must be 0 or more"),
        ({"kc": 1.5}, "'kc'.*wrong type"),
        ({"b": (5, 3)}, r"contracts 4.*\(5, 3\) contracts 5"),
        ({"b": (4, 4)}, r"out has shape \(2, 3\).*ask for \(2, 4\)"),
        ({"a": (2, 2, 2, 4)}, r"\(2, 2, 2, 4\); its rank must be 2 or 3"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
            run(**change)

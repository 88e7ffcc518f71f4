"""gemm_cpu through XLA: every ISA, layout, config and epilogue, in poisoned buffers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from numerics import Exact, normal
from processes import run_python
from spaces import one_of_each

from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants import CpuCall, cpu_calls
from tracea_jax.variants.cpu import DTYPES
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig

pytestmark = pytest.mark.once

ISAS = CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]
# With products of bfloat16 of their own, or the best one.
BF16_ISAS = [i for i in ISAS if i in ("avx512_bf16", "amx", "bfmmla")] or ISAS[-1:]
LAYOUTS = ("nn", "nt", "tn", "tt")
SMALL = GemmCpuConfig(kc=24, nc=40, tasks=2)  # several blocks of everything, soon
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
GATE = dataclasses.replace(FULL, activation="silu", residual_op="multiply")


def gemm(m: int, n: int, k: int, dtype: str = "float32", **changes) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **changes}
    return GemmProblem(m=m, n=n, k=k, **fields)


def operands(problem: GemmProblem) -> list[jax.Array]:
    p, epilogue = problem, problem.epilogue
    batch = [p.batch] if p.lhs_batched or p.rhs_batched else []
    lhs = [p.m, p.k] if p.layout[0] == "n" else [p.k, p.m]
    rhs = [p.k, p.n] if p.layout[1] == "n" else [p.n, p.k]
    shapes = [
        ([*(batch if p.lhs_batched else []), *lhs], p.lhs),
        ([*(batch if p.rhs_batched else []), *rhs], p.rhs),
    ]
    if epilogue.bias != "none":
        own = batch if epilogue.bias == "batched_row" else []
        shapes.append(([*own, p.n], epilogue.bias_dtype or p.out))
    if epilogue.residual:
        shapes.append(([*batch, p.m, p.n], epilogue.residual_dtype or p.out))
    return [normal(*s, dtype=d, seed=i) for i, (s, d) in enumerate(shapes)]


def call_of(problem: GemmProblem, config: GemmCpuConfig, isa: str) -> CpuCall:
    device = dataclasses.replace(local_cpu(), isa=isa)
    GEMM_CPU.check(problem, config, device)
    call = GEMM_CPU.call(problem, config, device)
    assert isinstance(call, CpuCall)
    return call


def results(
    problem: GemmProblem,
    inputs: list[jax.Array],
    config: GemmCpuConfig = SMALL,
    isa: str = cpu_isa(),
) -> list[jax.Array]:
    """The kernel's results, written into buffers that held nothing but NaN."""
    call = call_of(problem, config, isa)
    batch = [problem.batch] if problem.lhs_batched or problem.rhs_batched else []
    shape = (*batch, problem.m, problem.n)
    count = 1 + problem.epilogue.save_preactivation
    kernel = jax.ffi.ffi_call(
        call.target, [jax.ShapeDtypeStruct(shape, problem.out)] * count
    )
    run = jax.jit(
        lambda poison, *inputs: kernel(*inputs, **dict(call.attributes)),
        donate_argnums=0,
        keep_unused=True,
    )
    nan = np.full(shape, np.nan, problem.out)
    poison = [jnp.array(nan) for _ in range(count)]
    places = [x.unsafe_buffer_pointer() for x in poison]
    found = run(poison, *inputs)
    assert math.prod(shape) == 0 or places == [x.unsafe_buffer_pointer() for x in found]
    return found


def check(
    problem: GemmProblem, found: list[jax.Array], inputs: list[jax.Array]
) -> None:
    """Asserts that y, and z if it is saved, are right to the last rounding."""
    expected = numerics.exact_gemm(problem.layout, problem.epilogue, *inputs)
    for y, x in zip(expected, found, strict=True):
        y.assert_near(x)


def run_and_check(problem: GemmProblem, **how) -> None:
    inputs = operands(problem)
    check(problem, results(problem, inputs, **how), inputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_isa(layout, dtype, isa):
    run_and_check(gemm(37, 53, 67, dtype, layout=layout, epilogue=FULL), isa=isa)
    run_and_check(gemm(37, 53, 67, dtype, layout=layout, epilogue=GATE), isa=isa)


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
    """Of bfloat16 on AMX: partial sums of all rows would not stay in L2."""
    rows = local_cpu().l2_bytes // 4 // (4 * 1024) + 40
    config = GemmCpuConfig(kc=48, nc=1024, tasks=1)
    problem = gemm(rows, 1050, 130, "bfloat16", layout=layout, epilogue=FULL)
    run_and_check(problem, config=config)
    run_and_check(dataclasses.replace(problem, m=rows - 72), config=config)


@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("depth", [32, 96, 160])
def test_whole_rows_of_lhs_are_used_as_they_are_stored(depth, isa):
    """Of bfloat16 on AMX, up to the last rows; packed rows give the same bits."""
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


def test_blocks_of_amx_fit_the_operands():
    """Few rows: small blocks of B. Rows of A that are used often stay in L1."""
    device = dataclasses.replace(local_cpu(), isa="amx", l2_bytes=2 << 20)

    def blocks(m: int, n: int, k: int, layout: str = "nn") -> tuple[int, int]:
        problem = gemm(m, n, k, "bfloat16", layout=layout)
        config = GEMM_CPU.heuristic(problem, device)
        assert config in list(GEMM_CPU.space(problem, device).configs())
        return config.kc, config.nc

    narrow, wide = blocks(2048, 512, 4096), blocks(2048, 2048, 4096)
    assert wide[0] < narrow[0] and wide[1] > narrow[1]
    assert blocks(2048, 2048, 1024)[0] == narrow[0]
    assert blocks(2048, 2048, 4096, "nt") == wide
    few = blocks(16, 2048, 4096)
    assert math.prod(few) < math.prod(wide) <= math.prod(narrow)
    transposed = blocks(2048, 2048, 4096, "tn")
    assert transposed == blocks(2048, 512, 4096, "tn")
    assert transposed[0] < blocks(2048, 2048, 512, "tn")[0] <= wide[0]


def test_few_columns_do_not_pay_for_transposing_many_rows():
    """On AMX; vectors stream the rows as they are stored."""
    amx = dataclasses.replace(local_cpu(), isa="amx")
    vectors = dataclasses.replace(amx, isa="avx512")
    few = gemm(4096, 4, 4096, "bfloat16", layout="tn")
    assert GEMM_CPU.heuristic(few, amx) == GEMM_CPU.heuristic(few, vectors)
    for other in ({"n": 5}, {"layout": "nn"}, {"m": 128}):
        problem = dataclasses.replace(few, **other)
        assert GEMM_CPU.heuristic(problem, amx) != GEMM_CPU.heuristic(problem, vectors)


def test_short_products_are_cut_once_for_each_thread():
    device = dataclasses.replace(local_cpu(), cores=2)

    def tasks(m: int, n: int, k: int) -> int:
        return GEMM_CPU.heuristic(gemm(m, n, k), device).tasks

    assert tasks(512, 512, 512) == 1 and tasks(1024, 1024, 1024) == 2
    assert tasks(16, 1024, 1024) == tasks(1024, 16, 1024) == 2
    # Of many cores some are always slower than others.
    device = dataclasses.replace(device, cores=16)
    assert tasks(512, 512, 512) == tasks(4096, 4096, 4096) == 4


@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize(
    "shape",
    [(5, 16, 32), (16, 17, 33), (17, 48, 31), (32, 32, 2), (14, 31, 1), (29, 65, 95)],
)
def test_parts_of_tiles(shape, isa):
    m, n, k = shape
    for layout in LAYOUTS:
        whole = gemm(m, n, k, "bfloat16", layout=layout, epilogue=FULL)
        run_and_check(whole, isa=isa)
        run_and_check(gemm(m, n, k, "bfloat16", layout=layout), isa=isa)


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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_or_columns_of_every_number(layout, isa):
    """Past a strip of the operand that is streamed, and past a block of k."""
    dtypes = itertools.cycle(DTYPES)
    for few in range(1, 18):
        dtype = next(dtypes)
        for m, n in ((few, 37), (37, few), (few, 18 - few)):
            run_and_check(gemm(m, n, 71, dtype, layout=layout, epilogue=FULL), isa=isa)
    for m, n, k in ((3, 1045, 1030), (1045, 3, 1030), (6, 133, 2050), (133, 6, 2050)):
        run_and_check(gemm(m, n, k, layout=layout, epilogue=GATE), isa=isa)


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


def test_streaming_has_nothing_to_choose_but_tasks():
    for problem in (gemm(9, 640, 640), gemm(640, 9, 640)):
        space = GEMM_CPU.space(problem, local_cpu())
        configs = list(space.configs())
        assert len({(c.kc, c.nc) for c in configs}) == 1
        assert all(len(column) == len(configs) for column in space.derived.values())


@pytest.mark.parametrize("isa", ["amx", "bfmmla"])
def test_space_of_tiles(isa):
    """Other blocks than those of vectors, of at most three quarters of L2."""
    device = dataclasses.replace(local_cpu(), isa=isa, l2_bytes=2 << 20)
    large = gemm(4096, 4096, 4096, "bfloat16")
    space = GEMM_CPU.space(large, device)
    configs = list(space.configs())
    assert GEMM_CPU.heuristic(large, device) in configs and len(configs) <= 64
    assert all(2 * c.kc * c.nc <= 1.5 * (1 << 20) for c in configs)
    vectors = dataclasses.replace(device, isa="avx512")
    for other in gemm(4, 4096, 4096, "bfloat16"), gemm(64, 64, 64, "float16"):
        assert GEMM_CPU.heuristic(other, device) == GEMM_CPU.heuristic(other, vectors)
    # BFMMLA was never timed.
    assert GEMM_CPU.expects_to_win(large, device) == (isa == "amx")
    assert not GEMM_CPU.expects_to_win(large, vectors)


@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_blocks_of_a_large_l2(isa):
    """Half of 2 MiB for a block of B in use and, with few rows of A, the next one."""
    device = dataclasses.replace(local_cpu(), isa=isa, cores=2, l2_bytes=2 << 20)
    few = GemmCpuConfig(kc=256, nc=512, tasks=2)
    many = GemmCpuConfig(kc=512, nc=512, tasks=2)
    for rows, config in (17, few), (64, few), (512, few), (513, many), (4096, many):
        assert GEMM_CPU.heuristic(gemm(rows, 4096, 4096), device) == config


@pytest.mark.parametrize("isa", ["avx2", "avx512_bf16", "amx"])
@pytest.mark.parametrize("rows", [129, 512, 513, 4096])
def test_many_rows_stored_by_columns_are_packed_in_shallow_blocks(isa, rows):
    """They are packed from pieces far apart; the block of B stays as large."""
    device = dataclasses.replace(local_cpu(), isa=isa, l2_bytes=2 << 20)
    by_row, by_column = (gemm(rows, 4096, 4096, layout=x) for x in ("nn", "tn"))
    plain, shallow = (GEMM_CPU.heuristic(x, device) for x in (by_row, by_column))
    assert shallow.kc < plain.kc and shallow.nc > plain.nc
    assert shallow in list(GEMM_CPU.space(by_column, device).configs())
    few = dataclasses.replace(by_column, m=128)
    assert GEMM_CPU.heuristic(few, device).kc > shallow.kc


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_a_product_pays_for_its_call(calls_cost, isa):
    device = dataclasses.replace(local_cpu(), isa=isa)
    for tiny in (8, 8, 8), (33, 129, 65), (64, 128, 128), (128, 128, 128):
        assert GEMM_CPU.doubt(gemm(*tiny), device) == cpu_calls.REASON
    for large in (160, 160, 160), (512, 512, 512), (1, 4096, 4096):
        assert GEMM_CPU.expects_to_win(gemm(*large), device)


def test_a_product_of_pairs_pays_sooner(calls_cost):
    """XLA widens bfloat16 in a pass of its own; elsewhere that is not assumed."""
    device = dataclasses.replace(local_cpu(), isa="avx512_bf16")
    for tiny in (8, 8, 8), (1, 64, 64), (4, 32, 32):
        assert not GEMM_CPU.expects_to_win(gemm(*tiny, "bfloat16"), device)
    middle = gemm(33, 129, 65, "bfloat16")
    assert GEMM_CPU.expects_to_win(middle, device)
    amx = dataclasses.replace(device, isa="amx")
    assert GEMM_CPU.doubt(middle, amx) == cpu_calls.REASON
    assert GEMM_CPU.expects_to_win(gemm(512, 512, 512, "bfloat16"), amx)


def test_narrow_products_of_far_operands_are_left_to_xla():
    """If A is stored by rows and no cache has it; on other processors untried."""
    device = dataclasses.replace(local_cpu(), isa="avx512_bf16", l3_bytes=32 << 20)
    far, near = gemm(1024, 64, 8192), gemm(1024, 64, 8191)
    assert not GEMM_CPU.expects_to_win(far, device)
    wide, columns = (
        dataclasses.replace(far, **x) for x in ({"n": 65}, {"layout": "tn"})
    )
    for problem in (near, wide, columns, gemm(16, 1, 1 << 20)):
        assert GEMM_CPU.expects_to_win(problem, device)
    for isa in ("avx512", "amx"):
        assert GEMM_CPU.expects_to_win(far, dataclasses.replace(device, isa=isa))


def test_fewer_columns_are_narrow_on_amx():
    """However large its last cache: that is as slow as memory."""
    device = dataclasses.replace(local_cpu(), isa="amx", l3_bytes=300 << 20)
    for dtype, narrow, others in (
        ("float32", (1, 8, 16), (17,)),
        ("bfloat16", (2, 8), (1, 9)),
    ):
        for n in (*narrow, *others):
            problem = gemm(4096, n, 4096, dtype)
            assert GEMM_CPU.expects_to_win(problem, device) == (n in others)


def test_blocks_of_few_rows_on_amx():
    """B is read by long pieces of its rows, as it is stored, and stays near."""
    device = dataclasses.replace(local_cpu(), isa="amx", l2_bytes=2 << 20)
    bfmmla = dataclasses.replace(device, isa="bfmmla")
    stored = GemmCpuConfig(kc=1024, nc=128, tasks=2)
    for rows, config in ((5, (128, 1024)), (32, (128, 1024)), (33, (512, 512))):
        kc, nc = config
        problem = gemm(rows, 4096, 4096, "bfloat16")
        assert GEMM_CPU.heuristic(problem, device) == GemmCpuConfig(
            kc=kc, nc=nc, tasks=2
        )
        assert (
            GEMM_CPU.heuristic(problem, device)
            in GEMM_CPU.space(problem, device).configs()
        )
        transposed = dataclasses.replace(problem, layout="nt")
        assert GEMM_CPU.heuristic(transposed, device) == stored
        assert GEMM_CPU.heuristic(problem, bfmmla) == stored


def test_space_of_pairs():
    """As deep in vectors as that of f32; none of their own for too few rows."""
    device = dataclasses.replace(local_cpu(), isa="avx512_bf16", l2_bytes=1 << 20)
    vectors = dataclasses.replace(device, isa="avx512")

    def config(m: int, dtype: str = "bfloat16", layout: str = "nn") -> GemmCpuConfig:
        return GEMM_CPU.heuristic(gemm(m, 4096, 4096, dtype, layout=layout), device)

    for rows in (512, 4096):
        twice = 2 * config(rows, "float32").kc
        assert config(rows) == dataclasses.replace(config(rows, "float32"), kc=twice)
    assert math.prod((config(64).kc, config(64).nc)) < 1 << 17
    for few in (
        gemm(11, 4096, 4096, "bfloat16"),
        gemm(8, 4096, 4096, "bfloat16", layout="nt"),
        gemm(4096, 8, 4096, "bfloat16"),
    ):
        assert GEMM_CPU.heuristic(few, device) == GEMM_CPU.heuristic(few, vectors)
        more = dataclasses.replace(
            few, **({"n": 9} if few.n == 8 else {"m": few.m + 1})
        )
        assert GEMM_CPU.heuristic(more, device) != GEMM_CPU.heuristic(more, vectors)
    large = gemm(4096, 4096, 4096, "bfloat16")
    space = GEMM_CPU.space(large, device)
    assert config(4096) in list(space.configs()) and len(list(space.configs())) <= 200
    assert GEMM_CPU.expects_to_win(large, device)


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
    for dtype in DTYPES:
        run_and_check(gemm(m, n, k, dtype, layout="nt", epilogue=GATE))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_operands(batch, shape):
    run_and_check(gemm(*shape, epilogue=FULL))
    run_and_check(gemm(*shape, batch=batch, lhs_batched=True, epilogue=FULL))
    run_and_check(gemm(*shape, batch=batch, lhs_batched=True, epilogue=GATE))


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
    run_and_check(gemm(13, 35, 50, epilogue=epilogue))
    run_and_check(gemm(13, 35, 50, epilogue=dataclasses.replace(epilogue, bias="row")))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_every_dtype_beside_every_other(other, out):
    for epilogue in (FULL, GATE):
        epilogue = dataclasses.replace(epilogue, bias_dtype=other, residual_dtype=other)
        for dtype in DTYPES:
            run_and_check(gemm(9, 35, 30, dtype, out=out, epilogue=epilogue))


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
    one, many = (run_python(program, NPROC=count) for count in ("1", "5"))
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
        ({"kc": -1}, "kc=-1.*negative"),
        ({"kc": 1.5}, "'kc'.*wrong type"),
        ({"b": (5, 3)}, r"contracts 4.*\(5, 3\) contracts 5"),
        ({"b": (4, 4)}, r"out has shape \(2, 3\).*ask for \(2, 4\)"),
        ({"a": (2, 2, 2, 4)}, r"\(2, 2, 2, 4\); its rank must be 2 or 3"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
            run(**change)

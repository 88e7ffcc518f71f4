"""Which config gemm_cpu takes on which processor, and where it expects to win."""

from __future__ import annotations

import dataclasses
import math

import pytest
from cpu_gemms import gemm

from tracea_jax.device import local_cpu
from tracea_jax.variants import cpu_calls
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig

pytestmark = pytest.mark.once


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
    for large in (200, 200, 200), (512, 512, 512), (1, 4096, 4096):
        assert GEMM_CPU.expects_to_win(gemm(*large), device)


def test_products_of_many_rows_pay_later_on_avx2(calls_cost):
    """XLA is as good at them there; not at few rows, nor at A stored by columns."""

    def pays(isa: str, sizes: tuple[int, int, int], layout: str = "nn") -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa)
        return GEMM_CPU.doubt(gemm(*sizes, layout=layout), device) is None

    middle = 160, 160, 160
    assert pays("avx512", middle) and not pays("avx2", middle)
    assert pays("avx2", middle, "tn") and pays("avx2", (32, 512, 256))


def test_near_narrow_products_are_left_to_xla_on_avx2():
    """XLA is fast at results of few columns, and at a vector by a transposed B."""

    def wins(m: int, n: int, k: int, layout: str = "nn", isa: str = "avx2") -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa, l3_bytes=32 << 20)
        return GEMM_CPU.expects_to_win(gemm(m, n, k, layout=layout), device)

    for narrow in (2048, 1, 2048), (4096, 8, 1024), (2048, 16, 128):
        assert not wins(*narrow) and wins(*narrow, isa="avx512")
    for other in (4096, 10, 256), (4096, 2, 1024), (16, 16, 1 << 16), (64, 16, 64):
        assert wins(*other)
    assert not wins(1, 1024, 4096, "nt") and wins(2, 1024, 4096, "nt")
    assert wins(2048, 16, 2048, "tn") and wins(1, 4096, 4096)
    for columns, is_left in (3, False), (4, True), (5, False), (6, True), (7, True):
        assert wins(4096, columns, 2048) != is_left  # from memory
        assert wins(4096, columns, 2047)


def test_few_rows_or_columns_of_bfloat16_are_streamed_on_avx2(calls_cost):
    """XLA widens the large operand before; small and other ones were not measured."""

    def wins(m: int, n: int, k: int, layout: str = "nn", isa: str = "avx2") -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa)
        problem = gemm(m, n, k, "bfloat16", layout=layout)
        return GEMM_CPU.expects_to_win(problem, device)

    for few in (1, 512, 512), (16, 1024, 256), (512, 4, 512), (4096, 1, 1024):
        assert wins(*few) and not wins(*few, isa="avx512")
        assert not wins(*few, layout="tt")
    for other in (17, 512, 512), (512, 5, 512), (16, 511, 512), (16, 4096, 128):
        assert not wins(*other)
    assert wins(512, 16, 512, "tn") and not wins(512, 17, 512, "tn")
    assert wins(2, 512, 512, "nt") and not wins(1, 512, 512, "nt")


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

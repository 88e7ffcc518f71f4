"""Proof that the device headers compute what the Python algebra says.

``kernel()`` is a translation unit of ``static_assert``s: each ``Case`` is a C++
expression of ``n`` and the values that Python computes for n = 0, 1, ... Compiling it
proves the agreement; no GPU, no run and no tolerance is involved. A disagreement fails
to compile and names the case and the first n that differs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel
from tracea_jax.ir import lanes, operands, register_operand, staging, swizzle
from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import verified
from tracea_jax.ir.fast_divide import FastDivisor
from tracea_jax.ir.operands import OperandReads, TileCopies
from tracea_jax.ir.pipeline import AsyncCopyRing, Ring, turn_parity

HEADERS = (
    "tile/fast_divide.cuh",
    "tile/fragment.cuh",
    "tile/operand_map.cuh",
    "tile/pipeline.cuh",
    "tile/register_operand_map.cuh",
    "tile/swizzle.cuh",
)
MAX_STAGES = 8

_PRELUDE = """\
using tracea::u32;

// The state of a role that has really advanced k times.
template <int Stages>
TRACEA_HOST_DEVICE constexpr tracea::PipelineState<Stages> advanced(u32 k) {
  tracea::PipelineState<Stages> state;
  for (u32 step = 0; step < k; ++step) state.advance();
  return state;
}

// The same, a few steps of which were another's.
template <int Stages>
TRACEA_HOST_DEVICE constexpr tracea::PipelineState<Stages> skipped(u32 k) {
  const u32 passed = k * 2 / 3;
  tracea::PipelineState<Stages> state = advanced<Stages>(k - passed);
  state.skip(static_cast<int>(passed));
  return state;
}

template <class Case>
TRACEA_HOST_DEVICE constexpr int first_difference() {
  int n = 0;
  for (u32 expected : Case::kExpected) {
    if (Case::value(n) != expected) return n;
    ++n;
  }
  return -1;
}

template <class Case, int N>
struct Agrees {
  static_assert(N == -1, "device code and the Python algebra differ at n = N");
};
"""

_ENTRY = """\
#if defined(__CUDACC__)
extern "C" __global__ void parity() {}
#endif
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The claim that ``expression`` is ``expected[n]`` for every n.

    Attributes:
      name: a C++ identifier.
      expression: C++ text of the unsigned variable ``n``.
      expected: values in 0 .. 2^32 - 1, by n.
    """

    name: str
    expression: str
    expected: tuple[int, ...]

    def cxx(self) -> str:
        """A struct of the expected values and the expression, and its assertion."""
        values = ", ".join(f"{value}u" for value in self.expected)
        return (
            f"struct {self.name} {{\n"
            f"  static constexpr u32 kExpected[] = {{{values}}};\n"
            f"  TRACEA_HOST_DEVICE static constexpr u32 value(u32 n) {{\n"
            f"    return {self.expression};\n"
            f"  }}\n"
            f"}};\n"
            f"template struct Agrees<{self.name}, first_difference<{self.name}>()>;\n"
        )


def swizzle_cases() -> Iterator[Case]:
    """Every byte of two periods, for the tensor map modes and those of wider rows."""
    wide = [swizzle.conflict_free_swizzle(row_bytes) for row_bytes in (256, 512)]
    for mode in (*swizzle.TENSOR_MAP_MODES, *wide):
        name = f"Swizzle_{mode.bits}_{mode.base}_{mode.shift}"
        yield Case(
            name=name,
            expression=f"{mode.cxx()}::apply(n)",
            expected=tuple(mode(byte) for byte in range(2 * mode.period_bytes)),
        )
        yield Case(
            name=f"{name}_period",
            expression=f"{mode.cxx()}::kPeriodBytes + n",
            expected=(mode.period_bytes,),
        )


def fragment_cases() -> Iterator[Case]:
    """Row and column of every register of every lane."""
    fragments = {
        "mma_a": lanes.MMA_A,
        "mma_b": lanes.MMA_B,
        "mma_c": lanes.MMA_C,
        "wgmma_accumulator": lanes.wgmma_accumulator(256),
        "wgmma_tf32_a": lanes.WGMMA_TF32_A,
    }
    for function, fragment in fragments.items():
        held = [fragment(lane, i) for lane, i in fragment.positions()]
        for axis, part in enumerate(("row", "col")):
            count = fragment.registers
            yield Case(
                name=f"{function}_{part}",
                expression=f"tracea::{function}_{part}(n / {count}, n % {count})",
                expected=tuple(element[axis] for element in held),
            )


def staging_cases() -> Iterator[Case]:
    """Where the epilogue stages 16-bit elements (stmatrix.x4) and pairs of f32.

    Of a transposed product, pairs of either.
    """
    mode = swizzle.SWIZZLE_128B.cxx()
    for block in range(0, 8, 2):
        yield from _address_cases(
            f"stmatrix_{block}",
            functools.partial(staging.stmatrix_x4_byte, block=block),
            f"tracea::stmatrix_x4_byte<{mode}>(n, {block})",
            width=16,
        )
    for j, half in itertools.product(range(4), range(2)):
        yield from _address_cases(
            f"pair_{j}_{half}",
            functools.partial(staging.accumulator_pair_byte, j=j, half=half),
            f"tracea::accumulator_pair_byte<{mode}>(n, {j}, {half})",
            width=8,
        )
    for itemsize, block, j in itertools.product((2, 4), range(8), range(2)):
        if 8 * block < staging.ROW_BYTES // itemsize:
            yield from _address_cases(
                f"transposed_{itemsize}_{block}_{j}",
                functools.partial(
                    staging.transposed_pair_byte, block=block, j=j, itemsize=itemsize
                ),
                f"tracea::transposed_pair_byte<{mode}, {itemsize}>(n, {j}) + "
                f"{block} * tracea::kTransposedBlockBytes",
                width=2 * itemsize,
            )
    for function in (staging.stmatrix_x4_row, staging.stmatrix_x4_col):
        yield Case(
            name=function.__name__,
            expression=f"tracea::{function.__name__}(n)",
            expected=tuple(function(lane) for lane in range(lanes.WARP_LANES)),
        )


def _address_cases(
    name: str, byte: Callable[..., Any], device: str, *, width: int
) -> Iterator[Case]:
    """The device function in every thread, and each warp's simulated expression."""
    threads = range(lanes.WARPGROUP_LANES)
    expected = tuple(byte(thread) for thread in threads)
    yield Case(name=name, expression=device, expected=expected)
    for warp in range(4):
        first = warp * lanes.WARP_LANES
        address = verified(byte(LANE + first), width=width)
        yield Case(
            name=f"{name}_simulated_{warp}",
            expression=address.cxx("n"),
            expected=expected[first : first + lanes.WARP_LANES],
        )


def register_operand_cases() -> Iterator[Case]:
    """Which words of an m-major tile a thread reads, in two steps of two slabs."""
    yield Case(
        name="paired_column",
        expression="tracea::paired_column(n)",
        expected=tuple(register_operand.paired_column(row) for row in range(64)),
    )
    mode = swizzle.SWIZZLE_128B.cxx()
    for paired, slab, step, i in itertools.product(
        (False, True), range(2), range(2), range(4)
    ):
        device = f"tracea::RegisterOperandMap<{mode}, {cxx(paired)}>"
        first = f"{device}::first_byte(n)"
        byte = functools.partial(
            register_operand.fragment_byte, slab=slab, step=step, i=i, paired=paired
        )
        yield Case(
            name=f"fragment_{'paired' if paired else 'straight'}_{slab}_{step}_{i}",
            expression=f"{device}::byte({first}, {slab}, {step}, {i})",
            expected=tuple(byte(thread) for thread in range(lanes.WARPGROUP_LANES)),
        )
    for transposed, block, half in itertools.product((False, True), range(2), range(2)):
        yield from _pair_place_cases(transposed, block, half)


def _pair_place_cases(transposed: bool, block: int, half: int) -> Iterator[Case]:
    """Row and columns in the result of two registers, taken from the accumulator's."""
    accumulator = lanes.wgmma_accumulator(16)
    first = 4 * block + (half if transposed else 2 * half)
    second = first + (2 if transposed else 1)
    device = f"tracea::PairPlace<{cxx(transposed)}>"
    name = f"pair_place_{int(transposed)}_{block}_{half}"
    places = []
    for thread in range(lanes.WARPGROUP_LANES):
        pair = [accumulator(thread, i) for i in (first, second)]
        if transposed:
            pair = [(c, register_operand.paired_column(r)) for r, c in pair]
        (row, column), beside = pair
        assert beside == (row, column + 1)
        places.append((row, column))
    members = {"row": f"row(n, {block}, {half})", "col": f"col(n, {block})"}
    for axis, (member, call) in enumerate(members.items()):
        yield Case(
            name=f"{name}_{member}",
            expression=f"{device}::{call}",
            expected=tuple(place[axis] for place in places),
        )
    yield Case(
        name=f"{name}_registers",
        expression=f"{device}::first_register({block}, {half}) + n * {device}::kNext",
        expected=(first, second),
    )


def pipeline_cases() -> Iterator[Case]:
    """Stage and parities over several wraps, arrival counts, and cp.async waits."""
    for stages in range(1, MAX_STAGES + 1):
        yield from _ring_cases(stages)
    ring = Ring(stages=1)
    yield Case(
        name="empty_arrivals",
        expression="tracea::empty_arrivals(n / 2 + 1, n % 2 + 1)",
        expected=tuple(
            ring.empty_arrivals(consumers=consumers, cluster=cluster)
            for consumers in (1, 2, 3)
            for cluster in (1, 2)
        ),
    )
    yield Case(
        name="turn_parity",
        expression="tracea::turn_parity(n)",
        expected=tuple(turn_parity(tile) for tile in range(9)),
    )
    yield Case(
        name="full_arrivals",
        expression="tracea::full_arrivals() + n",
        expected=(ring.full_arrivals(),),
    )
    for stages in range(2, MAX_STAGES + 1):
        yield from _async_copy_cases(stages)


def _ring_cases(stages: int) -> Iterator[Case]:
    ring, steps = Ring(stages=stages), range(4 * stages + 3)
    states = {
        "at": f"tracea::PipelineState<{stages}>::at(n)",
        "advanced": f"advanced<{stages}>(n)",
        "skipped": f"skipped<{stages}>(n)",
    }
    members = {
        "stage_idx": ring.stage,
        "consumer_parity()": ring.consumer_parity,
        "producer_parity()": ring.producer_parity,
    }
    for (how, state), (member, function) in itertools.product(
        states.items(), members.items()
    ):
        yield Case(
            name=f"ring_{stages}_{how}_{member.removesuffix('()')}",
            expression=f"{state}.{member}",
            expected=tuple(function(k) for k in steps),
        )


def _async_copy_cases(stages: int) -> Iterator[Case]:
    rings = [AsyncCopyRing(stages=stages, form=form) for form in ("A", "B")]
    steps = range(2 * stages + 1)
    device = f"tracea::AsyncCopyPipeline<{stages}>"
    waits = tuple(ring.before_compute.groups_behind for ring in rings)
    yield Case(
        name=f"async_copy_{stages}_waits",
        expression=f"n ? {device}::kGroupsBehindB : {device}::kGroupsBehindA",
        expected=waits,
    )
    yield Case(
        name=f"async_copy_{stages}_prologue",
        expression=f"{device}::kPrologueGroups + n",
        expected=(rings[0].prologue,),
    )
    for stage in ("compute_stage", "load_stage"):
        yield Case(
            name=f"async_copy_{stages}_{stage}",
            expression=f"{device}::{stage}(n)",
            expected=tuple(getattr(rings[0], stage)(k) for k in steps),
        )


# Rows of the tiles of gemm_sm80, for elements of 2 and 4 bytes.
_K_MAJOR_ROWS = (64, 128)
_MN_MAJOR_ROWS = {2: (64, 128, 256, 512), 4: (128, 256, 512, 1024)}


def operand_reads() -> Iterator[OperandReads]:
    """Every way in which gemm_sm80 reads the tiles of an operand."""
    for is_a, mn_major, itemsize in itertools.product(
        (True, False), (False, True), (2, 4)
    ):
        widths = _MN_MAJOR_ROWS[itemsize] if mn_major else _K_MAJOR_ROWS
        for row_bytes, blocks in itertools.product(widths, (1, 4)):
            yield OperandReads(
                is_a=is_a,
                mn_major=mn_major,
                row_bytes=row_bytes,
                itemsize=itemsize,
                blocks=blocks,
            )


def tile_copies() -> Iterator[TileCopies]:
    """Copies of tiles of 4 KiB in the least and the largest units."""
    modes = {
        (reads.row_bytes, reads.swizzle): None
        for reads in operand_reads()
        if reads.row_bytes <= 1024
    }
    for row_bytes, mode in modes:
        for unit_bytes, threads in itertools.product((4, 16), (64, 256)):
            yield TileCopies(
                rows=4096 // row_bytes,
                row_bytes=row_bytes,
                unit_bytes=unit_bytes,
                threads=threads,
                swizzle=mode,
            )


def operand_cases() -> Iterator[Case]:
    """What a lane of the last of two warps reads, and where a thread copies to."""
    for crossed in (False, True):
        for function in (operands.ldmatrix_row, operands.ldmatrix_chunk):
            yield Case(
                name=f"{function.__name__}_{int(crossed)}",
                expression=f"tracea::{function.__name__}(n, {int(crossed)})",
                expected=tuple(function(lane, crossed=crossed) for lane in range(32)),
            )
    for reads in operand_reads():
        yield _operand_case(reads)
    for copies in tile_copies():
        yield from _copy_cases(copies)


def _operand_case(reads: OperandReads) -> Case:
    """All lanes, warps, blocks, steps and words that stay inside of the tile."""
    wide = reads.row_bytes // reads.itemsize // operands.BLOCK if reads.mn_major else 8
    warps = min(max(wide // reads.blocks, 1), 4)
    blocks, steps, words = min(reads.blocks, wide), 2, reads.words
    extents = (warps, blocks, steps, words, lanes.WARP_LANES)
    flags = f"{int(reads.is_a)}, {int(reads.mn_major)}, {reads.blocks}"
    device = (
        f"tracea::OperandMap<{reads.swizzle.cxx()}, {reads.row_bytes}, "
        f"{reads.itemsize}, {flags}>"
    )
    index = {
        "warp": f"n / {32 * words * steps * blocks}",
        "block": f"n / {32 * words * steps} % {blocks}",
        "step": f"n / {32 * words} % {steps}",
        "word": f"n / 32 % {words}",
    }
    first = f"{device}::first_byte({index['warp']}, n % 32)"
    return Case(
        name=f"operand_{'ba'[reads.is_a]}{'kn'[reads.mn_major]}_{reads.itemsize}_"
        f"{reads.row_bytes}_{reads.blocks}",
        expression=f"{device}::byte({first}, {index['block']}, {index['step']}, "
        f"{index['word']})",
        expected=tuple(
            reads.byte(warp, lane, block, step, word)
            for warp, block, step, word, lane in itertools.product(*map(range, extents))
        ),
    )


def _copy_cases(copies: TileCopies) -> Iterator[Case]:
    mode = copies.swizzle
    name = (
        f"copy_{copies.row_bytes}_{mode.bits}_{mode.base}_{mode.shift}_"
        f"{copies.unit_bytes}_{copies.threads}"
    )
    device = (
        f"tracea::CopyMap<{mode.cxx()}, {copies.rows}, {copies.row_bytes}, "
        f"{copies.unit_bytes}, {copies.threads}>"
    )
    thread, i = f"n % {copies.threads}", f"n / {copies.threads}"
    members = {
        "row": f"{device}::first_row({thread}) + {device}::rows_to({i})",
        "column": f"{device}::first_byte({thread}) + {device}::bytes_to({i})",
        "byte": f"{device}::byte({thread}, {i})",
    }
    everything = itertools.product(range(copies.units), range(copies.threads))
    values = [
        (*copies.place(thread, i), copies.byte(thread, i)) for i, thread in everything
    ]
    for (member, expression), expected in zip(
        members.items(), zip(*values, strict=True), strict=True
    ):
        yield Case(name=f"{name}_{member}", expression=expression, expected=expected)


def divisor_cases() -> Iterator[Case]:
    """Dividends around multiples of the divisor, up to the largest."""
    for divisor in (1, 3, 56, 2**16 + 1, 2**31 - 1):
        fast, most = FastDivisor.of(divisor), 2**31 - 1
        multiple = most // divisor * divisor
        fields = f"{divisor}u, {fast.multiplier}u, {fast.shift}"
        yield Case(
            name=f"divide_{divisor}",
            expression=f"tracea::FastDivisor{{{fields}}}.divide({multiple}u - n)",
            expected=tuple(fast.divide(multiple - n) for n in range(64)),
        )


def cases() -> tuple[Case, ...]:
    """Every claim about the headers of ``kernels/cuda/tile``."""
    return (
        *swizzle_cases(),
        *fragment_cases(),
        *staging_cases(),
        *register_operand_cases(),
        *operand_cases(),
        *pipeline_cases(),
        *divisor_cases(),
    )


def source(claims: Iterable[Case]) -> str:
    """The translation unit that compiles if and only if all claims hold."""
    includes = "".join(f'#include "{name}"\n' for name in HEADERS)
    body = "\n".join(case.cxx() for case in claims)
    return f"// Device headers agree with the Python algebra.\n{includes}\n" + (
        f"{_PRELUDE}\n{body}\n{_ENTRY}"
    )


def kernel(claims: Iterable[Case] | None = None, *, arch: str = "sm_90a") -> Kernel:
    """The same as a kernel that does nothing: compile it, there is no need to launch.

    Args:
      claims: ``cases()`` if omitted.
      arch: target architecture.
    """
    return Kernel(
        entry="parity",
        source=source(cases() if claims is None else claims),
        headers=sources.headers(*HEADERS),
        arch=arch,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        smem_bytes=0,
        params=(),
    )

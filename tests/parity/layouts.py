"""Claims about swizzles, and about where threads hold and stage their elements."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from parity.proof import Case
from tracea_jax.emit.epilogue import cxx
from tracea_jax.ir import lanes, register_operand, staging, swizzle
from tracea_jax.ir.address import LANE
from tracea_jax.ir.banks import verified


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

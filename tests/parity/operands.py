"""Claims about tiles of mma.sync: how gemm_sm80 copies and reads its operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from parity.proof import Case
from tracea_jax.ir import lanes, operands
from tracea_jax.ir.operands import OperandReads, TileCopies

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
    """Addresses that a lane of the last of two warps reads and a thread copies to."""
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

"""Time of attention kernels by part: python benchmarks/profile_attention.py

Nsight Compute (``ncu``) counts what the kernels of some cases of ``bench_attention``
do: pipes, caches, memory, and for what warps wait. Clocks are left as they are, and a
kernel runs several times to be counted, so that its time is not that of a benchmark.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import attention_suite
import bench_attention
import common
import jax
from attention_sides import Case
from matmul_suite import Row

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
SECTIONS += ("MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
COUNTED = {  # name of a row's figure -> what ncu calls it
    "tensor": "SM: Pipe Tensor Cycles Active",
    "xu": "SM: Inst Executed Pipe Xu",
    "alu": "SM: Pipe Alu Cycles Active",
    "fma": "SM: Pipe Fma Cycles Active",
    "l1": "L1: Data Pipe Lsu Wavefronts",
    "l2": "L2 Cache Throughput",
    "dram": "DRAM Throughput",
    "issue": "Issue Slots Busy",
    "registers": "Registers Per Thread",
}
STALLS = 3  # of a row, those that cost most
_KERNEL = re.compile(r"\n\s+(attention\w+) \(")
_STALL = re.compile(r"^\s+Stall ([\w ]+?)\s{2,}inst\s+([\d.]+)\s*$", re.MULTILINE)


def cases() -> Iterator[Case]:
    """Profiled cases: those that missed their bar once, and those that may."""
    wanted = {
        "backward": ("backward",),
        "masks": (
            *("window", "bias per head", "soft cap"),
            *("blocks", "documents of 512, gradients"),
        ),
        "decode": ("decode, large",),
    }
    for suite, groups in wanted.items():
        for group in groups:
            of_group = [c for c in attention_suite.suite(suite) if c.group == group]
            yield from of_group[-1:] if group == "backward" else of_group[:1]


def run_all() -> None:
    for case in cases():
        side = case.sides()["ours"]
        program, sets = bench_attention.lowered(case, side)
        executable = program.compile()
        jax.block_until_ready(executable(*sets[0]))


def rows_of(text: str) -> list[Row]:
    """A row for each kernel that ncu's page of details tells of, the first time."""
    names_and_pages = _KERNEL.split(text)[1:]
    pages = dict(
        reversed(list(zip(names_and_pages[::2], names_and_pages[1::2], strict=True)))
    )
    return [_row(name, page) for name, page in reversed(pages.items())]


def _row(name: str, page: str) -> Row:
    found: dict[str, Any] = {
        figure: _number(page, called) for figure, called in COUNTED.items()
    }
    stalls = {what: float(cycles) for what, cycles in _STALL.findall(page)}
    most = sorted(stalls, key=lambda what: -stalls[what])[:STALLS]
    return {"kernel": name, **found, "stalls": {what: stalls[what] for what in most}}


def _number(page: str, called: str) -> float | None:
    line = rf"^\s+{re.escape(called)}\s{{2,}}\S*\s*([\d.,]+)\s*$"
    found = re.search(line, page, re.MULTILINE)
    return float(found[1].replace(",", "")) if found else None


def profiled(ncu: str) -> str:
    """The page of details that ncu writes of this program.

    Raises:
      RuntimeError: with what ncu says, if it counted nothing.
    """
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:^attention"]
    command += [*sections, "--print-details", "all", sys.executable, __file__, "--run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not _KERNEL.search(done.stdout):
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return done.stdout


def render(rows: Sequence[Row]) -> str:
    head = ("kernel", *COUNTED, "warps wait for")
    return common.table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    figures = ("-" if row[n] is None else f"{row[n]:.1f}" for n in COUNTED)
    waits = (f"{what} {cycles:.1f}" for what, cycles in row["stalls"].items())
    return row["kernel"], *figures, ", ".join(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--run", action="store_true", help="only run the kernels")
    parser.add_argument("--ncu", default="ncu", help="the program")
    args = parser.parse_args()
    if args.run:
        run_all()
        return
    rows = rows_of(profiled(args.ncu))
    print(render(rows))
    print(common.save("attention_profile", rows, args))


if __name__ == "__main__":
    main()

"""Untuned calls against XLA on a GPU: python benchmarks/bench_untuned.py

The products of well-known models are planned from the answers that the package ships,
for the numbers of tokens of the shipped answers and for some in between. The peer is
the code people write, compiled by jit. Where the plan is XLA, nothing is raced. The
order is random but always the same, so that the problems which a time limit leaves out
are like the measured ones.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import bench_matmul
import common
from model_layers import LAYERS, order

import tracea_jax as tracea
from tracea_jax import dispatch
from tracea_jax.campaign import local_device

BETWEEN = (5, 24, 100, 700, 3000, 12000)  # numbers of tokens without measurements


def problems() -> list[bench_matmul.Problem]:
    """The problems of the shipped answers, and the same layers with other rows."""
    bodies = [layer for layer in LAYERS if not layer.is_head]
    asked = [layer.asked(m) for layer in bodies for m in BETWEEN]
    between = [*(layer.plain(m) for layer in bodies for m in BETWEEN), *asked]
    found: list[Any] = list(dict.fromkeys(p for p in [*order(), *between] if p))
    random.Random(0).shuffle(found)
    return found


def measure(problem: bench_matmul.Problem, rounds: int) -> dict[str, Any]:
    """One row: the plan, its origin, and its time against XLA's."""
    plan = dispatch.plan(problem, local_device())
    row = {
        "text": str(problem),
        "origin": plan.origin,
        "variant": plan.variant,
        "default_us": None,
        "xla_us": None,
        "ratio": None,
    }
    if plan.variant == "xla":
        return row
    inputs = bench_matmul.operands(problem)
    sides = bench_matmul.sides(problem, with_own=False)
    calls = {name: functools.partial(side, *inputs) for name, side in sides.items()}
    times = common.race(calls, rounds)
    row |= {f"{name}_us": statistics.median(us) for name, us in times.items()}
    return row | {"ratio": common.median_ratio(times, "xla", "default")}


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows until the time is over."""
    end = time.monotonic() + args.budget_s
    for problem in problems():
        if time.monotonic() > end:
            return
        row = measure(problem, args.rounds)
        if row["ratio"] is not None:
            print(
                f"{row['text']:60s} {row['origin']:12s} {row['ratio']:.3f}", flush=True
            )
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each race")
    parser.add_argument("--budget-s", type=float, default=900.0, help="for everything")
    common.add_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as nothing, tracea.options(cache_dir=nothing):
        for row in measured(args):
            rows.append(row)
            common.save("untuned", rows, args)
    print(f"{len(rows)} problems")


if __name__ == "__main__":
    main()

"""conv2d against XLA on a GPU: python benchmarks/bench_conv2d.py [--only GROUP ...]

Sides race in turns: XLA's convolution with the same epilogue written in jnp; each of
our kernels with its default config; and the default, which a call without
``implementation`` runs untuned and which may be XLA. Inputs are random normal, times
those of kernels.

Results are saved after every case; one that fails is a row with the reason. With
``--only``, the rows of other groups stay as they are, if device, versions and commit
are the same.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import common
import jax
from bench_matmul import render_groups
from conv2d_suite import BARS, FIGURES, Case, suite
from matmul_suite import Row, summary

from tracea_jax import dispatch, variants
from tracea_jax.campaign import local_device
from tracea_jax.ops.conv2d import workload
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem

# --- the sides ------------------------------------------------------------------------


def default(*inputs: jax.Array, problem: Conv2dProblem) -> list[jax.Array]:
    """The problem as the op plans it."""
    how = {"precision": None, "implementation": None, "config": None}
    return workload.bound(*inputs, problem=problem, **how)


def choices(problem: Conv2dProblem) -> Iterator[Choice]:
    """XLA, then the default config of each kernel that can serve the problem.

    The portable kernel is asked only where none that is made for the problem can.
    """
    device = local_device()
    able = [v for v in variants.of("conv2d") if v.why_not(problem, device) is None]
    for variant in sorted(able, key=lambda v: v.name != "xla"):
        if variant.name != "conv2d_sm80" or len(able) == 2:
            config = variant.heuristic(problem, device)
            yield Choice(variant=variant.name, config=config)


def row_of(case: Case, rounds: int) -> Row:
    """The row of a case, with the error if it fails."""
    problem = case.problem
    head: Row = {"group": case.group, "problem": problem.to_json()}
    head |= {"text": str(problem)}
    try:
        return {**head, **measured(problem, rounds)}
    except Exception as e:  # recorded, and the rest goes on
        return {**head, "error": f"{type(e).__name__}: {e}"[:1000]}


def measured(problem: Conv2dProblem, rounds: int) -> Row:
    """Times and ratios of every side, and the default's errors."""
    device = local_device()
    inputs = workload.operands(problem, seed=1)
    calls: dict[str, Any] = {}
    texts: dict[str, str] = {}

    def add(name: str, function: Any) -> None:
        compiled = jax.jit(function).lower(*inputs).compile()
        calls[name] = functools.partial(compiled, *inputs)

    for choice in choices(problem):
        texts[choice.variant] = str(choice.config)
        run = functools.partial(workload.execute, problem=problem, choice=choice)
        add(choice.variant, run)
    add("default", functools.partial(default, problem=problem))
    times = common.race(calls, rounds)
    medians = {name: statistics.median(of_side) for name, of_side in times.items()}
    kernels = [n for n in calls if n not in ("xla", "default")]
    best = min(kernels, key=lambda name: medians[name], default=None)
    results = {name: list(calls[name]()) for name in ("xla", "default")}
    return {
        "times_us": medians,
        "configs": texts,
        "plan": dispatch.plan(problem, device).variant,
        "best": best,
        "own_us": None if best is None else medians[best],
        "ratio_own": None if best is None else common.median_ratio(times, "xla", best),
        "ratio_default": common.median_ratio(times, "xla", "default"),
        "tflops": problem.flops / medians[best or "xla"] * 1e-6,
        **errors(problem, inputs, results),
    }


def errors(
    problem: Conv2dProblem,
    inputs: list[jax.Array],
    results: dict[str, list[jax.Array]],
) -> Row:
    """The default's worst error against float64, by the bound of rounding and by XLA's.

    Args:
      problem, inputs: what was computed.
      results: of the sides "xla" and "default".
    """
    device = local_device()
    found = {n: workload.error(problem, device, inputs, results[n], 0) for n in results}
    return {
        "error_of_bound": found["default"],
        "error_by_xla": found["default"] / max(found["xla"], 1e-9),
    }


def cells(row: Row) -> tuple[str, ...]:
    """A line of the printed table."""
    if "error" in row:
        return row["text"], row["error"].splitlines()[0][:80], *5 * ("-",)
    best = row["best"]
    ours = "-" if best is None else f"{row['own_us']:.1f}"
    ratio = "-" if best is None else f"{row['ratio_own']:.2f}"
    return (
        row["text"],
        f"{best} {row['configs'].get(best, '')}",
        f"{row['times_us']['xla']:.1f}",
        ours,
        f"{row['tflops']:.0f}",
        ratio,
        f"{row['ratio_default']:.2f}",
    )


HEAD = ("problem", "kernel", "XLA us", "ours us", "TF", "XLA/ours", "XLA/default")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="groups")
    parser.add_argument("--rounds", type=int, default=7)
    common.add_arguments(parser)
    args = parser.parse_args(arguments)
    wanted = [c for c in suite() if not args.only or c.group in args.only]
    groups = {case.group for case in wanted}
    kept = common.saved("conv2d", args) if args.only else []
    rows = [row for row in kept if row["group"] not in groups]
    for case in wanted:
        rows.append(row_of(case, args.rounds))
        print("  ".join(cells(rows[-1])), flush=True)
        common.save("conv2d", rows, args, groups=summary(rows, BARS, FIGURES))
    print(common.table(HEAD, [cells(row) for row in rows]))
    print(render_groups(summary(rows, BARS, FIGURES), FIGURES))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

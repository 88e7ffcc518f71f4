"""The policy's choices without tuning on a CPU: python benchmarks/bench_choices_cpu.py

Problems are random and mostly tiny, so that the cost of a call counts. A program makes
24 calls of one problem; our kernel with its untuned config and the code people write
run in turns. Where the policy chooses XLA, both programs are the same, so the choice is
worth 1.0 by definition.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import bench_cpu
import bench_matmul
import common
import jax

from tracea_jax import dispatch, policy
from tracea_jax.campaign import local_device
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops.common.bench import Workload
from tracea_jax.ops.gated_matmul import workload as gated_workload
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)
from tracea_jax.tuning import measure

CALLS = 24  # in a program, so that the cost of starting the program hardly counts
LOWEST = 0.97  # ratio below which a choice has lost time
EPILOGUES = (
    Epilogue(),
    Epilogue(),
    Epilogue(bias="row"),
    Epilogue(bias="row", activation="relu"),
    Epilogue(bias="row", activation="gelu"),
    Epilogue(bias="row", activation="silu", residual=True),
)
GROUPS = {"matmul": 12, "few rows": 3, "gated_matmul": 2, "conv2d": 3, "attention": 2}

Row = dict[str, Any]


# --- the draw -------------------------------------------------------------------------


def size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def product(rng: random.Random, rows: tuple[int, int]) -> GemmProblem:
    dtype = rng.choice(("float32", "bfloat16"))
    return GemmProblem(
        m=size(rng, *rows),
        n=size(rng, 8, 256),
        k=size(rng, 8, 256),
        lhs=dtype,
        rhs=dtype,
        out=dtype,
        layout=rng.choice(("nn", "nn", "nt", "tn")),
        epilogue=rng.choice(EPILOGUES),
    )


def gated(rng: random.Random) -> GatedMatmulProblem:
    p = product(rng, (8, 256))
    fields = {name: getattr(p, name) for name in ("m", "n", "k", "lhs", "rhs", "out")}
    return GatedMatmulProblem(**fields)


def convolution(rng: random.Random) -> Conv2dProblem:
    dtype, taps = rng.choice(("float32", "bfloat16")), rng.choice((1, 3))
    side, around = size(rng, 4, 32), taps // 2
    return Conv2dProblem(
        batch=rng.choice((1, 1, 4)),
        height=side,
        width=side,
        in_channels=size(rng, 4, 64),
        out_channels=size(rng, 4, 64),
        kernel_height=taps,
        kernel_width=taps,
        padding=((around, around), (around, around)),
        lhs=dtype,
        rhs=dtype,
        out=dtype,
    )


def attention(rng: random.Random) -> AttentionProblem:
    dtype, heads = rng.choice(("float32", "bfloat16")), rng.choice((1, 2, 4))
    head_dim = rng.choice((16, 32, 64))
    return AttentionProblem(
        batch=rng.choice((1, 1, 2)),
        q_len=size(rng, 4, 256),
        kv_len=size(rng, 4, 256),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        scale=head_dim**-0.5,
    )


DRAWS: dict[str, Callable[[random.Random], Problem]] = {
    "matmul": lambda rng: product(rng, (8, 256)),
    "few rows": lambda rng: product(rng, (1, 8)),
    "gated_matmul": gated,
    "conv2d": convolution,
    "attention": attention,
}


def problems(seed: int, each: int) -> Iterator[tuple[str, Problem]]:
    """Random problems of a seed: of each group ``each`` times the group's weight."""
    for group, weight in GROUPS.items():
        rng = random.Random(f"{seed} {group}")
        yield from ((group, DRAWS[group](rng)) for _ in range(weight * each))


# --- measuring ------------------------------------------------------------------------


def workload(problem: Problem) -> tuple[Workload, Callable[..., Any]]:
    """The problem's workload, and the code people write for it."""
    if isinstance(problem, GatedMatmulProblem):
        return gated_workload.GATED_MATMUL, bench_matmul.plain
    return bench_cpu.WORKLOADS[problem.op], bench_cpu.plain


def untuned(problem: Problem) -> policy.Choice:
    """The first kernel of ours that can run, with the config of its heuristic."""
    decision = policy.decide(diagnose(problem, local_device()))
    return next(hero for hero in decision.heroes if hero.variant != "xla")


def measured(problem: Problem, args: argparse.Namespace) -> Row:
    """The median of the rounds' ratios of a program with many calls."""
    how, plain = workload(problem)
    choice = untuned(problem)
    inputs = [how.operands(problem, seed) for seed in range(CALLS)]

    @jax.jit
    def ours(inputs: list[list[jax.Array]]) -> list[jax.Array]:
        return [how.execute(*x, problem=problem, choice=choice)[0] for x in inputs]

    @jax.jit
    def xla(inputs: list[list[jax.Array]]) -> list[jax.Array]:
        return [plain(*x, problem=problem) for x in inputs]

    runs = {
        name: common.repeating(functools.partial(run, inputs))
        for name, run in (("ours", ours), ("xla", xla))
    }
    timing = measure.Timing(
        slice_s=args.slice_s, rounds=args.rounds, max_rounds=args.rounds
    )
    race = measure.race(runs, timing)
    for failure in race.failures.values():
        raise failure
    return {
        "ours_us": round(race.median_us("ours") / CALLS, 3),
        "xla_us": round(race.median_us("xla") / CALLS, 3),
        "ratio_own": round(race.ratio("xla", "ours"), 3),
    }


def row_of(group: str, problem: Problem, args: argparse.Namespace) -> Row:
    """The row of a problem; a loss is measured again, and the median counts."""
    plan = dispatch.plan(problem, local_device())
    tries = [measured(problem, args)]
    if plan.variant != "xla" and tries[0]["ratio_own"] < 1.0:
        tries += [measured(problem, args) for _ in range(args.again)]
    tries.sort(key=lambda row: row["ratio_own"])
    row = tries[len(tries) // 2]
    return {
        "group": group,
        "text": str(problem),
        "problem": problem.to_json(),
        "variant": plan.variant,
        **row,
        "ratio": 1.0 if plan.variant == "xla" else row["ratio_own"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--each", type=int, default=5, help="times each group's weight")
    parser.add_argument("--rounds", type=int, default=15, help="of each race")
    parser.add_argument("--slice-s", type=float, default=0.01, help="least of a slice")
    parser.add_argument("--again", type=int, default=2, help="races more of a loss")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), help="groups")
    common.add_arguments(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    for group, problem in problems(args.seed, args.each):
        if args.only and group not in args.only:
            continue
        rows.append(row_of(group, problem, args))
        print(line(rows[-1]), flush=True)
    path = common.save("choices", rows, args, seed=args.seed, figures=figures(rows))
    print(common.table(FIGURES, [tuple(f.values()) for f in figures(rows)]))
    print(path)


def line(row: Row) -> str:
    sides = f"{row['ours_us']:8.1f} {row['xla_us']:8.1f} {row['ratio_own']:6.2f}"
    return f"{row['text']:60s} {sides} {row['variant']}"


FIGURES = ("group", "drawn", "ours", "geomean", "lowest", "lost", "geomean of ours")


def figures(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Ratios of the policy's choices and of always choosing ours, for each group."""
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        chosen = [row["ratio"] for row in own]
        values = (
            group,
            str(len(own)),
            str(sum(row["variant"] != "xla" for row in own)),
            f"{statistics.geometric_mean(chosen):.2f}",
            f"{min(chosen):.2f}",
            str(sum(ratio < LOWEST for ratio in chosen)),
            f"{statistics.geometric_mean(row['ratio_own'] for row in own):.2f}",
        )
        found.append(dict(zip(FIGURES, values, strict=True)))
    return found


if __name__ == "__main__":
    main()

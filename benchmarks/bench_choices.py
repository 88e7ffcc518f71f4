"""What is chosen, against XLA, on shapes drawn at random.

    python benchmarks/bench_choices.py {fused,decode} [--seed N] [--count N]

fused    products with every epilogue, planned from what ships with the package
decode   attention of few queries, by cuDNN and by XLA

A draw is told by its seed. Times are sums of kernel times, from the profiler, of calls
made in turns. The peer is the code people write, compiled by jit; of attention it is
what the op does where it leaves a problem to XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import bench_matmul
import common
import jax

import tracea_jax as tracea
from tracea_jax import dispatch, policy, variants
from tracea_jax.ops import attention_bench
from tracea_jax.problem import AttentionProblem, Epilogue, GemmProblem
from tracea_jax.tune import local_device

Row = dict[str, Any]

EPILOGUES = (
    Epilogue(),
    Epilogue(bias="row"),
    Epilogue(bias="row", activation="relu"),
    Epilogue(activation="gelu"),
    Epilogue(bias="row", activation="gelu"),
    Epilogue(bias="row", activation="gelu_exact"),
    Epilogue(activation="silu"),
    Epilogue(bias="row", activation="silu"),
    Epilogue(residual=True),
    Epilogue(bias="row", residual=True),
    Epilogue(bias="row", activation="silu", residual=True),
)
MOST_FLOPS = 2**41
MOST_BYTES = 2**33
HEADS = ((32, 8), (32, 32), (64, 8), (16, 1), (16, 16), (8, 8))


# --- draws ----------------------------------------------------------------------------


def product(draw: random.Random, least_flops: int) -> GemmProblem:
    """A product with log-uniform extents, three of four in multiples of 8."""
    while True:
        unit = 1 if draw.random() < 0.25 else 8
        m, n, k = (round(2 ** draw.uniform(4, 14.5) / unit) * unit for _ in range(3))
        dtypes = dict.fromkeys(("lhs", "rhs", "out"), "bfloat16")
        problem = GemmProblem(m=m, n=n, k=k, epilogue=draw.choice(EPILOGUES), **dtypes)
        if least_flops <= problem.flops <= MOST_FLOPS:
            return problem


def decode(draw: random.Random) -> AttentionProblem:
    """Attention of few queries to many keys; every fourth knows how many there are."""
    while True:
        heads, kv_heads = draw.choice(HEADS)
        head_dim = draw.choice((64, 128))
        problem = AttentionProblem(
            batch=round(2 ** draw.uniform(0, 7)),
            q_len=draw.choice((1, 1, 1, 2, 4, 8, 16, 32, 48)),
            kv_len=round(2 ** draw.uniform(6, 15)),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=draw.choice(("bfloat16", "bfloat16", "float16")),
            kv_lengths=draw.random() < 0.4,
            direction="backward" if draw.random() < 0.1 else "forward",
            scale=head_dim**-0.5,
        )
        if problem.bytes <= MOST_BYTES:
            return problem


# --- measuring ------------------------------------------------------------------------


def of_product(problem: GemmProblem, rounds: int) -> Row:
    """A product: what was planned, the best kernel of ours by that plan, and XLA."""
    device = local_device()
    plan = dispatch.plan(problem, device)
    own, _ = bench_matmul.planned(problem)
    inputs = bench_matmul.operands(problem)
    sides = bench_matmul.sides(problem, with_own=own is not None)
    calls = {name: functools.partial(side, *inputs) for name, side in sides.items()}
    return {
        "origin": plan.origin,
        "variant": plan.variant,
        "config": dataclasses.asdict(plan.config),
        "own": own and own.variant,
        "own_config": own and dataclasses.asdict(own.config),
        **_raced(calls, rounds),
    }


def of_attention(problem: AttentionProblem, rounds: int) -> Row:
    """Attention, forced to cuDNN and to XLA; "default" is the one that is planned."""
    device = local_device()
    plan = dispatch.plan(problem, device)
    inputs = attention_bench.operands(problem, 1)
    calls: dict[str, Any] = {}
    for name in ("cudnn", "xla"):
        config = variants.get("attention", name).heuristic(problem, device)
        choice = policy.Choice(variant=name, config=config)
        run = functools.partial(attention_bench.execute, problem=problem, choice=choice)
        calls[name] = functools.partial(jax.jit(run), *inputs)
    row = _raced(calls, rounds)
    ratio = 1.0 if plan.variant == "xla" else row["ratio_cudnn"]
    return {
        "origin": plan.origin,
        "variant": plan.variant,
        **row,
        "ratio_default": ratio,
    }


def _raced(calls: dict[str, Any], rounds: int) -> Row:
    times = common.race(calls, rounds)
    row: Row = {f"{name}_us": statistics.median(us) for name, us in times.items()}
    for name in times:
        if name != "xla":
            row[f"ratio_{name}"] = common.median_ratio(times, "xla", name)
    return row


def rows_of(
    problems: Iterator[Any], measure: Callable[[Any, int], Row], args: Any
) -> Iterator[Row]:
    """A row for each problem until the time is over; what fails says why."""
    end = time.monotonic() + args.budget_s
    for problem in problems:
        if time.monotonic() > end:
            return
        row: Row = {"text": str(problem), "problem": problem.to_json()}
        try:
            row |= measure(problem, args.rounds)
        except Exception as e:  # recorded, and the rest goes on
            row["error"] = f"{type(e).__name__}: {e}"[:500]
        shown = {k: f"{v:.3g}" for k, v in row.items() if isinstance(v, float)}
        print(row["text"], row.get("variant"), row.get("origin"), shown, flush=True)
        yield row


# --- the program ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("fused", "decode"))
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=60, help="of problems")
    parser.add_argument("--rounds", type=int, default=5, help="of each race")
    parser.add_argument("--budget-s", type=float, default=600.0, help="for everything")
    parser.add_argument("--least-flops", type=int, default=2**30)
    common.add_arguments(parser)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    draws: dict[str, Callable[[], Any]] = {
        "fused": lambda: product(draw, args.least_flops),
        "decode": lambda: decode(draw),
    }
    problems = (draws[args.what]() for _ in range(args.count))
    measure: Any = {"fused": of_product, "decode": of_attention}[args.what]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as nothing, tracea.options(cache_dir=nothing):
        for row in rows_of(problems, measure, args):
            rows.append(row)
            common.save(f"choices_{args.what}", rows, args, seed=args.seed)
    ratios = [r["ratio_default"] for r in rows if "ratio_default" in r]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{len(rows)} problems, default {mean:.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()

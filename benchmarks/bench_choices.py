"""The speed of choices against XLA, on random shapes.

    python benchmarks/bench_choices.py {fused,decode,tuned,shipped} [--seed N] ...

fused    products with every epilogue, planned from the answers that the package ships
decode   attention of few queries, by cuDNN and by XLA
tuned    products that were tuned first; a new process finds and times the answers
shipped  shipped answers that won by little, none of them random; ``judge_shipped.py``
         then keeps the answers whose kernels are clearly faster

A seed determines the random problems. Times are sums of kernel times, from the
profiler, of calls made in turns. The peer is the code people write, compiled by jit;
for attention it is the code that the op runs where it leaves a problem to XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import bench_matmul
import common
import jax

import tracea_jax as tracea
from tracea_jax import dispatch, knowledge, policy, variants
from tracea_jax.campaign import local_device
from tracea_jax.ops.attention import workload as attention_workload
from tracea_jax.options import current
from tracea_jax.problem import (
    AttentionProblem,
    Epilogue,
    GemmProblem,
    problem_from_json,
)
from tracea_jax.tuning.store.entries import Store

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
WON_BY = 1.04  # a shipped answer that won its race by less is raced again
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
    """Attention of few queries to many keys; every fourth problem has key lengths."""
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


def narrowly_shipped() -> Iterator[Any]:
    """Problems whose shipped answer for this device won its race by little."""
    for _, head in Store(knowledge.SHIPPED, read_only=True).heads():
        best, here = head.best, head.environment.device == local_device().name
        if here and best.variant != "xla" and best.ratio and best.ratio < WON_BY:
            yield problem_from_json(head.problem)


# --- measuring ------------------------------------------------------------------------


def of_product(problem: GemmProblem, rounds: int) -> Row:
    """The row of a product: the plan, our best kernel by that plan, and XLA."""
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


def of_answer(problem: Any, rounds: int) -> Row:
    """The row of a tuned or shipped answer and XLA, with the times of its tuning."""
    plan = dispatch.plan(problem, local_device())
    inputs = bench_matmul.operands(problem)
    sides = bench_matmul.sides(problem, with_own=False)
    calls = {name: functools.partial(side, *inputs) for name, side in sides.items()}
    key = problem.to_json()
    entries = knowledge.known(current()).own.entries()
    best = next((dataclasses.asdict(e.best) for e in entries if e.problem == key), {})
    return {
        "origin": plan.origin,
        "variant": plan.variant,
        "config": dataclasses.asdict(plan.config),
        "noted": {k: v for k, v in best.items() if k.endswith("_us")},
        **_raced(calls, rounds),
    }


def tune_then_check(args: argparse.Namespace) -> None:
    """Tunes the drawn products and lets a new process write the result file."""
    problems = list(dict.fromkeys(drawn(args)))
    with tempfile.TemporaryDirectory() as directory:
        with tracea.options(cache_dir=directory):
            budget_s = args.each_s * len(problems)
            untuned = common.tune_together(problems, budget_s=budget_s)
        for problem, why in untuned.items():
            print(f"{problem}: {why}", flush=True)
        variables = {**os.environ, "TRACEA_CACHE_DIR": directory}
        command = [sys.executable, *sys.argv, "--check"]
        subprocess.run(command, env=variables, check=True)


def of_attention(problem: AttentionProblem, rounds: int) -> Row:
    """The row of attention by cuDNN and by XLA; "default" names the planned one."""
    device = local_device()
    plan = dispatch.plan(problem, device)
    inputs = attention_workload.operands(problem, 1)
    calls: dict[str, Any] = {}
    for name in ("cudnn", "xla"):
        config = variants.get("attention", name).heuristic(problem, device)
        choice = policy.Choice(variant=name, config=config)
        run = functools.partial(
            attention_workload.execute, problem=problem, choice=choice
        )
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
    """A row for each problem until the time is over; a failed problem's says why."""
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


def drawn(args: argparse.Namespace) -> Iterator[Any]:
    """The problems that the arguments ask for."""
    if args.what == "shipped":
        yield from narrowly_shipped()
        return
    draw = random.Random(args.seed)
    for _ in range(args.count):
        yield decode(draw) if args.what == "decode" else product(draw, args.least_flops)


def check(args: argparse.Namespace) -> None:
    """Measures, writes the result file and prints the figures."""
    ways: dict[str, Any] = {"fused": of_product, "decode": of_attention}
    measure = ways.get(args.what, of_answer)
    rows: list[Row] = []
    for row in rows_of(itertools.islice(drawn(args), args.skip, None), measure, args):
        rows.append(row)
        common.save(f"choices_{args.what}", rows, args, seed=args.seed)
    ratios = [r["ratio_default"] for r in rows if "ratio_default" in r]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{len(rows)} problems, default {mean:.3f}, least {min(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("fused", "decode", "tuned", "shipped"))
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=60, help="of problems")
    parser.add_argument("--skip", type=int, default=0, help="what came earlier")
    parser.add_argument("--rounds", type=int, default=5, help="of each race")
    parser.add_argument("--budget-s", type=float, default=600.0, help="for measuring")
    parser.add_argument("--each-s", type=float, default=5.0, help="of tuning, each")
    parser.add_argument("--least-flops", type=int, default=2**30)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    common.add_arguments(parser)
    args = parser.parse_args()
    if args.check:
        check(args)
    elif args.what == "tuned":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        tune_then_check(args)
    else:
        with (
            tempfile.TemporaryDirectory() as nothing,
            tracea.options(cache_dir=nothing),
        ):
            check(args)


if __name__ == "__main__":
    main()

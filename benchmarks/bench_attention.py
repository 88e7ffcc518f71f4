"""Forward attention, unmeasured: each candidate's default config beside the fastest.

    python benchmarks/bench_attention.py [--heads 64 128] [--lengths 2048 16384]

16384 tokens of 2048 columns in heads of several sizes, full and causal, and windows and
shared keys at some lengths; bfloat16, random normal inputs, kernel times on a GPU. What
runs unmeasured is marked. Operations of scores that no query sees are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import common
import jax

from tracea_jax.campaign import local_device
from tracea_jax.diagnosis import diagnose
from tracea_jax.ir.tile_graph import KeyInterval
from tracea_jax.ops.attention import workload
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import AttentionProblem

TOKENS, COLUMNS = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS = (64, 128, 256)
WINDOWS = ((4096, 511), (16384, 1023))  # (length, keys before a query)
SLOW = "xla"  # where another candidate runs: it takes seconds


def problems(
    heads: Sequence[int] = HEADS, lengths: Sequence[int] = LENGTHS, tokens: int = TOKENS
) -> Iterator[AttentionProblem]:
    for head_dim in heads:
        for length in lengths:
            full = AttentionProblem(
                batch=max(1, tokens // length),
                q_len=length,
                kv_len=length,
                heads=COLUMNS // head_dim,
                kv_heads=COLUMNS // head_dim,
                head_dim=head_dim,
                dtype="bfloat16",
                scale=head_dim**-0.5,
            )
            causal = dataclasses.replace(full, is_causal=True)
            yield from (full, causal)
            for at, before in WINDOWS:
                if at == length:
                    yield dataclasses.replace(causal, window=(before, 0))
            if length >= 4096:
                yield dataclasses.replace(causal, kv_heads=causal.heads // 4)


def seen(problem: AttentionProblem) -> float:
    """The part of all scores that some rule on positions leaves."""
    p = problem
    left, right = p.window or (None, None)
    if p.is_causal:
        right = 0 if right is None else min(right, 0)
    keys = KeyInterval(kv_len=p.kv_len, limit=p.kv_len, left=left, right=right)
    pairs = sum(max(0, keys.end(q) - keys.begin(q)) for q in range(p.q_len))
    return pairs / (p.q_len * p.kv_len)


def measured(problem: AttentionProblem, rounds: int) -> list[dict[str, Any]]:
    """A row for each candidate, raced with the others."""
    decision = decide(diagnose(problem, local_device()))
    others = [c for c in decision.heroes if c.variant != SLOW]
    choices: list[Choice] = others or list(decision.heroes)
    operands = workload.operands(problem, seed=1)
    calls: dict[str, common.Call] = {}
    for choice in choices:
        run = functools.partial(workload.execute, problem=problem, choice=choice)
        calls[choice.variant] = functools.partial(jax.jit(run), *operands)
    times = common.race(calls, rounds)
    us = {name: statistics.median(values) for name, values in times.items()}
    flops = problem.flops * seen(problem)
    return [
        {
            "problem": problem.to_json(),
            "text": str(problem),
            "variant": choice.variant,
            "config": str(choice.config),
            "is_default": choice == decision.choice,
            "time_us": us[choice.variant],
            "tflops": flops / us[choice.variant] * 1e-6,
            "ratio": min(us.values()) / us[choice.variant],
        }
        for choice in choices
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--heads", type=int, nargs="*", default=HEADS)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for problem in problems(args.heads, args.lengths, args.tokens):
        rows += measured(problem, args.rounds)
        common.save("attention", rows, args)
    print(render(rows))
    print(common.save("attention", rows, args))


def render(rows: list[dict[str, Any]]) -> str:
    head = ("problem", "by", "us", "TFLOP/s", "fastest/it", "")
    cells = [
        (
            row["text"],
            f"{row['variant']} {row['config']}",
            f"{row['time_us']:.1f}",
            f"{row['tflops']:.3g}",
            f"{row['ratio']:.3f}",
            "default" if row["is_default"] else "",
        )
        for row in rows
    ]
    return common.table(head, cells)


if __name__ == "__main__":
    main()

"""Attention against cuDNN and XLA: python benchmarks/bench_attention.py --suite NAME

forward   16384 tokens of 2048 columns in heads of several sizes, full and causal
backward  the same with gradients, and gradients alone
masks     documents, windows, a bias, soft caps, sinks, blocks
decode    one query of each sequence against a long cache, and a copy's bandwidth
peers     the forward pass beside that of Pallas Mosaic GPU's example
memory    bytes that XLA plans for long sequences, and the most that were in use

Peers are ``jax.nn.dot_product_attention`` with its implementations by name. "Ours" is
our kernel by name, the default what runs unmeasured. bfloat16, random normal inputs,
kernel times on a GPU in turns, ratios as medians over the rounds. Operations of scores
that no query sees are not counted. Results are saved after every case.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attention_memory
import common
import jax
from attention_sides import Case, Side
from attention_suite import (
    BARS,
    BESIDES_US,
    PER_BLOCK_OF_SCORES,
    SUITES,
    suite,
)
from attention_tables import FIGURES
from bench_matmul import copy_gbs, render_groups
from matmul_suite import Row, summary

_ENTRY = re.compile(r'entry = "(\w+)"')
_PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # in operations


def lowered(case: Case, side: Side) -> tuple[Any, list[Any]]:
    """(the program, sets of its operands)."""
    if case.passes == "forward":
        run, sets = side.run, list(side.sets)
    else:
        forward = jax.jit(functools.partial(_forward, side.run, case.differentiated))
        o = jax.eval_shape(forward, *side.sets[0])[0]
        do = jax.jit(lambda: jax.random.normal(jax.random.key(7), o.shape, o.dtype))()
        run = functools.partial(_both, side.run, case.differentiated)
        sets = [(do, *operands) for operands in side.sets]
        if case.passes == "backward":
            run = _backward
            sets = [(do, forward(*operands)[1]) for operands in side.sets]
    return jax.jit(run).lower(*sets[0]), sets


def _forward(run: Callable[..., Any], count: int, *operands: Any) -> tuple[Any, Any]:
    rest = operands[count:]
    return jax.vjp(lambda *x: run(*x, *rest), *operands[:count])


def _both(run: Callable[..., Any], count: int, do: Any, *operands: Any) -> Any:
    o, pull = _forward(run, count, *operands)
    return o, pull(do)


def _backward(do: Any, pull: Callable[..., Any]) -> Any:
    return pull(do)


def measured(case: Case, rounds: int) -> Row:
    """Races the sides of a case. Sides that are one program race once."""
    programs: dict[str, str] = {}
    same: dict[str, str] = {}
    sides: dict[str, tuple[Any, list[Any]]] = {}
    with warnings.catch_warnings():
        # A kernel that cannot be compiled would be replaced by XLA, under our name.
        warnings.filterwarnings("error", message=".*is left to XLA")
        for name, side in case.sides().items():
            program, sets = lowered(case, side)
            text = program.as_text()
            twin = next((n for n, p in programs.items() if p == text), name)
            programs[name], same[name] = text, twin
            if twin == name:
                sides[name] = program, sets
    with concurrent.futures.ThreadPoolExecutor(len(sides)) as pool:
        made = pool.map(lambda side: side[0].compile(), sides.values())
        calls: dict[str, common.Call] = {
            name: functools.partial(_next, executable, itertools.cycle(sets))
            for (name, (_, sets)), executable in zip(sides.items(), made, strict=True)
        }
    raced = common.race(calls, rounds)
    times = {name: raced[twin] for name, twin in same.items()}
    us = {name: statistics.median(values) for name, values in times.items()}
    return {
        "problem": case.problem.to_json(),
        "text": case.text,
        "passes": case.passes,
        "kernels": list(dict.fromkeys(_ENTRY.findall(programs["ours"]))),
        "default_is": _who(same["default"], programs["default"]),
        "us": us,
        "own_us": us["ours"],
        **_ratios(case, times, us),
    }


def _next(executable: Callable[..., Any], sets: itertools.cycle[Any]) -> Any:
    return executable(*next(sets))


def _who(twin: str, program: str) -> str:
    if twin != "default":
        return twin
    if "__cudnn$" in program:
        return "cudnn"
    return "another kernel of ours" if _ENTRY.search(program) else "xla"


def _ratios(case: Case, times: dict[str, list[float]], us: dict[str, float]) -> Row:
    """Each peer's time divided by ours, by the peer's name, and our rates."""
    problem = case.problem
    found = {
        name: common.median_ratio(times, name, "ours")
        for name in times
        if name not in ("ours", "default")
    }
    rivals = [name for name in (*case.rivals, "xla") if name in times]
    found["ratio_default"] = min(
        common.median_ratio(times, n, "default") for n in rivals
    )
    if "dense" in found:
        allowed = PER_BLOCK_OF_SCORES * case.seen * us["dense"] + BESIDES_US
        found["allowed"] = allowed / us["ours"]
    flops = problem.flops * case.seen * _PASSES[case.passes]
    found["tflops"] = flops / us["ours"] * 1e-6
    if problem.q_len == 1:
        found["gbs"] = problem.bytes * case.seen / us["ours"] * 1e-3
        found["copy"] = found["gbs"] / copy_gbs()
    return found


def row_of(case: Case, rounds: int) -> Row:
    """The row of a case, with the error if it fails."""
    head: Row = {"group": case.group}
    try:
        return {**head, **measured(case, rounds)}
    except Exception as e:  # recorded, and the rest goes on
        error = f"{type(e).__name__}: {e}"[:1000]
        return {**head, "text": case.text, "passes": case.passes, "error": error}


def render(rows: Sequence[Row]) -> str:
    """A line for each case; ratios are of the peer's time by ours."""
    named = ("cudnn", "xla", "separate", "plain", "allowed", "copy", "mosaic")
    head = ("problem", "group", "ours us", "TFLOP/s", *named, "best/default", "")
    return common.table(head, [_cells(row, named) for row in rows])


def _cells(row: Row, named: Sequence[str]) -> tuple[str, ...]:
    if "error" in row:
        blank = ("-",) * (len(named) + 3)
        return row["text"], row["group"], *blank, row["error"].splitlines()[0]
    ratios = (f"{row[name]:.3f}" if name in row else "-" for name in named)
    default = f"{row['ratio_default']:.3f}"
    rates = f"{row['own_us']:.1f}", f"{row['tflops']:.3g}"
    return row["text"], row["group"], *rates, *ratios, default, row["default_is"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--suite", choices=(*SUITES, "memory"), required=True)
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups")
    parser.add_argument("--quick", action="store_true", help="one case of each group")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    name = f"attention_{args.suite}"
    if args.suite == "memory":
        rows = attention_memory.rows()
        print(attention_memory.render(rows))
        print(common.save(name, rows, args))
        return
    rows: list[Row] = []
    cases = [c for c in suite(args.suite) if args.only is None or c.group in args.only]
    if args.quick:
        cases = list({case.group: case for case in reversed(cases)}.values())[::-1]
    for case in cases:
        rows.append(row_of(case, args.rounds))
        print(render(rows[-1:]).splitlines()[-1], flush=True)
        path = common.save(name, rows, args, groups=summary(rows, BARS, FIGURES))
    print(render(rows))
    print(path)
    print(render_groups(summary(rows, BARS, FIGURES), FIGURES))


if __name__ == "__main__":
    main()

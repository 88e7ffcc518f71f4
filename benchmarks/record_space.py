"""Every legal config of gemm_sm90 on a few shapes: python record_space.py

On the table, a tuner is replayed and compared with the true best config of each shape.
Needs a GPU of compute capability 9.0. The configs' kernels do not depend on the shape
and are compiled once. Times are of kernels alone, from the profiler. Many configs are
launched in one program, in another order in each pass, and their inputs leave the L2
cache in between. Because the clock rate drifts, each time is divided by the time of one
reference config in the same program.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

# CUDA graphs would run the launches of one program side by side.
os.environ["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer= " + os.environ.get(
    "XLA_FLAGS", ""
)

import common
import jax

from tracea_jax.campaign import local_device
from tracea_jax.emit.gemm_sm90_kernel import entry_name
from tracea_jax.ops.common import kernel_time
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.options import current
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

SHAPES = (  # m, n, k: squares, an MLP, decoding, a long sum, edges that divide no tile
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 11008, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (256, 4096, 4096),
    (2048, 2048, 65536),
    (4095, 4104, 4088),
)
TOGETHER_BYTES = 4 << 30  # results of one program
MOST_TOGETHER = 64  # launches of one program, besides those of the reference

Times = dict[Any, list[float]]  # microseconds of each config, relative to the reference


def problem_of(shape: tuple[int, int, int]) -> GemmProblem:
    m, n, k = shape
    return GemmProblem(m=m, n=n, k=k, lhs="bfloat16", rhs="bfloat16", out="bfloat16")


def compile_all(configs: Sequence[Any], problem: GemmProblem) -> dict[Any, str]:
    """Compiles every config into the store, in parallel; the failures by config."""
    device, directory = local_device(), current().directory
    workers = max(1, (os.cpu_count() or 2) - 1)
    pool = CompilePool(directory, workers=workers)
    futures = {c: pool.submit(GEMM_SM90.call(problem, c, device)) for c in configs}
    concurrent.futures.wait(futures.values())
    errors = {c: future.exception() for c, future in futures.items()}
    pool.close()
    return {c: str(e)[:200] for c, e in errors.items() if e is not None}


def measure(
    problem: GemmProblem, configs: Sequence[Any], passes: int, repeats: int
) -> tuple[Times, list[float]]:
    """Relative times of every config, and the reference's own times."""
    reference = GEMM_SM90.heuristic(problem, local_device())
    bytes_each = 2 * problem.m * problem.n
    together = max(1, min(MOST_TOGETHER, TOGETHER_BYTES // bytes_each))
    sets = 1 + 2 * local_device().l2_bytes // problem.bytes
    operands = [matmul_workload.operands(problem, seed) for seed in range(sets)]
    times: Times = collections.defaultdict(list)
    level: list[float] = []
    for number in range(passes):
        order = [c for c in configs if c != reference]
        random.Random(number).shuffle(order)
        for group in _groups(order, together):
            base, found = _run(problem, operands, [reference, *group], repeats)
            level.append(base)
            times[reference].append(1.0)
            for config, us in found.items():
                times[config].append(us / base)
    return times, level


def _groups(order: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _run(
    problem: GemmProblem, operands: list[Any], group: Sequence[Any], repeats: int
) -> tuple[float, dict[Any, float]]:
    """Medians in microseconds: of the first config, and of each other one."""

    def launches(operands: list[Any]) -> list[Any]:
        results = []
        for config, x in zip(group, itertools.cycle(operands), strict=False):
            choice = Choice(variant="gemm_sm90", config=config)
            results += matmul_workload.execute(*x, problem=problem, choice=choice)
        return [r[:1, :1] for r in results]

    call = jax.jit(launches).lower(operands).compile()
    jax.block_until_ready(call(operands))
    names = {entry_name(problem, c): c for c in group}
    durations = _profiled(lambda: call(operands), repeats)
    found: dict[Any, list[float]] = collections.defaultdict(list)
    for name, us in durations:
        if name in names:
            found[names[name]].append(us)
    if any(len(found[c]) != repeats for c in group):
        raise RuntimeError(f"the profiler missed launches of {problem}")
    medians = {c: statistics.median(us) for c, us in found.items()}
    return medians[group[0]], {c: medians[c] for c in group[1:]}


def _profiled(call: Any, repeats: int) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel of some calls."""
    return [
        (event.name, event.duration_ns * 1e-3)
        for plane in kernel_time.profiled([call] * repeats).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def row(problem: GemmProblem, times: Times, level: list[float]) -> dict[str, Any]:
    """A shape's table: the reference's time, and a line with each config's ratio."""
    us = statistics.median(level)
    lines = [
        (*dataclasses.astuple(config), f"{statistics.median(ratios):.4f}")
        for config, ratios in times.items()
    ]
    return {
        "problem": problem.to_json(),
        "reference_us": us,
        "reference_spread": statistics.pstdev(level) / us,
        "fields": [f.name for f in dataclasses.fields(GEMM_SM90.config_type)],
        "configs": [",".join(map(str, line)) for line in sorted(lines)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, help="configs of each shape, to try it")
    parser.add_argument("--budget-s", type=float, default=math.inf)
    common.add_arguments(parser)
    args = parser.parse_args()
    problems = [problem_of(shape) for shape in SHAPES]
    device = local_device()
    spaces = {p: GEMM_SM90.space(p, device).configs()[: args.limit] for p in problems}
    everything = tuple(dict.fromkeys(c for cs in spaces.values() for c in cs))
    start = time.perf_counter()
    failures = compile_all(everything, problems[0])
    print(f"{len(everything)} kernels, {time.perf_counter() - start:.0f} s", flush=True)
    for config, why in failures.items():
        print(f"failed: {config}: {why}", flush=True)
    rows = []
    for problem in problems:
        if time.perf_counter() - start > args.budget_s:
            print(f"no time is left for {problem}")
            break
        configs = [c for c in spaces[problem] if c not in failures]
        times, level = measure(problem, configs, args.passes, args.repeats)
        rows.append(row(problem, times, level))
        config, best = min(times.items(), key=lambda item: statistics.median(item[1]))
        print(
            f"{problem}: {len(times)} configs, heuristic {statistics.median(level):.1f}"
            f" us, best {statistics.median(best):.4f} of it [{config}], "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
        common.save("space_gemm_sm90", rows, args)


if __name__ == "__main__":
    main()

"""Times of answers and listings of the tuning cache, against their bars.

    python benchmarks/bench_cache.py [--entries 5000] [--out DIRECTORY]

The cache is made up: products of many shapes with as many observations as a tuning of
the CPU kernel leaves. Medians of wall-clock time:

    in process     a lookup of a problem asked before, by an equal but different object
    from disk      the first lookup of a problem
    file evicted   the first lookup after the system dropped the file from its memory,
                   where the system can do so
    unseen         a shape that was never tuned, answered from its neighbours
    first unseen   the first lookup of such a shape, which reads all heads

Listing is timed with and without the start of the interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import common

from tracea_jax.cli import main as tracea
from tracea_jax.device import local_cpu
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.gemm_cpu import GEMM_CPU

_OBSERVATIONS = 64  # of an entry, at most
_FINALISTS = 8
_SAMPLE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--entries", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        problems = fill(pathlib.Path(directory), args.entries)
        rows = list(measured(pathlib.Path(directory), problems))
    rows = [{**row, "entries": args.entries} for row in rows]
    path = common.save("cache", rows, args)
    body = [
        (r["name"], f"{r['time_us']:.2f}", f"{r['bar_us']:.0f}" if r["bar_us"] else "-")
        for r in rows
    ]
    print(common.table(("what", "us", "bar"), body))
    print(path)


def fill(directory: pathlib.Path, count: int) -> list[GemmProblem]:
    """Writes entries of distinct problems, as a tuning would."""
    draw = random.Random(0)
    problems: dict[GemmProblem, None] = {}
    while len(problems) < count:
        m, n, k = (8 * draw.randrange(1, 512) for _ in range(3))
        problems[GemmProblem(m=m, n=n, k=k)] = None
    store = Store(directory / "tuned")
    for problem in problems:
        entry = made_up(problem, draw)
        path = store.path(Name.of(entry.problem, entry.environment.key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.to_bytes())
    return list(problems)


def made_up(problem: GemmProblem, draw: random.Random) -> Entry:
    configs = GEMM_CPU.space(problem, local_cpu()).configs()
    configs = draw.sample(configs, min(_OBSERVATIONS, len(configs)))
    times = sorted(problem.flops / 1e5 * draw.uniform(1, 2) for _ in configs)
    observations = [
        Observation(
            **named(problem, Choice(variant="gemm_cpu", config=config), local_cpu()),
            time_us=time_us,
            repeats=100,
            extra={"protocol": "race" if i < _FINALISTS else "steady", "spread": 0.01},
        )
        for i, (config, time_us) in enumerate(zip(configs, times, strict=True))
    ]
    best = observations[0]
    observations.sort(key=lambda o: o.identity)
    return Entry(
        problem=problem.to_json(),
        environment=environment(local_cpu()),
        best=Best(
            variant=best.variant,
            config=best.config,
            code=best.code,
            time_us=best.time_us,
            xla_us=problem.flops / 1e5 * 1.5,
            ratio=1.2,
        ),
        observations=tuple(observations),
        written="2026-01-01T00:00:00.000000+00:00",
    )


def measured(
    directory: pathlib.Path, problems: list[GemmProblem]
) -> Iterator[dict[str, Any]]:
    """Rows of (name, time, bar), time and bar in microseconds."""
    device = local_cpu()
    asked = random.Random(1).sample(problems, min(_SAMPLE, len(problems)))
    knowledge = Knowledge(directory)
    first = timed(lambda p: knowledge.lookup(p, device), asked)
    again = [GemmProblem.from_json(p.to_json()) for p in asked]
    rounds = [timed(lambda p: knowledge.lookup(p, device), again) for _ in range(15)]
    yield row("lookup in process", min(rounds), 2.0)
    yield row("lookup from disk", first, 200.0)
    if (evicted := from_cold_files(directory, asked)) is not None:
        yield row("lookup from disk, file evicted", evicted, None)
    unseen = [dataclasses.replace(p, m=p.m + 1) for p in asked]
    yield row(
        "first unseen", timed(lambda p: knowledge.lookup(p, device), unseen[:1]), None
    )
    yield row("unseen", timed(lambda p: knowledge.lookup(p, device), unseen[1:]), None)
    yield row("list, interpreter running", listing(directory, in_process=True), 5e5)
    yield row("list, with its start", listing(directory, in_process=False), None)
    yield row("start of the interpreter", started("import tracea_jax.options"), None)


def row(name: str, time_us: float, bar_us: float | None) -> dict[str, Any]:
    meets = None if bar_us is None else time_us < bar_us
    return {"name": name, "time_us": time_us, "bar_us": bar_us, "meets": meets}


def timed(call: Callable[[Any], Any], arguments: list[Any]) -> float:
    """Median microseconds of a call, over one call with each argument."""
    times = []
    for argument in arguments:
        start = time.perf_counter_ns()
        call(argument)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def from_cold_files(
    directory: pathlib.Path, problems: list[GemmProblem]
) -> float | None:
    """Times of first lookups after files left memory; None if the system keeps them."""
    if not hasattr(os, "posix_fadvise"):
        return None
    os.sync()  # the system drops only data that are written
    for path in directory.glob("tuned/*/*/*.json"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    knowledge = Knowledge(directory)
    return timed(lambda p: knowledge.lookup(p, local_cpu()), problems)


def listing(directory: pathlib.Path, *, in_process: bool) -> float:
    """Median microseconds of ``tracea cache list``, its output thrown away."""
    os.environ["TRACEA_CACHE_DIR"] = str(directory)
    command = ["cache", "list"]
    if not in_process:
        return ran([sys.executable, "-m", "tracea_jax", *command])
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return timed(lambda _: tracea(command), list(range(5)))


def started(program: str) -> float:
    """Median microseconds of a program in a new interpreter."""
    return ran([sys.executable, "-c", program])


def ran(command: list[str]) -> float:
    def run(_: int) -> None:
        subprocess.run(command, check=True, capture_output=True)

    return timed(run, list(range(5)))


if __name__ == "__main__":
    main()

"""Code that all benchmarks share: interleaved timing, the environment, result files.

A result is one JSON file for each benchmark and device,
``results/<device>/<benchmark>.json``: {"environment": {...}, "rows": [...]}. Rows are
plain data. A ratio is the peer's time divided by ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import statistics
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from tracea_jax import roofline
from tracea_jax.campaign import local_device, tune
from tracea_jax.device import CudaDevice, cuda_driver_version
from tracea_jax.graph import Graph
from tracea_jax.ops.common.kernel_time import (
    Call,
    ProfileError,
    kernel_spans,
    kernel_times,
)
from tracea_jax.problem import Problem
from tracea_jax.runtime import nvrtc
from tracea_jax.tuning import measure

ROOT = pathlib.Path(__file__).resolve().parent
RESULTS = ROOT / "results"
Name = TypeVar("Name", bound=Hashable)


def race(calls: dict[Name, Call], rounds: int = 15) -> dict[Name, list[float]]:
    """Microseconds of each call in every round, taken in turns.

    On a GPU a time is the sum of kernel times, from the profiler. On a CPU it is
    wall-clock time, of slices long enough to be timed well.
    """
    if isinstance(local_device(), CudaDevice):
        for call in calls.values():
            for _ in range(3):
                jax.block_until_ready(call())
        names = list(calls)
        first = [i % len(names) for i in range(rounds)]
        turns = [name for i in first for name in (*names[i:], *names[:i])]
        try:
            spans = kernel_spans([calls[name] for name in turns])
        except ProfileError:
            return kernel_times(calls, rounds)
        times: dict[Name, list[float]] = {name: [] for name in calls}
        for name, us in zip(turns, spans, strict=True):
            times[name].append(us)
        return times
    runs = {name: repeating(call) for name, call in calls.items()}
    timing = measure.Timing(slice_s=0.05, rounds=rounds, max_rounds=rounds)
    result = measure.race(runs, timing)
    for error in result.failures.values():
        raise error
    return {name: list(times) for name, times in result.times_us.items()}


def median_ratio(
    times: Mapping[Any, Sequence[float]], slow: Hashable, fast: Hashable
) -> float:
    """Median over the rounds of slow's time divided by fast's."""
    pairs = zip(times[slow], times[fast], strict=True)
    return statistics.median(s / f for s, f in pairs)


def tune_together(
    problems: Sequence[Problem], *, budget_s: float, **how: Any
) -> dict[Problem, str]:
    """Tunes problems in one campaign, in which each problem is worth the same.

    One campaign starts only one child process. If the campaign fails as a whole, the
    problems are tuned one by one, each with its share of the time.

    Args:
      problems: at least one.
      budget_s: seconds for all problems together.
      **how: effort, goal of ``tune``.

    Returns:
      The problems that have no answer in the end, and why.
    """
    graph = Graph()
    floors = {p: roofline.floor_us(p, local_device()) or 1.0 for p in problems}
    for problem, floor in floors.items():
        # Each problem gets so many runs that all problems take equally long, so that
        # large ones are not preferred. The largest gets ten, as numbers are whole.
        graph.add(problem, max(1, round(10 * max(floors.values()) / floor)))
    try:
        report = tune(graph, budget_s=budget_s, **how)
    except Exception as e:  # whatever a kernel does must not end the run
        if len(problems) == 1:
            return {problems[0]: f"{type(e).__name__}: {e}"}
        share_s = budget_s / len(problems)
        alone = (tune_together([p], budget_s=share_s, **how) for p in problems)
        return {problem: why for found in alone for problem, why in found.items()}
    untuned = {row.problem: row.stop for row in report.rows if row.entry is None}
    return {problem: untuned[problem] for problem in problems if problem in untuned}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every program writing results takes."""
    parser.add_argument("--out", type=pathlib.Path, help="instead of results/")
    parser.add_argument("--commit", help="what is measured, if this is no repository")


def environment(commit: str | None = None) -> dict[str, Any]:
    """The device, versions and commit that a result belongs to."""
    device = local_device()
    packages = ("tracea_jax", "jax", "jaxlib", "numpy")
    return {
        "device": device.name,
        "arch": device.arch,
        "units": getattr(device, "sm_count", None) or getattr(device, "cores", None),
        "driver": cuda_driver_version() if isinstance(device, CudaDevice) else None,
        "nvrtc": nvrtc.version() if isinstance(device, CudaDevice) else None,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save(
    benchmark: str,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
    **more: Any,
) -> pathlib.Path:
    """Writes a result file, as the common arguments say, and returns its path.

    The file is replaced atomically: a benchmark that is killed leaves a valid file.

    Args:
      benchmark, rows: name and content.
      args: the common arguments, which say where to write.
      **more: further entries beside "environment" and "rows".
    """
    where = environment(args.commit)
    path = _path(benchmark, where, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": where, "rows": rows, **more}, indent=1) + "\n"
    new = path.with_suffix(".tmp")
    new.write_text(text)
    new.replace(path)
    return path


def saved(benchmark: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an earlier run's file, if device, versions and commit agree."""
    where = environment(args.commit)
    path = _path(benchmark, where, args)
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    is_same = {**earlier["environment"], "date": where["date"]} == where
    return earlier["rows"] if is_same else []


def _path(
    benchmark: str, where: dict[str, Any], args: argparse.Namespace
) -> pathlib.Path:
    return (args.out or RESULTS) / slug(where["device"]) / f"{benchmark}.json"


def slug(name: str) -> str:
    """A device's name as a directory name."""
    words = re.sub(r"\([^)]*\)", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Aligned text columns, the first to the left."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(cells)
        )
        for cells in (list(zip(r, widths, strict=True)) for r in [head, *rows])
    ]
    return "\n".join(lines)


def repeating(call: Call) -> measure.Run:
    """Executions in a row, waited for at the end."""

    def run(count: int) -> None:
        result = None
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)

    return run


def _commit() -> str:
    """The commit of the working tree; "unknown" outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()

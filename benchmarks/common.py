"""What all benchmarks share: interleaved timing, the environment, result files.

A result is one JSON file for each benchmark and device,
``results/<device>/<benchmark>.json``: {"environment": {...}, "rows": [...]}. Rows are
plain data; ratios are the peer's time by ours, so above 1 ours is faster.
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
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from tracea_jax.device import CudaDevice, cuda_driver_version
from tracea_jax.graph import Graph
from tracea_jax.problem import Problem
from tracea_jax.runtime import nvrtc
from tracea_jax.tune import local_device, tune
from tracea_jax.tuning import measure, roofline

ROOT = pathlib.Path(__file__).resolve().parent
RESULTS = ROOT / "results"

_PROFILES = 3  # before it counts as failed that a profile lost something
_HOST_COPIES = ("memcpyh2d", "memcpyd2h")

Call = Callable[[], Any]  # dispatches one execution and returns its result


def race(calls: dict[str, Call], rounds: int = 15) -> dict[str, list[float]]:
    """Microseconds of each call in every round, taken in turns.

    On a GPU the sum of kernel times, from the profiler; on a CPU wall-clock time of
    slices long enough to be timed well.
    """
    if isinstance(local_device(), CudaDevice):
        return _kernel_times(calls, rounds)
    runs = {name: repeating(call) for name, call in calls.items()}
    timing = measure.Timing(slice_s=0.05, rounds=rounds, max_rounds=rounds)
    result = measure.race(runs, timing)
    for error in result.failures.values():
        raise error
    return {name: list(times) for name, times in result.times_us.items()}


def median_ratio(
    times: Mapping[Any, Sequence[float]], slow: Hashable, fast: Hashable
) -> float:
    """Median over the rounds of slow's time by fast's."""
    pairs = zip(times[slow], times[fast], strict=True)
    return statistics.median(s / f for s, f in pairs)


def tune_together(
    problems: Sequence[Problem], *, budget_s: float, **how: Any
) -> dict[Problem, str]:
    """Tunes problems, each worth the same; those without an answer then, and why.

    One tuning of all starts one child process. If it fails as a whole they are tuned
    one by one, each with its share of the time.

    Args:
      problems: at least one.
      budget_s: seconds for all.
      **how: effort, goal, progress of ``tune``.
    """
    graph = Graph()
    floors = {p: roofline.floor_us(p, local_device()) or 1.0 for p in problems}
    for problem, floor in floors.items():
        # As many runs of each as take equally long, so that large ones are not
        # preferred; ten of the largest, as numbers of runs are whole.
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
    """Device, versions and commit behind a result."""
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

    The file is replaced at once: whoever is killed while measuring leaves a valid one.

    Args:
      benchmark, rows, args: name, content, and where to.
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
    """The rows of an earlier run's file, if they can stand beside those of this one.

    That is if device, versions and commit are the same.
    """
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


def _kernel_times(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Sums of kernel durations of each call, one profile for everything.

    Calls are dispatched one at a time and waited for. Each one that counts follows an
    execution of itself that does not: what the call before left in the caches would
    favour, or slow down, whichever call always comes next. Kernels carry no name of
    their call, but each call launches the same number of them every time, which a first
    profile of each call alone tells.
    """
    for call in calls.values():
        for _ in range(3):
            jax.block_until_ready(call())
    order = [name for i in range(rounds) for name in _turned(list(calls), i)]
    for attempt in range(_PROFILES):
        counts = {name: len(_profile([call])) for name, call in calls.items()}
        durations = _profile([calls[name] for name in order for _ in range(2)])
        wanted = 2 * sum(counts[name] for name in order)
        if len(durations) == wanted:
            break
        if attempt == _PROFILES - 1:
            raise RuntimeError(
                f"the profiler saw {len(durations)} kernels, not {wanted}; {counts=}"
            )
    times: dict[str, list[float]] = {name: [] for name in calls}
    position = 0
    for name in order:
        start, end = position + counts[name], position + 2 * counts[name]
        times[name].append(sum(durations[start:end]) * 1e-3)
        position = end
    return times


def _turned(names: list[str], i: int) -> list[str]:
    return names[i % len(names) :] + names[: i % len(names)]


def _profile(calls: list[Call]) -> list[float]:
    """Durations in nanoseconds of what the calls launch, in order.

    That is kernels, and copies and fills within the device's memory.
    """
    events = [
        (event.start_ns, event.duration_ns)
        for plane in profiled(calls).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not any(name in event.name.lower() for name in _HOST_COPIES)
    ]
    return [duration for _, duration in sorted(events)]


def profiled(calls: Sequence[Call]) -> Any:
    """The ``jax.profiler.ProfileData`` of calls, made one at a time and waited for."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for call in calls:
                jax.block_until_ready(call())
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(path))


def _commit() -> str:
    """The commit of the working tree; "unknown" outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()

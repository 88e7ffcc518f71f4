"""Kernel times: how long calls keep a GPU busy, measured by JAX's profiler.

This is the time that a call costs in a program of many calls. It includes neither the
host's time to dispatch the call nor the work that a bench adds to time it. Times of
whole executions are taken in ``tuning.measure``. Callers: ``bench`` and benchmarks.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from tracea_jax.ops.common.typed import block_until_ready, full, jit, profiler

_PROFILES = 3  # attempts, as a profile may lose events
_MARK = "cbrt"  # in the name of a kernel that no call launches
_HOST_COPIES = ("memcpyh2d", "memcpyd2h")

Call = Callable[[], Any]  # dispatches one execution and returns its result
Name = TypeVar("Name")


class ProfileError(RuntimeError):
    """The profiler is not available, or its profile lacks kernels."""


def kernel_times(calls: Mapping[Name, Call], rounds: int) -> dict[Name, list[float]]:
    """Sums of kernel durations of each call in microseconds, one in each round.

    Calls are dispatched one at a time, in turns, and each is waited for. In its turn a
    call runs twice, and only the second run counts: the caches then hold what the same
    call left there, and not what another call left. Kernels carry no name of their
    call, but a call launches the same number of kernels every time. A first profile of
    each call alone shows that number.

    Raises:
      ProfileError: if no profile shows all kernels.
      Exception: any exception of a call.
    """
    for call in calls.values():
        for _ in range(3):
            block_until_ready(call())
    order = [name for i in range(rounds) for name in _turned(list(calls), i)]
    counts, durations = _complete_profile(calls, order)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    position = 0
    for name in order:
        start, end = position + counts[name], position + 2 * counts[name]
        times[name].append(sum(durations[start:end]) * 1e-3)
        position = end
    return times


def kernel_spans(turns: Sequence[Call]) -> list[float]:
    """Microseconds of kernels of each call, made in this order, from one profile.

    A mark behind each call tells calls apart. Every call runs twice in its turn, of
    which the second counts: the caches then hold what the same call left there.

    Raises:
      ProfileError: if the profile lacks kernels.
    """
    mark = functools.partial(jit(jnp.cbrt), full(7, 1.0, jnp.float32))
    block_until_ready(mark())
    steps = [step for call in turns for step in (call, mark, call, mark)]
    events = sorted(
        (event.start_ns, event.duration_ns, event.name.lower())
        for plane in profiled([mark, *steps]).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    spans: list[float] = []  # the last is behind the last mark
    for _, ns, name in events:
        if _MARK in name:
            spans.append(0.0)
        elif spans and "memcpyh2d" not in name and "memcpyd2h" not in name:
            spans[-1] += ns * 1e-3
    if len(spans) != 2 * len(turns) + 1 or not all(spans[:-1]):
        raise ProfileError(f"{len(spans)} marks, not {2 * len(turns) + 1}")
    return spans[1::2]


def _complete_profile(
    calls: Mapping[Name, Call], order: Sequence[Name]
) -> tuple[dict[Name, int], list[float]]:
    """Each call's number of kernels, and the durations of all; each call runs twice."""
    seen = ""
    for _ in range(_PROFILES):
        counts = {name: len(_profile([call])) for name, call in calls.items()}
        durations = _profile([calls[name] for name in order for _ in range(2)])
        wanted = 2 * sum(counts[name] for name in order)
        if len(durations) == wanted and all(counts.values()):
            return counts, durations
        seen = f"{len(durations)} kernels, not {wanted}; {counts=}"
    raise ProfileError(f"the profiler saw {seen}")


def profiled(calls: Sequence[Call]) -> Any:
    """The ``jax.profiler.ProfileData`` of calls, made one at a time and waited for.

    Raises:
      ProfileError: if the profiler is in use or not available, or its profile cannot be
        kept, as on a full disk.
      Exception: any exception of a call, which is no fault of the profiler.
    """
    options = profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python would only slow the host down
    with contextlib.ExitStack() as stack:
        with _profiling():
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            profiler.start_trace(directory, profiler_options=options)
        try:
            for call in calls:
                block_until_ready(call())
        except BaseException:
            with contextlib.suppress(Exception):
                profiler.stop_trace()
            raise
        with _profiling():
            profiler.stop_trace()
            (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
            return profiler.ProfileData.from_file(str(path))


@contextlib.contextmanager
def _profiling() -> Generator[None, None, None]:
    """Makes any exception a ``ProfileError``."""
    try:
        yield
    except Exception as e:
        raise ProfileError(f"{type(e).__name__}: {e}") from e


def _turned(names: list[Any], i: int) -> list[Any]:
    return names[i % len(names) :] + names[: i % len(names)]


def _profile(calls: Sequence[Call]) -> list[float]:
    """Durations in nanoseconds of all that the calls launch, in order.

    These are kernels, and copies and fills within the device's memory.
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

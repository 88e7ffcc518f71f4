"""Kernel times: how long calls keep a GPU busy, told by the profiler.

That is what a program pays for a call among others: neither what the host takes to
dispatch it nor what a bench adds in order to time it is in it.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

_PROFILES = 3  # before it counts as failed that a profile lost something
_HOST_COPIES = ("memcpyh2d", "memcpyd2h")

Call = Callable[[], Any]  # dispatches one execution and returns its result
Name = TypeVar("Name")


class ProfileError(RuntimeError):
    """The profiler cannot be had, or does not see what ran."""


def kernel_times(calls: Mapping[Name, Call], rounds: int) -> dict[Name, list[float]]:
    """Sums of kernel durations of each call in microseconds, one in each round.

    Calls are dispatched one at a time and waited for, in turns. Each one that counts
    follows an execution of itself that does not: what the call before left in the
    caches would favour, or slow down, whichever call always comes next. Kernels carry
    no name of their call, but each call launches the same number of them every time,
    which a first profile of each call alone tells.

    Raises:
      ProfileError: if no profile shows all kernels.
      Exception: what a call raises.
    """
    for call in calls.values():
        for _ in range(3):
            jax.block_until_ready(call())
    order = [name for i in range(rounds) for name in _turned(list(calls), i)]
    for attempt in range(_PROFILES):
        counts = {name: len(_profile([call])) for name, call in calls.items()}
        durations = _profile([calls[name] for name in order for _ in range(2)])
        wanted = 2 * sum(counts[name] for name in order)
        if len(durations) == wanted and all(counts.values()):
            break
        if attempt == _PROFILES - 1:
            raise ProfileError(
                f"the profiler saw {len(durations)} kernels, not {wanted}; {counts=}"
            )
    times: dict[Name, list[float]] = {name: [] for name in calls}
    position = 0
    for name in order:
        start, end = position + counts[name], position + 2 * counts[name]
        times[name].append(sum(durations[start:end]) * 1e-3)
        position = end
    return times


def profiled(calls: Sequence[Call]) -> Any:
    """The ``jax.profiler.ProfileData`` of calls, made one at a time and waited for.

    Raises:
      ProfileError: if the profiler is in use, or not to be had.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would only slow the host down
    with tempfile.TemporaryDirectory() as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
        except Exception as e:
            raise ProfileError(f"{type(e).__name__}: {e}") from e
        try:
            for call in calls:
                jax.block_until_ready(call())
        finally:
            jax.profiler.stop_trace()
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(path))


def _turned(names: list[Any], i: int) -> list[Any]:
    return names[i % len(names) :] + names[: i % len(names)]


def _profile(calls: Sequence[Call]) -> list[float]:
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

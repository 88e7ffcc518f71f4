"""Measuring: one candidate by slices, several in a race, one process at a time.

    slices   the protocol (``Timing``), and one candidate measured alone (``time_us``)
    race     several candidates measured in turns
    bench    what an op provides so that its candidates can be run and verified

Who wins a race is decided in ``tuning.select``. Callers: tuning/lab, tuner and session,
ops/common/bench, demo and benchmarks.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Iterator

from tracea_jax.device import Device
from tracea_jax.runtime import trust
from tracea_jax.tuning.measure.bench import (
    Bench,
    CandidateError,
    Flush,
    Run,
    Verification,
    batch_of,
    candidate_error,
    flush_of,
    kernel_times_of,
)
from tracea_jax.tuning.measure.race import PROTOCOLS, QUIET, Race, race
from tracea_jax.tuning.measure.slices import (
    Reference,
    Sample,
    Timing,
    calibrate,
    cold_us,
    relative_deviation,
    settle,
    slice_us,
    time_us,
)
from tracea_jax.tuning.store import files


@contextlib.contextmanager
def exclusive(
    directory: pathlib.Path | None,
    device: Device,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[bool]:
    """Keeps other tuning processes of this cache from measuring on the device.

    Two devices of the same name share the lock. If the directory is None or cannot be
    written, there is no lock, and several processes may measure at once.

    Args:
      directory: the cache directory.
      device: the device about to be measured.
      on_wait: called once if another process is measuring.

    Yields:
      Whether the lock is held.
    """
    name = hashlib.sha256(device.name.encode()).hexdigest()[:12]
    with contextlib.ExitStack() as stack:
        held = False
        if directory is not None:
            with contextlib.suppress(OSError):
                trust.make_private_directory(directory)
                trust.check(directory)
                path = directory / f"measure-{name}.lock"
                held = stack.enter_context(files.locked(path, on_wait))
        yield held


__all__ = [
    "PROTOCOLS",
    "QUIET",
    "Bench",
    "CandidateError",
    "Flush",
    "Race",
    "Reference",
    "Run",
    "Sample",
    "Timing",
    "Verification",
    "batch_of",
    "calibrate",
    "candidate_error",
    "cold_us",
    "exclusive",
    "flush_of",
    "kernel_times_of",
    "race",
    "relative_deviation",
    "settle",
    "slice_us",
    "time_us",
]

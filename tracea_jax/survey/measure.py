"""The row of a problem: its candidates, measured in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tracea_jax.device import CudaDevice, Device, to_json
from tracea_jax.policy import Choice
from tracea_jax.runtime import nvrtc, versions
from tracea_jax.survey import programs
from tracea_jax.survey.problems import Numbered
from tracea_jax.survey.rows import Candidate, Row, Time, slim
from tracea_jax.tuning.measure import CandidateError, Race, Run, Timing, race
from tracea_jax.tuning.store.code import code_of

# Many short turns: a disturbance spoils few of them, and ends none of the others'.
TIMING = Timing(
    slice_s=0.004, rounds=7, max_rounds=7, race_limit_s=0.6, min_rounds=4, race_s=0.0
)
Exclusive = Callable[[], contextlib.AbstractContextManager[Any]]


def measured(
    numbered: Numbered,
    choices: Sequence[Choice],
    device: Device,
    *,
    timing: Timing = TIMING,
    exclusive: Exclusive = contextlib.nullcontext,
) -> Row:
    """Measures the choices on a CPU; a choice that fails has no time.

    Args:
      numbered: the problem.
      choices: see ``candidates``.
      device: the local device.
      timing: the protocol of the race.
      exclusive: entered while something is timed, see ``measure.exclusive``.
    """
    found = programs.prepared(numbered.problem, choices, device)
    runs: dict[Choice, Run] = {}
    failed: dict[Choice, str] = {}
    for choice, run in found.items():
        if isinstance(run, CandidateError):
            failed[choice] = run.kind
        else:
            runs[choice] = run
    with exclusive():
        raced = race(runs, timing)
    failed |= dict.fromkeys(raced.failures, "launch_error")
    return row_of(numbered, raced, failed, device)


def row_of(
    numbered: Numbered, raced: Race, failed: dict[Choice, str], device: Device
) -> Row:
    """The row of a race."""
    problem = numbered.problem
    candidates = {
        choice: Candidate(
            variant=choice.variant,
            config=tuple(dataclasses.asdict(choice.config).items()),
            code=code_of(problem, choice, device),
        )
        for choice in (*raced.times_us, *failed)
    }
    times = [
        Time(
            choice=candidates[choice],
            time_us=raced.level_us(choice),
            spread=_spread(raced, choice),
        )
        for choice in raced.times_us
    ]
    return Row(
        index=numbered.index,
        seed=numbered.seed,
        problem=slim(problem),
        device=to_json(device),
        versions=_versions(device),
        rounds=raced.rounds,
        times=tuple(times),
        failed=tuple((candidates[choice], kind) for choice, kind in failed.items()),
    )


def _spread(raced: Race, choice: Choice) -> float:
    error = raced.relative_error(choice)
    return error if math.isfinite(error) else 1.0


def _versions(device: Device) -> dict[str, str]:
    found = versions.installed(is_cuda=(is_cuda := isinstance(device, CudaDevice)))
    return {**found, "nvrtc": nvrtc.version() or ""} if is_cuda else dict(found)

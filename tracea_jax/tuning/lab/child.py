"""A lab in a disposable child process, which owns the device's context.

    python -m tracea_jax.tuning.lab.child   the child's program

A choice that aborts, hangs, or leaves the context unusable fails and costs a new child;
the tuning goes on. A child keeps what it compiled and is reused while it works. This
module is the parent's side; the child's side is ``child_server``. The caller is
``knowledge``, which opens a lab for a tuning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab import child_server
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.lab.local import (
    Exclusive,
    LabError,
    OnRound,
    lost_device,
    xla_choice,
)
from tracea_jax.tuning.lab.serving import Tell
from tracea_jax.tuning.lab.worker import Worker, WorkerHung, WorkerLost
from tracea_jax.tuning.measure import (
    CandidateError,
    Race,
    Sample,
    Timing,
    Verification,
)

PROGRAM = ("-m", "tracea_jax.tuning.lab.child")
FACTORY = "tracea_jax.knowledge:bench_of"  # makes the benches of all ops
_TRIES = 3  # of a question, if each child dies before it begins to answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which a child is taken for hung, for each step of its work.

    Attributes:
      start_s: importing JAX, opening the device.
      prepare_s: compiling a choice and making its inputs.
      run_s: a measurement, besides the time of the protocol and of a slow choice.
      verify_s: running a choice and computing the reference.
      slowdown: how many times slower than the slowest measured choice a choice may be.
    """

    start_s: float = 180.0
    prepare_s: float = 300.0
    run_s: float = 60.0
    verify_s: float = 600.0
    slowdown: float = 100.0


class ChildLab:
    """A lab in a child process; see ``local.Lab``."""

    def __init__(
        self,
        factory: str,
        device: Device,
        timing: Timing | None = None,
        *,
        directory: pathlib.Path | None = None,
        environment: Mapping[str, str] | None = None,
        exclusive: Exclusive = contextlib.nullcontext,
        limits: Limits | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
          factory: "module:function"; (problem, device) -> bench, imported in the child.
          device: the local device; the child opens its own context of the device.
          timing: the measuring protocol.
          directory: the cache directory, into which kernels for a GPU are compiled
            ahead. None: the child uses its default, and nothing is compiled ahead.
          environment: variables of the child that differ from this process's.
          exclusive: entered while something is timed, see ``measure.exclusive``.
          limits: when the child is taken for hung.
        """
        self._factory = factory
        self._device = device
        self._timing = timing or Timing()
        self._environment = {**os.environ, **_environment(device, directory)}
        self._environment.update(environment or {})
        self._exclusive = exclusive
        self._limits = limits or Limits()
        is_gpu = isinstance(device, CudaDevice)
        pool = CompilePool(directory) if is_gpu and directory is not None else None
        self._ahead = Ahead(pool, device)
        self._child: Worker | None = None
        self._slowest_s = 0.0  # longest execution measured so far
        # After the loss of a child: the choice to blame, if any, and its failure.
        self._suspect: tuple[Choice | None, CandidateError | None] | None = None

    def compile(self, problem: Problem, choices: Sequence[Choice]) -> None:
        self._ahead.start(problem, choices)

    def sample(
        self, problem: Problem, choice: Choice, *, incumbent_us: float | None = None
    ) -> Sample:
        prepare_s = self._prepare(problem, choice)
        try:
            with self._exclusive():
                limit_s = self._run_limit_s()
                sample = self._ask(limit_s, "sample", problem, choice, incumbent_us)
        except _ChildLost as e:
            raise self._blame(choice, e) from e
        self._slowest_s = max(self._slowest_s, sample.time_us * 1e-6)
        return dataclasses.replace(sample, prepare_s=prepare_s)

    def verify(self, problem: Problem, choice: Choice) -> Verification:
        try:
            return self._ask(self._limits.verify_s, "verify", problem, choice)
        except _ChildLost as e:
            raise self._blame(choice, e) from e

    def race(
        self,
        problem: Problem,
        choices: Sequence[Choice],
        *,
        limit_s: float = math.inf,
        known_us: Mapping[Choice, float] | None = None,
        is_heat: bool = False,
        on_round: OnRound = lambda done, total: None,
    ) -> Race:
        failures: dict[Choice, CandidateError] = {}
        for choice in choices:
            try:
                self._prepare(problem, choice)
            except CandidateError as e:
                failures[choice] = e
        # If a choice ends the child, the others race again without that choice.
        while left := tuple(c for c in choices if c not in failures):
            racing = left[0]

            def on_event(event: tuple[Any, ...]) -> None:
                nonlocal racing
                if event[0] == "turn":
                    racing = left[event[1]]  # noqa: B023  called within this iteration
                else:
                    on_round(*event[1:])

            try:
                with self._exclusive():
                    race = self._ask(
                        self._run_limit_s(),
                        "race",
                        problem,
                        left,
                        limit_s,
                        known_us,
                        is_heat,
                        on_event=on_event,
                    )
            except _ChildLost as e:
                failures[e.choice or racing] = self._blame(racing, e)
            else:
                return dataclasses.replace(race, failures=failures | race.failures)
        return Race(times_us={}, repeats={}, failures=dict(failures))

    def kernel_race(self, problem: Problem, choices: Sequence[Choice]) -> Race:
        for choice in choices:
            self._prepare(problem, choice)
        try:
            with self._exclusive():
                limit_s = self._run_limit_s()
                return self._ask(limit_s, "kernel_race", problem, tuple(choices))
        except _ChildLost as e:
            raise self._blame(choices[0], e) from e

    def start(self, problem: Problem) -> None:
        """Starts the child and lets it run XLA's code.

        Raises:
          LabError: if the child cannot do so, as on a GPU that admits one process only.
        """
        self._suspect = self._suspect or (None, None)
        self._ready(problem)

    def close(self) -> None:
        self._end_child()
        self._ahead.close()

    def _prepare(self, problem: Problem, choice: Choice) -> float:
        self._ahead.wait(problem, choice)
        try:
            return self._ask(self._limits.prepare_s, "prepare", problem, choice)
        except _ChildLost as e:
            raise self._blame(choice, e) from e

    def _ask(
        self,
        limit_s: float,
        method: str,
        problem: Problem,
        *arguments: Any,
        on_event: Tell = lambda event: None,
    ) -> Any:
        """The answer of the child's lab.

        Raises:
          _ChildLost: if the question made the child unusable.
          CandidateError, LabError, ValueError: as a lab in this process raises them.
        """
        for _ in range(_TRIES):
            child = self._ready(problem)
            try:
                return child.ask((method, problem, *arguments), limit_s, on_event)
            except LabError as e:  # the context is lost; a new child has a new one
                assert e.failure is not None
                raise _ChildLost(e.failure, e.choice) from e
            except WorkerLost as e:
                if e.began:
                    kind = "compile_error" if method == "prepare" else "launch_error"
                    kind = "timeout" if isinstance(e, WorkerHung) else kind
                    raise _ChildLost(CandidateError(kind, f"{method}: {e}")) from e
                self._suspect = (None, None)
        raise LabError(f"child processes end before they have begun, {_TRIES} times")

    def _blame(self, choice: Choice, lost: _ChildLost) -> CandidateError:
        """Ends the child; the next one must first show that the device still works."""
        self._end_child()
        self._suspect = (lost.choice or choice, lost.failure)
        return lost.failure

    def _ready(self, problem: Problem) -> Worker:
        """A child that is alive; after a loss, one that has run XLA's code."""
        child = self._child
        if child is None or not child.is_alive:
            if child is not None:
                self._suspect = self._suspect or (None, None)  # no choice is to blame
            self._end_child()
            self._child = child = self._started()
        if self._suspect is not None:
            choice, failure = self._suspect
            if choice != xla_choice(problem, self._device):
                limits = self._limits
                limit_s = limits.prepare_s + self._run_limit_s()
                try:
                    child.ask(("check", problem), limit_s)
                except Exception as e:
                    self._end_child()
                    raise lost_device(self._device, choice, failure, e) from e
            self._suspect = None
        return child

    def _started(self) -> Worker:
        why = "the child process of the tuning cannot start"
        try:
            child = Worker(PROGRAM, self._environment)
        except OSError as e:
            raise LabError(f"{why}: {e}") from e
        try:
            hello = ("hello", self._factory, self._device, self._timing)
            child.ask(hello, self._limits.start_s)
        except BaseException as e:
            child.close()
            if isinstance(e, Exception):
                raise LabError(f"{why}: {e}") from e
            raise
        return child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._child = None

    def _run_limit_s(self) -> float:
        """Time limit of a whole sample, and between two turns of a race."""
        timing, limits = self._timing, self._limits
        protocol_s = timing.settle_s + timing.candidate_s + timing.cold_s
        if not self._slowest_s:
            return protocol_s + 10 * limits.run_s
        return protocol_s + limits.run_s + limits.slowdown * self._slowest_s


class _ChildLost(Exception):
    """The child died, hung, or can no longer use the device.

    Attributes:
      failure: of the choice that caused the loss.
      choice: that choice; None if the child did not name it.
    """

    def __init__(self, failure: CandidateError, choice: Choice | None = None) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.choice = choice


def _environment(device: Device, directory: pathlib.Path | None) -> dict[str, str]:
    """Variables that make the child share machine and cache with its parent."""
    platforms = dict.fromkeys((device.platform, CpuDevice.platform))
    variables = {
        "JAX_PLATFORMS": ",".join(platforms),  # the child opens no other devices
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the parent holds most of the memory
    }
    if directory is not None:
        variables["TRACEA_CACHE_DIR"] = str(directory.absolute())
    return variables


if __name__ == "__main__":
    child_server.main()

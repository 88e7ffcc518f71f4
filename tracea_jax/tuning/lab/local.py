"""The lab: where choices are compiled, measured, verified and raced.

    LocalLab   in this process; after an illegal access on a GPU it can run nothing more
    ChildLab   in a disposable child process (``lab.child``)

A lab raises ``CandidateError`` if one choice fails, and ``LabError`` if nothing can be
measured any more. How times are taken is in ``tuning.measure``. Callers: session,
sharing, verdict (through the protocol ``Lab``); ``knowledge`` and ``child_server`` make
the labs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tracea_jax import variants
from tracea_jax.device import CudaDevice, Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning import measure
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.measure import (
    Bench,
    CandidateError,
    Race,
    Run,
    Sample,
    Timing,
    Verification,
)
from tracea_jax.tuning.measure.bench import candidate_error

BenchOf = Callable[[Problem, Device], Bench]
Exclusive = Callable[[], contextlib.AbstractContextManager[Any]]
OnRound = Callable[[int, int], None]

_KEPT_PROBLEMS = 2  # problems whose inputs stay in the memory of the device
_KEPT_RUNS = 80  # prepared choices of a problem; more than ever race together

K = TypeVar("K")
V = TypeVar("V")


class LabError(RuntimeError):
    """The device no longer runs even XLA's code.

    Attributes:
      choice, failure: the choice after whose failure the device stopped working, and
        the failure to remember for it; None if no choice is to blame.
    """

    def __init__(
        self,
        message: str,
        choice: Choice | None = None,
        failure: CandidateError | None = None,
    ) -> None:
        super().__init__(message)
        self.choice = choice
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.choice, self.failure)


class Lab(Protocol):
    """Runs choices, in a process and with a protection that the lab decides."""

    def compile(self, problem: Problem, choices: Sequence[Choice]) -> None:
        """Starts compiling the choices ahead if the lab can; returns at once."""
        ...

    def sample(
        self, problem: Problem, choice: Choice, *, incumbent_us: float | None = None
    ) -> Sample:
        """Compiles and measures one choice, steady and cold.

        Args:
          problem: the problem to run.
          choice: the variant and config to run it with.
          incumbent_us: time of the best so far; a far slower choice is abandoned early.

        Raises:
          CandidateError: naming the kind of failure.
          LabError: if the device does not work any more.
        """
        ...

    def verify(self, problem: Problem, choice: Choice) -> Verification:
        """Compares a choice's results with a reference; raises as ``sample`` does."""
        ...

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
        """Measures choices in turns; see ``measure.race``.

        A heat is short and has no cold times. Choices that fail are in
        ``Race.failures`` with a ``CandidateError``.

        Raises:
          LabError: if the device does not work any more.
        """
        ...

    def kernel_race(self, problem: Problem, choices: Sequence[Choice]) -> Race:
        """Kernel times of choices, in turns.

        The race is empty where the device does not report kernel times.

        Raises:
          CandidateError: naming the kind of failure; the first choice is blamed for it.
          LabError: if the device does not work any more.
        """
        ...

    def close(self) -> None:
        """Ends all that the lab has started; may be called twice."""
        ...


class LocalLab:
    """A lab in this process."""

    def __init__(
        self,
        bench_of: BenchOf,
        device: Device,
        timing: Timing | None = None,
        *,
        exclusive: Exclusive = contextlib.nullcontext,
        pool: CompilePool | None = None,
    ) -> None:
        """Runs nothing yet.

        Args:
          bench_of: makes the bench of a problem.
          device: the local device.
          timing: the measuring protocol.
          exclusive: entered while something is timed, see ``measure.exclusive``.
          pool: compiles ahead; the lab closes it.
        """
        self._bench_of = bench_of
        self._device = device
        self._timing = timing or Timing()
        self._exclusive = exclusive
        self._ahead = Ahead(pool, device)
        self._workbenches: _Recent[Problem, _Workbench] = _Recent(_KEPT_PROBLEMS)
        self._is_settled = False

    def compile(self, problem: Problem, choices: Sequence[Choice]) -> None:
        self._ahead.start(problem, choices)

    def prepare(self, problem: Problem, choice: Choice) -> float:
        """Compiles a choice before ``sample`` needs it; returns the seconds it took.

        Raises:
          CandidateError: if the choice cannot be compiled.
        """
        start = self._timing.now_s()
        self._prepared(problem, choice)
        return self._timing.now_s() - start

    def sample(
        self, problem: Problem, choice: Choice, *, incumbent_us: float | None = None
    ) -> Sample:
        prepare_s = self.prepare(problem, choice)
        run = self._prepared(problem, choice)
        with self._blaming(problem, choice), self._exclusive():
            self._settle(run)
            sample = measure.time_us(
                run,
                self._timing,
                incumbent_us=incumbent_us,
                flush=measure.flush_of(self._workbench(problem).bench),
            )
        return dataclasses.replace(sample, prepare_s=prepare_s)

    def verify(self, problem: Problem, choice: Choice) -> Verification:
        with self._blaming(problem, choice):
            return self._workbench(problem).bench.verify(choice)

    def race(
        self,
        problem: Problem,
        choices: Sequence[Choice],
        *,
        limit_s: float = math.inf,
        known_us: Mapping[Choice, float] | None = None,
        is_heat: bool = False,
        on_round: OnRound = lambda done, total: None,
        on_turn: Callable[[Choice], None] = lambda choice: None,
    ) -> Race:
        failures: dict[Choice, CandidateError] = {}
        runs: dict[Choice, Run] = {}
        for choice in choices:
            on_turn(choice)
            try:
                runs[choice] = self._prepared(problem, choice)
            except CandidateError as e:
                failures[choice] = e
        with self._exclusive():
            for choice, run in list(runs.items())[:1]:
                on_turn(choice)
                with contextlib.suppress(Exception):  # the race reports the failure
                    self._settle(run)
            race = measure.race(
                runs,
                self._timing.heat if is_heat else self._timing.final,
                known_us=known_us,
                limit_s=limit_s,
                on_round=on_round,
                flush=None
                if is_heat
                else measure.flush_of(self._workbench(problem).bench),
                on_turn=on_turn,
            )
        failed = {
            c: candidate_error(e, "launch_error") for c, e in race.failures.items()
        }
        for choice, failure in list(failed.items())[:1]:
            self._check_after(problem, choice, failure)
        return dataclasses.replace(race, failures={**failures, **failed})

    def kernel_race(self, problem: Problem, choices: Sequence[Choice]) -> Race:
        runs = {choice: self._prepared(problem, choice) for choice in choices}
        rounds = self._timing.kernel_rounds
        with self._blaming(problem, choices[0]), self._exclusive():
            kernel_times = measure.kernel_times_of(self._workbench(problem).bench)
            times = kernel_times(runs, rounds)
        return Race(
            times_us={choice: tuple(us) for choice, us in times.items()},
            repeats=dict.fromkeys(times, 1),
            failures={},
        )

    def check(self, problem: Problem) -> None:
        """Runs XLA's own choice once; raises any error of that."""
        self._prepared(problem, xla_choice(problem, self._device))(1)

    def close(self) -> None:
        self._workbenches.clear()
        self._ahead.close()

    def _workbench(self, problem: Problem) -> _Workbench:
        def make() -> _Workbench:
            return _Workbench(
                self._bench_of(problem, self._device), _Recent(_KEPT_RUNS)
            )

        return self._workbenches.get(problem, make)

    def _prepared(self, problem: Problem, choice: Choice) -> Run:
        def prepare() -> Run:
            self._ahead.wait(problem, choice)
            try:
                return workbench.bench.prepare(choice)
            except Exception as e:
                failure = candidate_error(e, "compile_error")
                # Making inputs runs code, and fails when the context is lost.
                if isinstance(self._device, CudaDevice):
                    self._check_after(problem, choice, failure)
                raise failure from e

        workbench = self._workbench(problem)
        return workbench.runs.get(choice, prepare)

    def _settle(self, run: Run) -> None:
        if not self._is_settled:
            measure.settle(run, self._timing)
            self._is_settled = True

    @contextlib.contextmanager
    def _blaming(self, problem: Problem, choice: Choice) -> Iterator[None]:
        """Turns an exception into the choice's failure if the device still works."""
        try:
            yield
        except Exception as e:
            self._workbench(problem).runs.forget(choice)
            failure = candidate_error(e, "launch_error")
            self._check_after(problem, choice, failure)
            raise failure from e

    def _check_after(
        self, problem: Problem, choice: Choice, failure: CandidateError
    ) -> None:
        """Makes sure that the device still works after a choice failed.

        Some errors leave a GPU's context unusable. Then all later choices fail too, and
        these failures must not be remembered as the choices' own.

        Raises:
          LabError: if XLA's own code no longer runs.
        """
        if choice == xla_choice(problem, self._device):
            return
        try:
            self.check(problem)
        except Exception as e:
            raise lost_device(self._device, choice, failure, e) from e


def lost_device(
    device: Device,
    choice: Choice | None,
    failure: CandidateError | None,
    error: Exception,
) -> LabError:
    """The error to raise when XLA's code fails with ``error``.

    Args:
      device: the device, for the message.
      choice, failure: the choice that failed before XLA's code did, if any.
      error: the error of XLA's code.
    """
    after = f" after {choice} failed ({failure})" if choice is not None else ""
    left_out = "that choice is remembered and will be left out: " if after else ""
    return LabError(
        f"{device.name} no longer runs even XLA's code{after}, {_brief(error)}; "
        f"{left_out}start the tuning again in a new process",
        choice,
        failure,
    )


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def xla_choice(problem: Problem, device: Device) -> Choice:
    """XLA's own code for the problem; if it fails, the device is to blame."""
    return Choice(variant="xla", config=variants.XLA.heuristic(problem, device))


class _Recent(Generic[K, V]):
    """A cache of the ``size`` values that were used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: collections.OrderedDict[K, V] = collections.OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        if key not in self._values:
            value = make()
            while len(self._values) >= self._size:
                self._values.popitem(last=False)
            self._values[key] = value
        self._values.move_to_end(key)
        return self._values[key]

    def forget(self, key: K) -> None:
        self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class _Workbench:
    """A problem's bench and the runs prepared on it, which share its inputs."""

    bench: Bench
    runs: _Recent[Choice, Run]

"""One tuning in progress: evaluates choices, verifies and races the best of them.

A search decides only which choices are evaluated, and in which order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.tuning import measure, select
from tracea_jax.tuning.cache import Best, Database, Observation
from tracea_jax.tuning.files import Journal
from tracea_jax.tuning.measure import (
    Bench,
    CandidateError,
    Race,
    Run,
    Timing,
    Verification,
)
from tracea_jax.tuning.records import FAILURES, identity, union

FINALISTS = 4  # of the search, beside the heroes and XLA
MAX_REJECTED = 8  # finalists that fail verification before no more are tried
MAX_MESSAGE = 1000  # characters of a failure's message that are kept


class TuningError(RuntimeError):
    """Nothing can be measured any more; what was measured is in the journal."""


class Progress(Protocol):
    """Told about every step of a tuning."""

    def __call__(
        self, *, phase: str, done: int, total: int, best_us: float | None, message: str
    ) -> None:
        """One step.

        Args:
          phase: "sweep", "verify", "race", "wait" for another process, or "done".
          done, total: steps of the phase.
          best_us: lowest time so far, if any.
          message: the choice at hand, or what is waited for.
        """
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Session:
    """What a tuning knows and how it measures.

    Attributes:
      bench, database, device, journal, timing, progress: as given to ``tuner.tune``.
      space: every choice, in the order that breaks ties.
      heroes: the defaults, XLA's among them.
      budget_s: seconds for everything, may be infinite.
      known: the observation of each choice seen so far, by identity.
    """

    bench: Bench
    database: Database
    device: Device
    journal: Journal
    timing: Timing
    progress: Progress | None
    space: tuple[Choice, ...]
    heroes: tuple[Choice, ...]
    budget_s: float
    known: dict[str, Observation]
    start_s: float = 0.0
    is_settled: bool = False
    verified: dict[Choice, Verification] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_s = self.timing.now_s()

    @property
    def elapsed_s(self) -> float:
        return self.timing.now_s() - self.start_s

    @property
    def best_us(self) -> float | None:
        """The lowest time known of any choice that may still win."""
        times = [o.time_us for o in self.known.values() if o.time_us is not None]
        return min(times, default=None)

    @property
    def xla(self) -> Choice:
        return next(h for h in self.heroes if h.variant == "xla")

    def observed(self, choice: Choice) -> Observation | None:
        return self.known.get(identity_of(choice))

    def tell(self, phase: str, done: int, total: int, message: str) -> None:
        if self.progress is not None:
            self.progress(
                phase=phase,
                done=done,
                total=total,
                best_us=self.best_us,
                message=message,
            )

    def evaluate(self, choice: Choice) -> Observation:
        """Compiles and measures one choice; a failure is an observation like any other.

        Raises:
          TuningError: if the device no longer works after the failure.
        """
        start = self.timing.now_s()
        run = self._prepare(choice)
        if isinstance(run, Observation):
            return run
        prepare_s = self.timing.now_s() - start
        try:
            with self._exclusive():
                self._settle(run)
                sample = measure.time_us(run, self.timing, incumbent_us=self.best_us)
        except Exception as e:
            return self._failed_running(choice, e)
        extra: dict[str, Any] = {"protocol": "steady", "prepare_s": round(prepare_s, 3)}
        if sample.abandoned:
            extra["abandoned"] = True
        else:
            extra["spread"] = round(sample.spread, 5)
        return self._remember(_measured(choice, sample.time_us, sample.repeats, extra))

    def finish(self, *, bounded_s: float | None = None) -> tuple[Best, dict[str, Any]]:
        """Verifies the leading choices and races them against the heroes and XLA.

        Args:
          bounded_s: if given, only the leader and the heroes race, for so long.

        Returns:
          The best and what its verification said.

        Raises:
          TuningError: if no choice runs.
        """
        finalists = self._verify(1 if bounded_s is not None else FINALISTS)
        race = self._race((*finalists, self.xla), bounded_s)
        if not race.times_us:
            why = next(iter(race.failures.values()), None)
            raise TuningError(f"nothing could be run, not even by XLA: {why}")
        order = (*self.space, self.xla)
        chosen = select.winner(race, order, self.heroes)
        second = select.runner_up(race, chosen, order)
        best = Best(
            variant=chosen.variant,
            config=config_json(chosen),
            time_us=_median(race, chosen),
            xla_us=_median(race, self.xla),
            ratio=_ratio(race, self.xla, chosen),
            runner_up={}
            if second is None
            else {
                "variant": second.variant,
                "config": config_json(second),
                "time_us": _median(race, second),
            },
            origin="xla"
            if chosen == self.xla
            else ("hero" if chosen in self.heroes else "sweep"),
        )
        verification = self.verified.get(chosen)
        verified = dataclasses.asdict(verification) if verification else {}
        return best, {**verified, "rounds": race.rounds} if verified else {}

    def _verify(self, wanted: int) -> list[Choice]:
        """The heroes of ours and the leading choices, those that compute correctly."""
        heroes = [h for h in self.heroes if h.variant != "xla"]
        passed = [h for h in heroes if self._is_correct(h)]
        leaders = [
            c
            for c in self._ranked()
            if c not in heroes and c != self.xla and not self._is_rejected(c)
        ]
        accepted = rejected = 0
        for choice in leaders:
            late = accepted > 0 and self.elapsed_s > self.budget_s
            if late or accepted == wanted or rejected == MAX_REJECTED:
                break
            self.tell("verify", accepted, wanted, str(choice))
            if self._is_correct(choice):
                passed.append(choice)
                accepted += 1
            else:
                rejected += 1
        return passed

    def _ranked(self) -> list[Choice]:
        """Measured choices of the space, the fastest first; ties in its order."""
        seen = {c: self.observed(c) for c in self.space}
        times = {c: o.time_us for c, o in seen.items() if o and o.time_us is not None}
        return sorted(times, key=times.__getitem__)

    def _is_rejected(self, choice: Choice) -> bool:
        observation = self.observed(choice)
        return observation is not None and observation.failure is not None

    def _is_correct(self, choice: Choice) -> bool:
        """Verifies a choice, once; remembers why if it may not be used."""
        if choice in self.verified:
            return True
        if self._is_rejected(choice):
            return False
        try:
            result = self.bench.verify(choice)
        except Exception as e:
            self._failed_running(choice, e)
            return False
        if result.failure is None:
            self.verified[choice] = result
            return True
        message = result.message or (
            f"error {result.max_rel_error:.3g}, allowed {result.tolerance:.3g}"
            + ("" if result.repeatable else "; two runs differ")
        )
        self._remember(_failure(choice, result.failure, message))
        return False

    def _race(self, choices: Sequence[Choice], bounded_s: float | None) -> Race:
        runs: dict[Choice, Run] = {}
        for choice in choices:
            run = self._prepare(choice)
            if not isinstance(run, Observation):
                runs[choice] = run

        def on_round(done: int, total: int) -> None:
            self.tell("race", done, max(done, total), f"{len(runs)} finalists")

        with self._exclusive():
            for run in list(runs.values())[:1]:
                with contextlib.suppress(Exception):  # the race will see it fail
                    self._settle(run)
            limit_s = self.budget_s - self.elapsed_s if bounded_s is None else bounded_s
            race = measure.race(runs, self.timing, limit_s=limit_s, on_round=on_round)
        for choice, times in race.times_us.items():
            repeats = race.repeats[choice] * len(times)
            extra = {
                "protocol": "race",
                "spread": round(measure.relative_deviation(times), 5),
            }
            self._remember(_measured(choice, race.median_us(choice), repeats, extra))
        for choice, error in race.failures.items():
            self._failed_running(choice, error)
        return race

    def _prepare(self, choice: Choice) -> Run | Observation:
        try:
            return self.bench.prepare(choice)
        except Exception as e:
            return self._remember(_failure_of(choice, e, "compile_error"))

    def _settle(self, run: Run) -> None:
        if not self.is_settled:
            measure.settle(run, self.timing)
            self.is_settled = True

    def _failed_running(self, choice: Choice, error: Exception) -> Observation:
        """Remembers the failure, then makes sure that the device still works.

        Some errors leave a GPU's context unusable. All later candidates would fail too
        and, were that remembered, never be tried again.
        """
        observation = self._remember(_failure_of(choice, error, "launch_error"))
        if choice != self.xla:
            try:
                self.bench.prepare(self.xla)(1)
            except Exception as e:
                raise TuningError(
                    f"{self.device.name} no longer runs even XLA's code after {choice} "
                    f"failed ({observation.message}); that choice is remembered and "
                    "will be left out: start the tuning again in a new process"
                ) from e
        return observation

    def _remember(self, observation: Observation) -> Observation:
        """Journals an observation; keeps the better-measured one of its choice."""
        name = observation.identity
        known = [self.known[name]] if name in self.known else []
        (self.known[name],) = union(known, [observation])
        self.database.append(self.journal, (observation,))
        return observation

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        message = f"another process is measuring on {self.device.name}"

        def on_wait() -> None:
            self.tell("wait", 0, 1, message)

        with measure.exclusive(self.database.directory, self.device, on_wait):
            yield


def config_json(choice: Choice) -> dict[str, Any]:
    """The choice's config as plain data."""
    return dataclasses.asdict(choice.config)


def identity_of(choice: Choice) -> str:
    """The identity of observations of this choice."""
    return identity(choice.variant, config_json(choice))


def _measured(
    choice: Choice, time_us: float, repeats: int, extra: dict[str, Any]
) -> Observation:
    return Observation(
        variant=choice.variant,
        config=config_json(choice),
        time_us=time_us,
        repeats=repeats,
        extra=extra,
    )


def _failure(choice: Choice, kind: str, message: str) -> Observation:
    return Observation(
        variant=choice.variant,
        config=config_json(choice),
        failure=kind,
        message=message[:MAX_MESSAGE],
    )


def _failure_of(choice: Choice, error: Exception, kind: str) -> Observation:
    """The failure that an exception stands for; ``kind`` if it does not tell."""
    if isinstance(error, TimeoutError):
        kind = "timeout"
    if isinstance(error, CandidateError) and error.kind in FAILURES:
        kind = error.kind
    return _failure(choice, kind, f"{type(error).__name__}: {error}")


def _median(race: Race, choice: Choice) -> float | None:
    return race.median_us(choice) if choice in race.times_us else None


def _ratio(race: Race, slow: Choice, fast: Choice) -> float | None:
    both = slow in race.times_us and fast in race.times_us
    return race.ratio(slow, fast) if both else None

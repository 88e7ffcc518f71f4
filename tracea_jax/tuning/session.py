"""One tuning in progress: evaluates choices, verifies and races the best of them.

A search (``tuning.search``) decides only which choices are evaluated, and in which
order. The lab (``tuning.lab``) runs choices; ``tuning.select`` and ``tuning.verdict``
decide who wins. Caller: ``tuning.tuner``, which connects a search with a session.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.schema import one_line
from tracea_jax.tuning import goals, measure, select
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.lab.local import Lab, LabError
from tracea_jax.tuning.measure import (
    CandidateError,
    Race,
    Reference,
    Timing,
    Verification,
)
from tracea_jax.tuning.measure.race import QUIET
from tracea_jax.tuning.outcome import Decided, Outcome
from tracea_jax.tuning.progress import Progress, TuningError
from tracea_jax.tuning.search.candidates import identity_of
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.files import Journal
from tracea_jax.tuning.store.records import Best, Observation, union
from tracea_jax.tuning.verdict import kernel_race, verdict

FINALISTS = 8  # choices of the search that race, beside the heroes and XLA
CONTENDERS = 64  # choices in a heat, at most
HEAT_SHARE = 0.3  # part of the time left that a heat may take
MAX_REJECTED = 8  # failed verifications after which no further finalist is tried
MAX_MESSAGE = 1000  # characters of a failure's message that are kept
DRIFT_EVERY = 10  # evaluations between two measurements of the reference
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class Session:
    """The observations of a tuning, and the steps that add to them.

    Attributes:
      problem, lab, knowledge, device, timing, progress, observe: as of
        ``tuner.Tuning``.
      journal: receives every observation at once.
      order: every choice, in the order that breaks ties; XLA's last.
      heroes: the defaults, XLA's among them.
      untuned: the hero that runs where nothing was tuned.
      reference: the hero that is measured again and again to see the machine's drift.
      budget_s: seconds for everything, may be infinite.
      goal: one of ``goals.GOALS``.
      known: the observation of each choice seen so far, by identity.
      start_s: time of ``timing`` at which the session began.
      compiles: number of choices that were prepared.
      drift: the reference's times so far.
      since_drift: evaluations since the reference was last measured.
      verified: results of choices that passed verification.
      heat: the contenders' times relative to each other, if there was a heat.
    """

    problem: Problem
    lab: Lab
    knowledge: Knowledge
    device: Device
    journal: Journal
    timing: Timing
    progress: Progress | None
    observe: Callable[[Observation], None]
    order: tuple[Choice, ...]
    heroes: tuple[Choice, ...]
    untuned: Choice
    reference: Choice
    budget_s: float
    goal: str
    known: dict[str, Observation]
    start_s: float = 0.0
    compiles: int = 0
    drift: Reference = Reference()
    since_drift: int = 0
    verified: dict[Choice, Verification] = dataclasses.field(default_factory=dict)
    heat: dict[Choice, float] = dataclasses.field(default_factory=dict)

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

    def time_us(self, choice: Choice) -> float | None:
        """The steady time of a choice; None if it is unknown."""
        observation = self.observed(choice)
        return observation.time_us if observation is not None else None

    def score_us(self, choice: Choice) -> float | None:
        """The score that the search gets: the time by the goal, corrected for drift."""
        observation = self.observed(choice)
        if observation is None:
            return None
        score = goals.score_us(observation, self.goal)
        return score and score / float(observation.extra.get("drift", 1.0))

    def tell(
        self, phase: str, done: int, total: int, message: str, won: Best | None = None
    ) -> None:
        """Reports a step; ``won`` is the outcome of the last race, once it is over.

        The search measures one choice after the other, so it reports no ratios.
        """
        if self.progress is not None:
            ours, xla = (self.best_us, None) if won is None else won.decisive
            self.progress(
                phase=phase,
                done=done,
                total=total,
                best_us=ours,
                message=message,
                ratio=xla / ours if ours and xla else None,
            )

    def evaluate(self, choice: Choice) -> Observation:
        """Compiles and measures one choice; a failure is an observation like any other.

        Raises:
          TuningError: if the device no longer works after the failure.
        """
        self._check_drift()
        self.compiles += choice.variant != "xla"
        try:
            sample = self.lab.sample(self.problem, choice, incumbent_us=self.best_us)
        except CandidateError as e:
            return self._failed(choice, e)
        except LabError as e:
            raise self._lost(e) from e
        took = f"{sample.time_us:.1f} us, compiled in {sample.prepare_s:.2f} s"
        _logger.debug("%s: %s took %s", self.problem, choice, took)
        if choice == self.reference:
            self.drift = self.drift.measured(sample.time_us)
        extra: dict[str, Any] = {
            "protocol": "steady",
            "prepare_s": round(sample.prepare_s, 3),
        }
        if self.drift.has_drifted():
            extra["drift"] = round(self.drift.factor, 4)
        if sample.abandoned:
            extra["abandoned"] = True
        else:
            extra["spread"] = round(sample.spread, 5)
        return self._remember(
            Observation(
                **self._named(choice),
                time_us=sample.time_us,
                cold_us=sample.cold_us,
                repeats=sample.repeats,
                extra=extra,
            )
        )

    def finish(self, *, bounded_s: float | None = None) -> Outcome:
        """Verifies the leading choices and races them against the heroes and XLA.

        Args:
          bounded_s: if given, only the leader and the heroes race, for so long.

        Raises:
          TuningError: if no choice runs.
        """
        if bounded_s is None:
            self._hold_heat()
        finalists = self._verify(1 if bounded_s is not None else FINALISTS)
        limit_s = self.budget_s - self.elapsed_s if bounded_s is None else bounded_s
        race = self._race((*finalists, self.xla), limit_s)
        if not race.times_us:
            why = next(iter(race.failures.values()), None)
            raise TuningError(f"nothing could be run, not even by XLA: {why}")
        decided = self._decided(race)
        passed = self.verified.get(decided.chosen)
        best = decided.best(
            self.problem,
            self.device,
            order=self.order,
            heroes=self.heroes,
            goal=self.goal,
        )
        return Outcome(
            best=best,
            verified={**dataclasses.asdict(passed), "rounds": race.rounds}
            if passed
            else {},
            untuned=decided.times(self.untuned),
        )

    def _decided(self, race: Race) -> Decided:
        """The winner by the goal, or by kernel times where the device reports them.

        A choice that fails while its kernels are timed is left out.
        """
        while True:
            chosen = select.winner(race, self.order, self.heroes, self.goal)
            untuned = self.untuned if self.untuned in race.times_us else self.xla
            three = chosen, untuned, self.xla
            if chosen == untuned == self.xla or not {*three} <= set(race.times_us):
                return Decided(race=race, kernels=None, chosen=chosen, xla=self.xla)
            self.tell("race", 1, 1, "kernel times")
            try:
                kernels = kernel_race(self.lab, self.problem, *three)
            except CandidateError as e:
                blamed = untuned if chosen == self.xla else chosen
                self._failed(blamed, e)
                race = race.without(blamed)
                continue
            except LabError as e:
                raise self._lost(e) from e
            if kernels is not None:
                chosen = verdict(kernels, *three)
            return Decided(race=race, kernels=kernels, chosen=chosen, xla=self.xla)

    @property
    def _is_restless(self) -> bool:
        """True if the machine's speed changes because other programs use it as well.

        A GPU is used by this program alone: only its clock rates change, and waiting
        does not steady them.
        """
        return self.device.platform == "cpu" and self.drift.unrest > 1 + QUIET

    def _hold_heat(self) -> None:
        """Races all choices that may be among the best, if samples are too rough.

        Samples are taken one after the other. While the machine's speed changes, the
        samples of two equal choices may differ as much as two samples of the reference
        do, and as much again because the samples were corrected for drift.
        """
        self._measure_drift()
        ranked = [c for c in self._ranked() if not self._is_rejected(c)]
        if not self._is_restless or len(ranked) <= FINALISTS:
            return
        limit_us = (self.score_us(ranked[0]) or math.inf) * self.drift.unrest**2
        close = [c for c in ranked if (self.score_us(c) or math.inf) <= limit_us]
        contenders = close[:CONTENDERS]
        limit_s = HEAT_SHARE * (self.budget_s - self.elapsed_s)
        if len(contenders) <= FINALISTS or limit_s <= 0:
            return
        racers = tuple(dict.fromkeys((*contenders, self.reference)))
        race = self._race(racers, limit_s, is_heat=True)
        self.heat = {c: race.relative(c) for c in race.times_us}
        if self.reference in self.heat:
            self.drift = self.drift.measured(race.median_us(self.reference))

    def _verify(self, wanted: int) -> list[Choice]:
        """The correct ones of our heroes and of the leading choices."""
        heroes = [h for h in self.heroes if h.variant != "xla"]
        passed = [h for h in heroes if self._is_correct(h)]
        leaders = [
            c
            for c in self._ranked()
            if c not in heroes and c != self.xla and not self._is_rejected(c)
        ]
        accepted = rejected = 0
        for choice in leaders:
            enough = self.elapsed_s > self.budget_s or self._is_hopeless(choice, passed)
            if accepted == wanted or rejected == MAX_REJECTED or accepted and enough:
                break
            self.tell("verify", accepted, wanted, str(choice))
            if self._is_correct(choice):
                passed.append(choice)
                accepted += 1
            else:
                rejected += 1
        return passed

    def _ranked(self) -> list[Choice]:
        """Measured choices, the best first; equal ones as in ``order``.

        The racers of a heat come first, ranked by their times in the heat.
        """
        scores = {c: self.score_us(c) for c in self.order}
        known = {c: score for c, score in scores.items() if score is not None}
        return sorted(known, key=lambda c: (self.heat.get(c, math.inf), known[c]))

    def _is_hopeless(self, choice: Choice, passed: Sequence[Choice]) -> bool:
        """True if a choice is far slower than a correct one, so that it cannot win.

        A choice whose sample was abandoned may still win: the sample was compared with
        all choices, also with those whose results turned out to be wrong.
        """
        scores = [score for c in passed if (score := self.score_us(c)) is not None]
        score = self.score_us(choice)
        limit = self.timing.abandon * min(scores, default=math.inf)
        return score is not None and score > limit

    def _is_rejected(self, choice: Choice) -> bool:
        observation = self.observed(choice)
        return observation is not None and observation.failure is not None

    def _is_correct(self, choice: Choice) -> bool:
        """Verifies a choice once; a failure is remembered with its reason."""
        if choice in self.verified:
            return True
        if self._is_rejected(choice):
            return False
        try:
            result = self.lab.verify(self.problem, choice)
        except CandidateError as e:
            self._failed(choice, e)
            return False
        except LabError as e:
            raise self._lost(e) from e
        if result.failure is None:
            self.verified[choice] = result
            return True
        message = result.message or (
            f"error {result.max_rel_error:.3g}, allowed {result.tolerance:.3g}"
            + ("" if result.repeatable else "; two runs differ")
        )
        self._fail(choice, result.failure, message)
        return False

    def _race(
        self, choices: Sequence[Choice], limit_s: float, is_heat: bool = False
    ) -> Race:
        who = "contenders" if is_heat else "finalists"

        def on_round(done: int, total: int) -> None:
            self.tell("race", done, max(done, total), f"{len(choices)} {who}")

        quiet = {self.reference: self.drift.least_us} if self._is_restless else {}
        try:
            race = self.lab.race(
                self.problem,
                choices,
                limit_s=limit_s,
                known_us=quiet,
                is_heat=is_heat,
                on_round=on_round,
            )
        except LabError as e:
            raise self._lost(e) from e
        for choice, times in race.times_us.items():
            spread = round(measure.relative_deviation(race.quiet_us(choice)), 5)
            known = self.observed(choice)
            self._remember(
                Observation(
                    **self._named(choice),
                    time_us=race.median_us(choice),
                    cold_us=race.median_us(choice, "cold")
                    if race.cold_us.get(choice)
                    else known and known.cold_us,
                    repeats=race.repeats[choice] * len(times),
                    extra={"protocol": "heat" if is_heat else "race", "spread": spread},
                )
            )
        for choice, error in race.failures.items():
            if isinstance(error, CandidateError):
                self._failed(choice, error)
        return race

    def _check_drift(self) -> None:
        """Measures the reference again if enough evaluations were made meanwhile."""
        self.since_drift += 1
        if self.since_drift >= DRIFT_EVERY:
            self._measure_drift()

    def _measure_drift(self) -> None:
        """Measures the reference again if it was measured before; ignores a failure."""
        self.since_drift = 0
        if self.drift.count == 0:
            return
        try:
            sample = self.lab.sample(self.problem, self.reference)
        except CandidateError:
            return
        except LabError as e:
            raise self._lost(e) from e
        self.drift = self.drift.measured(sample.time_us)

    def _failed(self, choice: Choice, error: CandidateError) -> Observation:
        return self._fail(choice, error.kind, str(error))

    def _fail(self, choice: Choice, kind: str, message: str) -> Observation:
        why = one_line(message, MAX_MESSAGE)
        _logger.info("%s: %s is refused: %s: %s", self.problem, choice, kind, why)
        return self._remember(
            Observation(
                **self._named(choice), failure=kind, message=message[:MAX_MESSAGE]
            )
        )

    def _named(self, choice: Choice) -> dict[str, Any]:
        return named(self.problem, choice, self.device)

    def _lost(self, error: LabError) -> TuningError:
        """The error to raise; the choice that is to blame is remembered as failed."""
        if error.choice is not None and error.failure is not None:
            self._failed(error.choice, error.failure)
        return TuningError(str(error))

    def _remember(self, observation: Observation) -> Observation:
        """Journals an observation; keeps the better-measured one of its choice."""
        name = observation.identity
        known = [self.known[name]] if name in self.known else []
        (self.known[name],) = union(known, [observation])
        self.knowledge.own.append(self.journal, (observation,))
        self.observe(observation)
        return observation


def no_limit(budget_s: float | None) -> float:
    """The budget as a number: infinity for None."""
    return math.inf if budget_s is None else budget_s

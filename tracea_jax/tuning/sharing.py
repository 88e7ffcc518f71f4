"""Lets problems share configs: measures missing times, races, and records the answers.

    entries -> gaps measured -> portfolio.cover -> verify, race against the own best
            -> entries with the shared answers

Which configs are shared is computed in ``tuning.portfolio``; how a problem gets its own
best in the first place is ``tuning.tuner``. The caller is ``campaign.run``.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.tuning import goals, portfolio
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import current, legal_choice
from tracea_jax.tuning.lab.local import Lab, xla_choice
from tracea_jax.tuning.measure import CandidateError, Race
from tracea_jax.tuning.portfolio import Portfolio, Shared
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.records import Best, Entry, Observation, identity, union
from tracea_jax.tuning.verdict import verdict

_logger = logging.getLogger(__name__)
ORIGIN = "portfolio"  # of an answer whose config is shared
RACE_S = 2.0  # for the race of a shared config against the problem's own best
MIN_LEFT_S = 0.5  # with less of the budget left, nothing more is measured

Observe = Callable[[Problem, Observation], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Times of a problem's new answer divided by those of its own best, in one race.

    Attributes:
      steady: ratio of steady times; 1 if the answer stayed.
      cold: ratio of cold times; 1 if the answer stayed or cold times were not measured.
      goal: ratio of times by the goal; 1 if the answer stayed.
    """

    steady: float = 1.0
    cold: float = 1.0
    goal: float = 1.0

    @property
    def worst(self) -> float:
        """The ratio that must not exceed 1 + fraction.

        It includes the steady times whatever the goal, because most programs execute
        their kernels in a row.
        """
        return max(self.steady, self.goal)


Changed = dict[Problem, tuple[Entry, Slowness]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Finds a portfolio for entries of one device and records it as their answers.

    Attributes:
      lab, knowledge, device, goal: as in ``tuner.Tuning``.
      fraction: see ``Portfolio``.
      left_s: returns the seconds that are left for measuring.
      observe: called with every observation.
    """

    lab: Lab
    knowledge: Knowledge
    device: Device
    goal: str
    fraction: float
    left_s: Callable[[], float]
    observe: Observe = lambda problem, observation: None

    def share(self, entries: Iterable[Entry]) -> tuple[Portfolio, Changed]:
        """Finds the portfolio of these entries and records it as their answers.

        Problems that XLA serves best, and variants without a config, take no part. If
        no time is left to measure a config on a problem, the config counts as one that
        does not serve the problem.

        Returns:
          The portfolio, and every changed entry with the slowness of its new answer.

        Raises:
          LabError: if nothing can be measured any more.
        """
        groups: dict[str, dict[Problem, Entry]] = {}
        for entry in entries:
            best = entry.best
            if best.variant != "xla" and best.config and best.time_us is not None:
                problem = problem_from_json(entry.problem)
                seen = current(entry.observations, problem, self.device)
                entry = dataclasses.replace(entry, observations=seen)
                groups.setdefault(problem.op, {})[problem] = entry
        configs: list[Shared] = []
        changed: Changed = {}
        measured = 0
        for op, group in groups.items():
            known, new, slowness = self._served(group)
            measured += new
            configs += _shared(op, known, slowness)
            for problem, entry in known.items():
                if entry != group[problem]:
                    entry = self.knowledge.own.record(entry)
                    _logger.info("%s: %s, shared", problem, entry.best)
                    changed[problem] = entry, slowness[problem]
        configs.sort(key=lambda shared: -len(shared.problems))
        found = Portfolio(
            fraction=self.fraction, configs=tuple(configs), measured=measured
        )
        return found, changed

    def _served(
        self, group: Mapping[Problem, Entry]
    ) -> tuple[dict[Problem, Entry], int, dict[Problem, Slowness]]:
        """Entries with shared answers, the number of new times, and each slowness."""
        known = dict(group)
        times = {problem: self._times(entry) for problem, entry in known.items()}
        best = {p: times[p][_own(entry)] for p, entry in known.items()}
        measured = 0
        for problem, name in portfolio.gaps(times, best, self.fraction):
            if self.left_s() < MIN_LEFT_S:
                break
            if any(o.identity == name for o in known[problem].observations):
                continue  # the config was tried on this problem and failed
            choice = self._choice(problem, name, known.values())
            if choice is not None:
                seen = self._measured(problem, choice, known[problem].best.time_us)
                known[problem] = _with(known[problem], seen)
                times[problem] |= self._scores([seen])
                measured += 1
        chosen = portfolio.cover(times, best, self.fraction)
        slowness = dict.fromkeys(known, Slowness())
        for problem, entry in known.items():
            served = [name for name in chosen if name in times[problem]]
            name = min(served, key=lambda n: (times[problem][n], n))
            choice = self._choice(problem, name, known.values())
            if _own(entry) not in chosen and choice is not None:
                known[problem], slowness[problem] = self._raced(problem, entry, choice)
        return known, measured, slowness

    def _times(self, entry: Entry) -> dict[str, float]:
        """Times of our configs by the goal; the answer's time is that of its race."""
        best = entry.best
        answer = Observation(
            variant=best.variant,
            config=best.config,
            time_us=best.time_us,
            cold_us=best.cold_us,
        )
        return self._scores([*entry.observations, answer])

    def _scores(self, observations: Iterable[Observation]) -> dict[str, float]:
        scores = {
            o.identity: goals.score_us(o, self.goal) for o in observations if o.config
        }
        return {name: us for name, us in scores.items() if us is not None}

    def _choice(
        self, problem: Problem, name: str, entries: Iterable[Entry]
    ) -> Choice | None:
        """The choice of this identity; None if it is not legal for the problem."""
        known = (o for e in entries for o in e.observations if o.identity == name)
        seen = next(known)
        found = legal_choice(seen.variant, seen.config, problem, self.device)
        return None if isinstance(found, str) else found

    def _measured(
        self, problem: Problem, choice: Choice, best_us: float | None
    ) -> Observation:
        name = named(problem, choice, self.device)
        try:
            sample = self.lab.sample(problem, choice, incumbent_us=best_us)
        except CandidateError as e:
            observation = Observation(**name, failure=e.kind, message=str(e))
        else:
            observation = Observation(
                **name,
                time_us=sample.time_us,
                cold_us=sample.cold_us,
                repeats=sample.repeats,
                extra={"protocol": "steady", "for": ORIGIN},
            )
        self.observe(problem, observation)
        return observation

    def _raced(
        self, problem: Problem, entry: Entry, choice: Choice
    ) -> tuple[Entry, Slowness]:
        """Verifies a shared choice and races it against the problem's own best.

        Returns:
          The entry with the choice as its answer, if the choice is correct, nearly as
          fast as the own best, and not slower than XLA; else the entry with its own
          answer.
        """
        best = entry.best
        own = legal_choice(best.variant, best.config, problem, self.device)
        assert isinstance(own, Choice)
        try:
            verification = self.lab.verify(problem, choice)
        except CandidateError as e:
            return self._failed(problem, entry, choice, e.kind, str(e)), Slowness()
        if (kind := verification.failure) is not None:
            message = verification.message
            return self._failed(problem, entry, choice, kind, message), Slowness()
        xla = xla_choice(problem, self.device)
        limit_s = max(min(RACE_S, self.left_s()), 0.0)
        race = self.lab.race(problem, (choice, own, xla), limit_s=limit_s)
        if not {choice, own, xla} <= set(race.times_us):
            return entry, Slowness()
        slowness = self._slowness(race, choice, own)
        if slowness.worst > 1 + self.fraction or race.ratio(xla, choice) < 1:
            return entry, Slowness()
        found = verdict(self.lab, problem, choice, xla)
        if found is not None and not found.is_ours:
            return entry, Slowness()
        verified = {**dataclasses.asdict(verification), "rounds": race.rounds}
        answer = dataclasses.replace(
            self._answer(problem, race, choice, own, best),
            kernel_us=found and found.ours_us,
            xla_kernel_us=found and found.xla_us,
        )
        changed = dataclasses.replace(
            entry, best=answer, verified=verified, written=_now()
        )
        return changed, slowness

    def _answer(
        self, problem: Problem, race: Race, choice: Choice, own: Choice, before: Best
    ) -> Best:
        xla = xla_choice(problem, self.device)
        second = named(problem, own, self.device)
        return dataclasses.replace(
            before,
            **named(problem, choice, self.device),
            time_us=race.median_us(choice),
            xla_us=race.median_us(xla),
            ratio=race.ratio(xla, choice),
            cold_us=_cold_us(race, choice),
            xla_cold_us=_cold_us(race, xla),
            runner_up={**second, "time_us": race.median_us(own)},
            origin=ORIGIN,
        )

    def _slowness(self, race: Race, choice: Choice, own: Choice) -> Slowness:
        was_cold = all(race.cold_us.get(racer) for racer in (choice, own))
        return Slowness(
            steady=race.ratio(choice, own),
            cold=race.ratio(choice, own, "cold") if was_cold else 1.0,
            goal=goals.ratio(race, choice, own, self.goal),
        )

    def _failed(
        self, problem: Problem, entry: Entry, choice: Choice, kind: str, message: str
    ) -> Entry:
        name = named(problem, choice, self.device)
        observation = Observation(**name, failure=kind, message=message)
        self.observe(problem, observation)
        return _with(entry, observation)


def _own(entry: Entry) -> str:
    """The identity of the entry's answer."""
    return identity(entry.best.variant, entry.best.config)


def _with(entry: Entry, observation: Observation) -> Entry:
    observations = union(entry.observations, [observation])
    return dataclasses.replace(entry, observations=observations, written=_now())


def _cold_us(race: Race, choice: Choice) -> float | None:
    return race.median_us(choice, "cold") if race.cold_us.get(choice) else None


def _shared(
    op: str, known: Mapping[Problem, Entry], slowness: Mapping[Problem, Slowness]
) -> list[Shared]:
    users: dict[str, list[Problem]] = {}
    for problem, entry in known.items():
        users.setdefault(_own(entry), []).append(problem)
    return [
        Shared(
            op=op,
            variant=known[problems[0]].best.variant,
            config=known[problems[0]].best.config,
            problems=tuple(problems),
            worst=max(1.0, *(slowness[problem].worst for problem in problems)),
        )
        for problems in users.values()
    ]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")

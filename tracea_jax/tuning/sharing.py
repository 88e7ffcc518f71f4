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
from typing import Any

from tracea_jax import policy
from tracea_jax.device import Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.tuning import goals, portfolio
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import current, legal_choice, varies
from tracea_jax.tuning.lab.local import Lab, xla_choice
from tracea_jax.tuning.measure import CandidateError
from tracea_jax.tuning.outcome import Decided
from tracea_jax.tuning.portfolio import Portfolio, Shared
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.protocols import UNTUNED
from tracea_jax.tuning.store.records import Entry, Observation, identity, union
from tracea_jax.tuning.verdict import kernel_race, verdict

_logger = logging.getLogger(__name__)
ORIGIN = "portfolio"  # of an answer whose config is shared
RACE_S = 2.0  # for the race of a shared config against the problem's own best
MIN_LEFT_S = 0.5  # with less of the budget left, nothing more is measured

Observe = Callable[[Problem, Observation], None]


Changed = dict[Problem, Entry]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Finds a portfolio for entries of one device and records it as their answers.

    Attributes:
      lab, knowledge, device, goal: as in ``tuner.Tuning``.
      determinism: ``Options.determinism``. True shares nothing whose bits may differ
        from run to run; None shares it only among problems whose own best does.
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
    determinism: bool | None = None
    observe: Observe = lambda problem, observation: None

    def share(self, entries: Iterable[Entry]) -> tuple[Portfolio, Changed]:
        """Finds the portfolio of these entries and records it as their answers.

        Problems that XLA serves best, variants without a config, and answers whose bits
        must not differ but may, take no part. If no time is left to measure a config on
        a problem, the config counts as one that does not serve the problem.

        Returns:
          The portfolio, and every changed entry.

        Raises:
          LabError: if nothing can be measured any more.
        """
        groups: dict[str, dict[Problem, Entry]] = {}
        for entry in entries:
            best = entry.best
            if best.variant != "xla" and best.config and best.time_us is not None:
                problem = problem_from_json(entry.problem)
                if not self._may_run(problem, entry, best.variant, best.config):
                    continue
                seen = current(entry.observations, problem, self.device)
                entry = dataclasses.replace(entry, observations=seen)
                groups.setdefault(problem.op, {})[problem] = entry
        configs: list[Shared] = []
        changed: Changed = {}
        measured = 0
        for op, group in groups.items():
            known, new, worst = self._served(group)
            measured += new
            configs += _shared(op, known, worst)
            for problem, entry in known.items():
                if entry != group[problem]:
                    entry = self.knowledge.own.record(entry)
                    _logger.info("%s: %s, shared", problem, entry.best)
                    changed[problem] = entry
        configs.sort(key=lambda shared: -len(shared.problems))
        found = Portfolio(
            fraction=self.fraction, configs=tuple(configs), measured=measured
        )
        return found, changed

    def _served(
        self, group: Mapping[Problem, Entry]
    ) -> tuple[dict[Problem, Entry], int, dict[Problem, float]]:
        """Entries with shared answers, the number of new times, and what sharing costs.

        That is each answer's time divided by that of the problem's own best; 1 where
        the answer stayed.
        """
        known = dict(group)
        times = {p: self._times(p, entry) for p, entry in known.items()}
        best = {p: times[p][_own(entry)] for p, entry in known.items()}
        measured = 0
        for problem, name in portfolio.gaps(times, best, self.fraction):
            if self.left_s() < MIN_LEFT_S:
                break
            if any(o.identity == name for o in known[problem].observations):
                continue  # the config was tried on this problem and failed
            choice = self._choice(problem, name, known)
            if choice is not None:
                seen = self._measured(problem, choice, known[problem].best.time_us)
                known[problem] = _with(known[problem], seen)
                times[problem] |= self._scores([seen])
                measured += 1
        chosen = portfolio.cover(times, best, self.fraction)
        worst = dict.fromkeys(known, 1.0)
        for problem, entry in known.items():
            served = [name for name in chosen if name in times[problem]]
            name = min(served, key=lambda n: (times[problem][n], n))
            choice = self._choice(problem, name, known)
            if _own(entry) not in chosen and choice is not None:
                known[problem], worst[problem] = self._raced(problem, entry, choice)
        return known, measured, worst

    def _times(self, problem: Problem, entry: Entry) -> dict[str, float]:
        """Times of our configs by the goal; the answer's time is that of its race."""
        seen = (
            o
            for o in entry.observations
            if self._may_run(problem, entry, o.variant, o.config)
        )
        best = entry.best
        answer = Observation(
            variant=best.variant,
            config=best.config,
            time_us=best.time_us,
            cold_us=best.cold_us,
        )
        return self._scores([*seen, answer])

    def _may_run(
        self, problem: Problem, entry: Entry, variant: str, config: dict[str, Any]
    ) -> bool:
        """True if the config has equal bits from run to run, or need not have them."""
        best, device = entry.best, self.device
        if self.determinism is False or not varies(variant, config, problem, device):
            return True
        return self.determinism is None and varies(
            best.variant, best.config, problem, device
        )

    def _scores(self, observations: Iterable[Observation]) -> dict[str, float]:
        scores = {
            o.identity: goals.score_us(o, self.goal) for o in observations if o.config
        }
        return {name: us for name, us in scores.items() if us is not None}

    def _choice(
        self, problem: Problem, name: str, known: Mapping[Problem, Entry]
    ) -> Choice | None:
        """The choice of this identity; None if the problem cannot or may not run it."""
        entries = known.values()
        seen = next(o for e in entries for o in e.observations if o.identity == name)
        if not self._may_run(problem, known[problem], seen.variant, seen.config):
            return None
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
    ) -> tuple[Entry, float]:
        """Verifies a shared choice and races it against the problem's own best.

        Returns:
          The entry with the choice as its answer, if the choice is correct, nearly as
          fast as the own best, and not slower than XLA or what runs untuned; else the
          entry with its own answer. And its time divided by that of the own best.
        """
        best = entry.best
        own = legal_choice(best.variant, best.config, problem, self.device)
        assert isinstance(own, Choice)
        try:
            verification = self.lab.verify(problem, choice)
        except CandidateError as e:
            return self._failed(problem, entry, choice, e.kind, str(e)), 1.0
        if (kind := verification.failure) is not None:
            message = verification.message
            return self._failed(problem, entry, choice, kind, message), 1.0
        decided, worst = self._decided(problem, entry, choice, own)
        if decided is None or worst > 1 + self.fraction:
            return entry, 1.0
        answer = decided.best(
            problem, self.device, order=(own,), heroes=(), goal=self.goal
        )
        untuned = decided.times(self._default(problem))
        changed = dataclasses.replace(
            entry,
            best=dataclasses.replace(answer, origin=ORIGIN),
            verified={
                **dataclasses.asdict(verification),
                "rounds": decided.race.rounds,
            },
            tuner={**entry.tuner, UNTUNED: untuned},
            written=_now(),
        )
        return changed, worst

    def _decided(
        self, problem: Problem, entry: Entry, choice: Choice, own: Choice
    ) -> tuple[Decided | None, float]:
        """A race that the choice wins against XLA and what runs untuned; else None.

        And its time divided by that of the own best: of the times by the goal and of
        those in a row, as most programs execute kernels, whichever is larger.
        """
        xla = xla_choice(problem, self.device)
        untuned = self._untuned(problem, entry) or xla
        racers = tuple(dict.fromkeys((choice, own, untuned, xla)))
        limit_s = max(min(RACE_S, self.left_s()), 0.0)
        race = self.lab.race(problem, racers, limit_s=limit_s)
        if not set(racers) <= set(race.times_us):
            return None, 1.0
        by_goal = goals.times(race, self.goal)
        worst = max(race.ratio(choice, own), by_goal[choice] / by_goal[own])
        if by_goal[choice] > min(by_goal[xla], by_goal[untuned]):
            return None, worst
        try:
            kernels = kernel_race(self.lab, problem, choice, untuned, xla)
        except CandidateError:  # one of the three fails under the profiler
            return None, worst
        if kernels and verdict(kernels, choice, untuned, xla) != choice:
            return None, worst
        return Decided(race=race, kernels=kernels, chosen=choice, xla=xla), worst

    def _untuned(self, problem: Problem, entry: Entry) -> Choice | None:
        """The choice where nothing was tuned; None if it failed in the tuning."""
        choice = self._default(problem)
        name = identity(choice.variant, dataclasses.asdict(choice.config))
        failed = {o.identity for o in entry.observations if o.failure is not None}
        return None if name in failed else choice

    def _default(self, problem: Problem) -> Choice:
        return policy.decide(diagnose(problem, self.device, self.determinism)).choice

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


def _shared(
    op: str, known: Mapping[Problem, Entry], worst: Mapping[Problem, float]
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
            worst=max(1.0, *(worst[problem] for problem in problems)),
        )
        for problems in users.values()
    ]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")

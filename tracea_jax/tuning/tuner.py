"""The tuner: searches a space, races the best against the defaults, and remembers.

    what is known -> search -> verify -> race -> select.winner -> verdict -> entry

Every measurement is on disk before the next one starts, so a tuning that was killed
continues where it stopped. A choice that fails is remembered with its reason and never
scored; a choice whose results are wrong cannot win. Several tunings together are in
``tuning.schedule``. Callers: ``campaign.run`` and ``campaign.watch``, ``knowledge``.
"""

from __future__ import annotations

import datetime
import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.diagnosis import Diagnosis
from tracea_jax.policy import Choice, Decision
from tracea_jax.problem import Problem
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.neighbours import Neighbour
from tracea_jax.tuning.goals import GOALS
from tracea_jax.tuning.lab.local import Lab
from tracea_jax.tuning.measure import Timing
from tracea_jax.tuning.progress import Progress, TuningError
from tracea_jax.tuning.search import history
from tracea_jax.tuning.search.batches import SWEPT, Search
from tracea_jax.tuning.search.candidates import Candidates, identity_of
from tracea_jax.tuning.session import Session, no_limit
from tracea_jax.tuning.store.environment import canonical, digest, environment
from tracea_jax.tuning.store.protocols import UNTUNED
from tracea_jax.tuning.store.records import Entry, Observation
from tracea_jax.typing import Effort, Goal

VERSION = 5  # of the tuning method; every entry names the version that made it
# Evaluations at most.
EFFORTS: dict[Effort, int] = {"none": 0, "quick": 16, "default": 64, "max": 256}
GAINS = {"max": 0.003}  # expected gain below which a search ends; 1 % by default
SEARCH_SHARE = 0.6  # of the time budget; the rest is for verifying and racing
BOUNDED_S = 2.0  # for the race after Ctrl-C
_logger = logging.getLogger(__name__)


class Tuning:
    """One problem being tuned, batch by batch.

        while tuning.step():
            ...
        entry = tuning.finish()

    The winner beats the defaults and XLA, or is the fastest one of these; see
    ``select.winner``. Choices that this machine has measured before are not
    measured again, but may race again.

    Attributes:
      stop: why the search is over: "complete", "converged", "budget" or a reason that
        the caller sets; None while it goes on.
    """

    def __init__(
        self,
        problem: Problem,
        diagnosis: Diagnosis,
        decision: Decision,
        lab: Lab,
        knowledge: Knowledge,
        device: Device,
        *,
        effort: Effort = "default",
        budget_s: float | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        goal: Goal = "latency",
        timing: Timing | None = None,
        observe: Callable[[Observation], None] = lambda observation: None,
    ) -> None:
        """Measures nothing yet.

        Args:
          problem: the problem to tune.
          diagnosis, decision: the variants that can run it, and the choices to try.
          lab: runs and verifies choices.
          knowledge: supplies earlier measurements; receives the entry.
          device: the local device.
          effort: "none" (the defaults and XLA race, nothing is searched), "quick" (at
            most 16 choices are evaluated), "default" (64) or "max" (256). "default" and
            "max" evaluate every choice of a space of at most 200.
          budget_s: seconds for everything; the step at hand is finished, and a race has
            a few rounds at least.
          seed: of the search.
          progress: called at every step.
          goal: "latency", "throughput" or "balanced"; see ``goals``.
          timing: the measuring protocol.
          observe: called with every observation as it is made.

        Raises:
          ValueError: on an unknown effort or goal, or a budget that is not positive.
        """
        _check(effort, goal, budget_s)
        self.problem = problem
        self.stop: str | None = None
        self._knowledge, self._device = knowledge, device
        self._candidates = Candidates.of(decision)
        self._default = decision.choice
        self._effort: Effort = effort
        self._seed, self._goal = seed, goal
        heroes = _with_xla(
            tuple(h for h in decision.heroes if h.variant in diagnosis.candidates),
            problem,
            device,
        )
        journal = knowledge.own.journal(problem, device)
        self._close = weakref.finalize(self, journal.close)
        self._session = Session(
            problem=problem,
            lab=lab,
            knowledge=knowledge,
            device=device,
            journal=journal,
            timing=timing or Timing(),
            progress=progress,
            observe=observe,
            order=(*self._candidates.choices, next(_of_xla(heroes))),
            heroes=heroes,
            untuned=self._default,
            reference=heroes[0],
            budget_s=no_limit(budget_s),
            goal=goal,
            known={o.identity: o for o in knowledge.observations(problem, device)},
        )
        self._search = self._begun()
        self._batch: list[int] = []  # proposed by the search and not measured yet

    @property
    def expected_gain(self) -> float:
        """Gain expected of more search, in log units; 0 when the search is over."""
        return 0.0 if self.stop is not None else float(self._search.expected_gain)

    @property
    def best_us(self) -> float | None:
        """The lowest steady time known."""
        return self._session.best_us

    @property
    def default_us(self) -> float | None:
        """The steady time of the default, which runs where nothing was tuned."""
        return self._session.time_us(self._default)

    @property
    def xla_us(self) -> float | None:
        return self._session.time_us(self._session.xla)

    @property
    def compiles(self) -> int:
        """Configs that this tuning has compiled."""
        return self._session.compiles

    @property
    def evals(self) -> int:
        """Choices of the space that the search knows, measured here or before."""
        return self._search.evals

    @property
    def legal(self) -> int:
        """Choices of the space."""
        return len(self._candidates.choices)

    @property
    def tried(self) -> int:
        """Choices of the space that were measured or failed, here or before."""
        observed = map(self._session.observed, self._candidates.choices)
        return sum(observation is not None for observation in observed)

    def step(self, *, limit_s: float = math.inf) -> bool:
        """Measures one batch, or the part of it that fits in the time.

        Args:
          limit_s: seconds after which no further choice is begun; one is always begun.

        Returns:
          False when the search is over.
        """
        session, end_s = self._session, self._session.elapsed_s + limit_s
        if self.stop is None and not self._batch:
            self._ask()
        if self.stop is None and session.observed(session.xla) is None:
            session.evaluate(session.xla)
        while self._batch and self.stop is None:
            index = self._batch.pop(0)
            choice = self._candidates.choices[index]
            if session.observed(choice) is None:
                session.tell("search", self.evals, self._allowed, str(choice))
                session.evaluate(choice)
            self._search.tell(index, self._value(choice))
            if self._is_late:
                self.stop = "budget"
            if session.elapsed_s >= end_s:
                break
        return self.stop is None

    def _ask(self) -> None:
        """Asks for the next batch and starts compiling it, or sets ``stop``."""
        if self._is_late:
            self.stop = "budget"
            return
        self._batch = list(self._search.ask()) if self._allowed else []
        if not self._batch:
            self.stop = self._search.stop if self._allowed else "complete"
        choices = [self._candidates.choices[index] for index in self._batch]
        fresh = [c for c in choices if self._session.observed(c) is None]
        self._session.lab.compile(self.problem, fresh)

    def finish(self, *, bounded_s: float | None = None) -> Entry:
        """Verifies and races the best, and records the winner and all observations.

        Args:
          bounded_s: if given, only the leader and the defaults race, for so long.

        Raises:
          TuningError: if the device stopped working.
        """
        session = self._session
        outcome = session.finish(bounded_s=bounded_s)
        entry = Entry(
            problem=self.problem.to_json(),
            environment=environment(self._device),
            best=outcome.best,
            observations=tuple(session.known[name] for name in sorted(session.known)),
            verified=outcome.verified,
            tuner={**self._summary(), UNTUNED: outcome.untuned},
            written=_now(),
        )
        entry = self._knowledge.own.record(entry, session.journal)
        self._close()
        _logger.info("%s: %s, %d evaluations", self.problem, entry.best, self.evals)
        session.tell("done", 1, 1, entry.best.variant, entry.best)
        return entry

    @property
    def _is_late(self) -> bool:
        session = self._session
        return session.elapsed_s >= SEARCH_SHARE * session.budget_s

    @property
    def _allowed(self) -> int:
        """Evaluations at most; the efforts "default" and "max" sweep small spaces."""
        size, most = len(self._candidates.choices), EFFORTS[self._effort]
        swept = most >= EFFORTS["default"] and size <= SWEPT
        return size if swept else min(size, most)

    def _begun(self) -> Search:
        """A search that has been told all observations known already."""
        candidates, session = self._candidates, self._session
        near = self._knowledge.neighbours(self.problem, self._device)
        seeds = (*session.heroes, *self._known_configs(near))
        search = Search(
            candidates.features,
            codes=candidates.codes,
            log_prior=self._log_prior,
            first=candidates.indices(seeds),
            budget=self._allowed,
            seed=int(digest(canonical([self.problem.to_json(), self._seed]), 8), 16),
            gain=GAINS.get(self._effort, 0.01),
            history=history.of(
                near, self.problem, self._device, candidates, self._goal
            ),
        )
        known = [c for c in candidates.choices if session.observed(c) is not None]
        for index, choice in zip(candidates.indices(known), known, strict=True):
            search.tell(index, self._value(choice))
        return search

    def _known_configs(self, near: Sequence[Neighbour]) -> tuple[Choice, ...]:
        """Winners for this problem in other environments, then for its neighbours."""
        problem, device = self.problem, self._device
        before = self._knowledge.elsewhere(problem, device)
        nearest = [n.best for n in near]
        return sum((history.seeds(b, problem, device) for b in (before, nearest)), ())

    def _value(self, choice: Choice) -> float | None:
        """The value that the surrogate learns: the score divided by the bound."""
        score = self._session.score_us(choice)
        return score and score / self._floor_us

    @property
    def _log_prior(self) -> np.ndarray | None:
        """Logarithm of the modelled times divided by the same bound."""
        prior = self._candidates.log_prior
        return None if prior is None else prior - np.log(self._floor_us)

    @functools.cached_property
    def _floor_us(self) -> float:
        return history.floor_us(self.problem, self._device)

    def _summary(self) -> dict[str, Any]:
        session, gain = self._session, float(self._search.expected_gain)
        return {
            "version": VERSION,
            "effort": self._effort,
            "seed": self._seed,
            "goal": self._goal,
            "space": digest(canonical([identity_of(c) for c in session.order]), 16),
            "legal": self.legal,
            "pruned": self._candidates.pruned,
            "tried": self.tried,
            "evals": self.evals,
            "compiles": session.compiles,
            "wall_s": round(session.elapsed_s, 3),
            "expected_gain": gain if gain < 1e300 else None,
            "stop": self.stop or "bounded",
        }


def finished(tuning: Tuning) -> Entry:
    """Searches to the end, races and records.

    Ctrl-C ends the search; the choices measured until then still race, shortly.

    Returns:
      The entry as stored, with the observations that other processes added meanwhile.
    """
    try:
        while tuning.step():
            pass
    except KeyboardInterrupt:
        tuning.stop = "interrupted"
        return tuning.finish(bounded_s=BOUNDED_S)
    try:
        return tuning.finish()
    except KeyboardInterrupt:
        tuning.stop = "interrupted"
        return tuning.finish(bounded_s=BOUNDED_S)


def _with_xla(
    heroes: tuple[Choice, ...], problem: Problem, device: Device
) -> tuple[Choice, ...]:
    """The heroes and XLA's choice, which races even if the policy leaves it out."""
    if any(_of_xla(heroes)):
        return heroes
    config = variants.XLA.heuristic(problem, device)
    return (*heroes, Choice(variant="xla", config=config))


def _of_xla(choices: Sequence[Choice]) -> Any:
    return (choice for choice in choices if choice.variant == "xla")


def _check(effort: str, goal: str, budget_s: float | None) -> None:
    if effort not in get_args(Effort):
        raise ValueError(f"{effort=} must be one of {', '.join(get_args(Effort))}")
    if goal not in GOALS:
        raise ValueError(f"{goal=} must be one of {', '.join(GOALS)}")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"{budget_s=} must be positive seconds, or None for no limit")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


__all__ = ["EFFORTS", "GOALS", "Progress", "Tuning", "TuningError", "finished"]

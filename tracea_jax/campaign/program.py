"""The races of a whole program against plain, before and after the tuning of its ops.

    Executions -> Needs -> race -> search -> race -> keep.decide -> Entry

The first race comes before the search, so that there is an outcome whatever the search
leaves of the budget; the last one comes after it. ``campaign.races``, the only caller,
decides when they are held and what is reported of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tracea_jax import verdicts
from tracea_jax.campaign.executions import Execution, Executions, difference
from tracea_jax.campaign.keep import (
    Decision,
    Undecided,
    Without,
    decide,
    first_decision,
)
from tracea_jax.campaign.needs import Needs
from tracea_jax.device import Device
from tracea_jax.ops.common import choice
from tracea_jax.options import Options, local_device
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.tuning import measure
from tracea_jax.tuning.store.records import Best, Entry, Observation, union

FEWER_SHARE = 0.25  # part of the rest that is kept for races with fewer sites
_MAX_MESSAGE = 2000
_USED_UP = "the budget was used up"
IS_PLAIN = "XLA serves every site, which is plain already"
Tell = Callable[..., None]


def own(make: Callable[[], Any]) -> Any:
    """A field that is no argument."""
    return dataclasses.field(default_factory=make, init=False, repr=False)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Contest:
    """The races of one program.

    Attributes:
      program: what races.
      device, settings: as of the tuning.
      timing: the protocol.
      left_s: () -> seconds left for everything.
      clock: seconds, monotonic.
      tell: called with phase, done, total, best_us and message at every step.
      needs: what a race takes, known after ``begin``.
      first: the race before the search; None if it was not held.
    """

    program: Executions
    device: Device
    settings: Options
    timing: measure.Timing
    left_s: Callable[[], float]
    clock: Callable[[], float]
    tell: Tell
    needs: Needs = Needs(compile_s=0.0, race_s=0.0)
    first: measure.Race | None = None
    _classes: dict[str, list[str]] = own(dict)
    _problem: ProgramProblem | None = own(lambda: None)
    _is_plain: bool = own(bool)
    _runs: dict[Without, Execution | Exception] = own(dict)
    _seen: list[Observation] = own(list)
    _slowest_s: float = own(float)  # of what was compiled so far

    def begin(self) -> None:
        """Traces the program, compiles plain, and estimates what a race needs.

        Raises:
          keep.Undecided: if it cannot race.
        """
        if why := self._why_not():
            raise Undecided(why)
        start_s = self.clock()
        self._trace()
        self.program = self.program.filled()
        trace_s = self.clock() - start_s
        plain = self._prepared(None)
        if isinstance(plain, Exception):
            raise Undecided(f"plain JAX fails: {plain}")
        plain_s = self.clock() - start_s - trace_s
        _, each_us = measure.calibrate(plain, self.timing)
        each_s = 1e-6 * each_us
        self.needs = Needs.of(
            trace_s=trace_s, plain_s=plain_s, each_s=each_s, timing=self.timing
        )

    def race_first(self) -> Entry | None:
        """Races plain against the program as it runs by now, and remembers the outcome.

        None if XLA serves every site now.

        Raises:
          keep.Undecided: if plain fails.
        """
        if self._is_plain:
            return None
        start_s = self.clock()
        self.first = self._race([None, ()])
        spent_s = self.clock() - start_s
        compile_s = min(self._slowest_s, spent_s)
        self.needs = Needs(compile_s=compile_s, race_s=spent_s - compile_s)
        return self._recorded(first_decision(self.first, self.program.ops))

    @property
    def reserve_s(self) -> float:
        """Seconds to keep for ``race_last``."""
        fewer = len(self._classes) if len(self._classes) > 1 else 0
        rest_s = max(self.left_s() - self.needs.once_s, 0.0)
        fewer_s = min(fewer * self.needs.once_s, FEWER_SHARE * rest_s)
        return self.needs.once_s + fewer_s

    def race_last(self, *, is_changed: bool) -> Entry:
        """Races plain, the program as it runs by now, and the program with fewer sites.

        Args:
          is_changed: whether other configs run than in ``race_first``.

        Raises:
          keep.Undecided: if there is nothing to race.
        """
        if is_changed:
            self._trace()
            self._runs = {r: run for r, run in self._runs.items() if r is None}
            self.first = None
            self._seen.clear()
        if self._is_plain:
            raise Undecided(IS_PLAIN)
        if self.first is not None and self.left_s() >= self.needs.race_s:
            # Nothing is to be compiled, and the machine may be quieter than it was.
            self.first = _joined(self.first, self._race([None, ()]))
        ops = self.program.ops
        decision = decide(self._race, self._classes, ops, self.first)
        return self._recorded(decision)

    def _trace(self) -> None:
        jaxpr, self._classes = self.program.sites()
        if not self._classes:
            raise Undecided("it has no sites")
        ops, after_grad = self.program.ops, self.program.after_grad
        self._problem = verdicts.problem_of(jaxpr, ops, after_grad)
        self._is_plain = choice.is_as_written(jaxpr)

    def _why_not(self) -> str | None:
        if self.device != local_device():
            return f"it would run on {local_device().name}"
        if self.settings.implementation is not None:
            return f"options(implementation={self.settings.implementation!r}) is set"
        if self.left_s() <= 0:
            return _USED_UP
        return self.program.why_not()

    def _race(self, racers: Sequence[Without]) -> measure.Race:
        """Programs in turns; those whose results are wrong have no times.

        Raises:
          TimeoutError: if the time left would not suffice.
        """
        runs: dict[Any, measure.Run] = {}
        failures: dict[Any, Exception] = {}
        for i, racer in enumerate(racers):
            self._tell("compile", i, len(racers), racer)
            prepared = self._prepared(racer)
            if isinstance(prepared, Exception):
                failures[racer] = prepared
            else:
                runs[racer] = prepared
        with measure.exclusive(self.settings.directory, self.device):
            if None in runs:
                measure.settle(runs[None], self.timing)
            held = measure.race(
                runs,
                self.timing,
                limit_s=max(self.left_s(), 0.0),
                on_round=lambda done, total: self._tell("race", done, total, None),
            )
        held = dataclasses.replace(held, failures={**failures, **held.failures})
        self._seen.extend(self._observations(held))
        return held

    def _prepared(self, without: Without) -> Execution | Exception:
        if without not in self._runs:
            # Time for plain and for every site was kept.
            if without and self.left_s() <= self._slowest_s + self.needs.race_s:
                raise TimeoutError(_USED_UP)
            start_s = self.clock()
            self._runs[without] = self._checked(without)
            spent_s = self.clock() - start_s
            self._slowest_s = max(self._slowest_s, spent_s)
        return self._runs[without]

    def _checked(self, without: Without) -> Execution | Exception:
        """Compiled, run once and compared with plain; or why it may not race."""
        try:
            run = self.program.prepare(without)
            found = run.results()
            plain = self._runs.get(None)
            if plain is not None and not isinstance(plain, Exception):
                if (wrong := difference(found, plain.results())) is not None:
                    return measure.CandidateError("wrong_result", wrong)
        except Exception as e:  # whatever a program does, plain may still run
            return measure.candidate_error(e, "compile_error")
        return run

    def _observations(self, race: measure.Race) -> list[Observation]:
        seen: list[Observation] = []
        for racer, times in race.times_us.items():
            repeats = len(times) * race.repeats[racer]
            name = self._named(racer)
            time_us = race.median_us(racer)
            seen.append(Observation(**name, time_us=time_us, repeats=repeats))
        for racer, error in race.failures.items():
            failure = measure.candidate_error(error, "launch_error")
            seen.append(
                Observation(
                    **self._named(racer),
                    failure=failure.kind,
                    message=str(failure)[:_MAX_MESSAGE],
                )
            )
        return seen

    def _named(self, without: Without) -> dict[str, Any]:
        if without is None:
            return {"variant": "xla", "config": {}}
        assert self._problem is not None
        return verdicts.name_of(self._problem, without, self.device)

    def _recorded(self, decision: Decision) -> Entry:
        assert self._problem is not None
        kept, every = decision.kept, decision.every
        about: dict[str, Any] = {"function": self.program.name}
        if every is not None:
            about |= {"every": round(every.ratio, 4), "every_us": every.time_us}
        best = Best(
            **self._named(kept.without),
            time_us=kept.time_us,
            xla_us=kept.plain_us,
            ratio=kept.ratio,
            goal="throughput",
            origin="search",
        )
        observations = union(self._seen)
        return verdicts.record(
            self._problem, self.device, self.settings, best, observations, about
        )

    def _tell(self, phase: str, done: int, total: int, racer: Without) -> None:
        message = "plain" if racer is None else f"without {', '.join(racer) or '-'}"
        if phase == "race":
            message = ""
        total = max(total, done)
        self.tell(phase=phase, done=done, total=total, best_us=None, message=message)


def _joined(one: measure.Race, other: measure.Race) -> measure.Race:
    """The rounds of two races of the same programs, without those that failed once."""
    both = [racer for racer in one.times_us if racer in other.times_us]
    return measure.Race(
        times_us={r: (*one.times_us[r], *other.times_us[r]) for r in both},
        repeats={r: min(one.repeats[r], other.repeats[r]) for r in both},
        failures={**one.failures, **other.failures},
    )

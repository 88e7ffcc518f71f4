"""The race of a whole program against plain, which ends the tuning of a function.

    Executions -> races -> keep.decide -> Entry -> Whole

``campaign.run`` holds it in process 0; from then on ``verdicts`` knows the outcome.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tracea_jax import knowledge, verdicts
from tracea_jax.campaign.executions import Execution, Executions, Program, difference
from tracea_jax.campaign.keep import Decision, Undecided, Without, decide
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.ops.common import choice
from tracea_jax.options import Options, local_device
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.schema import one_line
from tracea_jax.tuning import measure
from tracea_jax.tuning.store.records import Best, Entry, Observation, union

TIMING = measure.Timing()
_MAX_MESSAGE = 2000
_logger = logging.getLogger(__name__)
Tell = Callable[..., None]


def _own(make: Callable[[], Any]) -> Any:
    return dataclasses.field(default_factory=make, init=False, repr=False)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Contest:
    """The races of one program.

    Attributes:
      program: what races.
      device, settings: as of the tuning.
      left_s: () -> seconds left for everything.
      tell: called with phase, done, total, best_us and message at every step.
    """

    program: Executions
    device: Device
    settings: Options
    left_s: Callable[[], float]
    tell: Tell
    _runs: dict[Without, Execution | Exception] = _own(dict)
    _seen: list[Observation] = _own(list)
    _slowest_s: float = 0.0  # of what was compiled so far

    def entry(self) -> Entry:
        """Races the program and remembers what is kept of it.

        Raises:
          keep.Undecided: if there was no race.
        """
        if why := self._why_not():
            raise Undecided(why)
        start_s = time.monotonic()
        jaxpr, classes = self.program.sites()
        if not classes:
            raise Undecided("it has no sites")
        if choice.is_as_written(jaxpr):
            raise Undecided("XLA serves every site, which is plain already")
        ops = self.program.ops
        problem = verdicts.problem_of(jaxpr, ops, self.program.after_grad)
        self.program = self.program.filled()
        decision = decide(functools.partial(self._race, problem), classes)
        if decision.kept.without == tuple(sorted(classes)):
            # All, also what other versions may find in it.
            kept = dataclasses.replace(decision.kept, without=tuple(sorted(ops)))
            decision = dataclasses.replace(decision, kept=kept)
        seconds = round(time.monotonic() - start_s, 3)
        about = {"function": self.program.name, "wall_s": seconds}
        return self._recorded(problem, decision, about)

    def _why_not(self) -> str | None:
        if self.device != local_device():
            return f"it would run on {local_device().name}"
        if self.settings.implementation is not None:
            return f"implementation={self.settings.implementation!r} is asked for"
        if self.left_s() <= 0:
            return "the budget was used up"
        return self.program.why_not()

    def _race(self, problem: ProgramProblem, racers: Sequence[Without]) -> measure.Race:
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
                measure.settle(runs[None], TIMING)
            held = measure.race(
                runs,
                TIMING.final,
                limit_s=max(self.left_s(), 0.0),
                on_round=lambda done, total: self._tell("race", done, total, None),
            )
        held = dataclasses.replace(held, failures={**failures, **held.failures})
        self._seen.extend(self._observations(problem, held))
        return held

    def _prepared(self, without: Without) -> Execution | Exception:
        if without not in self._runs:
            if self.left_s() <= self._slowest_s:
                raise TimeoutError("the budget was used up")
            start_s = time.monotonic()
            self._runs[without] = self._checked(without)
            spent_s = time.monotonic() - start_s
            self._slowest_s = max(self._slowest_s, spent_s)
        return self._runs[without]

    def _checked(self, without: Without) -> Execution | Exception:
        """Compiled, and run once beside plain; or why it may not race."""
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

    def _observations(
        self, problem: ProgramProblem, race: measure.Race
    ) -> list[Observation]:
        seen: list[Observation] = []
        for racer, times in race.times_us.items():
            repeats = len(times) * race.repeats[racer]
            name = self._named(problem, racer)
            time_us = race.median_us(racer)
            seen.append(Observation(**name, time_us=time_us, repeats=repeats))
        for racer, error in race.failures.items():
            failure = measure.candidate_error(error, "launch_error")
            seen.append(
                Observation(
                    **self._named(problem, racer),
                    failure=failure.kind,
                    message=str(failure)[:_MAX_MESSAGE],
                )
            )
        return seen

    def _named(self, problem: ProgramProblem, without: Without) -> dict[str, Any]:
        if without is None:
            return {"variant": "xla", "config": {}}
        return verdicts.name_of(problem, without, self.device)

    def _recorded(
        self, problem: ProgramProblem, decision: Decision, about: dict[str, Any]
    ) -> Entry:
        kept, every = decision.kept, decision.every
        if every is not None:
            about = {**about, "every": round(every.ratio, 4)}
        best = Best(
            **verdicts.name_of(problem, kept.without, self.device),
            time_us=kept.time_us,
            xla_us=kept.plain_us,
            ratio=kept.ratio,
            origin="search",
        )
        observations = union(self._seen)
        return verdicts.record(
            problem, self.device, self.settings, best, observations, about
        )

    def _tell(self, phase: str, done: int, total: int, racer: Without) -> None:
        message = "plain" if racer is None else f"without {', '.join(racer) or '-'}"
        if phase == "race":
            message = ""
        total = max(total, done)
        self.tell(phase=phase, done=done, total=total, best_us=None, message=message)


def hold(
    program: Program,
    *,
    device: Device,
    settings: Options,
    left_s: Callable[[], float],
    tell: Tell,
) -> tuple[Entry | None, Whole]:
    """The outcome of a contest, and its entry.

    A contest that could not be held, or was ended, has no entry: what was tuned before
    stays, and the report tells why. Arguments are those of ``Contest``.
    """
    knowledge.refresh(settings)  # what was tuned by now is what races
    knowledge.trust_own(settings, device)
    try:
        with program.opened() as executions:
            entry = Contest(
                program=executions,
                device=device,
                settings=settings,
                left_s=left_s,
                tell=tell,
            ).entry()
    except Undecided as e:
        return None, _logged(program, Whole(reason=str(e)))
    except KeyboardInterrupt:
        return None, _logged(program, Whole(reason="interrupted"))
    except Exception as e:  # of the user's function, or for want of memory
        return None, _logged(
            program, Whole(reason=one_line(f"{type(e).__name__}: {e}"))
        )
    return entry, _logged(program, Whole.of_entry(entry))


def _logged(program: Program, whole: Whole) -> Whole:
    _logger.info("%s as a %s", program.name, whole)
    return whole

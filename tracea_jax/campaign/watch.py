"""Reports a campaign while it runs: progress, log and trials.

Tunings call the functions that a ``Watch`` makes for them; ``campaign.progress`` shows
the steps. What is reported at the end is in ``campaign.report``.
Callers: ``campaign.tune`` and ``campaign.run``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tracea_jax.campaign.progress import WHOLE, Told
from tracea_jax.campaign.rows import Trial
from tracea_jax.graph import Node
from tracea_jax.problem import Problem
from tracea_jax.tuning.store.records import Observation

Log = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The keywords that ``tune(progress=...)`` is called with.

    Attributes:
      phase: the kind of work: "search", "verify", "compile", "race", "wait" or "done".
      done, total: steps of the phase that are done, and all steps of it.
      best_us, xla_us: the lowest time so far and XLA's time; None if unknown. While the
        search goes on they are of different moments: their quotient says little.
      ratio: None before the last race of the problem is over. Then ``best_us`` and
        ``xla_us`` are the times of the winner and of XLA that decided the race, and
        this is their quotient. Of a whole program XLA's time is that of plain.
      message: the choice at hand, or the reason for waiting.
      problem: the problem at hand, as text; "whole program" while that races.
      node, nodes: number of problems that are done, and of all problems.
      share: the part of the whole campaign that is done, 0 to 1.
      left_s: seconds left of the budget; without a budget an estimate, or None.
    """

    phase: str
    done: int
    total: int
    best_us: float | None
    xla_us: float | None
    ratio: float | None
    message: str
    problem: str
    node: int
    nodes: int
    share: float
    left_s: float | None


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    trials: list[Trial] = dataclasses.field(default_factory=list)
    part: float = 0.0  # of the problem's tuning that is done, 0 to 1


class Watch:
    """Passes on progress and observations; keeps the trials of every problem."""

    def __init__(
        self,
        *,
        progress: Told | None = None,
        log: str | os.PathLike[str] | Log | None = None,
        budget_s: float | None = None,
        is_raced: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._log = log
        has_end = budget_s is not None and not math.isinf(budget_s)
        self._budget_s = budget_s if has_end else None
        self._clock = clock
        self._start_s = clock()
        self._nodes: dict[Problem, _Node] = {}
        self._race = _Node() if is_raced else None  # of the whole program
        self._file: TextIO | None = None

    def __enter__(self) -> Watch:
        """Opens the log before any time is spent on measuring.

        Raises:
          OSError: if the log cannot be written.
        """
        if self._log is not None and not callable(self._log):
            self._file = pathlib.Path(self._log).open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    @property
    def share(self) -> float:
        """The part of the whole campaign that is done, 0 to 1."""
        race = () if self._race is None else (self._race,)
        parts = [node.part for node in (*self._nodes.values(), *race)]
        return sum(parts) / len(parts) if parts else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left of the budget; without one, estimated by the pace so far."""
        if self._budget_s is not None:
            return max(self._budget_s - self.elapsed_s, 0.0)
        share = self.share
        return self.elapsed_s * (1 - share) / share if share else None

    def expect(self, nodes: Sequence[Node]) -> None:
        """Announces the problems that will be tuned."""
        for node in nodes:
            self._nodes.setdefault(node.problem, _Node())

    def trials(self, problem: Problem) -> tuple[Trial, ...]:
        return tuple(self._nodes[problem].trials)

    def latest(
        self, problem: Problem, variant: str, config: dict[str, Any]
    ) -> Trial | None:
        """The last successful trial of a choice: that of the race after a race."""
        found = (
            trial
            for trial in reversed(self._nodes[problem].trials)
            if (trial.variant, trial.config) == (variant, config) and trial.time_us
        )
        return next(found, None)

    def progress(self, problem: Problem) -> Callable[..., None] | None:
        """The function that the tuning of a problem calls at every step."""
        if self._progress is None:
            return None

        def tell(
            *,
            phase: str,
            done: int,
            total: int,
            best_us: float | None,
            message: str,
            ratio: float | None = None,
        ) -> None:
            assert self._progress is not None
            self._advance(problem, phase, done, total)
            xla = self.latest(problem, "xla", {})
            step = Step(
                phase=phase,
                done=done,
                total=total,
                best_us=best_us,
                xla_us=_of_race(best_us, ratio) or (xla and xla.time_us),
                ratio=ratio,
                message=message,
                problem=str(problem),
                node=sum(node.part == 1 for node in self._nodes.values()),
                nodes=len(self._nodes),
                share=self.share,
                left_s=self.left_s,
            )
            self._progress(**_fields(step))

        return tell

    def waiting(self) -> Callable[..., None] | None:
        """The function to call while waiting for process 0, which tunes."""
        if self._progress is None:
            return None
        told = self._progress

        def tell(**step: Any) -> None:
            told(
                **step,
                xla_us=None,
                ratio=None,
                problem="",
                node=0,
                nodes=1,
                share=0.0,
                left_s=self.left_s,
            )

        return tell

    def whole(self) -> Callable[..., None]:
        """The function to call at every step of the race of the whole program."""
        told = self._progress

        def tell(
            *,
            phase: str,
            best_us: float | None = None,
            ratio: float | None = None,
            **step: Any,
        ) -> None:
            if self._race is not None and phase == "done":
                self._race.part = 1.0
            if told is not None:
                told(
                    **step,
                    phase=phase,
                    best_us=best_us,
                    ratio=ratio,
                    xla_us=_of_race(best_us, ratio),
                    problem=WHOLE,
                    node=sum(node.part == 1 for node in self._nodes.values()),
                    nodes=len(self._nodes),
                    share=self.share,
                    left_s=self.left_s,
                )

        return tell

    def observe(self, problem: Problem) -> Callable[[Observation], None]:
        """The function that the tuning of a problem calls with every observation."""

        def seen(observation: Observation) -> None:
            trial = Trial(
                variant=observation.variant,
                config=observation.config,
                time_us=observation.time_us,
                cold_us=observation.cold_us,
                failure=observation.failure,
                elapsed_s=round(self.elapsed_s, 6),
            )
            self._nodes[problem].trials.append(trial)
            self._write(problem, trial, observation.message)

        return seen

    def _write(self, problem: Problem, trial: Trial, message: str) -> None:
        if self._log is None:
            return
        line = {**dataclasses.asdict(trial), "problem": problem.to_json()}
        if message:
            line["message"] = message
        if callable(self._log):
            self._log(line)
        elif self._file is not None:
            with contextlib.suppress(OSError):  # a full disk does not end the tuning
                print(json.dumps(line), file=self._file, flush=True)

    def _advance(self, problem: Problem, phase: str, done: int, total: int) -> None:
        node = self._nodes[problem]
        if phase == "done":
            node.part = 1.0
        elif phase in ("verify", "race"):
            node.part = max(node.part, 0.9)
        elif total:
            node.part = max(node.part, 0.9 * done / total)


def _of_race(best_us: float | None, ratio: float | None) -> float | None:
    """XLA's time in a race that is over."""
    return best_us * ratio if best_us and ratio else None


def _fields(step: Step) -> dict[str, Any]:
    return {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}

"""Races the attention of models, a few problems at a time, and makes their answers.

A process of its own (``attention_process``) races the kernels of ours in groups and
compiles those that follow. If a group ends it, or leaves it a GPU that answers nothing
but errors, another one goes on with the next group, and the problems of the lost group
race once more, each alone, at last. No program of cuDNN runs there: who won meets it
in a process of the problem's own (``attention_duels``). Caller: ``tune_layers``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from attention_ahead import Prepared, prepared
from attention_answers import (
    Errors,
    Raced,
    Races,
    candidates,
    cudnn,
    described,
    races,
    verified,
)

from tracea_jax.device import Device
from tracea_jax.options import current as options
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
from tracea_jax.survey.turns import on_visible_gpus
from tracea_jax.tuning.store.records import Entry

TOGETHER = 8  # problems of one profile, which takes as long to begin as to race one
JUDGED = 24  # problems raced until winners meet cuDNN and their answers are written
ENDING_S = 45.0  # of the time, for the last of these

Answers = Iterator[tuple[AttentionProblem, Entry | str]]


class Racer:
    """Races groups of problems in this process, and compiles those that follow."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._turns = on_visible_gpus(options().directory)
        self._announced: list[AttentionProblem] = []
        self._ready: Iterator[tuple[AttentionProblem, Prepared]] = iter(())
        self._errors: Errors = {}

    def race(
        self,
        group: Sequence[AttentionProblem],
        following: Sequence[AttentionProblem] = (),
    ) -> Races:
        """Of each problem the race, or why there was none.

        Args:
          group: the problems.
          following: what later calls will ask for, in their order: it is compiled.

        Raises:
          Exception: of a GPU that runs nothing any more, whatever it is asked.
        """
        if self._announced[: len(group)] != list(group):
            self._announced = [*group, *following]
            wanted = {p: self._apart_from_cudnn(p) for p in self._announced}
            self._ready = prepared(wanted, self._device)
        del self._announced[: len(group)]
        began = time.monotonic()
        waiting = dict(itertools.islice(self._ready, len(group)))
        compiled = time.monotonic()
        for ready in waiting.values():
            for choice, e in ready.failed.items():
                print(f"  not {choice}: {described(e)}", flush=True)
        found = races(waiting, self._device, self._turns)
        raced_s = time.monotonic() - compiled
        waited_s = compiled - began
        print(
            f"  waited {waited_s:.1f} s for programs, raced {raced_s:.1f} s", flush=True
        )
        if any(isinstance(race, str) for _, race in found):
            salt = time.monotonic_ns() % (1 << 20)  # so that a new kernel is loaded
            jax.block_until_ready(jax.jit(lambda x: x * salt + 1)(jnp.ones(8)))
        return found

    def _apart_from_cudnn(self, problem: AttentionProblem) -> list[Choice]:
        rival = cudnn(problem, self._device)
        return [c for c in candidates(problem, self._device) if c != rival]

    def verify(self, found: Sequence[Raced]) -> dict[AttentionProblem, str]:
        """See ``verified``."""
        return verified(found, self._device, self._errors)


def entries(
    problems: Sequence[AttentionProblem],
    device: Device,
    budget_s: float,
    racer: Any = None,
    settled: Callable[[Sequence[Raced]], Races] = lambda found: [
        (race.problem, race) for race in found
    ],
) -> Answers:
    """An answer for each problem that there was time for, or why there is none.

    Args:
      problems: the most important first.
      device: this machine's.
      budget_s: seconds for everything.
      racer: what races; a ``Racer``, or ``attention_process.Apart``.
      settled: the races against cuDNN of who won, as ``attention_duels.settled``.
    """
    racer = racer or Racer(device)
    end = time.monotonic() + budget_s - ENDING_S
    groups = [
        tuple(problems[i : i + TOGETHER]) for i in range(0, len(problems), TOGETHER)
    ]
    lost: list[AttentionProblem] = []
    found: list[Raced] = []
    count = 0
    while groups and time.monotonic() < end or not count:
        group, *groups = groups
        try:
            following = [p for later in groups for p in later]
            for problem, race in racer.race(group, following):
                if isinstance(race, Raced):
                    found.append(race)
                else:
                    yield problem, race
        except Exception as e:  # whatever a kernel does must not end the rest
            print(f"  not {len(group)} problems: {described(e)}", flush=True)
            if len(group) == 1:
                yield group[0], described(e)
            else:
                lost += group
        count += len(group)
        left_s = end - time.monotonic()
        print(f"  {count} of {len(problems)} raced, {left_s:.0f} s left", flush=True)
        if not groups:  # once more, each alone
            groups, lost = [(p,) for p in lost], []
        if len(found) >= JUDGED:
            yield from _answered(found, racer, settled, device)
            found = []
    yield from _answered(found, racer, settled, device)


def _answered(
    found: Sequence[Raced],
    racer: Any,
    settled: Callable[[Sequence[Raced]], Races],
    device: Device,
) -> Answers:
    """The answers of some that raced; none of those whom cuDNN did not meet."""
    over: list[Raced] = []
    for problem, race in settled(found) if found else []:
        if isinstance(race, Raced):
            over.append(race)
        else:
            yield problem, race
    yield from _verified(over, racer, device)


def _verified(found: Sequence[Raced], racer: Any, device: Device) -> Answers:
    """Entries of those that are right; who ends the process is found by halves."""
    try:
        wrong = racer.verify(found)
    except Exception as e:
        if len(found) == 1:
            yield found[0].problem, f"not verified: {described(e)}"
            return
        yield from _verified(found[: len(found) // 2], racer, device)
        yield from _verified(found[len(found) // 2 :], racer, device)
        return
    for race in found:
        yield race.problem, wrong.get(race.problem) or race.entry(device)

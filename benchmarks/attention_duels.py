"""Who of ours won meets cuDNN, each problem in a process of its own.

    python -m attention_duels   the process's program

A program of cuDNN is loaded by capturing a stream. Now and then that fails, and then
the process loads no kernel any more, whosever it is. So a process loads one such
program, after all others that it needs are compiled and loaded, and ends with its race.
A process that is lost, hangs or answers nonsense costs its problem a second try, and no
other problem anything. Several start and compile beside each other, and measure in
turns. Caller: ``tune_layers --what attention``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Sequence

from attention_ahead import prepared_alone
from attention_answers import Raced, Races, cudnn, described, races

from tracea_jax.campaign import local_device
from tracea_jax.device import Device
from tracea_jax.options import current as options
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
from tracea_jax.survey.turns import on_visible_gpus
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.lab.worker import Worker

PROGRAM = ("-m", "attention_duels")
LONGEST_S = 60.0  # of a process, which waits for its turns, too
TRIES = 2
PROCESSES = 8  # at a time; one takes a core until it has compiled


class NotRun(RuntimeError):
    """A program that had to race did not run."""


def settled(found: Sequence[Raced], device: Device) -> Races:
    """The last race of each winner, or why it could not take place.

    Args:
      found: races without cuDNN. Those of problems that cuDNN has no program for are
        over.
      device: this machine's.
    """
    at_a_time = max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        races_of = functools.partial(_settled, device=device)
        return list(pool.map(races_of, found))


def _settled(race: Raced, device: Device) -> tuple[AttentionProblem, Raced | str]:
    if cudnn(race.problem, device) is None:
        return race.problem, race if race.is_settled() else "its times are noise"
    why = ""
    for _ in range(TRIES):
        try:
            return race.problem, _in_a_process(race)
        except Exception as e:  # whatever became of the process
            why = described(e)
            print(f"  {race.problem} and cuDNN: {why}", flush=True)
    return race.problem, f"it did not meet cuDNN: {why}"


def _in_a_process(race: Raced) -> Raced:
    with contextlib.closing(Worker(PROGRAM, os.environ)) as worker:
        last = worker.ask(race, LONGEST_S)
    if not isinstance(last, Raced) or last.problem != race.problem:
        raise NotRun(f"it answered {str(last)[:80]}")
    return last


def duel(race: Raced, device: Device) -> Raced:
    """Races the winner, the default and cuDNN, in this process.

    Raises:
      NotRun: if one of them did not run, or who is the fastest differs from round to
        round: nobody knows then.
    """
    last = finalists(race, device)
    ready = prepared_alone(race.problem, last)
    for choice, e in ready.failed.items():
        raise NotRun(f"{choice}: {described(e)}")
    turns = on_visible_gpus(options().directory)
    ((_, found),) = races({race.problem: ready}, device, turns)
    if isinstance(found, str):
        raise NotRun(found)
    if missing := [str(c) for c in last if c not in found.times]:
        raise NotRun(f"{', '.join(missing)} did not run")
    if not found.is_settled():
        raise NotRun("times are noise")
    return found


def finalists(race: Raced, device: Device) -> list[Choice]:
    """Who races at last; the default may be one of the others."""
    rival = cudnn(race.problem, device)
    return list(dict.fromkeys(c for c in (race.usual, race.best, rival) if c))


def main() -> None:
    def answer(question: Raced, tell: Tell) -> Raced:
        return duel(question, local_device())

    serve(answer)


if __name__ == "__main__":
    main()

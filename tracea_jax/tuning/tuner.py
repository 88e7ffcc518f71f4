"""The tuner: sweep a list of choices, race the best against the defaults, remember.

    cache and journals -> sweep -> verify -> race -> select.winner -> entry -> cache

Every measurement is on disk before the next one starts, so a tuning that is killed goes
on where it was. A choice that fails is remembered with its reason and never scored; one
whose results are wrong cannot win.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import random
from collections.abc import Sequence

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.doctor import Diagnosis
from tracea_jax.policy import Choice, Decision
from tracea_jax.problem import Problem
from tracea_jax.tuning.cache import Database, Entry, environment
from tracea_jax.tuning.environment import canonical, digest
from tracea_jax.tuning.measure import Bench, Timing
from tracea_jax.tuning.session import Progress, Session, TuningError, identity_of

VERSION = 1  # of the method; entries tell by which one they were made
EFFORTS = {"none": 0, "quick": 16, "default": 64, "max": 256}  # evaluations at most
GOALS = ("latency", "throughput")
SWEEP_SHARE = 0.6  # of the time budget; the rest is for verifying and racing
BOUNDED_S = 2.0  # for the race after Ctrl-C


def tune(
    problem: Problem,
    diagnosis: Diagnosis,
    decision: Decision,
    bench: Bench,
    database: Database,
    device: Device,
    *,
    effort: str = "default",
    budget_s: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    goal: str = "latency",
    timing: Timing | None = None,
) -> Entry:
    """Measures the decision's choices and records the best.

    The winner beats the best default by 1 % or is that default, and beats XLA or is
    XLA. What this machine measured before is not measured again, but races again.
    Ctrl-C ends the sweep; what was measured until then still races, shortly.

    Args:
      problem, diagnosis, decision: what to tune, and the choices to try.
      bench: runs and verifies choices of this problem.
      database: supplies what was measured before; receives the entry.
      device: the local device.
      effort: "none" (the defaults and XLA race, nothing is swept), "quick" (at most 16
        choices are evaluated), "default" (64) or "max" (256). A larger space is
        sampled; the defaults are always in.
      budget_s: seconds for everything; the step at hand is finished, and a race has a
        few rounds at least.
      seed: decides which choices of a large space are evaluated.
      progress: told about every step.
      goal: "latency" or "throughput". For one problem both mean least time; what is
        measured is the time of executions in a row, for either.
      timing: the measuring protocol.

    Returns:
      The entry as stored, with what other processes found meanwhile.

    Raises:
      ValueError: on an unknown effort or goal, or a budget that is not positive.
      TuningError: if the device stopped working.
    """
    _check(effort, goal, budget_s)
    space = tuple(c for c in decision.space if c.variant in diagnosis.candidates)
    heroes = tuple(h for h in decision.heroes if h.variant in diagnosis.candidates)
    space_hash = digest(canonical([identity_of(c) for c in space]), 16)
    key = digest(canonical([problem.to_json(), space_hash, seed]), 16)
    choices = sample(space, heroes, EFFORTS[effort], int(key, 16))
    with contextlib.closing(database.journal(problem, device)) as journal:
        session = Session(
            bench=bench,
            database=database,
            device=device,
            journal=journal,
            timing=timing or Timing(),
            progress=progress,
            space=space,
            heroes=_with_xla(heroes, problem, device),
            budget_s=math.inf if budget_s is None else budget_s,
            known={o.identity: o for o in database.observations(problem, device)},
        )
        stop = sweep(session, choices)
        try:
            bounded_s = BOUNDED_S if stop == "interrupted" else None
            best, verified = session.finish(bounded_s=bounded_s)
        except KeyboardInterrupt:
            if stop == "interrupted":
                raise  # asked twice: the journal keeps what was measured
            stop = "interrupted"
            best, verified = session.finish(bounded_s=BOUNDED_S)
        entry = Entry(
            problem=problem.to_json(),
            environment=environment(problem.op, device),
            best=best,
            observations=tuple(session.known[name] for name in sorted(session.known)),
            verified=verified,
            tuner={
                "version": VERSION,
                "effort": effort,
                "seed": seed,
                "goal": goal,
                "space": space_hash,
                "evals": sum(session.observed(c) is not None for c in choices),
                "wall_s": round(session.elapsed_s, 3),
                "stop": stop,
            },
            written=_now(),
        )
        entry = database.record(entry, journal)
    session.tell("done", 1, 1, entry.best.variant)
    return entry


def sweep(session: Session, choices: Sequence[Choice]) -> str:
    """Evaluates the choices in order; says why it stopped.

    Returns:
      "complete", "budget" or "interrupted".
    """
    try:
        for done, choice in enumerate(choices):
            if session.observed(choice) is not None:
                continue
            if session.elapsed_s >= SWEEP_SHARE * session.budget_s:
                return "budget"
            session.tell("sweep", done, len(choices), str(choice))
            session.evaluate(choice)
    except KeyboardInterrupt:
        return "interrupted"
    return "complete"


def sample(
    space: Sequence[Choice], heroes: Sequence[Choice], count: int, seed: int
) -> tuple[Choice, ...]:
    """The heroes, then others of the space in its order: ``count`` in all, or none."""
    if count == 0:
        return ()
    others = [c for c in space if c not in heroes]
    size = min(len(others), max(count - len(heroes), 0))
    picked = sorted(random.Random(seed).sample(range(len(others)), size))
    return (*heroes, *(others[i] for i in picked))


def _with_xla(
    heroes: tuple[Choice, ...], problem: Problem, device: Device
) -> tuple[Choice, ...]:
    """XLA is raced whether or not the policy lists it."""
    if any(h.variant == "xla" for h in heroes):
        return heroes
    config = variants.XLA.heuristic(problem, device)
    return (*heroes, Choice(variant="xla", config=config))


def _check(effort: str, goal: str, budget_s: float | None) -> None:
    if effort not in EFFORTS:
        raise ValueError(f"{effort=} must be one of {', '.join(EFFORTS)}")
    if goal not in GOALS:
        raise ValueError(f"{goal=} must be one of {', '.join(GOALS)}")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"{budget_s=} must be positive seconds, or None for no limit")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


__all__ = ["EFFORTS", "GOALS", "Progress", "TuningError", "sample", "sweep", "tune"]

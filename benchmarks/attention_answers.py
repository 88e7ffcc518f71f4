"""Answers for the attention of models: each problem is raced once, in kernel time.

A search would take minutes for each. Here the variants' own models say which configs
can win; these race with each other, and who wins with the default and with cuDNN. What
is not the default becomes the answer only if it is faster by more than the noise
(``MARGIN``), and then the default is its runner-up, so that an entry says what was
gained. Who wins is compared with another choice at the problem itself, and, if it is a
kernel of ours, with float64 at a small, ragged problem of the same kind.

Which problems race together, and in which process, is in ``attention_groups`` and
``attention_duels``, the callers, and ``convolution_answers`` judges races as here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
from attention_ahead import Prepared, compile_kernels

from tracea_jax.device import CudaDevice, Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops.attention import workload
from tracea_jax.ops.common.kernel_time import ProfileError
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import AttentionProblem
from tracea_jax.survey.cuda_errors import forget_error
from tracea_jax.survey.turns import Turns
from tracea_jax.tuning import tuner
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants import XLA
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.attention_decode_sm90 import (
    ATTENTION_DECODE_SM90,
    CHOICES,
)
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

ROUNDS = 4
LONG_FLOPS, FEW_ROUNDS = 1e13, 2  # of what takes some 20 ms, and varies little
MARGIN = 1.01  # times the winner's time that the default takes at least
NOISE = 1.03  # times the least time that the default takes at most, if it stays
DIFFERENCE = 2.0**-5  # of the largest number, between two right results
EVERY = 99  # of the likely configs, of which there are fewer
SHORT = 1024  # keys; with more, who computes a tile follows from the mask

Times = dict[Choice, list[float]]
Errors = dict[tuple[AttentionProblem, Choice], float | str]
Races = list[tuple[AttentionProblem, "Raced | str"]]  # or why there was none


def default(problem: AttentionProblem, device: Device) -> Choice:
    """The choice where nothing was measured."""
    return decide(diagnose(problem, device)).choice


def candidates(problem: AttentionProblem, device: Device) -> list[Choice]:
    """Who may win: the default, few configs of ours near it, and cuDNN.

    XLA's own programs take several times as long on a GPU; one races where it is the
    default.
    """
    own = ATTENTION_DECODE_SM90 if problem.q_len == 1 else ATTENTION_SM90
    variant: Any = ATTENTION_BACKWARD_SM90 if problem.direction == "backward" else own
    found = [default(problem, device)]
    if variant.why_not(problem, device) is None:
        configs = _configs(variant, problem, device)
        found += [Choice(variant=variant.name, config=config) for config in configs]
    if (rival := cudnn(problem, device)) is not None:
        found.append(rival)
    if not isinstance(device, CudaDevice):
        found.append(Choice(variant="xla", config=XLA.config_type()))
    return list(dict.fromkeys(found))


def cudnn(problem: AttentionProblem, device: Device) -> Choice | None:
    """cuDNN's program, where it has one."""
    if ATTENTION_CUDNN.why_not(problem, device) is not None:
        return None
    config: Any = ATTENTION_CUDNN.heuristic(problem, device)
    return Choice(variant=ATTENTION_CUDNN.name, config=config)


def _configs(variant: Any, problem: AttentionProblem, device: Device) -> list[Any]:
    """The legal configs of a variant among those near its default."""
    usual = variant.heuristic(problem, device)
    near: Iterable[dict[str, Any]]
    if variant is ATTENTION_SM90:
        near = (
            {"tile_q": c.tile_q, "tile_kv": c.tile_kv, "schedule": s, "overlap": o}
            for c in ATTENTION_SM90.likely(problem, device, EVERY)
            for s in (("static", "drawn") if problem.kv_len <= SHORT else (c.schedule,))
            for o in (False, True)
        )
    elif variant is ATTENTION_DECODE_SM90:
        splits = CHOICES["splits"]
        at = splits.index(usual.splits)
        near = [
            *({"splits": n} for n in splits[max(0, at - 1) : at + 2]),
            *({"tile_kv": 128}, {"blocks_per_sm": 1}, {"persistent": True}),
        ]
    else:
        large = {"tile_kv": 128, "stages_q": 2, "tile_q": 128, "block_kv": 64}
        small = {"tile_kv": 64, "stages_q": 2, "tile_q": 64, "block_kv": 64}
        near = [
            {**large, "block_q": 64, "stages_kv": 3, "dq": "recomputed"},
            {**large, "block_q": 64, "stages_kv": 2, "dq": "ordered"},
            {**large, "block_q": 128, "stages_kv": 2, "dq": "ordered"},
            {**small, "block_q": 64, "stages_kv": 2, "dq": "beside"},
        ]
    every = [usual, *(dataclasses.replace(usual, **fields) for fields in near)]
    return [c for c in dict.fromkeys(every) if _is_legal(variant, problem, c, device)]


def _is_legal(variant: Any, problem: Any, config: Any, device: Device) -> bool:
    try:
        variant.check(problem, config, device)
    except ValueError:
        return False
    return True


# --- running --------------------------------------------------------------------------


def raced(
    calls: Mapping[AttentionProblem, dict[Choice, Any]], device: Device
) -> dict[AttentionProblem, Times]:
    """``common.race`` of each problem; on a GPU in one profile for all."""
    if not isinstance(device, CudaDevice):
        return {p: common.race(of, ROUNDS) for p, of in calls.items()}
    turns = [(p, c) for p in calls for _ in range(_rounds(p)) for c in calls[p]]
    spans = common.kernel_spans([calls[p][c] for p, c in turns])
    times: dict[AttentionProblem, Times] = {p: {c: [] for c in calls[p]} for p in calls}
    for (problem, choice), us in zip(turns, spans, strict=True):
        times[problem][choice].append(us)
    return times


def _rounds(problem: Any) -> int:
    return ROUNDS if problem.flops < LONG_FLOPS else FEW_ROUNDS


def _raced_surely(
    calls: Mapping[AttentionProblem, dict[Choice, Any]], device: Device
) -> dict[AttentionProblem, Times]:
    """Each problem in a profile of its own, if that of all has lost events."""
    try:
        return raced(calls, device)
    except ProfileError as e:
        print(f"  again: {e}", flush=True)
    found: dict[AttentionProblem, Times] = {}
    for problem, of in calls.items():
        with contextlib.suppress(ProfileError):
            found |= raced({problem: of}, device)
    return found


def winner(times: Times, usual: Choice) -> Choice:
    """The fastest if it is clearly faster than the default, else that."""
    best = min(times, key=lambda c: statistics.median(times[c]))
    if usual not in times or best == usual:
        return best
    is_clear = common.median_ratio(times, usual, best) >= MARGIN
    always = all(u > b for u, b in zip(times[usual], times[best], strict=True))
    return best if is_clear and always else usual


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """A race that is over.

    Attributes:
      apart: how far the results of the winner and of another choice are apart.
    """

    problem: AttentionProblem
    best: Choice
    usual: Choice
    times: Times
    apart: float

    def is_settled(self) -> bool:
        """Returns whether no other choice has a clearly smaller median.

        The default stays where another was faster in most rounds, but not in all.
        """
        us = {c: statistics.median(values) for c, values in self.times.items()}
        return us[self.best] <= NOISE * min(us.values())

    def entry(self, device: Device) -> Entry:
        """The winner with what the default took, if that is another."""
        us = {c: statistics.median(values) for c, values in self.times.items()}
        xla = next((c for c in us if c.variant == "xla"), None)
        code = functools.partial(named, self.problem, device=device)
        race = {"protocol": "race"}
        seen = [
            Observation(
                **code(c), time_us=time_us, repeats=len(self.times[c]), extra=race
            )
            for c, time_us in us.items()
        ]
        gained = self.usual in us and self.usual != self.best
        second = {**code(self.usual), "time_us": us[self.usual]} if gained else {}
        return Entry(
            problem=self.problem.to_json(),
            environment=environment(device),
            best=Best(
                **code(self.best),
                time_us=us[self.best],
                kernel_us=us[self.best],
                xla_us=us[xla] if xla else None,
                xla_kernel_us=us[xla] if xla else None,
                ratio=common.median_ratio(self.times, xla, self.best) if xla else None,
                runner_up=second,
                origin="xla"
                if self.best.variant == "xla"
                else ("search" if gained else "hero"),
                goal="throughput",
            ),
            observations=tuple(sorted(seen, key=lambda o: o.identity)),
            verified={"ok": True} if self.best.variant != "xla" else {},
            tuner={"version": tuner.VERSION, "effort": "quick"},
            written=datetime.datetime.now(datetime.UTC).isoformat(
                timespec="microseconds"
            ),
        )


def races(
    group: Mapping[AttentionProblem, Prepared], device: Device, turns: Turns
) -> Races:
    """Races a few problems in one profile, while no other process uses the GPU."""
    with turns.together():
        calls = {problem: dict(_ran(ready)) for problem, ready in group.items()}
    with turns.alone():
        times = _raced_surely({p: of for p, of in calls.items() if of}, device)
    found: Races = [
        (p, "no profile has all of it" if calls[p] else "nothing ran")
        for p in calls
        if p not in times
    ]
    with turns.together():
        return found + [
            (p, _judged_race(p, times[p], calls[p], group[p], device)) for p in times
        ]


def _judged_race(
    problem: AttentionProblem,
    times: Times,
    calls: Mapping[Choice, Any],
    ready: Prepared,
    device: Device,
) -> Raced:
    """Who won, and how far the results are from those of another variant, if any."""
    usual = default(problem, device)
    best = winner(times, usual)
    others = [c for c in times if c.variant != best.variant] or list(times)
    other = min(others, key=lambda c: statistics.median(times[c]))
    apart = float(ready.difference(calls[best](), calls[other]()))
    return Raced(problem=problem, best=best, usual=usual, times=times, apart=apart)


def _ran(ready: Prepared) -> Iterator[tuple[Choice, Any]]:
    """Calls of the choices that ran once."""
    inputs = ready.operands(jnp.uint32(1))
    for choice, run in ready.runs.items():
        for is_last in (False, True):
            try:
                jax.block_until_ready(run(*inputs))
                yield choice, functools.partial(run, *inputs)
                break
            except Exception as e:  # such as no memory
                forget_error()
                if is_last:
                    print(f"  not {choice}: {described(e)}", flush=True)


# --- verifying ------------------------------------------------------------------------


def verified(
    found: Sequence[Raced], device: Device, errors: Errors | None = None
) -> dict[AttentionProblem, str]:
    """Why winners cannot be trusted, by their problems.

    Lengths do not matter, so that many problems share a small one.

    Args:
      found: what raced.
      device: this machine's.
      errors: what is known of small problems and choices; it is added to.
    """
    errors = {} if errors is None else errors
    asked = {
        (workload.ragged(r.problem), r.best)
        for r in found
        if r.best.variant not in ("xla", "cudnn")
    }
    new = [pair for pair in asked if pair not in errors]
    compile_kernels(new, device)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        judged = pool.map(lambda pair: _error(pair[0], pair[1], device), new)
        errors.update(zip(new, judged, strict=True))
    wrong: dict[AttentionProblem, str] = {}
    for r in found:
        error = errors.get((workload.ragged(r.problem), r.best), 0.0)
        if isinstance(error, str) or not error <= 1:
            wrong[r.problem] = f"{r.best} has an error of {error} of what is allowed"
        elif not r.apart <= DIFFERENCE:
            wrong[r.problem] = f"{r.best} and another differ by {r.apart:.3g}"
    return wrong


def _error(small: AttentionProblem, choice: Choice, device: Device) -> float | str:
    """Against float64, in units of what is allowed; or what was raised."""
    try:
        operands = workload.operands(small, 3)
        run = functools.partial(workload.execute, problem=small, choice=choice)
        return workload.error(small, device, operands, jax.jit(run)(*operands), 3)
    except Exception as e:  # the others are verified
        return described(e)


def described(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"[:300]

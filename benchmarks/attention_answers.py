"""Answers for the attention of models: each problem is raced once, in kernel time.

A search would take minutes for each. Here the variants' own models say which configs
can win; these race with cuDNN, and with XLA where its scores fit into memory. Who wins
is compared with float64 at a small, ragged problem of the same kind, and with the
runner-up at the problem itself. Caller: ``tune_layers --what attention``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp

from tracea_jax.device import CudaDevice, Device
from tracea_jax.ops.attention import workload
from tracea_jax.ops.common.kernel_time import ProfileError, profiled
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
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

ROUNDS = 5
THREADS = 12
AHEAD = 12  # problems that are compiled while others race
NARROW = 1.01  # below, cuDNN or XLA is as good
XLA_SCORES = 1 << 30  # more would not fit, or take seconds
DIFFERENCE = 2.0**-5  # of the largest number, between two right results
SHORT = 1024  # keys; with more, who computes a tile follows from the mask

Compiled = dict[Choice, Callable[..., Any]]
Prepared = tuple[Callable[..., Any], Compiled, dict[Choice, Exception]]
_MARK = "cbrt"  # in the name of a kernel that no call launches


def candidates(problem: AttentionProblem, device: Device) -> list[Choice]:
    """Who may win: few configs of ours, cuDNN, and XLA if its scores fit."""
    own = ATTENTION_DECODE_SM90 if problem.q_len == 1 else ATTENTION_SM90
    variant: Any = ATTENTION_BACKWARD_SM90 if problem.direction == "backward" else own
    found: list[Choice] = []
    if variant.why_not(problem, device) is None:
        configs = _configs(variant, problem, device)
        found = [Choice(variant=variant.name, config=config) for config in configs]
    if ATTENTION_CUDNN.why_not(problem, device) is None:
        config: Any = ATTENTION_CUDNN.heuristic(problem, device)
        found.append(Choice(variant="cudnn", config=config))
    p = problem
    is_small = p.batch * p.heads * p.q_len * p.kv_len <= XLA_SCORES
    if is_small and not p.saves_lse:
        found.append(Choice(variant="xla", config=XLA.config_type()))
    return found


def _configs(variant: Any, problem: AttentionProblem, device: Device) -> list[Any]:
    """Of one variant, the legal ones among those near its default."""
    usual = variant.heuristic(problem, device)
    near: Iterable[dict[str, Any]]
    if variant is ATTENTION_SM90:
        near = (
            {"tile_q": c.tile_q, "tile_kv": c.tile_kv, "schedule": s, "overlap": o}
            for c in ATTENTION_SM90.likely(problem, device)
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


def _operands(problem: AttentionProblem, seed: jax.Array) -> list[jax.Array]:
    """Random operands; those of gradients are what the forward pass leaves."""
    p = problem
    keys = (p.batch, p.kv_len, p.kv_heads)
    q = (p.batch, p.q_len, p.heads)
    shapes = ((*q, p.head_dim), (*keys, p.head_dim), (*keys, p.columns))
    rngs = jax.random.split(jax.random.key(seed), 4)
    dtype = jnp.dtype(p.dtype)
    pairs = zip(rngs, shapes, strict=False)
    found = [jax.random.normal(key, shape, dtype) for key, shape in pairs]
    if p.kv_lengths:
        found.append(jnp.full(p.batch, p.kv_len, jnp.int32))
    if p.direction == "backward":
        forward = dataclasses.replace(p, direction="forward", saves_lse=True)
        config: Any = ATTENTION_SM90.heuristic(forward, common.local_device())
        choice = Choice(variant=ATTENTION_SM90.name, config=config)
        found += workload.execute(*found, problem=forward, choice=choice)
        found.append(jax.random.normal(rngs[3], (*q, p.columns), dtype))
    return found


def _compiled(
    problem: AttentionProblem, choice: Choice | None = None
) -> Callable[..., Any]:
    """What runs a choice, or makes the operands."""
    operands = functools.partial(_operands, problem)
    if choice is None:
        return jax.jit(operands).lower(jnp.uint32(0)).compile()
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    shapes = jax.eval_shape(operands, jnp.uint32(0))
    return jax.jit(run).lower(*shapes).compile()


def prepared(
    problems: Sequence[AttentionProblem], device: Device
) -> Iterator[tuple[AttentionProblem, Prepared]]:
    """Compiles the candidates and operands of each problem, some problems ahead."""
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    started: dict[AttentionProblem, dict[Choice | None, Any]] = {}
    try:
        for i, problem in enumerate(problems):
            for later in problems[i : i + AHEAD]:
                if later not in started:
                    wanted = (None, *candidates(later, device))
                    started[later] = {
                        c: pool.submit(_compiled, later, c) for c in wanted
                    }
            yield problem, _finished(started[problem])
            started[problem] = {}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _finished(futures: dict[Choice | None, Any]) -> Prepared:
    done: Compiled = {}
    failed: dict[Choice, Exception] = {}
    for choice, future in futures.items():
        if choice is not None:
            try:
                done[choice] = future.result()
            except Exception as e:
                failed[choice] = e
    return futures[None].result(), done, failed


def raced(calls: dict[Choice, Any], device: Device) -> dict[Choice, list[float]]:
    """``common.race``, on a GPU with one profile for all: marks tell calls apart."""
    if not isinstance(device, CudaDevice):
        return common.race(calls, ROUNDS)
    one = jnp.ones(7)
    mark = functools.partial(jax.jit(jnp.cbrt), one)
    order = [choice for _ in range(ROUNDS) for choice in calls]
    steps = [step for c in order for step in (calls[c], mark, calls[c], mark)]
    for call in (mark, *calls.values()):
        jax.block_until_ready(call())
    events = sorted(
        (event.start_ns, event.duration_ns, event.name.lower())
        for plane in profiled([mark, *steps]).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    spans: list[float] = []  # of the calls, every second one counts
    for _, ns, name in events:
        if _MARK in name:
            spans.append(0.0)
        elif "memcpyh2d" not in name and "memcpyd2h" not in name:
            spans[-1] += ns * 1e-3
    if len(spans) != 2 * len(order) + 1 or not all(spans[:-1]):
        raise ProfileError(f"{len(spans)} marks, not {2 * len(order) + 1}")
    times: dict[Choice, list[float]] = {choice: [] for choice in calls}
    for choice, us in zip(order, spans[1::2], strict=True):
        times[choice].append(us)
    return times


def answer(problem: AttentionProblem, ready: Prepared, device: Device) -> Entry | str:
    """The winner of a race as an entry, or why there is none."""
    operands, compiled, _ = ready
    inputs = operands(jnp.uint32(1))
    calls: dict[Choice, Any] = {}
    for choice, run in compiled.items():
        try:
            jax.block_until_ready(run(*inputs))
            calls[choice] = functools.partial(run, *inputs)
        except Exception as e:  # such as no memory
            print(f"  not {choice}: {type(e).__name__}", flush=True)
    if not calls:
        return "nothing ran"
    times = raced(calls, device)
    us = {choice: statistics.median(values) for choice, values in times.items()}
    best = _winner(us)
    if wrong := _wrong(problem, best, calls, us, device):
        return wrong
    return _entry(problem, best, us, times, device)


def _winner(us: dict[Choice, float]) -> Choice:
    """The fastest; one of ours only if it is faster by more than nothing."""
    best = min(us, key=lambda c: us[c])
    theirs = [c for c in us if c.variant in ("cudnn", "xla")]
    if theirs and best not in theirs:
        rival = min(theirs, key=lambda c: us[c])
        return best if us[rival] >= NARROW * us[best] else rival
    return best


def _wrong(
    problem: AttentionProblem,
    best: Choice,
    calls: dict[Choice, Any],
    us: dict[Choice, float],
    device: Device,
) -> str | None:
    """Why the winner's results cannot be trusted."""
    if best.variant == "xla":
        return None
    error = _error(workload.ragged(problem), best, device)
    if not error <= 1:
        return f"{best} has {error:.3g} of the error that rounding allows"
    others = [c for c in us if c.variant != best.variant]
    if not others:
        return None
    other = min(others, key=lambda c: us[c])
    for x, y in zip(calls[best](), calls[other](), strict=True):
        far = _difference(x, y)
        if not far <= DIFFERENCE:
            return f"{best} and {other} differ by {far:.3g}"
    return None


@functools.cache
def _error(small: AttentionProblem, choice: Choice, device: Device) -> float:
    """Against float64; lengths do not matter, so that many problems share it."""
    operands = workload.operands(small, 3)
    run = functools.partial(workload.execute, problem=small, choice=choice)
    return workload.error(small, device, operands, jax.jit(run)(*operands), 3)


@jax.jit
def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype("float32"), y.astype("float32")
    return jnp.abs(x - y).max() / jnp.abs(y).max()


def _entry(
    problem: AttentionProblem,
    best: Choice,
    us: dict[Choice, float],
    times: dict[Choice, list[float]],
    device: Device,
) -> Entry:
    xla = next((c for c in us if c.variant == "xla"), None)
    seen = [
        Observation(
            **named(problem, choice, device),
            time_us=time_us,
            repeats=ROUNDS,
            extra={"protocol": "race"},
        )
        for choice, time_us in us.items()
    ]
    return Entry(
        problem=problem.to_json(),
        environment=environment(device),
        best=Best(
            **named(problem, best, device),
            time_us=us[best],
            kernel_us=us[best],
            xla_us=us[xla] if xla else None,
            xla_kernel_us=us[xla] if xla else None,
            ratio=common.median_ratio(times, xla, best) if xla else None,
            origin="xla" if best.variant == "xla" else "search",
            goal="throughput",
        ),
        observations=tuple(sorted(seen, key=lambda o: o.identity)),
        verified={"ok": True} if best.variant != "xla" else {},
        tuner={"version": tuner.VERSION, "effort": "quick"},
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
    )


def entries(
    problems: Sequence[AttentionProblem], device: Device, budget_s: float
) -> Iterator[tuple[AttentionProblem, Entry | str]]:
    """An answer for each problem, or why there is none, until the time is over."""
    end = time.monotonic() + budget_s
    for problem, ready in prepared(problems, device):
        for choice, e in ready[-1].items():
            print(f"  not {choice}: {type(e).__name__}: {str(e)[:200]}", flush=True)
        try:
            yield problem, answer(problem, ready, device)
        except Exception as e:  # the rest goes on
            yield problem, f"{type(e).__name__}: {str(e)[:300]}"
        if time.monotonic() > end:
            return

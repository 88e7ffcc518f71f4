"""Answers for the convolutions of models: each problem is raced once, in kernel time.

The configs that the variants' models find fastest race with the default, some problems
in one profile. What is clearly faster than the default becomes the answer, else the
default does: so a raced problem is never answered from its neighbours. The results of a
winner and of the default are compared; what configs compute is tested elsewhere.

Problems are compiled some ahead of the races, by threads, those first for which XLA
need not compile anything: it takes seconds. Several processes can share a GPU, each
with a part of the problems (``share``): XLA tries kernels on the GPU while it compiles,
so what it compiles and what races take turns. Caller: ``tune_layers --what
convolutions``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_answers import DIFFERENCE, Raced, Times, raced, winner

from tracea_jax.device import CudaDevice, Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops.common.kernel_time import ProfileError
from tracea_jax.ops.conv2d import workload
from tracea_jax.options import current as options
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import Conv2dProblem
from tracea_jax.survey.turns import Turns, on_visible_gpus
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.store.records import Entry
from tracea_jax.variants.conv2d_bands import CONV2D_BANDS
from tracea_jax.variants.conv2d_depthwise import CONV2D_DEPTHWISE
from tracea_jax.variants.conv2d_grouped import CONV2D_GROUPED
from tracea_jax.variants.conv2d_grouped_images import CONV2D_GROUPED_IMAGES
from tracea_jax.variants.conv2d_sm90 import CONV2D_SM90
from tracea_jax.variants.conv2d_strips_sm90 import CONV2D_STRIPS_SM90
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90

LIKELY = 3  # configs of each variant that can rank them
AHEAD = 128  # problems that are compiled while others race
TOGETHER = 24  # problems of one profile, which takes long to begin
TOGETHER_BYTES = 3 << 30  # of their operands and results
COMPARED = 1 << 22  # numbers of results
COPIED_BYTES = 1 << 26
_RANKED: tuple[Any, ...] = (
    *(CONV2D_SM90, CONV2D_STRIPS_SM90, CONV2D_WEIGHTS_SM90),
    *(CONV2D_BANDS, CONV2D_DEPTHWISE, CONV2D_GROUPED, CONV2D_GROUPED_IMAGES),
)
_BY_XLA = ("xla", "conv2d_product")  # XLA tries kernels for them while it compiles

Run = Callable[..., Any]
Runs = dict[Choice, Run]


@functools.cache
def default(problem: Conv2dProblem, device: Device) -> Choice:
    """What runs where nothing was measured."""
    return decide(diagnose(problem, device)).choice


def candidates(problem: Conv2dProblem, device: Device) -> list[Choice]:
    """Who may win: the default, each variant's own, and few configs near it.

    XLA and products race where they are the default, and the portable kernel where it
    is alone with XLA: elsewhere they were measured to lose, or to win little.
    """
    decision = decide(diagnose(problem, device))
    found = [decision.choice]
    found += [hero for hero in decision.heroes if hero.variant != "xla"]
    for variant in _RANKED:
        if isinstance(device, CudaDevice) and not variant.why_not(problem, device):
            found += [
                Choice(variant=variant.name, config=config)
                for config in variant.likely(problem, device, LIKELY)
            ]
    if any(c.variant in {v.name for v in _RANKED} for c in found):
        slow = ("conv2d_sm80", "conv2d_product")
        found[1:] = [c for c in found[1:] if c.variant not in slow]
    return list(dict.fromkeys(found))


def share(
    problems: Sequence[Conv2dProblem], part: int, parts: int
) -> list[Conv2dProblem]:
    """One of so many equal parts, in which problems have many kernels in common."""

    def kind(problem: Conv2dProblem) -> tuple[Any, ...]:
        return problem.direction, not problem.epilogue.is_identity

    alike = sorted(range(len(problems)), key=lambda i: kind(problems[i]))
    first, last = (len(problems) * i // parts for i in (part, part + 1))
    return [problems[i] for i in sorted(alike[first:last])]


# --- preparing ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is needed to race a problem.

    Attributes:
      runs: of each choice that can run.
    """

    problem: Conv2dProblem
    runs: Runs

    @property
    def bytes(self) -> int:
        return self.problem.bytes * 2


def prepared(
    problem: Conv2dProblem, device: Device, kernels: Ahead, turns: Turns
) -> Prepared:
    """Compiles a problem's choices; those that fail are told and left out."""
    choices = candidates(problem, device)
    kernels.start(problem, choices)
    runs: Runs = {}
    # While XLA compiles, others compile the kernels.
    for choice in sorted(choices, key=lambda c: c.variant not in _BY_XLA):
        try:
            runs[choice] = _compiled(kernels, turns, problem, choice)
        except Exception as e:  # the others race
            why = f"{type(e).__name__}: {str(e)[:200]}"
            print(f"  not {choice} of {problem}: {why}", flush=True)
    for seed, array in enumerate(_shapes(problem)):
        if _is_large(array):
            _tiled(array.shape, str(array.dtype), seed)
    return Prepared(problem=problem, runs={c: runs[c] for c in choices if c in runs})


def _compiled(
    kernels: Ahead, turns: Turns, problem: Conv2dProblem, choice: Choice
) -> Run:
    kernels.wait(problem, choice)
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    lowered = jax.jit(run).lower(*_shapes(problem))
    is_by_xla = choice.variant in _BY_XLA
    with turns.together() if is_by_xla else contextlib.nullcontext():
        return lowered.compile()


@functools.cache
def _shapes(problem: Conv2dProblem) -> Any:
    return jax.eval_shape(functools.partial(workload.operands, problem, 0))


@functools.cache
def _numbers(dtype: str) -> np.ndarray:
    """Some random numbers, of which operands are made: of more, it takes longer."""
    numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    return numbers.astype(jnp.dtype(dtype))


def _operands(problem: Conv2dProblem) -> list[jax.Array]:
    """Random arrays, small ones from the host: a program takes long to compile."""
    return [
        _tiled(s.shape, str(s.dtype), seed)()
        if _is_large(s)
        else jax.device_put(np.resize(_numbers(str(s.dtype))[509 * seed :], s.shape))
        for seed, s in enumerate(_shapes(problem))
    ]


def _is_large(array: Any) -> bool:
    return array.size * array.dtype.itemsize > COPIED_BYTES


@functools.cache
def _tiled(shape: tuple[int, ...], dtype: str, seed: int) -> Run:
    """What makes a large array of random numbers."""
    numbers, size = jax.device_put(_numbers(dtype)), math.prod(shape)

    def make(numbers: jax.Array) -> jax.Array:
        some = numbers[509 * seed :]
        return jnp.tile(some, -(-size // len(some)))[:size].reshape(shape)

    return functools.partial(jax.jit(make).lower(numbers).compile(), numbers)


# --- racing ---------------------------------------------------------------------------


def races(
    group: Sequence[Prepared], device: Device
) -> list[tuple[Conv2dProblem, Raced | str]]:
    """Races a few problems: who wins, or why nobody does."""
    calls: dict[Any, dict[Choice, Any]] = {}
    found: list[tuple[Conv2dProblem, Raced | str]] = []
    for ready in group:
        problem = ready.problem
        inputs = _operands(problem)
        calls[problem] = {}
        for choice, run in ready.runs.items():
            try:
                jax.block_until_ready(run(*inputs))
                calls[problem][choice] = functools.partial(run, *inputs)
            except Exception as e:  # such as no memory
                print(f"  not {choice}: {type(e).__name__}", flush=True)
        if default(problem, device) not in calls[problem]:
            del calls[problem]
            found.append((problem, "its default did not run"))
    for problem, times in _raced_surely(calls, device).items():
        usual = default(problem, device)
        best = winner(times, usual)
        _tell(problem, times, usual)
        apart = 0.0
        if best != usual:
            apart = _difference(calls[problem][best](), calls[problem][usual]())
        if not apart <= DIFFERENCE:
            found.append((problem, f"{best} is wrong: {apart=:.3g}"))
            continue
        race: Any = {"problem": problem, "best": best, "usual": usual}
        found.append((problem, Raced(**race, times=times, apart=apart)))
    return found


def _raced_surely(
    calls: Mapping[Any, dict[Choice, Any]], device: Device
) -> dict[Any, Times]:
    """Each problem in a profile of its own, if that of all has lost events."""
    with contextlib.suppress(ProfileError):
        return raced(calls, device)
    found: dict[Any, Times] = {}
    for problem, of in calls.items():
        with contextlib.suppress(ProfileError):
            found |= raced({problem: of}, device)
    return found


def _tell(problem: Conv2dProblem, times: Times, usual: Choice) -> None:
    us = {c: statistics.median(values) for c, values in times.items()}
    few = sorted(us, key=lambda c: us[c])[:4]
    text = "; ".join(f"{c} {us[c]:.1f}" for c in dict.fromkeys((usual, *few)))
    print(f"  {problem} | {text}", flush=True)


def _difference(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> float:
    """The largest, relative to the largest number; of the first numbers of many."""

    def apart(x: jax.Array, y: jax.Array) -> float:
        a, b = (_host(x)[:COMPARED].astype(np.float32) for x in (x, y))
        return float(np.abs(a - b).max() / np.abs(b).max())

    return max(apart(x, y) for x, y in zip(some, others, strict=True))


def _host(x: jax.Array) -> np.ndarray:
    """An array's first images, which is all of it if there is only one."""
    some = x[:1] if _is_large(x) else x
    return np.asarray(some).reshape(-1)


# --- all of them ----------------------------------------------------------------------


def entries(
    problems: Sequence[Conv2dProblem], device: Device, budget_s: float
) -> Iterator[tuple[Conv2dProblem, Entry | str]]:
    """The answer of each problem that there was time for, or why there is none."""
    began = time.monotonic()
    end = began + budget_s
    spent = {"waiting": 0.0, "queueing": 0.0, "racing": 0.0}
    turns, count = on_visible_gpus(options().directory), 0
    with _groups(problems, device, turns, end) as groups:
        for group in groups:
            spent["waiting"] += time.monotonic() - began - sum(spent.values())
            with contextlib.ExitStack() as turn:
                with _timed(spent, "queueing"):
                    turn.enter_context(turns.alone())
                with _timed(spent, "racing"):
                    found = _survived(races, group, device)
            for problem, race in found:
                yield problem, race if isinstance(race, str) else race.entry(device)
            count += len(group)
            print(_progress(count, len(problems), spent, end), flush=True)


@contextlib.contextmanager
def _timed(spent: dict[str, float], what: str) -> Iterator[None]:
    before = time.monotonic()
    yield
    spent[what] += time.monotonic() - before


def _progress(count: int, of: int, spent: Mapping[str, float], end: float) -> str:
    text = ", ".join(f"{s:.0f} s {what}" for what, s in spent.items())
    return f"  {count} of {of} raced; {text}; {end - time.monotonic():.0f} s left"


def _survived(
    race: Callable[..., Any], group: Sequence[Prepared], device: Device
) -> list[tuple[Conv2dProblem, Raced | str]]:
    """What a race finds; if it breaks, those of the problems one by one."""
    try:
        return race(group, device)
    except Exception as e:  # the others go on
        why = f"{type(e).__name__}: {str(e)[:300]}"
    if len(group) == 1:
        return [(group[0].problem, why)]
    print(f"  one by one: {why}", flush=True)
    return [found for one in group for found in _survived(race, [one], device)]


@contextlib.contextmanager
def _groups(
    problems: Sequence[Conv2dProblem], device: Device, turns: Turns, end: float
) -> Iterator[Iterator[list[Prepared]]]:
    """Problems ready to race, some together, until the time is over."""
    workers = len(os.sched_getaffinity(0))  # those that this part may use
    has_kernels = isinstance(device, CudaDevice)
    pool = CompilePool(options().directory, workers=workers) if has_kernels else None
    kernels = Ahead(pool, device)
    threads = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        yield _grouped(problems, device, kernels, turns, threads, end)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        kernels.close()


def _grouped(
    problems: Sequence[Conv2dProblem],
    device: Device,
    kernels: Ahead,
    turns: Turns,
    threads: concurrent.futures.Executor,
    end: float,
) -> Iterator[list[Prepared]]:
    waiting: deque[Any] = deque()
    left = _quick_first(problems, device)
    group: list[Prepared] = []
    while time.monotonic() < end:
        while len(waiting) < AHEAD and (problem := next(left, None)) is not None:
            task = threads.submit(prepared, problem, device, kernels, turns)
            waiting.append((problem, task))
        if not waiting:
            break
        problem, task = waiting.popleft()
        try:
            group.append(task.result(max(0.0, end - time.monotonic())))
        except Exception as e:  # the others go on
            print(f"  not {problem}: {type(e).__name__}: {str(e)[:200]}", flush=True)
        size = sum(ready.bytes for ready in group)
        if len(group) == TOGETHER or size > TOGETHER_BYTES:
            yield group
            group = []
    if group and time.monotonic() < end:
        yield group


def _quick_first(
    problems: Sequence[Conv2dProblem], device: Device
) -> Iterator[Conv2dProblem]:
    """First those whose default XLA has no part in, last those that are products."""
    for slow in (None, *_BY_XLA):
        for problem in problems:
            variant = default(problem, device).variant
            if variant == slow or (slow is None and variant not in _BY_XLA):
                yield problem

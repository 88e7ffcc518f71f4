"""Answers for the convolutions of models: each problem is raced once, in kernel time.

The configs that the variants' models find fastest race with the default, some problems
in one profile. What is clearly faster than the default becomes the answer, else the
default does: so a raced problem is never answered from its neighbours. A winner is
compared with the default at the problem itself, and with float64 at a small, ragged
problem of the same kind.

Problems are compiled some ahead of the races, by threads. Several processes can share a
GPU, each with a part of the problems (``share``): XLA tries kernels on the GPU while it
compiles, so what it compiles and what races take turns. Caller: ``tune_layers --what
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
from attention_answers import DIFFERENCE, Raced, Times, raced, winner
from turns import Turns

from tracea_jax import variants
from tracea_jax.device import CudaDevice, Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops.common.kernel_time import ProfileError
from tracea_jax.ops.conv2d import workload
from tracea_jax.options import current as options
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import Conv2dProblem
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

    XLA races where it is the default, and the portable kernel where it is alone with
    XLA: elsewhere they were measured to lose.
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
        found[1:] = [c for c in found[1:] if c.variant != "conv2d_sm80"]
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
      operands: makes them.
      runs: of each choice that can run.
      difference: of the results of two choices, relative to the largest number.
    """

    problem: Conv2dProblem
    operands: Sequence[Run]
    runs: Runs
    difference: Run

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
    shapes = _shapes(problem)
    made = [_made(s.shape, str(s.dtype), seed) for seed, s in enumerate(shapes)]
    run = functools.partial(workload.execute, problem=problem, choice=choices[0])
    results = tuple((r.shape, str(r.dtype)) for r in jax.eval_shape(run, *shapes))
    return Prepared(
        problem=problem,
        operands=made,
        runs={c: runs[c] for c in choices if c in runs},
        difference=_compared(results),
    )


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
def _numbers(dtype: str) -> jax.Array:
    """Some random numbers, of which operands are made: of more, it takes longer."""
    return jax.random.normal(jax.random.key(0), ((1 << 22) + 4096,), jnp.dtype(dtype))


@functools.cache
def _made(shape: tuple[int, ...], dtype: str, seed: int) -> Run:
    """What makes an array of random numbers."""
    numbers, size = _numbers(dtype), math.prod(shape)

    def make(numbers: jax.Array) -> jax.Array:
        some = numbers[509 * seed :]
        times = -(-size // len(some))
        return jnp.tile(some, times)[:size].reshape(shape)

    made = jax.jit(make).lower(numbers).compile()
    return functools.partial(made, numbers)


@functools.cache
def _compared(results: tuple[tuple[tuple[int, ...], str], ...]) -> Run:
    shapes = [jax.ShapeDtypeStruct(*result) for result in results]
    return jax.jit(_difference).lower(shapes, shapes).compile()


def _difference(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    pairs = [
        (x.astype("float32"), y.astype("float32"))
        for x, y in zip(some, others, strict=True)
    ]
    return jnp.stack([jnp.abs(x - y).max() / jnp.abs(y).max() for x, y in pairs]).max()


# --- racing ---------------------------------------------------------------------------


def races(
    group: Sequence[Prepared], device: Device
) -> list[tuple[Conv2dProblem, Raced | str]]:
    """Races a few problems: who wins, or why nobody does."""
    calls: dict[Any, dict[Choice, Any]] = {}
    found: list[tuple[Conv2dProblem, Raced | str]] = []
    for ready in group:
        problem = ready.problem
        inputs = [make() for make in ready.operands]
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
    compare = {ready.problem: ready.difference for ready in group}
    for problem, times in _raced_surely(calls, device).items():
        usual = default(problem, device)
        best = winner(times, usual)
        _tell(problem, times, usual)
        apart = 0.0
        if best != usual:
            both = calls[problem][best](), calls[problem][usual]()
            apart = float(compare[problem](*both))
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


# --- verifying ------------------------------------------------------------------------


@functools.cache
def _error(small: Conv2dProblem, choice: Choice, device: Device) -> float | str:
    """Against float64, in units of what is allowed; or what was raised."""
    try:
        operands = workload.operands(small, 3)
        run = functools.partial(workload.execute, problem=small, choice=choice)
        return workload.error(small, device, operands, jax.jit(run)(*operands), 3)
    except Exception as e:  # the others are verified
        return f"{type(e).__name__}: {str(e)[:200]}"


def why_wrong(race: Raced, device: Device) -> str | None:
    """Why a winner cannot be trusted; many problems share a small one.

    A config that a small problem cannot have was compared with the default.
    """
    asked: Any = race.problem
    best, small = race.best, workload.ragged(asked)
    if best.variant == "xla" or best == race.usual:
        return None
    variant: Any = variants.get(small.op, best.variant)
    try:
        if variant.why_not(small, device) is None:
            variant.check(small, best.config, device)
        else:
            return None
    except ValueError:
        return None
    error = _error(small, best, device)
    is_right = not isinstance(error, str) and error <= 1
    return None if is_right else f"{best} has an error of {error} of what is allowed"


# --- all of them ----------------------------------------------------------------------


_STAGES: tuple[str, ...] = ("waiting", "queueing", "racing", "verifying")


def entries(
    problems: Sequence[Conv2dProblem], device: Device, budget_s: float
) -> Iterator[tuple[Conv2dProblem, Entry | str]]:
    """The answer of each problem that there was time for, or why there is none."""
    began = time.monotonic()
    end = began + budget_s
    spent = dict.fromkeys(_STAGES, 0.0)
    turns, count = Turns(options().directory / f"turns-{_gpu()}"), 0
    with (
        concurrent.futures.ThreadPoolExecutor(4) as verifiers,
        _groups(problems, device, turns, end) as groups,
    ):
        for group in groups:
            spent["waiting"] += time.monotonic() - began - sum(spent.values())
            with contextlib.ExitStack() as turn:
                with _timed(spent, "queueing"):
                    turn.enter_context(turns.alone())
                with _timed(spent, "racing"):
                    found = _survived(races, group, device)
            with _timed(spent, "verifying"), turns.together():
                made = list(verifiers.map(lambda race: _entry(race[1], device), found))
            for (problem, _), entry in zip(found, made, strict=True):
                yield problem, entry
            count += len(group)
            print(_progress(count, len(problems), spent, end), flush=True)


def _entry(race: Raced | str, device: Device) -> Entry | str:
    """What a race found, if it can be trusted; or why there is nothing."""
    if isinstance(race, str):
        return race
    return why_wrong(race, device) or race.entry(device)


def _gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")


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
    left = iter(problems)
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

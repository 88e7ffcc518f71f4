"""Answers for the convolutions of models: each problem is raced once, in kernel time.

The configs that the variants' models find fastest race with the default, some problems
in one profile. What is clearly faster than the default becomes the answer; where
nothing is, there is none, and the default stays. A winner is compared with the default
at the problem itself, and, once for each kind of problem, with float64. Caller:
``tune_layers --what convolutions``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from attention_answers import DIFFERENCE, Raced, Times, raced, winner

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
CHUNK = 48  # problems that are compiled before they race: XLA's programs are tuned on
# the GPU while they compile, which would disturb races
TOGETHER = 12  # problems of one profile
MOST_BYTES = 1 << 27  # of a problem that is compared with float64
_RANKED: tuple[Any, ...] = (
    *(CONV2D_SM90, CONV2D_STRIPS_SM90, CONV2D_WEIGHTS_SM90),
    *(CONV2D_BANDS, CONV2D_DEPTHWISE, CONV2D_GROUPED, CONV2D_GROUPED_IMAGES),
)

Run = Callable[..., Any]
Runs = dict[Choice, Run]


@functools.cache
def default(problem: Conv2dProblem, device: Device) -> Choice:
    """What runs where nothing was measured."""
    return decide(diagnose(problem, device)).choice


def candidates(problem: Conv2dProblem, device: Device) -> list[Choice]:
    """Who may win: the default, each variant's own, and few configs near it.

    XLA races where it is the default: elsewhere it was measured to lose.
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
    return list(dict.fromkeys(found))


# --- running --------------------------------------------------------------------------


@functools.cache
def _made(shape: tuple[int, ...], dtype: str, seed: int) -> Run:
    """What makes an array of random numbers."""
    key = jax.random.key(seed)
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.dtype(dtype)))


def _operands(problem: Conv2dProblem) -> list[jax.Array]:
    shapes = enumerate(_shapes(problem))
    return [_made(s.shape, str(s.dtype), seed)() for seed, s in shapes]


@functools.cache
def _shapes(problem: Conv2dProblem) -> Any:
    return jax.eval_shape(functools.partial(workload.operands, problem, 0))


def _compiled(kernels: Ahead, problem: Conv2dProblem, choice: Choice) -> Run:
    kernels.wait(problem, choice)
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    return jax.jit(run).lower(*_shapes(problem)).compile()


def prepared(
    wanted: Mapping[Conv2dProblem, Sequence[Choice]],
    kernels: Ahead,
    threads: concurrent.futures.Executor,
) -> dict[Conv2dProblem, Runs]:
    """Programs of the choices, in any order; those that fail are told and left out."""
    waiting = {
        threads.submit(_compiled, kernels, problem, choice): (problem, choice)
        for problem, choices in wanted.items()
        for choice in choices
    }
    runs: dict[Conv2dProblem, Runs] = {problem: {} for problem in wanted}
    for done in concurrent.futures.as_completed(waiting):
        problem, choice = waiting[done]
        try:
            runs[problem][choice] = done.result()
        except Exception as e:  # the others race
            why = f"{type(e).__name__}: {str(e)[:200]}"
            print(f"  not {choice} of {problem}: {why}", flush=True)
    return runs


def races(
    group: Mapping[Conv2dProblem, Runs], device: Device
) -> Iterator[tuple[Conv2dProblem, Raced | str | None]]:
    """Races a few problems: what is faster than the default, why it is not, or None."""
    calls: dict[Any, dict[Choice, Any]] = {}
    operands: dict[Conv2dProblem, list[jax.Array]] = {}
    for problem, runs in group.items():
        inputs = operands[problem] = _operands(problem)
        calls[problem] = {}
        for choice, run in runs.items():
            try:
                jax.block_until_ready(run(*inputs))
                calls[problem][choice] = functools.partial(run, *inputs)
            except Exception as e:  # such as no memory
                print(f"  not {choice}: {type(e).__name__}", flush=True)
        if default(problem, device) not in calls[problem]:
            del calls[problem]
            yield problem, "its default did not run"
    for problem, times in _raced_surely(calls, device).items():
        usual = default(problem, device)
        best = winner(times, usual)
        _tell(problem, times, usual)
        if best == usual:
            yield problem, None
            continue
        found, wanted = calls[problem][best](), calls[problem][usual]()
        apart = float(_difference(found, wanted))
        error = _error(problem, best, device, operands[problem], found)
        if error > 1 or not apart <= DIFFERENCE:
            yield problem, f"{best} is wrong: {error=:.3g}, {apart=:.3g}"
            continue
        race: Any = {"problem": problem, "best": best, "usual": usual}
        yield problem, Raced(**race, times=times, apart=apart)


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


_seen: set[Any] = set()  # what was compared with float64


def _error(
    problem: Conv2dProblem,
    best: Choice,
    device: Device,
    inputs: list[jax.Array],
    results: list[jax.Array],
) -> float:
    """In units of what rounding allows; 0 if the same kernel was judged before.

    The host would take seconds for large arrays, which are compared with the default's.
    """
    kind = (best, problem.direction, problem.epilogue, problem.strides, problem.groups)
    if kind in _seen or problem.bytes > MOST_BYTES:
        return 0.0
    _seen.add(kind)
    return workload.error(problem, device, inputs, results, 0)


@jax.jit
def _difference(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    pairs = [
        (x.astype("float32"), y.astype("float32"))
        for x, y in zip(some, others, strict=True)
    ]
    return jnp.stack([jnp.abs(x - y).max() / jnp.abs(y).max() for x, y in pairs]).max()


def entries(
    problems: Sequence[Conv2dProblem], device: Device, budget_s: float
) -> Iterator[tuple[Conv2dProblem, Entry | str]]:
    """Answers of problems whose default was beaten, while there is time."""
    end = time.monotonic() + budget_s
    cores = os.cpu_count() or 1
    has_kernels = isinstance(device, CudaDevice)
    pool = CompilePool(options().directory, workers=cores) if has_kernels else None
    kernels = Ahead(pool, device)
    chunks = [problems[i : i + CHUNK] for i in range(0, len(problems), CHUNK)]
    wanted: dict[Conv2dProblem, list[Choice]] = {}

    def start(chunk: Sequence[Conv2dProblem]) -> None:
        for problem in chunk:
            wanted[problem] = candidates(problem, device)
            kernels.start(problem, wanted[problem])

    threads = concurrent.futures.ThreadPoolExecutor(cores)
    took, count = 0.0, 0
    try:
        start(chunks[0])
        for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
            before = time.monotonic()
            if before + took > end:
                break
            start(following or ())
            runs = prepared({p: wanted[p] for p in chunk}, kernels, threads)
            compiled = time.monotonic() - before
            for j in range(0, len(chunk), TOGETHER):
                group = {p: runs[p] for p in chunk[j : j + TOGETHER]}
                try:
                    for problem, race in races(group, device):
                        if isinstance(race, Raced):
                            yield problem, race.entry(device)
                        elif race is not None:
                            yield problem, race
                except Exception as e:  # the rest goes on
                    print(f"  not {len(group)}: {type(e).__name__}: {e}"[:400])
            took = time.monotonic() - before
            count += len(chunk)
            print(
                f"  {count} of {len(problems)} raced, {compiled:.0f} of "
                f"{took:.0f} s compiling, {end - time.monotonic():.0f} s left",
                flush=True,
            )
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        kernels.close()

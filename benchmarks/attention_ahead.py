"""What a race of attention runs, compiled before it, some problems at a time.

Kernels are compiled in processes, also while others race; the programs around them in
threads, with the operands' and the comparison's, while nothing runs. The first run of
a program of cuDNN loads it by capturing a stream, and fails now and then if XLA
compiles another one meanwhile. Caller: ``attention_answers``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp

from tracea_jax.device import CudaDevice, Device
from tracea_jax.ops.attention import workload
from tracea_jax.options import current as options
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
from tracea_jax.survey.turns import on_visible_gpus
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.variants import XLA
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

CHUNK = 24  # problems whose programs are compiled before they race
WORKERS = 16  # processes that compile kernels, and half of the threads
# Of a program of ours or of cuDNN, in which XLA has nothing to try on the GPU.
_UNTUNED = {"xla_gpu_autotune_level": 0}

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is needed to race a problem.

    Attributes:
      operands: makes them from a seed.
      runs: of each choice.
      difference: of the results of two choices, relative to the largest number.
      failed: why other choices cannot run.
    """

    operands: Run
    runs: Mapping[Choice, Run]
    difference: Run
    failed: Mapping[Choice, Exception]


def prepared(
    wanted: Mapping[AttentionProblem, Sequence[Choice]], device: Device
) -> Iterator[tuple[AttentionProblem, Prepared]]:
    """Compiles the choices of each problem; the problems in their order."""
    threads = concurrent.futures.ThreadPoolExecutor(2 * _workers())
    kernels = _kernels(device)
    problems = list(wanted)
    chunks = [problems[i : i + CHUNK] for i in range(0, len(problems), CHUNK)]

    def start(problem: AttentionProblem) -> dict[Any, Any]:
        whole = threads.submit(_operands_compiled, problem)
        runs = {
            c: threads.submit(_compiled, kernels, problem, c) for c in wanted[problem]
        }
        return {**runs, None: whole}

    try:
        for chunk, following in itertools.zip_longest(chunks, chunks[1:], fillvalue=[]):
            started = {problem: start(problem) for problem in chunk}
            ready = {problem: _finished(of) for problem, of in started.items()}
            for problem in following:
                threads.submit(kernels.start, problem, wanted[problem])
            for problem in chunk:
                yield problem, ready.pop(problem)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        kernels.close()


def prepared_alone(problem: AttentionProblem, choices: Sequence[Choice]) -> Prepared:
    """Compiles the choices of a problem one after another, cuDNN's the last.

    Their kernels are in the store, or are compiled on the way.
    """
    kernels = Ahead(None, common.local_device())
    operands, difference = _operands_compiled(problem)
    runs: dict[Choice, Run] = {}
    failed: dict[Choice, Exception] = {}
    for choice in sorted(choices, key=lambda c: c.variant == ATTENTION_CUDNN.name):
        try:
            runs[choice] = _compiled(kernels, problem, choice)
        except Exception as e:  # the others race
            failed[choice] = e
    return Prepared(operands=operands, runs=runs, difference=difference, failed=failed)


def compile_kernels(
    pairs: Sequence[tuple[AttentionProblem, Choice]], device: Device
) -> None:
    """Compiles at once what the choices run; what fails is left to who runs it."""
    kernels = _kernels(device)
    try:
        for problem, choice in pairs:
            kernels.start(problem, [choice])
        for problem, choice in pairs:
            with contextlib.suppress(Exception):
                kernels.wait(problem, choice)
    finally:
        kernels.close()


def _workers() -> int:
    return min(os.cpu_count() or 1, WORKERS)


def _kernels(device: Device) -> Ahead:
    """What compiles kernels in processes; nothing, where there are none."""
    if not isinstance(device, CudaDevice):
        return Ahead(None, device)
    return Ahead(CompilePool(options().directory, workers=_workers()), device)


def _finished(futures: dict[Any, Any]) -> Prepared:
    operands, difference = futures.pop(None).result()
    runs: dict[Choice, Run] = {}
    failed: dict[Choice, Exception] = {}
    for choice, future in futures.items():
        try:
            runs[choice] = future.result()
        except Exception as e:  # the others race
            failed[choice] = e
    return Prepared(operands=operands, runs=runs, difference=difference, failed=failed)


def _compiled(kernels: Ahead, problem: AttentionProblem, choice: Choice) -> Run:
    kernels.wait(problem, choice)
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    lowered = jax.jit(run).lower(*_shapes(problem))
    if not _is_gpu():
        return lowered.compile()
    if choice.variant != "xla":
        return lowered.compile(compiler_options=_UNTUNED)
    with on_visible_gpus(options().directory).together():  # XLA tries kernels there
        return lowered.compile()


def _operands_compiled(problem: AttentionProblem) -> tuple[Run, Run]:
    """What makes the operands, and what compares two results."""
    operands = functools.partial(_operands, problem)
    untuned = _UNTUNED if _is_gpu() else None
    lowered = jax.jit(operands).lower(jnp.uint32(0))
    made = lowered.compile(compiler_options=untuned)
    choice = Choice(variant="xla", config=XLA.config_type())
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    results = jax.eval_shape(run, *_shapes(problem))
    compared = jax.jit(_difference).lower(results, results)
    return made, compared.compile(compiler_options=untuned)


def _is_gpu() -> bool:
    return isinstance(common.local_device(), CudaDevice)


@functools.cache
def _shapes(problem: AttentionProblem) -> Any:
    return jax.eval_shape(functools.partial(_operands, problem), jnp.uint32(0))


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


def _difference(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    pairs = [
        (x.astype("float32"), y.astype("float32"))
        for x, y in zip(some, others, strict=True)
    ]
    return jnp.stack([jnp.abs(x - y).max() / jnp.abs(y).max() for x, y in pairs]).max()

"""Programs of single executions, compiled, loaded and timed by their kernels.

Programs are compiled as users' programs are, with autotuning, but for those that only
call compiled kernels: they have nothing to tune.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import catalogue, variants
from tracea_jax.device import CudaDevice, Device, backend_of
from tracea_jax.ops.common.kernel_time import ProfileError, kernel_spans
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.survey import programs
from tracea_jax.survey.cuda_errors import forget_error
from tracea_jax.tuning.measure import Timing, candidate_error, race

_UNTUNED = {"xla_gpu_autotune_level": 0}
_NO_MEMORY = "RESOURCE_EXHAUSTED"  # in messages of XLA
_LAST = "cudnn"  # loading it may fail, and spoil what is loaded after it

Call = Callable[[], Any]
Calls = Mapping[Choice, Call]


class GpuLost(RuntimeError):
    """This process can no longer run anything on the GPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The choices of a problem that can be timed, and why others cannot.

    Attributes:
      calls: execute a choice once and return its results.
      failed: kinds of failures.
    """

    calls: Calls
    failed: Mapping[Choice, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A problem whose programs are compiled on a device.

    Attributes:
      problem, device: what, and where.
      inputs: operands in the host's memory.
    """

    problem: Problem
    device: Device
    inputs: list[jax.Array]

    @classmethod
    def of(cls, problem: Problem, device: Device) -> Subject:
        workload = catalogue.get(problem.op).bench(problem, device).workload
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            inputs = programs.operands(problem, workload)
        return cls(problem=problem, device=device, inputs=inputs)

    def compiled(self, choice: Choice) -> Any:
        """The program of a choice; the same in each process, so that caches have it."""
        workload = catalogue.get(self.problem.op).bench(self.problem, self.device)
        execute = functools.partial(
            workload.workload.execute, problem=self.problem, choice=choice
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs]
        lowered = jax.jit(execute).lower(*shapes)
        options = compiler_options(self.problem, choice, self.device)
        return lowered.compile(compiler_options=options)

    def on_device(self) -> list[jax.Array]:
        """The operands in the device's memory."""
        backend = backend_of(self.device.platform)
        return jax.device_put(self.inputs, jax.local_devices(backend=backend)[0])


def compiler_options(
    problem: Problem, choice: Choice, device: Device
) -> dict[str, Any] | None:
    """XLA's options for the program of a choice, which differ from a user's for speed.

    A variant may leave a part of its work to XLA, such as a product, which is tuned as
    in a user's program: without, it may take many times as long.
    """
    if not isinstance(device, CudaDevice):
        return None
    variant = variants.get(problem.op, choice.variant)
    call = variant.call(problem, choice.config, device)
    return None if isinstance(call, variants.Inline) else _UNTUNED


def loaded(
    asked: Mapping[Any, tuple[Subject, Sequence[Choice]]],
    threads: concurrent.futures.Executor,
) -> dict[Any, Loaded]:
    """Compiles the programs of some problems, and runs each of them.

    Raises:
      GpuLost: if one of them broke the GPU's context, or if there is no memory for any
        choice of a problem.
    """
    futures = {
        name: {c: threads.submit(subject.compiled, c) for c in choices}
        for name, (subject, choices) in asked.items()
    }
    calls: dict[Any, dict[Choice, Call]] = {name: {} for name in asked}
    failed: dict[Any, dict[Choice, str]] = {name: {} for name in asked}
    for name, (subject, _) in asked.items():
        inputs = subject.on_device()
        for choice, future in futures[name].items():
            try:
                calls[name][choice] = functools.partial(future.result(), *inputs)
            except Exception as e:  # the others run
                failed[name][choice] = candidate_error(e, "compile_error").kind
    for is_last in (False, True):
        for name, of in calls.items():
            for choice in [c for c in of if (c.variant == _LAST) == is_last]:
                if why := _failure(of[choice]):
                    failed[name][choice] = why
                    del of[choice]
    for name, of in calls.items():
        if not of and _NO_MEMORY in failed[name].values():
            raise GpuLost(f"no memory for any choice of {asked[name][0].problem}")
    return {n: Loaded(calls=calls[n], failed=_kinds(failed[n])) for n in asked}


def _kinds(failed: Mapping[Choice, str]) -> dict[Choice, str]:
    """Kinds of failures as rows have them."""
    return {c: "launch_error" if k == _NO_MEMORY else k for c, k in failed.items()}


def _failure(call: Call) -> str | None:
    """The kind of failure of a call, if it fails twice.

    Raises:
      GpuLost: if nothing else runs after it, either.
    """
    kind = "launch_error"
    for _ in range(2):
        try:
            jax.block_until_ready(call())
            return None
        except Exception as e:
            kind = _NO_MEMORY if _NO_MEMORY in str(e) else "launch_error"
            forget_error()
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as e:
        raise GpuLost(f"{type(e).__name__}: {e}"[:300]) from e
    return kind


def kernel_times(
    calls: Mapping[Any, Calls], rounds: int, device: Device
) -> dict[Any, dict[Choice, list[float]]]:
    """Kernel times of the calls of some problems, those of each problem in turns.

    Problems whose kernels no profile shows are left out.
    """
    if not isinstance(device, CudaDevice):
        return {name: _wall_times(of, rounds) for name, of in calls.items()}
    with contextlib.suppress(ProfileError):
        return _profiled(calls, rounds)
    found: dict[Any, dict[Choice, list[float]]] = {}
    for name, of in calls.items():
        with contextlib.suppress(ProfileError):
            found |= _profiled({name: of}, rounds)
    return found


def _profiled(
    calls: Mapping[Any, Calls], rounds: int
) -> dict[Any, dict[Choice, list[float]]]:
    turns = [
        (name, choice)
        for name, of in calls.items()
        for i in range(rounds)
        for choice in _turned(list(of), i)
    ]
    spans = kernel_spans([calls[name][choice] for name, choice in turns])
    times: dict[Any, dict[Choice, list[float]]]
    times = {name: {choice: [] for choice in of} for name, of in calls.items()}
    for (name, choice), us in zip(turns, spans, strict=True):
        times[name][choice].append(us)
    return times


def _turned(choices: list[Choice], i: int) -> list[Choice]:
    start = i % max(len(choices), 1)
    return choices[start:] + choices[:start]


def _wall_times(calls: Calls, rounds: int) -> dict[Choice, list[float]]:
    """On a device without kernel times."""

    def run(call: Call, count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(call())

    timing = Timing(slice_s=1e-4, rounds=rounds, max_rounds=rounds)
    runs = {choice: functools.partial(run, call) for choice, call in calls.items()}
    return {choice: list(us) for choice, us in race(runs, timing).times_us.items()}

"""A variant's call as a program: custom calls to kernels, and array code between them.

    emit(ctx, operands, call, cubins)   for a lowering rule
    run(steps, launch, operands, ...)   the steps one after another, in JAX

``serving`` decides which call it is and compiles the kernels; ``runtime.launch``
encodes a launch. The lowering rule that all ops share calls ``emit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import launch
from tracea_jax.runtime.nvrtc import Cubin
from tracea_jax.variants import CpuCall, Launch, Step, Steps

# (step, arrays read, shapes of what it writes) -> arrays written
LaunchStep = Callable[
    [Launch, Sequence[jax.Array], Sequence[jax.ShapeDtypeStruct]], Sequence[jax.Array]
]


def emit(
    ctx: Any,
    operands: Sequence[Any],
    call: CpuCall | Kernel | Steps,
    cubins: Mapping[Kernel, Cubin],
) -> Sequence[Any]:
    """Emits a call and returns the MLIR values of its results.

    Args:
      ctx: the lowering rule's context; its avals give the result types.
      operands: MLIR values.
      call: what to emit. A kernel alone reads all operands and writes all results.
      cubins: the compiled code of each of its kernels.

    Raises:
      ValueError: if a launch breaks a limit, or an expression computes another shape or
        dtype than that of the buffer it writes.
    """
    if isinstance(call, CpuCall):
        return launch.cpu_lowering(ctx, operands, call.target, dict(call.attributes))
    embed = ctx.module_context.lowering_parameters.for_export
    if isinstance(call, Kernel):
        return launch.cuda_lowering(ctx, operands, call, cubins[call], embed=embed)

    def launched(step: Launch, arrays: Any, results: Any) -> Any:
        return launch.cuda_call(
            *arrays,
            results=results,
            kernel=step.kernel,
            cubin=cubins[step.kernel],
            embed=embed,
            updates=step.updates,
        )

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
    code = functools.partial(run, call, launched, results)
    return mlir.lower_fun(code, multiple_results=True)(ctx, *operands)


def run(
    steps: Steps,
    launch_step: LaunchStep,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
) -> list[jax.Array]:
    """The results of the steps, run or traced one after another.

    Args:
      steps: the call.
      launch_step: launches one kernel.
      results: shapes and dtypes of ``steps.results``.
      operands: as ``steps.operands`` names them.

    Raises:
      ValueError: if an expression computes another shape or dtype than that of the
        buffer it writes.
    """
    arrays = dict(zip(steps.operands, operands, strict=True))
    shapes = {b.name: jax.ShapeDtypeStruct(b.shape, b.dtype) for b in steps.scratch}
    shapes |= dict(zip(steps.results, results, strict=True))
    for step in steps.steps:
        read = [arrays[name] for name in step.reads]
        to_write = [shapes[name] for name in step.writes]
        if isinstance(step, Launch):
            written = launch_step(step, read, to_write)
        else:
            written = step(jnp, *read)
            _check_written(step, written, to_write)
        arrays.update(zip(step.writes, written, strict=True))
    return [arrays[name] for name in steps.results]


def _check_written(
    step: Step, written: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]
) -> None:
    def texts(arrays: Sequence[Any]) -> str:
        return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)

    if (found := texts(written)) != (wanted := texts(shapes)):
        raise ValueError(
            f"step {step.name!r} computes {found} for buffers of {wanted}: {step}"
        )

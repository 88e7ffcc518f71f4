"""Compiling the kernels of choices before they are needed.

Here choices become kernels; ``compile_pool`` compiles them in worker processes.
Callers: both labs (``local``, ``child``), and ``knowledge``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.emit.kernel import Kernel
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.measure.bench import candidate_error


class Ahead:
    """Compiles the kernels of choices in a pool; without a pool it does nothing."""

    def __init__(self, pool: CompilePool | None, device: Device) -> None:
        self._pool = pool
        self._device = device

    def start(self, problem: Problem, choices: Sequence[Choice]) -> None:
        """Submits the choices' kernels to the pool; returns at once."""
        if self._pool is None:
            return
        for choice in choices:
            with contextlib.suppress(Exception):  # ``wait`` or preparing will report it
                for kernel in kernels_of(problem, choice, self._device):
                    self._pool.submit(kernel)

    def wait(self, problem: Problem, choice: Choice) -> None:
        """Waits until the pool has compiled the choice's kernels, if there are any.

        Raises:
          CandidateError: if a kernel cannot be compiled.
        """
        if self._pool is None:
            return
        try:
            for kernel in kernels_of(problem, choice, self._device):
                self._pool.submit(kernel).result()
        except Exception as e:
            raise candidate_error(e, "compile_error") from e

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def kernels_of(problem: Problem, choice: Choice, device: Device) -> tuple[Kernel, ...]:
    """The kernels that must be compiled to run a choice."""
    variant = variants.get(problem.op, choice.variant)
    return variants.kernels_in(variant.call(problem, choice.config, device))

"""Compiling the kernels of choices before they are needed."""

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
    """Kernels of choices, compiled by a pool before they are needed."""

    def __init__(self, pool: CompilePool | None, device: Device) -> None:
        self._pool = pool
        self._device = device

    def start(self, problem: Problem, choices: Sequence[Choice]) -> None:
        """Submits the choices' kernels."""
        if self._pool is None:
            return
        for choice in choices:
            with contextlib.suppress(Exception):  # ``wait`` or preparing will report it
                for kernel in kernels_of(problem, choice, self._device):
                    self._pool.submit(kernel)

    def wait(self, problem: Problem, choice: Choice) -> None:
        """Returns when the choice's kernels are compiled, at once if there are none.

        Raises:
          CandidateError: if it cannot be compiled.
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
    """The kernels that a choice has to compile."""
    variant = variants.get(problem.op, choice.variant)
    return variants.kernels_in(variant.call(problem, choice.config, device))

"""A launcher as plain values, for processes that do not have the user's functions.

The launch of every config is written out, and the reference is a serialised program.
The caller is pickling: ``launcher.Launcher`` becomes one on its way to a process that
measures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.export

from tracea_jax.emit.kernel import Kernel
from tracea_jax.ops.common.typed import jit
from tracea_jax.problem.cuda_kernel import CudaKernelProblem
from tracea_jax.variants import Launch, Steps

_PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(
    frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False
)
class FrozenLauncher:
    """A ``launcher.Launcher`` without functions of the user.

    Attributes:
      plain: the problem, without a launcher.
      space, tolerance, results: as of ``launcher.Launcher``.
      calls: (config, launch) of each config.
      program: the reference, serialised; None if there is none.
    """

    plain: CudaKernelProblem
    space: tuple[tuple[str, tuple[Any, ...]], ...]
    tolerance: float | None
    results: list[Any]
    calls: tuple[tuple[Any, Kernel | Steps], ...] = dataclasses.field(repr=False)
    program: bytes | None = dataclasses.field(repr=False)

    @property
    def configs(self) -> tuple[Any, ...]:
        return tuple(config for config, _ in self.calls)

    @property
    def has_reference(self) -> bool:
        return self.program is not None

    @property
    def problem(self) -> CudaKernelProblem:
        return dataclasses.replace(self.plain, launcher=self)

    def call(self, config: Any, arch: str) -> Kernel | Steps:
        return _for_arch(dict(self.calls)[config], arch)

    def reference(self, *operands: Any) -> list[Any]:
        assert self.program is not None
        program: Any = jax.export.deserialize(bytearray(self.program))
        return [*program.call(*operands)]


@functools.lru_cache(maxsize=16)  # every question to another process asks for it
def freeze(launcher: Any) -> FrozenLauncher:
    """The launcher as plain values."""
    inputs = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in launcher.inputs.values()]
    program = None
    if launcher.has_reference:
        exported = jax.export.export(jit(launcher.reference), platforms=_PLATFORMS)
        program = bytes(exported(*inputs).serialize())
    return FrozenLauncher(
        plain=dataclasses.replace(launcher.problem, launcher=None),
        space=launcher.space,
        tolerance=launcher.tolerance,
        results=launcher.results,
        calls=tuple((config, launcher.call(config, "")) for config in launcher.configs),
        program=program,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A kernel as the primitive wants it, for the one problem of a launcher."""

    of: Any
    vmap: str = "sequential"

    def launcher(self, avals: Sequence[Any], numbers: Any) -> Any:
        return self.of


def _for_arch(call: Kernel | Steps, arch: str) -> Kernel | Steps:
    if isinstance(call, Kernel):
        return dataclasses.replace(call, arch=arch)
    steps = tuple(
        dataclasses.replace(s, kernel=dataclasses.replace(s.kernel, arch=arch))
        if isinstance(s, Launch)
        else s
        for s in call.steps
    )
    return dataclasses.replace(call, steps=steps)

"""What each device computes of a site whose arrays the compiler splits.

How shardings propagate is known to the compiler alone, so that the program is compiled,
for the devices of its arguments; it is not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.ops.common import partition
from tracea_jax.ops.common.partition import Partitioned
from tracea_jax.problem import Problem
from tracea_jax.serving import Served

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A problem that each device solves of a site.

    Attributes:
      devices: how many parts the arrays around it have.
      mesh: names and sizes of its axes, as far as they are known.
      problem: of one device.
      plan: None where none applies, for ``reason``.
      variant: what runs.
      reason: why.
      moves: between devices around it, in words.
    """

    devices: int
    mesh: tuple[tuple[str, int], ...]
    problem: Problem
    plan: Plan | None
    variant: str | None
    reason: str
    moves: tuple[str, ...]

    def __str__(self) -> str:
        config = self.plan.config_text if self.plan else ""
        runs = " ".join(filter(None, (self.variant or "cannot run", config)))
        moved = f"; {', '.join(self.moves)}" if self.moves else ""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        where = f"each of {self.devices} devices" + (f" ({axes})" if axes else "")
        return f"{where}: {self.problem}: {runs}{moved}"

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "devices": self.devices,
            "mesh": dict(self.mesh),
            "problem": self.problem.to_json(),
            "variant": self.variant,
            "config": dataclasses.asdict(plan.config) if plan else None,
            "origin": plan and plan.origin,
            "reason": self.reason,
            "moves": list(self.moves),
        }


Parts = dict[str, tuple[Part, ...]]  # by ``partition.key_of``


def parts_of(closed: Any, arrays: Sequence[Any], device: Device) -> Parts | str:
    """The parts of a program's sites, or why they are not known.

    Args:
      closed: the program.
      arrays: its arguments; those without values may have shardings.
      device: that it is planned for.
    """
    if jax.default_backend() != _BACKENDS.get(device.platform, device.platform):
        return f"{device.name} is not here"

    def program(*arrays: Any) -> Any:
        return jaxpr_as_fun(closed)(*arrays)

    # A name of its own: no cache has the program, in which nothing would be split.
    program.__name__ = f"explained_{next(_numbers)}_{id(closed):x}"
    try:
        with partition.recording() as found, _kept_in_no_cache():
            jax.jit(program).lower(*arrays).compile(compiler_options=_FAST)
    except Exception as e:  # whatever a compiler has to say
        return f"{type(e).__name__}: {str(e).splitlines()[0]}"
    parts: dict[str, dict[Part, None]] = {}
    for call in found:
        for problem, served in call.plans:
            parts.setdefault(call.key, {})[_part(call, problem, served)] = None
    return {key: tuple(some) for key, some in parts.items()}


_BACKENDS = {"cuda": "gpu"}
_FAST = {"xla_backend_optimization_level": 0, "xla_gpu_autotune_level": 0}


@contextlib.contextmanager
def _kept_in_no_cache() -> Iterator[None]:
    """Programs compiled inside are not written to JAX's persistent cache."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _part(call: Partitioned, problem: Problem, served: Served) -> Part:
    return Part(
        devices=math.prod(call.decision.mesh.values()),
        mesh=call.axes,
        problem=problem,
        plan=served.plan,
        variant=served.variant,
        reason=served.reason,
        moves=call.moves,
    )

"""tune: measure the candidates of a problem now and remember the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from tracea_jax import ops as ops  # ops register how they are measured
from tracea_jax.device import Device
from tracea_jax.dispatch import device_for
from tracea_jax.dispatch import tune as tune_problem
from tracea_jax.problem import Problem

if TYPE_CHECKING:
    from tracea_jax.tuning.records import Entry


def tune(
    problem: Problem,
    *,
    device: Device | None = None,
    goal: str = "latency",
    effort: str = "default",
    budget_s: float | None = None,
    seed: int = 0,
    progress: Any = None,
) -> Entry:
    """Measures a problem's candidates on this machine and caches the fastest.

    XLA is one of them, so the answer is never slower than not using the package.
    Functions that are already jitted are traced again and use the result.

    Args:
      problem: such as ``tracea.GemmProblem(m=4096, n=4096, k=4096, ...)``.
      device: by default that of JAX's default backend.
      goal: what to minimise; see ``tuning.tuner.GOALS``.
      effort: "none", "quick", "default" or "max": how many configs are measured.
      budget_s: stop searching after that many seconds.
      seed: of the random inputs and of every random choice.
      progress: called as the tuning goes on; see ``tuning.tuner.Progress``.

    Returns:
      The entry that was written: the best choice, XLA's time, all observations.

    Raises:
      ValueError: on an unknown goal or effort.
    """
    return tune_problem(
        problem,
        device or local_device(),
        publish=True,
        goal=goal,
        effort=effort,
        budget_s=budget_s,
        seed=seed,
        progress=progress,
    )


def local_device() -> Device:
    """The profile of the device that JAX computes on by default."""
    platform = jax.default_backend()
    return device_for({"gpu": "cuda"}.get(platform, platform))

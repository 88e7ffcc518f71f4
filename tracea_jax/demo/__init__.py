"""The demo: unmodified models, transformed, tuned, checked and timed on this machine.

A language model's loss with all gradients, and a block of a residual network, both in
plain JAX, run under ``jax.jit`` with and without ``tracea.transform``. Both results are
compared with float64. The models are in ``language_model`` and ``residual_block``;
larger comparisons are in benchmarks/bench_models. Caller: ``tracea demo`` (``cli``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.campaign import local_device, tune
from tracea_jax.campaign.progress import Told, showing
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.demo.residual_block import ResidualBlock
from tracea_jax.device import Device
from tracea_jax.explain import Explanation, explain
from tracea_jax.page import times
from tracea_jax.transform import transform
from tracea_jax.tuning import measure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The two models of the demo with their sizes."""

    language_model: LanguageModel
    residual_block: ResidualBlock


SIZES = {
    "cpu": Sizes(
        language_model=LanguageModel(
            batch=4,
            tokens=128,
            layers=2,
            vocabulary=2048,
            width=256,
            hidden=1024,
            heads=8,
            kv_heads=4,
            dtype="float32",
        ),
        residual_block=ResidualBlock(
            batch=4, size=28, channels=256, narrow=64, dtype="float32"
        ),
    ),
    "cuda": Sizes(
        language_model=LanguageModel(
            batch=2,
            tokens=4096,
            layers=2,
            vocabulary=32768,
            width=2048,
            hidden=8192,
            heads=16,
            kv_heads=8,
            dtype="bfloat16",
        ),
        residual_block=ResidualBlock(
            batch=64, size=56, channels=256, narrow=64, dtype="bfloat16"
        ),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: times of a call in microseconds, and errors against float64.

    Attributes:
      what, sizes: name and sizes of the model.
      sites: how many calls of each op the model makes.
      ours_us, plain_us: times of the transformed and of the plain model.
      ratio: plain time divided by transformed time.
      error, plain_error: largest errors, relative to the largest result.
      unit: unit roundoff of the model's dtype.
    """

    what: str
    sizes: str
    sites: str
    ours_us: float
    plain_us: float
    ratio: float
    error: float
    plain_error: float
    unit: float

    @property
    def ok(self) -> bool:
        """True if our results are as accurate as plain JAX's, or as the dtype allows.

        Both errors are the largest of many. Summing in another, equally good order
        already changes such an error several times.
        """
        return self.error <= max(4 * self.plain_error, 16 * self.unit)

    def __str__(self) -> str:
        verdict = "correct" if self.ok else "WRONG"
        return "\n".join(
            [
                f"{self.what}: {self.sizes}",
                f"  runs on {self.sites}",
                f"  {times.microseconds(self.ours_us)}, plain JAX "
                f"{times.microseconds(self.plain_us)}: "
                f"{times.ratio(self.plain_us, self.ours_us)}",
                f"  error against float64 {self.error:.2e} ({verdict}), plain JAX "
                f"{self.plain_error:.2e}",
            ]
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the demo; ``print`` it."""

    device: Device
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        return "\n\n".join([f"on {self.device}", *map(str, self.rows)])


def demo(progress: bool = True, budget_s: float = 20.0) -> Outcome:
    """Tunes, runs and checks the models on JAX's default device.

    Args:
      progress: whether bars are shown, in a terminal or a notebook.
      budget_s: seconds of search for each of the two models.
    """
    device = local_device()
    sizes = SIZES.get(device.platform, SIZES["cpu"])
    model, block = sizes.language_model, sizes.residual_block
    compare = functools.partial(_compare, progress=progress, budget_s=budget_s)
    rows = (
        compare(
            "language model, loss and gradients",
            model,
            plain=jax.value_and_grad(model.loss),
            ours=jax.value_and_grad(transform(model.loss)),
        ),
        compare(
            "residual block",
            block,
            plain=block.forward,
            ours=transform(block.forward),
        ),
    )
    return Outcome(device=device, rows=rows)


def _compare(
    what: str,
    model: LanguageModel | ResidualBlock,
    *,
    plain: Callable[..., Any],
    ours: Callable[..., Any],
    progress: bool,
    budget_s: float,
) -> Row:
    args = model.inputs()
    tune(ours, *args, effort="quick", budget_s=budget_s, progress=progress)
    explanation = explain(ours)(*args)
    calls = {"ours": jax.jit(ours), "plain": jax.jit(plain)}
    exact = _in_f64(plain, args)
    errors = {name: _relative_error(call(*args), exact) for name, call in calls.items()}
    with showing(progress) as told:
        race = measure.race(
            {name: _repeating(call, args) for name, call in calls.items()},
            measure.Timing(),
            on_round=functools.partial(_tell, told, what),
        )
    for error in race.failures.values():
        raise error
    return Row(
        what=what,
        sizes=str(model),
        sites=_counted(explanation),
        ours_us=race.median_us("ours"),
        plain_us=race.median_us("plain"),
        ratio=race.ratio("plain", "ours"),
        error=errors["ours"],
        plain_error=errors["plain"],
        unit=float(jnp.finfo(model.dtype).eps) / 2,
    )


def _counted(explanation: Explanation) -> str:
    names = [site.op for site in explanation.sites]
    return ", ".join(f"{names.count(op)} {op}" for op in dict.fromkeys(names))


def _in_f64(plain: Callable[..., Any], args: Any) -> Any:
    """The plain model's results in float64, on the same numbers."""
    with jax.enable_x64(True):
        wide = jax.tree.map(_widened, args)
        return jax.tree.map(np.asarray, jax.jit(plain)(*wide))


def _widened(x: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float64) if floating else x


def _relative_error(found: Any, exact: Any) -> float:
    """The largest error of any result, relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(
        float(np.abs(np.asarray(x).astype(np.float64) - y).max() / np.abs(y).max())
        for x, y in pairs
    )


def _tell(told: Told | None, what: str, done: int, total: int) -> None:
    if told is not None:
        total = max(done, total)
        told(phase=what, done=done, total=total, best_us=None, message="")


def _repeating(call: Any, args: Any) -> measure.Run:
    def run(count: int) -> None:
        for _ in range(count - 1):
            call(*args)
        jax.block_until_ready(call(*args))

    return run

"""Races of whole programs that take time on a clock of their own, for tests."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import synthetic_bench as synthetic
from jaxprs import count
from numerics import normal

import tracea_jax as tracea
from tracea_jax.campaign import executions, races, run
from tracea_jax.campaign.executions import Execution, Executions
from tracea_jax.campaign.keep import Without

OPS = ("attention", "conv2d", "gated_matmul", "matmul")


def layers(x: Any, w: Any, k: Any) -> Any:
    """One product and one convolution."""
    y = jax.nn.relu(x @ w).reshape(1, 8, 8, -1)
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(y, k, (1, 1), "SAME", dimension_numbers=numbers)


def step(x: Any, w: Any, k: Any) -> Any:
    """A training step, which differentiates ``layers``."""

    def loss(w: Any, k: Any) -> Any:
        return (layers(x, w, k) ** 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(w, k)


ARGUMENTS = (normal(64, 16), normal(16, 8, seed=1), normal(3, 3, 8, 8, seed=2))


@dataclasses.dataclass
class Script:
    """Times of the steps of races.

    Attributes:
      times_us: by what the program leaves; None is plain.
      spoil: what the program leaves whose results are not those of plain.
      compiled: what was compiled.
      compiling: called with the script and what the program leaves, before it compiles.
    """

    times_us: Mapping[Any, float]
    spoil: Any = dataclasses.field(default_factory=tuple)
    clock: synthetic.Clock = dataclasses.field(default_factory=synthetic.Clock)
    compiled: list[Without] = dataclasses.field(default_factory=list)
    compiling: Callable[[Script, Without], None] = lambda script, without: None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Lets the races of ``tune`` follow the script; sites are not tuned."""
        prepare = Executions.prepare

        def scripted(own: Executions, without: Without) -> _Scripted:
            self.compiling(self, without)
            self.compiled.append(without)
            return _Scripted(prepare(own, without), self, without)

        patch.setattr(executions.Executions, "prepare", scripted)
        patch.setattr(races, "TIMING", synthetic.timing(self.clock))
        patch.setattr(run.Run, "_rows", lambda *_: {})


@dataclasses.dataclass
class _Scripted:
    execution: Execution
    script: Script
    without: Without

    def __call__(self, count: int) -> None:
        self.script.clock.work(count * self.script.times_us[self.without])

    def results(self) -> list[Any]:
        found = self.execution.results()
        if self.without not in self.script.spoil:
            return found
        return [jnp.full_like(x, jnp.nan) for x in found]


LOSING = {None: 100.0, (): 125.0, ("conv2d",): 80.0, ("matmul",): 140.0}
WINNING = {None: 100.0, (): 70.0, ("conv2d",): 90.0, ("matmul",): 80.0}


def raced(
    monkeypatch: pytest.MonkeyPatch,
    times: Mapping[Any, float],
    fn: Any = layers,
    args: Any = ARGUMENTS,
    **how: Any,
) -> Any:
    """The report of a tuning whose races take these times."""
    with monkeypatch.context() as patch:
        Script(times).install(patch)
        return tracea.tune(fn, *args, **how)


def sites(fn: Any = layers, args: Any = ARGUMENTS, **how: Any) -> tuple[int, int]:
    """How many products and convolutions of ours a transformed function has."""
    fast = tracea.transform(fn, **how)
    names = ("tracea_matmul", "tracea_conv2d")
    first, second = (count(fast, *args, name=name) for name in names)
    return first, second


def with_tests() -> str:
    """A path on which another process finds this module too."""
    here = str(pathlib.Path(__file__).parent)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))

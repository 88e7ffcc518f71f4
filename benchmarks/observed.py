"""Measured times that gemm_sm90's analytic model is fitted to, and their weights."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from recorded_spaces import read_space

import tracea_jax
from tracea_jax.device import NAMED
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.store.records import Entry
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_model import Constants, modelled_us
from tracea_jax.variants.gemm_sm90_space import of_columns
from tracea_jax.variants.space import Space

SHIPPED = pathlib.Path(tracea_jax.__file__).parent / "data" / "tuned"
DEVICE = NAMED["H200"]
NOISE = 0.025  # of one observation, log
MISFIT = 0.2  # of the model, of how much slower than the best a config is (log)
MOST = 60  # observations that a problem counts for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The fitted parameters: those of the model, and those of the table only."""

    constants: Constants
    kernel_us: float
    coolness: float

    def of(self, table: bool) -> Constants:
        """The constants as they were when something was measured."""
        if not table:
            return self.constants
        macs = self.constants.macs_per_us * self.coolness
        kernel_us = self.kernel_us
        return dataclasses.replace(
            self.constants, macs_per_us=macs, launch_us=kernel_us
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The observations of one problem.

    Attributes:
      space: the configs that were measured.
      time_us: their times.
      raced: whether each time is from a race, with the device at its hottest.
      table: whether the configs are all those of the problem, recorded in a table.
    """

    problem: GemmProblem
    space: Space
    time_us: np.ndarray
    raced: np.ndarray
    table: bool

    def log_model(self, parameters: Parameters) -> np.ndarray:
        config = of_columns(self.space.columns)
        constants = parameters.of(self.table)
        return np.log(modelled_us(self.problem, config, DEVICE, constants))

    def weights(self) -> np.ndarray:
        """1 / the standard deviation of each time's logarithm."""
        slower = np.log(self.time_us / self.time_us.min())
        spread = np.hypot(NOISE, MISFIT * slower) if self.table else NOISE
        weight = np.ones(len(slower)) / spread
        return weight * min(1, MOST**0.5 / np.linalg.norm(weight * NOISE))


def read(directory: pathlib.Path) -> list[Observed]:
    """The problems in a directory's entries that gemm_sm90 was measured on."""
    found = []
    for path in sorted(directory.rglob("matmul/*.json")):
        entry = Entry.from_bytes(path.read_bytes())
        seen = [
            o
            for o in entry.observations
            if o.variant == "gemm_sm90" and o.time_us is not None
        ]
        if len(seen) > 2:
            found.append(
                Observed(
                    problem=GemmProblem.from_json(entry.problem),
                    space=Space.of(*(GEMM_SM90.config_type(**o.config) for o in seen)),
                    time_us=np.array([o.time_us for o in seen]),
                    raced=np.array([o.extra.get("protocol") == "race" for o in seen]),
                    table=False,
                )
            )
    return found


def read_table() -> list[Observed]:
    """The problems whose whole spaces were recorded."""
    return [
        Observed(
            problem=problem,
            space=Space.of(*configs),
            time_us=times_us,
            raced=np.zeros(len(times_us), bool),
            table=True,
        )
        for problem, configs, times_us in read_space()
    ]

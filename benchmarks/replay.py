"""Recorded search spaces: a tuner's quality without the device that was tuned.

A space is a gzip-compressed CSV file, one row for each legal config: its parameters,
``time_ms`` (empty if it failed), ``compile_s`` and ``status``. Public collections of
such spaces exist, recorded by brute force; none is part of this project.

    F(n) = time of the space's best config / time of the best of n evaluated ones
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import os
import pathlib
from collections.abc import Callable

import numpy as np

from tracea_jax.tuning.search.batches import Recipe, Search, codes, encode

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT = ROOT.parent / "shared" / "data" / "tuning_spaces"
NOT_PARAMETERS = ("time_ms", "compile_s", "status")

Order = list[int]  # evaluated configs
Method = Callable[["Recorded", int, int], Order]  # of a space, a seed, evaluations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """A space of n configs.

    Attributes:
      columns: values of each parameter (n,).
      times: (n,), NaN where the config failed.
    """

    name: str
    columns: dict[str, np.ndarray]
    times: np.ndarray

    @property
    def best(self) -> float:
        return float(np.nanmin(self.times))

    def fractions(self, seen: np.ndarray, count: int) -> np.ndarray:
        """F(1) to F(count) for times seen in order.

        0 until a config works, constant after the last one.
        """
        lowest = np.minimum.accumulate(np.where(np.isnan(seen), np.inf, seen))
        found = self.best / lowest[:count]
        return np.pad(found, (0, count - len(found)), mode="edge")


def directory() -> pathlib.Path:
    """Directory of recorded spaces: ``TUNING_SPACES``, or next to the project."""
    return pathlib.Path(os.environ.get("TUNING_SPACES") or DEFAULT)


def load(where: pathlib.Path) -> list[Recorded]:
    """The spaces of a directory by name; empty if there is none."""
    return [read(path) for path in sorted(where.glob("*.csv.gz"))]


def read(path: pathlib.Path) -> Recorded:
    """One file."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in NOT_PARAMETERS]
    return Recorded(
        name=path.name.removesuffix(".csv.gz"),
        columns={name: _column([row[name] for row in rows]) for name in names},
        times=np.array([float(row["time_ms"] or "nan") for row in rows]),
    )


def _column(values: list[str]) -> np.ndarray:
    """Integers, else floats, else text."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(values).astype(kind)
        except ValueError:
            continue
    return np.array(values)


def search(space: Recorded, seed: int, **options) -> tuple[Order, Search]:
    """Evaluates what the project's search asks for, until it is over."""
    options = {"codes": codes(space.columns), "seed": seed, **options}
    tuner = Search(options.pop("features", encode(space.columns)), **options)
    order: Order = []
    while asked := tuner.ask():
        for index in asked:
            time = float(space.times[index])
            tuner.tell(index, None if np.isnan(time) else time)
        order += asked
    return order, tuner


def tuned(**options) -> Method:
    """The search with a fixed number of evaluations, whatever gain it expects."""

    def method(space: Recorded, seed: int, count: int) -> Order:
        made = {k: v(space) if callable(v) else v for k, v in options.items()}
        return search(space, seed, budget=count, gain=0.0, **made)[0]

    return method


def random(space: Recorded, seed: int, count: int) -> Order:
    """Configs at random, none twice."""
    return np.random.default_rng(seed).permutation(len(space.times))[:count].tolist()


def raw_time(space: Recorded, seed: int, count: int) -> Order:
    """The search on times instead of their logarithms."""
    scale = float(np.nanmedian(space.times))
    warped = dataclasses.replace(space, times=np.exp(space.times / scale))
    return tuned()(warped, seed, count)


def clblast_sgemm(space: Recorded) -> np.ndarray:
    """Logarithm of the predicted time of CLBlast's SGEMM of 4096 on an RTX 3090.

    Occupancy, instruction mix, latency hiding and L2 traffic; it ranks, roughly.
    """
    c = {name: column.astype(np.float64) for name, column in space.columns.items()}
    size, kwg, sms = 4096, 32, 82
    tm, tn, threads = (
        c["MWG"] / c["MDIMC"],
        c["NWG"] / c["NDIMC"],
        c["MDIMC"] * c["NDIMC"],
    )
    registers = tm * tn + 2 * (tm + tn) + 24
    spilled = np.maximum(0, registers - 255)
    smem = 4 * kwg * (c["SA"] * c["MWG"] + c["SB"] * c["NWG"])
    blocks = np.minimum.reduce(
        [
            np.full_like(tm, 16),
            1536 // threads,
            65536 // (np.minimum(255, registers) * threads),
            np.where(smem > 0, 102400 // (smem + 1024), np.inf),
        ]
    )
    usable = blocks > 0
    blocks = np.maximum(blocks, 1)
    tiles = (size / c["MWG"]) * (size / c["NWG"])
    filled = tiles / (np.ceil(tiles / (blocks * sms)) * blocks * sms)
    loads = tm / c["VWM"] * (3 - 2 * c["SA"]) + tn / c["VWN"] * (3 - 2 * c["SB"])
    issue = tm * tn / (tm * tn + 2 * loads)
    parallel = np.minimum(1, tm * tn / 16 + 0.25)
    hidden = np.clip(blocks * np.ceil(threads / 32) / 8 * parallel, 0.05, 1)
    arithmetic = 2 * size**3 / (35.6e12 * issue * hidden * filled)
    traffic = 4 * size**3 * (1 / c["MWG"] + 1 / c["NWG"]) / (3.5 * 936e9)
    return np.where(usable, np.log(arithmetic + traffic) + 0.02 * spilled, np.inf)


def interval(samples: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over spaces of the mean over seeds.

    Args:
      samples: (spaces, seeds); seeds are drawn anew for each space.
    """
    rng = np.random.default_rng(0)
    spaces, seeds = samples.shape
    drawn = rng.integers(seeds, size=(draws, spaces, seeds))
    means = samples[np.arange(spaces)[:, None], drawn].mean(axis=(1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def ablations() -> dict[str, Method]:
    """The search with one part changed each."""

    def unaligned(space: Recorded) -> np.ndarray:
        return encode(space.columns, alignment=False)

    return {
        "raw time": raw_time,
        "no alignment feature": tuned(features=unaligned),
        "design of 8": tuned(recipe=Recipe(design=8)),
        "no single picks": tuned(recipe=Recipe(singles=0)),
        "design of 8, no single picks": tuned(recipe=Recipe(design=8, singles=0)),
        "no local moves": tuned(recipe=Recipe(local=0.0)),
        "batch 1": tuned(batch=1),
        "batch 4": tuned(batch=4),
        "batch 16": tuned(batch=16),
    }

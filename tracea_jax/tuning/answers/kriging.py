"""Ordinary kriging over shapes and configs: from a few observations to others.

The covariance of two observations falls with the distance of their shapes and with that
of their configs. (Cressie, Statistics for Spatial Data, 1993, section 3.2.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

SHAPE_SCALE = 2.0  # octaves over which what a model misses changes
CONFIG_SCALE = 4.0  # the same for configs, in octaves of their fields
NOISE = 0.02  # variance of an observation, relative to that of what a model misses


def krige(
    at: np.ndarray,
    configs: np.ndarray,
    values: np.ndarray,
    here: np.ndarray,
    wanted: np.ndarray,
) -> np.ndarray:
    """Ordinary kriging: (m,) values at (here, wanted) from (n,) at (at, configs)."""
    covariance = _covariance(at, configs, at, configs) + NOISE * np.eye(len(values))
    ones = np.ones(len(values))
    solved = np.linalg.solve(covariance, np.stack([ones, values], axis=1))
    mean = solved[:, 1].sum() / solved[:, 0].sum()
    weights = solved[:, 1] - mean * solved[:, 0]
    return mean + _covariance(here, wanted, at, configs) @ weights


def _covariance(
    shapes: np.ndarray, configs: np.ndarray, at: np.ndarray, others: np.ndarray
) -> np.ndarray:
    apart = np.linalg.norm(shapes[:, None] - at[None], axis=2) / SHAPE_SCALE
    differ = np.abs(configs[:, None] - others[None]).sum(axis=2) / CONFIG_SCALE
    return np.exp(-apart - differ)


def features_of(configs: Sequence[Any]) -> np.ndarray:
    """(n, fields) coordinates of configs of one type; numbers count octaves."""
    rows = [[*_coordinates(c)] for c in configs]
    names = sorted({name for row in rows for name, _ in row})
    columns = {name: i for i, name in enumerate(names)}
    features = np.zeros((len(rows), len(columns)))
    for row, coordinates in zip(features, rows, strict=True):
        for name, value in coordinates:
            row[columns[name]] = value
    return features


def _coordinates(config: Any) -> Iterable[tuple[str, float]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for i, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, int | float):
                octave = math.copysign(math.log2(1 + abs(part)), part)
                yield f"{field.name} {i}", octave
            else:  # two different names are one octave apart
                yield f"{field.name} {i} {part}", 0.5

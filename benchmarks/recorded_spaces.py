"""Reads the tables that ``record_space.py`` writes: a time for every legal config."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tracea_jax.problem import GemmProblem
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

RECORDED = pathlib.Path(__file__).resolve().parent / "results" / "nvidia_h200"
GEMM_SM90_TABLE = RECORDED / "space_gemm_sm90.json"


class Measured(NamedTuple):
    """All legal configs of one problem, and the time of each one's kernel alone.

    The order of the configs is that of ``Space.configs()``.
    """

    problem: GemmProblem
    configs: tuple[Any, ...]
    times_us: np.ndarray


def read_space(path: pathlib.Path = GEMM_SM90_TABLE) -> list[Measured]:
    """The shapes of a table, in its order."""
    return [_measured(row) for row in json.loads(path.read_text())["rows"]]


def _measured(row: dict[str, Any]) -> Measured:
    lines = sorted(_line(text) for text in row["configs"])
    make = GEMM_SM90.config_type
    return Measured(
        problem=GemmProblem.from_json(row["problem"]),
        configs=tuple(
            make(**dict(zip(row["fields"], fields, strict=True))) for fields, _ in lines
        ),
        times_us=row["reference_us"] * np.array([ratio for _, ratio in lines]),
    )


def _line(text: str) -> tuple[tuple[int, ...], float]:
    """The fields of a config, and its time divided by the reference's."""
    *fields, ratio = text.split(",")
    return tuple(map(int, fields)), float(ratio)

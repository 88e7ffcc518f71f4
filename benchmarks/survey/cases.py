"""Problems with measured choices, from the rows of surveys and from shipped answers.

A case is what ``fit`` learns from, and what its tables judge decisions on.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tracea_jax import variants
from tracea_jax.device import NAMED, Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.survey import rows
from tracea_jax.survey.rows import Row

MEASURED = 0.03  # relative error of times in shipped answers, which do not say theirs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A choice with its time.

    Attributes:
      choice: what ran.
      time_us: median.
      error: its relative standard error.
    """

    choice: Choice
    time_us: float
    error: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem on a device with the choices that were measured side by side."""

    problem: Problem
    device: Device
    measured: tuple[Measured, ...]
    versions: tuple[tuple[str, str], ...] = ()  # of libraries, by name

    @property
    def family(self) -> str:
        """Equal for problems that must not be on both sides of a split.

        Those that differ in their extents, dtypes or epilogue alone are one family,
        unless extents are all that an op's problems have.
        """
        data = self.problem.to_json()
        names = _FAMILY[self.problem.op]
        return json.dumps([data.get(name) for name in names])


_FAMILY = {
    "matmul": ("m", "n", "k"),
    "gated_matmul": ("m", "n", "k"),
    "conv2d": ("in_channels", "out_channels", "kernel_height", "groups"),
    "attention": ("q_len", "kv_len", "heads", "kv_heads", "head_dim"),
}


def surveyed(path: pathlib.Path) -> list[Case]:
    """The cases of one file of rows, or of all files in a folder, in order."""
    files = sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]
    return [_of_row(row) for file in files for row in rows.read(file)]


def shipped(folder: pathlib.Path) -> list[Case]:
    """The answers in a folder of tuned answers, with their observations."""
    found = (_of_entry(e["head"], e["observations"]) for e in _entries(folder))
    return [case for case in found if case is not None]


def _entries(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".volume", ".json") or path.name == "environment.json":
            continue
        text, at = path.read_text(), 0
        while (start := text.find('{"schema"', at)) >= 0:
            value, at = decoder.raw_decode(text, start)
            yield value


def _of_entry(head: dict[str, Any], seen: list[dict[str, Any]]) -> Case | None:
    names = {device.name: device for device in NAMED.values()}
    device = names.get(head["environment"]["device"])
    if device is None:
        return None
    problem = problem_from_json(head["problem"])
    best = head["best"]
    times = {(o["variant"], json.dumps(o["config"])): o.get("time_us") for o in seen}
    if best.get("xla_us"):
        times.setdefault(("xla", "{}"), best["xla_us"])
    measured = [
        _measured(problem, name, json.loads(config), us, MEASURED)
        for (name, config), us in times.items()
        if us
    ]
    return Case(
        problem=problem,
        device=device,
        measured=tuple(m for m in measured if m is not None),
    )


def _of_row(row: Row) -> Case:
    problem = row.asked
    measured = [
        _measured(problem, t.choice.variant, dict(t.choice.config), t.time_us, t.spread)
        for t in row.times
    ]
    return Case(
        problem=problem,
        device=rows.device_of(row.device),
        measured=tuple(m for m in measured if m is not None),
        versions=tuple(sorted(row.versions.items())),
    )


def _measured(
    problem: Problem, variant: str, config: dict[str, Any], us: float, error: float
) -> Measured | None:
    """None of a variant or a config that this version does not have."""
    try:
        known = variants.get(problem.op, variant)
        value = variants.config_from_json(known, config)
    except (KeyError, LookupError, ValueError):
        return None
    choice = Choice(variant=variant, config=value)
    return Measured(choice=choice, time_us=us, error=error)

"""Rows of a survey: a problem and the times of its choices, in an append-only file.

    <directory>/<device>/<op>.jsonl

Each line is an object. What many rows share is written once, before the first row that
names it by its number:

    {"run": 0, "device": {...}, "versions": {...}}        where rows were measured
    {"choice": 0, "variant": .., "config": {..}, "code": ..}   what was measured
    {"row": 7, "seed": 0, "of": 0, "problem": {..}, "rounds": 7,
     "times": [[choice, us, spread], ..], "failed": [[choice, kind], ..]}

A row and the lines it needs are appended by one write, so that a kill loses at most the
row that is being written. A last line without an end is dropped with a warning; any
other line that cannot be understood is an error. A finished file may be compressed by
xz, as ``<op>.jsonl.xz``; it is read, and takes no more rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import lzma
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.problem.epilogue import tuples
from tracea_jax.tuning.store import files


class Damaged(ValueError):
    """A file of rows that cannot be understood."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice as plain data, which outlives the version that had it.

    Attributes:
      variant, config: as ``policy.Choice``, the config's fields.
      code: ``tuning.store.code`` of what it compiled; "" if nothing of ours.
    """

    variant: str
    config: tuple[tuple[str, Any], ...]
    code: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """The measured time of a choice.

    Attributes:
      choice: what was measured.
      time_us: of one execution in a program.
      spread: standard error of the time, against the others' of the row, as a fraction.
    """

    choice: Candidate
    time_us: float
    spread: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one problem; see ``survey.problems`` and ``candidates``.

    Attributes:
      index, seed: of the problem's draw.
      problem: as plain data, without fields that have their defaults.
      device: ``device.to_json``.
      versions: of what the times depend on, by name: jax, driver, ...
      rounds: in which all choices were measured in turns.
      times: of the choices that ran, in the order in which they were chosen.
      failed: the others, and the kind of failure (``records.FAILURES``).
    """

    index: int
    seed: int
    problem: Mapping[str, Any]
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    rounds: int
    times: tuple[Time, ...]
    failed: tuple[tuple[Candidate, str], ...] = ()

    @property
    def asked(self) -> Problem:
        """The problem.

        Raises:
          ValueError: if this version does not know such a problem.
        """
        return problem_from_json(dict(self.problem))

    @property
    def key(self) -> tuple[int, int]:
        """The key of a row in its file."""
        return self.seed, self.index

    def times_of(self, variant: str) -> tuple[Time, ...]:
        return tuple(t for t in self.times if t.choice.variant == variant)


# --- values as plain data -------------------------------------------------------------


def slim(problem: Problem) -> dict[str, Any]:
    """The problem as plain data without the fields that have their defaults."""
    found = _without_defaults(problem, problem.to_json())
    return {"op": problem.op, **found}


def _without_defaults(value: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if field.name not in data or getattr(value, field.name) == field.default:
            continue
        own = getattr(value, field.name)
        is_nested = dataclasses.is_dataclass(own)
        mine = data[field.name]
        found[field.name] = _without_defaults(own, mine) if is_nested else mine
    return found


def device_of(data: Mapping[str, Any]) -> Device:
    """The device that ``device.to_json`` described."""
    kinds = {"cpu": CpuDevice, "cuda": CudaDevice}
    kind = kinds[data["platform"]]
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return kind(**{k: v for k, v in fields.items() if k in names})


def slug(device: Device) -> str:
    """The device as the name of a directory; CPUs with their instruction set."""
    name = re.sub(r"\([^)]*\)", " ", device.name)
    if isinstance(device, CpuDevice):
        name = f"{name} {device.isa}"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def path(directory: pathlib.Path, device: Device, op: str) -> pathlib.Path:
    """Path of the rows of the op on the device."""
    return directory / slug(device) / f"{op}.jsonl"


# --- reading --------------------------------------------------------------------------


def read(file: pathlib.Path) -> list[Row]:
    """All rows of a file; none if there is no file.

    Raises:
      Damaged: naming the line that cannot be understood.
    """
    return _content(file)[0]


def _content(file: pathlib.Path) -> tuple[list[Row], _Known, int]:
    """The rows, what their lines named by number, and the bytes of whole lines."""
    try:
        data = file.read_bytes()
        if file.suffix == ".xz":
            data = lzma.decompress(data)
    except FileNotFoundError:
        data = b""
    except lzma.LZMAError as e:
        raise Damaged(f"{file}: {e}") from e
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        warnings.warn(f"{file}: its last line was cut off and is dropped", stacklevel=3)
    known, rows = _Known(), []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            if (row := known.row(json.loads(line))) is not None:
                rows.append(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
            raise Damaged(f"{file}:{number}: {type(e).__name__}: {e}") from e
    return rows, known, whole


class _Known:
    """The values that lines name by number."""

    def __init__(self) -> None:
        self.runs: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.choices: list[Candidate] = []
        self._numbers: dict[Candidate, int] = {}

    def row(self, line: Mapping[str, Any]) -> Row | None:
        """The row of a line; None of a line that only gives something its number."""
        if "run" in line:
            _check(line["run"] == len(self.runs), "runs are numbered in order")
            self.runs.append((dict(line["device"]), dict(line["versions"])))
            return None
        if "choice" in line:
            _check(line["choice"] == len(self.choices), "choices are numbered in order")
            self._add(
                Candidate(
                    variant=str(line["variant"]),
                    config=tuple((k, tuples(v)) for k, v in line["config"].items()),
                    code=str(line["code"]),
                )
            )
            return None
        device, versions = self.runs[_count(line["of"])]
        return Row(
            index=_count(line["row"]),
            seed=_count(line["seed"]),
            problem={str(k): v for k, v in line["problem"].items()},
            device=device,
            versions=versions,
            rounds=_count(line["rounds"]),
            times=tuple(self._time(*entry) for entry in line["times"]),
            failed=tuple(
                (self.choices[_count(number)], str(kind))
                for number, kind in line["failed"]
            ),
        )

    def _time(self, number: int, time_us: float, spread: float) -> Time:
        is_time = 0 < time_us < math.inf and 0 <= spread < math.inf
        _check(is_time, f"{time_us} us with a spread of {spread} is no time")
        choice = self.choices[_count(number)]
        return Time(choice=choice, time_us=float(time_us), spread=float(spread))

    def lines(self, row: Row) -> Iterator[dict[str, Any]]:
        """The lines to append for a row; they count as appended."""
        run = (dict(row.device), dict(row.versions))
        if run not in self.runs:
            named = {"device": run[0], "versions": run[1]}
            yield {"run": len(self.runs), **named}
            self.runs.append(run)
        for choice in (*(t.choice for t in row.times), *(c for c, _ in row.failed)):
            if choice not in self._numbers:
                fields = {**dataclasses.asdict(choice), "config": dict(choice.config)}
                yield {"choice": len(self.choices), **fields}
                self._add(choice)
        number = self._numbers
        yield {
            "row": row.index,
            "seed": row.seed,
            "of": self.runs.index(run),
            "problem": row.problem,
            "rounds": row.rounds,
            "times": [
                [number[t.choice], _digits(t.time_us, 5), _digits(t.spread, 2)]
                for t in row.times
            ],
            "failed": [[number[choice], kind] for choice, kind in row.failed],
        }

    def _add(self, choice: Candidate) -> None:
        self._numbers.setdefault(choice, len(self.choices))
        self.choices.append(choice)


def _count(value: Any) -> int:
    _check(isinstance(value, int) and value >= 0, f"{value!r} is no number of anything")
    return value


def _check(is_right: bool, why: str) -> None:
    if not is_right:
        raise ValueError(why)


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


# --- writing --------------------------------------------------------------------------


class Writer:
    """Appends rows to one file, which nobody else writes meanwhile.

    Attributes:
      rows: of the file, those that were appended included.
    """

    def __init__(self, file: pathlib.Path) -> None:
        """Opens the file, and cuts a line off that was not written to its end.

        Raises:
          Damaged: if the file cannot be understood.
          OSError: if it cannot be written.
        """
        self._stack = contextlib.ExitStack()
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock")
        self._stack.enter_context(files.locked(lock))
        self.rows, self._known, whole = _content(file)
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._stack.callback(os.close, self._fd)
        os.ftruncate(self._fd, whole)
        os.lseek(self._fd, 0, os.SEEK_END)

    def append(self, row: Row) -> None:
        lines = map(_line, self._known.lines(row))
        data = "".join(lines).encode()
        while data:
            data = data[os.write(self._fd, data) :]
        self.rows.append(row)

    def close(self) -> None:
        self._stack.close()


def write(file: pathlib.Path, found: Iterable[Row]) -> None:
    """Appends rows whose problems the file has not."""
    with contextlib.closing(Writer(file)) as writer:
        there = {row.key for row in writer.rows}
        for row in found:
            if row.key not in there:
                there.add(row.key)
                writer.append(row)


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"

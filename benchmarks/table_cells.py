"""Cells and lines of the tables that ``tables`` and ``attention_tables`` write."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

UNMEASURED = "\nNot measured yet.\n\n"  # instead of missing results

# Groups of machines, by the names of their directories in results, with their titles.
_DIRECTORIES = {
    "h100": r"nvidia_h100\w*",
    "h200": r"nvidia_h200\w*",
    "cpu": r"(?!nvidia|replay)\w+",
}
MACHINES = {
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
    "cpu": "CPU",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Selected:
    """The results of some machines: ``machines`` is one of ``MACHINES``."""

    results: Results
    machines: str

    def glob(self, pattern: str) -> Iterator[pathlib.Path]:
        """The files of these machines that match "DIRECTORY/NAME"."""
        directory = re.compile(_DIRECTORIES[self.machines])
        for file in self.results.glob(pattern):
            if directory.fullmatch(file.parent.name):
                yield file


Results = pathlib.Path | Selected


def head(where: dict[str, Any]) -> str:
    """The line above a table: which device, when."""
    return (
        f"\n{where['device']} ({where['arch']}, {where['units']} units), "
        f"jax {where['versions']['jax']}, {where['date']}:\n"
    )


def table(above: str, columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    Args:
      above: the line above it, ``head``; "" for none.
      columns: titles between bars; a column whose title ends in a colon is aligned to
        the right.
      rows: cells of each.
    """
    titles = columns.split(" | ")
    aligned = "|".join("---:" if title.endswith(":") else "---" for title in titles)
    lines = [
        above,
        _line([title.removesuffix(":") for title in titles]),
        f"|{aligned}|",
        *map(_line, rows),
    ]
    return "\n".join(lines) + "\n\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def bar_cells(group: str, figure: str, bar: dict[str, Any]) -> tuple[str, ...]:
    """The row of a bar."""
    sign = "<=" if bar.get("is_upper") else ">="
    met = "yes" if bar["is_met"] else "no"
    goal, value = f"{sign} {bar['limit']:.2f}", number(bar["value"], 3)
    return group, figure, goal, value, met


def bar_rows(
    result: dict[str, Any], figures: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """The rows of the bars of a result's groups; ``figures``: what each is called."""
    return [
        bar_cells(group["group"], figures[bar["figure"]], bar)
        for group in result.get("groups", ())
        for bar in group["bars"]
    ]


def bars_table(where: dict[str, Any], rows: list[tuple[str, ...]]) -> str:
    """The table of the rows of bars; nothing where there are none."""
    columns = "group | figure | goal: | measured: | met"
    return table(head(where), columns, rows) if rows else ""


def for_each(
    results: Results,
    pattern: str,
    table: Callable[[dict[str, Any]], str],
    otherwise: str = "\n",
) -> str:
    """The tables of all results in files of such names, or what stands for none."""
    files = sorted(results.glob(pattern))
    return "".join(table(json.loads(file.read_text())) for file in files) or otherwise

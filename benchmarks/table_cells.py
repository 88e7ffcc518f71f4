"""Cells and lines of the tables that ``tables`` and ``attention_tables`` write."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

UNMEASURED = "\nNot measured yet.\n\n"  # what stands where results are missing


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
    results: pathlib.Path,
    pattern: str,
    table: Callable[[dict[str, Any]], str],
    otherwise: str = "\n",
) -> str:
    """The tables of all results in files of such names, or what stands for none."""
    files = sorted(results.glob(pattern))
    return "".join(table(json.loads(file.read_text())) for file in files) or otherwise

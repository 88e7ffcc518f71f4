"""Cells and lines of the tables that ``tables`` and ``attention_tables`` write."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

UNMEASURED = "\nNot measured yet.\n\n"  # what stands where results are missing


def head(where: dict[str, Any]) -> str:
    """The line above a table: which device, when."""
    return (
        f"\n{where['device']} ({where['arch']}, {where['units']} units), "
        f"jax {where['versions']['jax']}, {where['date']}:\n"
    )


def number(value: float | None, digits: int) -> str:
    """A number with so many digits; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def bar_line(group: str, figure: str, bar: dict[str, Any]) -> str:
    """The row of a bar."""
    sign = "<=" if bar.get("is_upper") else ">="
    met = "yes" if bar["is_met"] else "no"
    goal, value = f"{sign} {bar['limit']:.2f}", number(bar["value"], 3)
    return f"| {group} | {figure} | {goal} | {value} | {met} |"


def bar_lines(result: dict[str, Any], figures: Mapping[str, str]) -> list[str]:
    """The rows of the bars of a result's groups; ``figures``: what each is called."""
    return [
        bar_line(group["group"], figures[bar["figure"]], bar)
        for group in result.get("groups", ())
        for bar in group["bars"]
    ]


def bars_table(where: dict[str, Any], lines: list[str]) -> str:
    """The table of the rows of bars; nothing where there are none."""
    if not lines:
        return ""
    columns = "| group | figure | goal | measured | met |"
    return "\n".join([head(where), columns, "|---|---|---:|---:|---|", *lines]) + "\n\n"


def for_each(
    results: pathlib.Path,
    pattern: str,
    table: Callable[[dict[str, Any]], str],
    otherwise: str = "\n",
) -> str:
    """The tables of all results in files of such names, or what stands for none."""
    files = sorted(results.glob(pattern))
    return "".join(table(json.loads(file.read_text())) for file in files) or otherwise

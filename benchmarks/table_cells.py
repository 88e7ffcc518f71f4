"""Cells and lines of the tables that ``tables`` and ``attention_tables`` write."""

from __future__ import annotations

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

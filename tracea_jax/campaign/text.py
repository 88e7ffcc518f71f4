"""Parts of a report as text: counted words, times, and a portfolio as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.campaign import rows
from tracea_jax.page import Column, Row, Table, times
from tracea_jax.tuning.portfolio import Portfolio

# What the protocols measure, in a heading: "times of ...".
MEANINGS = {
    "steady": "executions in a row",
    "cold": "single executions on cold caches",
    "balanced": "executions in a row and on cold caches (geometric means)",
    "kernels": "kernels, as the profiler reports them",
}


def tried(tuned: Sequence[rows.Row]) -> str:
    """ "1 of 7 configs tried, 1 compiled"."""
    tried, legal, compiles = (
        sum(getattr(row, name) for row in tuned)
        for name in ("tried", "legal", "compiles")
    )
    if not legal:
        return "no config tried"
    return f"{tried} of {counted(legal, 'config')} tried, {compiles} compiled"


def compared(ours_us: float, other: str, other_us: float) -> str:
    """ "XLA 330.0 us (1.65x)", beside our time of 200.0 us."""
    ratio = times.ratio(other_us, ours_us)
    return f"{other} {times.microseconds(other_us)} ({ratio})"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def portfolio(portfolio: Portfolio) -> Table:
    """A line for each shared config, with how many problems it serves how well."""
    served = counted(portfolio.problems, "problem")
    configs = counted(len(portfolio.configs), "config")
    percent = f"{100 * portfolio.fraction:g} %"
    lines = (
        (
            rows.choice(shared.op, shared.variant, shared.config),
            counted(len(shared.problems), "problem"),
            f"{100 * (shared.worst - 1):.1f} % over",
        )
        for shared in portfolio.configs
    )
    return Table(
        columns=(
            Column("config"),
            Column("serves", ": "),
            Column("at most", ", at most "),
        ),
        rows=tuple(map(Row, lines)),
        title=f"portfolio: {configs} for {served}, each within {percent} of its best",
    )

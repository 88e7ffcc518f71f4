"""Parts of a report as text: counted words, and a shared portfolio as a table."""

from __future__ import annotations

from tracea_jax.campaign.rows import choice
from tracea_jax.page import Column, Row, Table
from tracea_jax.tuning.portfolio import Portfolio


def evaluations(evals: int, compiles: int) -> str:
    return f"{counted(evals, 'evaluation')}, {counted(compiles, 'compile')}"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def portfolio(portfolio: Portfolio) -> Table:
    """A line for each shared config, with how many problems it serves how well."""
    served = counted(portfolio.problems, "problem")
    configs = counted(len(portfolio.configs), "config")
    percent = f"{100 * portfolio.fraction:g} %"
    lines = (
        (
            choice(shared.op, shared.variant, shared.config),
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

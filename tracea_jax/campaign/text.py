"""The parts of a report as text: a table of rows, counted words, a shared portfolio."""

from __future__ import annotations

import dataclasses

from tracea_jax.campaign.rows import Row, choice
from tracea_jax.tuning.portfolio import Portfolio

_HEAD = ("count", "problem", "untuned us", "tuned us", "XLA us", "evals", "choice")


def table(rows: tuple[Row, ...], protocol: str) -> list[str]:
    """One line for each row under a head, with times of this protocol."""
    cells = [_HEAD, *(_cells(row, protocol) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    left = (1, len(_HEAD) - 1)  # columns of text
    lines = []
    for row in cells:
        padded = [
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _cells(row: Row, protocol: str) -> tuple[str, ...]:
    times = dataclasses.astuple(row.times(protocol))
    return (
        str(row.count),
        str(row.problem),
        *("-" if us is None else f"{us:.1f}" for us in times),
        str(row.evals),
        f"{row.choice}, {row.origin}" if row.origin else row.choice,
    )


def evaluations(evals: int, compiles: int) -> str:
    return f"{counted(evals, 'evaluation')}, {counted(compiles, 'compile')}"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def portfolio(portfolio: Portfolio) -> list[str]:
    served = counted(portfolio.problems, "problem")
    configs = counted(len(portfolio.configs), "config")
    percent = f"{100 * portfolio.fraction:g} %"
    lines = [f"portfolio: {configs} for {served}, each within {percent} of its best"]
    for shared in portfolio.configs:
        shown = choice(shared.op, shared.variant, shared.config)
        over = 100 * (shared.worst - 1)
        lines.append(
            f"  {shown}: {counted(len(shared.problems), 'problem')}, at most "
            f"{over:.1f} % over"
        )
    return lines

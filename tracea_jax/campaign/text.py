"""Reports of tunings as text."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from tracea_jax import variants
from tracea_jax.tuning.portfolio import Portfolio

if TYPE_CHECKING:
    from tracea_jax.campaign.report import Row, TuneReport

_HEAD = ("count", "problem", "untuned us", "tuned us", "XLA us", "evals", "choice")
_MEANING = {
    "steady": "of executions in a row",
    "cold": "of single executions on cold caches",
    "balanced": "geometric means of executions in a row and on cold caches",
}


def of_report(report: TuneReport) -> str:
    """What ``print(report)`` shows."""
    if len(report.rows) == 1 and not report.parts:
        return "\n".join(_alone(report))
    lines = [f"{_counted(len(report.rows), 'problem')} on {report.device}"]
    lines += [f"goal {report.goal}, effort {report.effort}: {_work(report)}"]
    lines += [f"times {_MEANING[report.protocol]}", ""]
    lines += _table(report.rows, report.protocol)
    if report.timed:
        lines += ["", *_totals(report)]
    if report.parts:
        lines += ["", "tuned for problems that are made of them:"]
        lines += _table(report.parts, report.protocol)
    if report.portfolio is not None:
        lines += ["", *_portfolio(report.portfolio)]
    return "\n".join(lines)


def choice(op: str, variant: str, config: dict[str, Any]) -> str:
    """A choice from plain data, as plans print it."""
    try:
        value = variants.config_from_json(variants.get(op, variant), config)
    except (ValueError, TypeError):  # of another version
        value = ", ".join(f"{k} {v}" for k, v in config.items()) or "-"
    return variant if str(value) == "-" else f"{variant} [{value}]"


def _alone(report: TuneReport) -> list[str]:
    (row,) = report.rows
    steady, cold = row.steady, row.cold
    times = "not timed" if steady.after is None else f"{steady.after:.1f} us"
    if steady.after and steady.xla and row.variant != "xla":
        times += f", XLA {steady.xla:.1f} us, {steady.xla / steady.after:.2f}x"
    lines = [f"{row.problem}: {row.choice}, {times}"]
    if cold.after and cold.xla and report.protocol != "steady":
        lines.append(f"  on cold caches {cold.after:.1f} us, XLA {cold.xla:.1f} us")
    details = [
        "" if steady.before is None else f"untuned {steady.before:.1f} us",
        _evaluations(row.evals, row.compiles),
        f"{row.seconds:.1f} s",
        f"ended by: {row.stop}" if row.stop else "",
    ]
    return [*lines, "  " + ", ".join(part for part in details if part)]


def _work(report: TuneReport) -> str:
    done = _evaluations(report.evals, report.compiles)
    rows = (*report.rows, *report.parts)
    stops = collections.Counter(row.stop for row in rows if row.stop)
    why = ", ".join(f"{n} {stop}" for stop, n in stops.items())
    return f"{done}, {report.seconds:.1f} s" + (f"; ended by: {why}" if why else "")


def _evaluations(evals: int, compiles: int) -> str:
    return f"{_counted(evals, 'evaluation')}, {_counted(compiles, 'compile')}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _table(rows: tuple[Row, ...], protocol: str) -> list[str]:
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


def _totals(report: TuneReport) -> list[str]:
    lines = []
    for protocol in dict.fromkeys((report.protocol, "steady")):
        total = report.total(protocol)
        if not (total.before and total.after and total.xla):
            continue
        how = "" if protocol == report.protocol else f", {_MEANING[protocol]}"
        lines.append(
            f"sum of count x time{how}: untuned {total.before:.1f} us, tuned "
            f"{total.after:.1f} us ({total.before / total.after:.2f}x), XLA "
            f"{total.xla:.1f} us ({total.xla / total.after:.2f}x)"
        )
    missing = len(report.rows) - len(report.timed)
    return [*lines, *([f"({missing} without all times left out)"] if missing else [])]


def _portfolio(portfolio: Portfolio) -> list[str]:
    served = _counted(portfolio.problems, "problem")
    configs = _counted(len(portfolio.configs), "config")
    percent = f"{100 * portfolio.fraction:g} %"
    lines = [f"portfolio: {configs} for {served}, each within {percent} of its best"]
    for shared in portfolio.configs:
        shown = choice(shared.op, shared.variant, shared.config)
        over = 100 * (shared.worst - 1)
        lines.append(
            f"  {shown}: {_counted(len(shared.problems), 'problem')}, at most "
            f"{over:.1f} % over"
        )
    return lines

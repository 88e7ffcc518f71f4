"""Drawings of a report: how each search converged, and where the fast configs are.

matplotlib is needed only here, and imported only when something is drawn. The report
itself is in ``campaign.report``. Callers: ``tune(plot=...)`` (``campaign``) and
``tracea tune --plot`` (``cli.tuning``).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pathlib
import statistics
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.rows import Row, Trial
from tracea_jax.campaign.text import MEANINGS
from tracea_jax.device import Device
from tracea_jax.outputs import check_drawing
from tracea_jax.page import times

MOST_ROWS = 6  # problems in one picture, at most; a PDF has a page for each problem
_PAGE = (11.0, 4.4)  # inches
_TITLE = 75  # characters that fit above half a page


def save(report: TuneReport, path: str | os.PathLike[str]) -> None:
    """Draws a report: for each problem its convergence, and a map of two config fields.

    A PDF has a page for every problem. Other files show at most ``MOST_ROWS`` problems,
    those that take most of the graph's time.

    Args:
      report: of ``tracea.tune``.
      path: ends in .pdf, .png or .svg.

    Raises:
      ValueError: as ``outputs.check_drawing`` raises it, or if nothing was measured.
    """
    check_drawing(path)
    rows = ranked(report)
    if not rows:
        raise ValueError("nothing was measured in this tuning, so nothing can be drawn")
    if pathlib.Path(path).suffix.lower() == ".pdf":
        with _module("matplotlib.backends.backend_pdf").PdfPages(path) as pages:
            for row in rows:
                pages.savefig(figure([row], report.device))
    else:
        figure(rows[:MOST_ROWS], report.device).savefig(path, dpi=120)


def save_or_warn(report: TuneReport, path: str | os.PathLike[str]) -> None:
    """``save``, but what cannot be drawn warns: the report matters more."""
    try:
        save(report, path)
    except (ValueError, OSError) as e:
        warnings.warn(f"{path} was not drawn: {e}", stacklevel=3)


def ranked(report: TuneReport) -> list[Row]:
    """The measured problems, those that take most of the graph's time first."""
    rows = [r for r in (*report.rows, *report.parts) if any(map(_us, r.trials))]
    return sorted(rows, key=lambda r: -r.count * (r.times().after or 0.0))


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """The lowest time after each trial; NaN before the first success."""
    best, line = math.inf, []
    for trial in trials:
        best = min(best, _us(trial) or math.inf)
        line.append(best if best < math.inf else math.nan)
    return line


def searched(row: Row) -> list[Trial]:
    """The first measurement of each config, which leaves out those of the race."""
    firsts: dict[Any, Trial] = {}
    for trial in row.trials:
        firsts.setdefault((trial.variant, *sorted(trial.config.items())), trial)
    return list(firsts.values())


def importance(trials: Sequence[Trial]) -> dict[str, float]:
    """The part of the variance of log time that each field of the config explains.

    Only trials of the variant with the most successful trials count. A field that never
    changed is left out.
    """
    best = _of_main_variant(trials)
    names = best[0].config if best else {}
    values = [math.log(_us(t) or 1.0) for t in best]
    total = statistics.pvariance(values) if len(values) > 1 else 0.0
    found: dict[str, float] = {}
    for name in names:
        groups: dict[Any, list[float]] = {}
        for trial, value in zip(best, values, strict=True):
            groups.setdefault(trial.config[name], []).append(value)
        if len(groups) > 1 and total:
            within = sum(len(g) * statistics.pvariance(g) for g in groups.values())
            found[name] = 1 - within / (len(values) * total)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """The lowest time for each pair of values of two fields; NaN for untried pairs.

    Attributes:
      variant: whose configs these are.
      x, y: names of the fields; y is "" if only one field ever changed.
      columns, rows: the values of x and of y, in order.
      times_us: a row of times for each value of y.
    """

    variant: str
    x: str
    y: str
    columns: tuple[Any, ...]
    rows: tuple[Any, ...]
    times_us: tuple[tuple[float, ...], ...]


def heat_map(trials: Sequence[Trial]) -> Map | None:
    """The map over the two most important fields; None if no field ever changed."""
    scores = importance(trials)
    names = sorted(scores, key=lambda name: (-scores[name], name))[:2]
    if not names:
        return None
    x, y = (*names, "")[:2]
    best: dict[tuple[Any, Any], float] = {}
    own = _of_main_variant(trials)
    for trial in own:
        key = (trial.config[x], trial.config.get(y))
        best[key] = min(best.get(key, math.inf), _us(trial) or math.inf)
    columns = tuple(sorted({key[0] for key in best}, key=_order))
    rows = tuple(sorted({key[1] for key in best}, key=_order))
    lowest = tuple(tuple(best.get((c, r), math.nan) for c in columns) for r in rows)
    return Map(
        variant=own[0].variant, x=x, y=y, columns=columns, rows=rows, times_us=lowest
    )


def _us(trial: Trial) -> float | None:
    return trial.time_us


def _order(value: Any) -> tuple[bool, Any]:
    """A sort key: numbers by size, then anything else by its text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else str(value)


def _of_main_variant(trials: Sequence[Trial]) -> list[Trial]:
    timed = [t for t in trials if t.time_us is not None and t.config]
    names = [t.variant for t in timed]
    main = max(dict.fromkeys(names), key=names.count, default=None)
    return [t for t in timed if t.variant == main]


# --- drawing --------------------------------------------------------------------------


def _module(name: str) -> Any:
    return importlib.import_module(name)


def figure(rows: Sequence[Row], device: Device) -> Any:
    """The drawing as a figure of matplotlib: a line of two axes for each problem."""
    # Not pyplot: it would open windows, and keep figures.
    size = (_PAGE[0], _PAGE[1] * len(rows))
    made = _module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    made.suptitle(f"tuned on {device}", size=10)
    axes = made.subplots(len(rows), 2, squeeze=False)
    for row, (left, right) in zip(rows, axes, strict=True):
        _draw_convergence(left, row)
        _draw_map(made, right, row)
    return made


def _draw_convergence(axes: Any, row: Row) -> None:
    trials = searched(row)
    for variant in dict.fromkeys(t.variant for t in trials if t.config):
        own = [(i, t) for i, t in enumerate(trials, 1) if t.variant == variant]
        taken = [t.time_us or math.nan for _, t in own]
        axes.plot([i for i, _ in own], taken, ".", label=variant)
    numbers = range(1, len(trials) + 1)
    axes.step(numbers, best_so_far(trials), "0.4", where="post", label="best so far")
    lines = (("XLA", row.steady.xla, "C3"), ("untuned", row.steady.before, "C2"))
    for name, us, color in lines:
        if us is not None:
            axes.axhline(us, linestyle="--", color=color, label=f"{name} in the race")
    axes.set(
        xlabel="configs measured",
        ylabel="time of executions in a row (µs)",
        yscale="log",
    )
    title = [str(row.problem), *textwrap.wrap(f"winner: {_winner(row)}", _TITLE)]
    axes.set_title("\n".join(title), size=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _use_plain_numbers(axes)
    axes.legend(fontsize=8)


def _winner(row: Row) -> str:
    parts, us = [row.choice], row.times()
    if us.after is not None:
        parts.append(f"{times.number(us.after)} µs")
    if us.after and us.xla and row.variant != "xla":
        ratio = times.ratio(us.xla, us.after)
        parts.append(f"XLA {times.number(us.xla)} µs ({ratio})")
    if row.protocol != "steady":  # unlike the axis
        parts.append(f"times of {MEANINGS[row.protocol]}")
    return ", ".join(parts)


def _use_plain_numbers(axes: Any) -> None:
    """Ticks of a logarithmic axis such as 20, 50, 100; of a short one 31, 32, 33."""
    ticker = _module("matplotlib.ticker")
    low, high = axes.get_ylim()
    is_long = high > 8 * low
    steps = ticker.LogLocator(subs=(1, 2, 5)) if is_long else ticker.MaxNLocator(7)
    axes.yaxis.set_major_locator(steps)
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _draw_map(made: Any, axes: Any, row: Row) -> None:
    found = heat_map(searched(row))
    if found is None:
        axes.set_axis_off()
        axes.set_title("no config field was varied", size=9)
        return
    image = axes.imshow(found.times_us, aspect="auto", cmap="viridis_r")
    axes.set_facecolor("0.9")  # of pairs that were not tried
    by = f"{found.x} and {found.y}" if found.y else found.x
    axes.set(xlabel=found.x, ylabel=found.y)
    axes.set_title(f"{found.variant}: lowest time by {by}", size=9)
    axes.set_xticks(range(len(found.columns)), map(str, found.columns))
    axes.set_yticks(range(len(found.rows)), map(str, found.rows) if found.y else [""])
    if sum(len(str(value)) for value in found.columns) > 40:
        axes.tick_params(axis="x", labelrotation=45)
    made.colorbar(image, ax=axes, label="lowest time (µs)", format="{x:g}")

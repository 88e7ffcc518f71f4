"""The drawing of a bench: ratios of the whole program and of its sites, as bars.

matplotlib is needed only here, and imported only when something is drawn. Caller:
``tracea bench --plot`` (``cli.bench``).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import textwrap
from typing import Any

from tracea_jax.bench.report import BenchReport, SiteTime
from tracea_jax.bench.timed import Timed

MOST_BARS = 20  # sites in one picture, those that take most time
_WIDTH, _BAR, _MARGINS = 10.0, 0.5, 1.8  # inches
_LABEL = 44  # characters of a line
# What bars are called in the legend, with their colours.
_WHOLE, _FASTER, _SLOWER, _EVEN = (
    "whole program",
    "faster",
    "slower",
    "no difference measured",
)
_KINDS = {"faster": _FASTER, "slower": _SLOWER, "none": _EVEN}
_COLOURS = {_WHOLE: "C0", _FASTER: "C2", _SLOWER: "C3", _EVEN: "0.6"}


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its times, and what it shows, as the legend calls it."""

    name: str
    timed: Timed
    kind: str

    @property
    def text(self) -> str:
        """The text to the right of the bar."""
        (plain, plain_us), (ours, ours_us) = map(
            _rounded, (self.timed.plain_us, self.timed.ours_us)
        )
        if self.timed.difference == "none":
            return f"{plain} → {ours}: {_EVEN}"
        return f"{plain} → {ours}: {plain_us / ours_us:.2f}x"


def bars(report: BenchReport) -> list[Bar]:
    """The whole program, then the sites that take most of its time."""

    def time_us(site: SiteTime) -> float:
        return (site.count or 1) * (site.timed.plain_us if site.timed else 0.0)

    whole = report.whole.timed
    made = [] if whole is None else [Bar("whole program", whole, _WHOLE)]
    for site in sorted(report.timed, key=time_us, reverse=True)[:MOST_BARS]:
        count = "?" if site.count is None else site.count
        if site.timed is not None:
            name = f"{count} x {site.problem}"
            made.append(Bar(name, site.timed, _KINDS[site.timed.difference]))
    return made


def save(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draws a report.

    Args:
      report: of ``tracea.bench``.
      path: ends in .pdf, .png or .svg; ``outputs.check_drawing`` tells before.

    Raises:
      ValueError: if nothing was measured.
    """
    figure(report).savefig(path, dpi=120)


def figure(report: BenchReport) -> Any:
    """The drawing as a figure of matplotlib, with one axes.

    Raises:
      ValueError: if nothing was measured.
    """
    drawn = bars(report)
    if not drawn:
        raise ValueError("nothing was measured, so nothing can be drawn")
    # Not pyplot: it would open windows, and keep figures.
    made = importlib.import_module("matplotlib.figure").Figure(
        figsize=(_WIDTH, _MARGINS + _BAR * len(drawn)), layout="constrained"
    )
    axes = made.subplots()
    longest = max(1.0, *(bar.timed.high for bar in drawn))
    for kind in dict.fromkeys(bar.kind for bar in drawn):
        own = [(y, bar.timed) for y, bar in enumerate(drawn) if bar.kind == kind]
        below = [max(timed.ratio - timed.low, 0.0) for _, timed in own]
        above = [max(timed.high - timed.ratio, 0.0) for _, timed in own]
        axes.barh(
            [y for y, _ in own],
            [timed.ratio for _, timed in own],
            xerr=[below, above],
            color=_COLOURS[kind],
            label=kind,
            error_kw={"capsize": 3, "ecolor": "0.3"},
        )
    for y, bar in enumerate(drawn):
        end = max(1.0, bar.timed.high)  # right of the line
        axes.text(end + 0.02 * longest, y, bar.text, va="center", size=8)
    axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1)
    names = ["\n".join(_lines(bar.name)) for bar in drawn]
    axes.set_yticks(range(len(drawn)), names, size=8)
    axes.set_ylim(len(drawn) - 0.5, -0.5)  # the first bar on top
    axes.set_xlim(0, 1.35 * longest)  # room for the text
    axes.set_xlabel(
        "plain time / transformed time; whiskers: middle half of the rounds"
    )
    axes.legend(fontsize=8, loc="lower right")
    left = len(report.timed) - MOST_BARS
    more = f"; {left} smaller sites are not drawn" if left > 0 else ""
    title = f"{report.function}: plain against transformed{more}"
    axes.set_title(f"{title}\n{report.device}", size=10)
    return made


def _lines(name: str) -> list[str]:
    return textwrap.wrap(name, _LABEL, max_lines=2, placeholder=" ...")


def _rounded(us: float) -> tuple[str, float]:
    """A time as text, "12.3 µs" or "4.56 ms", and the microseconds that it says."""
    scale, unit = next(((s, u) for s, u in _UNITS if us >= s), _UNITS[-1])
    number = f"{us / scale:.3g}"
    return f"{number} {unit}", float(number) * scale


_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))

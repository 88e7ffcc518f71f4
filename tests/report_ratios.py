"""Reads reports as people do: every ratio must be a quotient of times beside it.

A ratio is a number with an x, such as 1.25x, or a cell below a head such as "ratio".
Its times must stand in the same line, or in the same row of the table, as numbers with
a unit or below a head that ends in one.
"""

from __future__ import annotations

import html
import re
from typing import Any

_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_RATIO = re.compile(rf"(?<![\w.,])({_NUMBER})x(?!\w)")
_TIME = re.compile(rf"(?<![\w.,])({_NUMBER}) (us|µs|ms|s)\b")
_UNITS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_HEAD_OF_TIMES = re.compile(r"(?:^|.*\s)(us|µs|ms|s)$")
_HEADS_OF_RATIOS = ("ratio", "speedup")
_ENDS = re.compile(r"</(?:p|tr|li|summary|pre)>|<br>")


def checked(report: Any) -> int:
    """The number of ratios in a report's text and in its HTML, each of them checked."""
    found = checked_text(str(report))
    assert checked_text(text_of(report._repr_html_())) == found
    return found


def text_of(page: str) -> str:
    """The lines of a page of HTML, with two spaces between the cells of a row."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    page = _ENDS.sub("\n", page.replace("\n", " "))
    page = re.sub(r"</t[hd]>|<ul>", "  ", page)
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def checked_text(text: str) -> int:
    """The number of ratios in a text.

    Raises:
      AssertionError: if one is not the quotient of two times printed with it.
    """
    found, head = 0, []
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if any(map(_HEAD_OF_TIMES.match, cells)) and not _TIME.search(line):
            head = cells
            continue
        if len(cells) < len(head):
            head = []
        times, ratios = _row(head, cells)
        times += [float(us) * _UNITS[unit] for us, unit in _TIME.findall(line)]
        ratios += _RATIO.findall(line)
        for ratio in ratios:
            assert _is_quotient(ratio, times), f"{ratio} is no quotient in: {line}"
        found += len(ratios)
    return found


def _row(head: list[str], cells: list[str]) -> tuple[list[float], list[str]]:
    """The times and the ratios in a row of a table."""
    times, ratios = [], []
    for name, cell in zip(head, cells, strict=False):
        unit = _HEAD_OF_TIMES.match(name)
        if not re.fullmatch(_NUMBER, cell):
            continue
        if unit is not None:
            times.append(float(cell) * _UNITS[unit[1]])
        elif name in _HEADS_OF_RATIOS:
            ratios.append(cell)
    return times, ratios


def _is_quotient(ratio: str, times: list[float]) -> bool:
    """Whether two of the times have this quotient, rounded as it is printed."""
    digits, _, exponent = ratio.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    half = 0.5 * last * (1 + 1e-6)
    return any(
        b and i != j and abs(a / b - float(ratio)) <= half
        for i, a in enumerate(times)
        for j, b in enumerate(times)
    )

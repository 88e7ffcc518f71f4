"""The bar of ``tune``: where it is shown, and what it says."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
from processes import forked
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.campaign import progress
from tracea_jax.campaign.progress import WHOLE, showing
from tracea_jax.campaign.watch import Watch

pytestmark = pytest.mark.once

PROBLEM = tracea.GemmProblem(m=16, n=24, k=8)
QUICKLY: Any = {"effort": "none", "budget_s": 0.2}
SEARCH: Any = {"phase": "search", "total": 4, "best_us": None, "message": "a config"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """The successive texts of the line."""
        return [line.strip() for line in self.getvalue().split("\r") if line.strip()]


@contextlib.contextmanager
def terminal(monkeypatch) -> Iterator[Terminal]:
    """Error output that says it is a terminal; pytest captures it before a test."""
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.redirect_stderr(Terminal()) as stream:
        yield stream


@contextlib.contextmanager
def bar(monkeypatch) -> Iterator[tuple[Terminal, Any]]:
    """A terminal, and what tells the bar on it."""
    with terminal(monkeypatch) as stream, showing(True) as told:
        assert told is not None
        yield stream, told


def on_terminal(
    program: str, columns: int, rows: int = 24, **variables: str
) -> tuple[str, str]:
    """Output, and error output on a terminal of this size, of a Python program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    others = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        forked(textwrap.dedent(program)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=others | variables,
    )
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 1 << 16):
            written += data
    except OSError:  # the other end is closed
        pass
    output, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return output.decode(), written.decode()


# --- where ----------------------------------------------------------------------------


# The second tuning is told to show nothing.
TUNE = """
    import sys
    import tracea_jax as tracea
    problem = tracea.GemmProblem(m=16, n=24, k=8)
    for how in ({}, {"progress": False}):
        print(tracea.tune(problem, effort="none", budget_s=0.2, **how))
        print("=====", file=sys.stderr)
"""


BAR = """
    from tracea_jax.campaign.progress import showing
    how = {"phase": "search", "total": 4, "best_us": None, "message": "a config"}
    with showing(True) as told:
        told(**how, done=2, left_s=5.0)
"""


@pytest.mark.parametrize("columns", slow_unless([160], [50, 160]))
def test_a_terminal_shows_the_bar_unless_told_not_to(columns):
    output, shown = on_terminal(TUNE, columns)
    assert output.count("matmul 16x24x8 float32 nn: ") == 2
    shown, nothing, _ = shown.split("=====")
    assert nothing.strip() == ""
    lines = [line for line in shown.split("\r") if line.strip()]
    assert re.match(r"100%\|.{20}\| matmul 16x24x8", lines[-1])
    assert max(map(len, lines)) <= columns  # a longer line would not change but repeat
    assert "done" in lines[-1] or columns == 50


@pytest.mark.parametrize(
    ("columns", "rows", "variables"),
    slow_unless(
        [(0, 0, {"COLUMNS": "0"}), (160, 0, {"COLUMNS": "160"})],
        [(0, 0, {}), (0, 0, {"COLUMNS": "0"}), (0, 24, {})]
        + [(160, 0, {"COLUMNS": "160"})],
    ),
)
def test_a_terminal_without_a_size_shows_the_bar(columns, rows, variables):
    _, shown = on_terminal(BAR, columns, rows, **variables)
    lines = [line.strip() for line in shown.split("\r") if line.strip()]
    told = r"50%\|.{20}\| search 2/4, 0:05 left, a config"
    assert re.fullmatch(told, lines[-1])


def test_elsewhere_nothing_is_printed(capfd):
    tracea.tune(PROBLEM, **QUICKLY)
    assert capfd.readouterr() == ("", "")


def test_without_error_output_nothing_fails():
    closed = Terminal()
    closed.close()
    for stream in (None, closed):
        with contextlib.redirect_stderr(stream):
            assert tracea.tune(PROBLEM, **QUICKLY).entries


@pytest.mark.parametrize(("kernel", "shown"), [(object(), True), (None, False)])
def test_a_notebook_shows_the_bar(monkeypatch, kernel, shown):
    """IPython in a pipe is none: its shell has no kernel."""
    shell = types.SimpleNamespace(kernel=kernel)
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        tracea.tune(PROBLEM, **QUICKLY)
    assert ("100%" in stream.getvalue()) == shown


def test_a_function_is_told_in_place_of_the_bar(monkeypatch):
    steps = []
    with terminal(monkeypatch) as stream:
        tracea.tune(PROBLEM, **QUICKLY, progress=lambda **step: steps.append(step))
    assert stream.getvalue() == "" and steps[-1]["phase"] == "done"


def test_anything_else_is_refused():
    wrong: Any = "yes"
    with pytest.raises(TypeError, match="progress='yes' must be True, False or a fun"):
        tracea.tune(PROBLEM, progress=wrong)


# --- what -----------------------------------------------------------------------------


def test_one_line_changes(monkeypatch):
    with bar(monkeypatch) as (stream, told):
        told(**SEARCH, done=0)
        told(**{**SEARCH, "phase": "race"}, done=1)
        told(phase="done", done=1, total=1, best_us=1.25, message="")
    assert stream.getvalue().count("\n") == 1
    lines = list(dict.fromkeys(stream.lines))
    empty, half = "0%|                    |", "25%|#####               |"
    assert lines[-3:] == [
        f"{empty} search 0/4, a config",
        f"{half} race 1/4, a config",
        "100%|####################| done, best 1.25 us",
    ]


def test_the_bar_tells_of_the_graph_and_of_the_time(monkeypatch):
    graph = {"problem": "matmul 8x8x8 float32 nn", "node": 3, "nodes": 4}
    how = {**SEARCH, "best_us": 2.0, "xla_us": 3.0, "share": 0.75, "left_s": 3725.4}
    with bar(monkeypatch) as (stream, told):
        told(**{**how, **graph}, done=2)
    text = (
        "3/4 matmul 8x8x8 float32 nn: search 2/4, best 2.00 us, 1:02:05 left, a config"
    )
    assert stream.lines[-1] == f"75%|###############     | {text}"


@pytest.mark.parametrize(
    ("problem", "text"),
    [("matmul", "XLA 2.62 us (1.31x)"), (WHOLE, "plain 2.62 us (1.31x)")],
)
def test_the_ratio_is_that_of_the_race(monkeypatch, problem, text):
    done = {"phase": "done", "done": 1, "total": 1, "best_us": 2.0, "message": ""}
    with bar(monkeypatch) as (stream, told):
        told(**done, problem=problem, xla_us=2.62, ratio=1.31)
    assert stream.lines[-1].endswith(f"| {problem}: done, best 2.00 us, {text}")


def test_times_that_follow_each_other_are_not_printed_at_once(monkeypatch):
    with bar(monkeypatch) as (stream, told):
        for done in range(1000):
            told(phase="race", done=done, total=1000, best_us=2.0, message="")
    assert len(stream.lines) < 100
    assert stream.lines[-1].endswith("race 999/1000, best 2.00 us")


def test_the_time_left_is_written_as_a_clock():
    assert [progress._clock(s) for s in (0.4, 65, 3605)] == ["0:00", "1:05", "1:00:05"]


@pytest.mark.parametrize("budget_s", [None, math.inf])
def test_without_an_end_the_time_left_is_estimated(budget_s):
    watch = Watch(budget_s=budget_s, is_raced=True, clock=itertools.count().__next__)
    assert watch.left_s is None  # nothing is done yet
    watch.whole()(phase="done")
    assert watch.left_s == 0

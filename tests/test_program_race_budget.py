"""When programs race around a search, by clocks that pass only as somebody works."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
from program_races import ARGUMENTS, LOSING, WINNING, Script, layers, sites

import tracea_jax as tracea
from tracea_jax import campaign
from tracea_jax.campaign import run
from tracea_jax.campaign.needs import about
from tracea_jax.campaign.watch import Watch

pytestmark = pytest.mark.once


@dataclasses.dataclass
class Day:
    """A tuning on a clock of its own: what it compiled, searched and said, in order.

    Attributes:
      plain_s, ours_s: that compiling plain, and any program with our ops, takes.
      changes: whether the search finds other configs.
      search: called while the search goes on.
    """

    monkeypatch: pytest.MonkeyPatch
    plain_s: float = 2.0
    ours_s: float = 3.0
    times: Any = dataclasses.field(default_factory=lambda: WINNING)
    changes: bool = False
    search: Any = lambda: None
    events: list[Any] = dataclasses.field(default_factory=list)
    searched_s: float | None = None
    took_s: float = 0.0

    def tune(self, **how: Any) -> Any:
        script = Script(self.times)
        with self.monkeypatch.context() as patch:
            script.install(patch)
            script.compiling = self.compiled

            def rows(own: run.Run, graph: Any, *rest: Any) -> Any:
                self.events.append("search")
                if own.has_budget:
                    searched_s = own.left_s - rest[-1]
                    script.clock.work(1e6 * searched_s)
                    self.searched_s = searched_s
                self.search()
                return {}

            def choices(*_: Any) -> Any:
                return "search" in self.events and self.changes

            patch.setattr(run.Run, "_rows", rows)
            patch.setattr(run.Run, "_choices", choices)
            clock = functools.partial(Watch, clock=lambda: 1e-9 * script.clock.ns)
            patch.setattr(campaign, "Watch", clock)
            report = tracea.tune(layers, *ARGUMENTS, **how)
        self.took_s = 1e-9 * script.clock.ns
        return report

    def compiled(self, script: Script, without: Any) -> None:
        self.events.append(without)
        script.clock.work(1e6 * (self.plain_s if without is None else self.ours_s))

    def said(self, caplog: Any) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


FEWER = [("matmul",), ("conv2d",)]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("budget_s", [None, 100.0])
def test_plain_is_compiled_first_and_the_program_races_before_the_search(
    monkeypatch, changes, budget_s
):
    day = Day(monkeypatch, changes=changes)
    whole = day.tune(budget_s=budget_s).whole
    last = [(), *FEWER] if changes else FEWER  # what raced is not compiled again
    assert day.events[:3] == [None, (), "search"]
    assert sorted(day.events[3:]) == sorted(last)
    assert whole.verdict is not None and whole.verdict.without == ()
    assert whole.note == "" and whole.reason == ""


@pytest.mark.parametrize(("plain_s", "factor"), [(0.5, 1.0), (4.0, 0.5), (30.0, 2.0)])
def test_a_budget_that_was_called_enough_is(monkeypatch, caplog, plain_s, factor):
    """The announced budget suffices for a race, a search and another race."""
    how: Any = {"plain_s": plain_s, "ours_s": factor * plain_s, "changes": True}
    whole = Day(monkeypatch, **how).tune(budget_s=1.5 * plain_s).whole
    (said,) = Day.said(Day(monkeypatch), caplog)
    assert f"layers: {whole.reason}; only single problems are tuned" == said
    needed = re.search(r"needs about (\d+) s, the budget is", whole.reason)
    assert needed is not None and whole.verdict is None
    caplog.clear()
    day = Day(monkeypatch, **how)
    enough_s = float(needed[1])
    report = day.tune(budget_s=enough_s)
    assert report.whole.verdict is not None
    if factor <= 1:  # our program compiles as fast as was estimated
        assert day.said(caplog) == [] and report.whole.note == ""
        assert day.searched_s is not None and day.searched_s > 0
        assert day.events.count(()) == 2
        assert day.took_s <= enough_s + 1.0


def test_a_budget_for_one_race_has_that_and_no_search(monkeypatch, caplog):
    day = Day(monkeypatch, plain_s=10.0, ours_s=10.0)
    report = day.tune(budget_s=25.0)
    assert day.events == [None, ()]  # no other configs: nothing can have got slower
    assert report.whole.verdict is not None
    more = "tuning it and racing again needs about 41 s, the budget is 25 s"
    assert day.said(caplog) == [f"layers: {more}; it races untuned"]
    assert report.whole.note == f"raced untuned: {more}"
    assert str(report).endswith(f"every site\n({report.whole.note})")
    assert {row.stop for row in report.rows} == {"budget"}
    assert day.took_s < 25.0


def test_the_warning_comes_before_anything_of_ours_is_compiled(monkeypatch):
    steps: list[tuple[int, str]] = []
    day = Day(monkeypatch, plain_s=10.0)
    day.tune(
        budget_s=15.0,
        progress=lambda **step: steps.append((len(day.events), step["message"])),
    )
    ((done, text),) = [s for s in steps if "needs about" in s[1]][:1]
    assert done == 1 and "the budget is 15 s" in text
    assert day.events == [None, "search"]


def test_the_search_leaves_the_time_that_the_last_race_needs(monkeypatch):
    day = Day(monkeypatch, plain_s=2.0, ours_s=4.0, changes=True, times=LOSING)
    report = day.tune(budget_s=100.0)
    assert day.searched_s is not None and 50 < day.searched_s < 100 - 2 - 4 - 4
    assert report.whole.verdict.without == ("conv2d",)
    assert {*day.events} == {None, (), "search", *FEWER}
    assert day.took_s <= 101.0


@pytest.mark.parametrize(("slower", "wins"), [(1.0, True), (2.0, False)])
def test_a_race_on_a_busy_machine_is_held_again(monkeypatch, slower, wins):
    """Before the search another program slows all down, and ours down the most."""
    busy = {None: 200.0, (): 300.0, **dict.fromkeys(FEWER, 400.0)}
    day = Day(monkeypatch, times=dict(busy))

    def search() -> None:
        day.times.update({r: us / 2 * slower for r, us in busy.items()})
        day.times[()] = 80.0 * slower if wins else 150.0 * slower

    day.search = search
    verdict = day.tune().whole.verdict
    assert verdict.leaves_all != wins
    assert day.events.count(()) == 1


@pytest.mark.parametrize("changes", [False, True])
def test_what_raced_is_kept_if_the_last_race_is_interrupted(monkeypatch, changes):
    day = Day(monkeypatch, changes=changes, times=LOSING)
    compiled = day.compiled

    def second(script: Script, without: Any) -> None:
        if "search" in day.events:
            raise KeyboardInterrupt
        compiled(script, without)

    day.compiled = second  # type: ignore[method-assign]
    whole = day.tune().whole
    assert whole.verdict.leaves_all and sites() == (0, 0)
    assert whole.note == "raced before the search, not after it: interrupted"


def test_ctrl_c_during_the_first_race_ends_the_tuning(monkeypatch):
    day = Day(monkeypatch)

    def compiled(script: Script, without: Any) -> None:
        day.events.append(without)
        if without == ():
            raise KeyboardInterrupt

    day.compiled = compiled  # type: ignore[method-assign]
    report = day.tune()
    assert day.events == [None, ()]
    assert report.whole.reason == "interrupted"
    assert {row.stop for row in report.rows} == {"interrupted"}


def test_a_failure_of_the_last_race_is_a_note(monkeypatch):
    day = Day(monkeypatch, changes=True)
    compiled = day.compiled

    def fails(script: Script, without: Any) -> None:
        if "search" in day.events:
            script.times_us = {}
        compiled(script, without)

    day.compiled = fails  # type: ignore[method-assign]
    whole = day.tune().whole
    assert whole.verdict is not None
    assert whole.note.startswith("raced before the search, not after it: ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (7.2, "8 s"), (41.1, "42 s"), (99.9, "100 s"), (123.0, "130 s")],
)
def test_seconds_are_rounded_up(seconds, text):
    assert about(seconds) == f"about {text}"

"""Each module that prints a ratio: the times that it is the quotient of are beside it.

Whole reports are read in test_report_times and test_bench_functions.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from program_races import ARGUMENTS as STEP_ARGUMENTS
from program_races import WINNING, raced, step
from report_ratios import checked, checked_text
from scripted_tunings import CPU, SMALL

import tracea_jax as tracea
from tracea_jax import demo
from tracea_jax.bench import plot as bench_plot
from tracea_jax.bench.report import SiteTime, WholeTime
from tracea_jax.bench.timed import Timed
from tracea_jax.campaign import plot as campaign_plot
from tracea_jax.campaign import text
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.rows import Row
from tracea_jax.campaign.whole import Whole
from tracea_jax.cli import entries
from tracea_jax.page import times
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.verdicts import Verdict

pytestmark = pytest.mark.once

US = st.floats(1e-2, 1e8)
PACKAGE = pathlib.Path(tracea.__file__).parent
_PRINTS = re.compile(r"times\.ratio(?:_number)?\(|:\.\d[fg]\}x\"")


def best(ours_us: float, other_us: float) -> Best:
    return Best(
        variant="gemm_cpu",
        config={},
        time_us=ours_us,
        xla_us=other_us,
        goal="throughput",
    )


def entry(ours_us: float, other_us: float) -> Entry:
    return Entry(
        problem=SMALL.to_json(),
        environment=environment(CPU),
        best=best(ours_us, other_us),
        tuner={"untuned": {"time_us": other_us}},
    )


def timed(ours_us: float, other_us: float) -> Timed:
    ratio = other_us / ours_us
    low, high = sorted((0.9 * ratio, 1.1 * ratio))
    return Timed(
        plain_us=other_us, ours_us=ours_us, low=low, high=high, noise=1.0, rounds=9
    )


def verdict(ours_us: float, other_us: float) -> Verdict:
    return Verdict(
        ops=("conv2d", "matmul"),
        without=("conv2d",),
        ratio=other_us / ours_us,
        time_us=ours_us,
        plain_us=other_us,
        environment=environment(CPU),
    )


def site(ours_us: float, other_us: float) -> SiteTime:
    return SiteTime(
        where="model.py:3",
        op="matmul",
        problem=SMALL,
        count=2,
        variant="gemm_cpu",
        plan=None,
        timed=timed(ours_us, other_us),
        by="wall clock",
        reason="",
    )


def whole(ours_us: float, other_us: float) -> Whole:
    found = verdict(ours_us, other_us)
    return Whole(verdict=found, every=other_us / ours_us, every_us=ours_us)


def tuned(ours_us: float, other_us: float) -> Row:
    found = entry(ours_us, other_us)
    return Row(problem=SMALL, count=3, entry=found, legal=7, tried=2, stop="")


def report(*us: float) -> TuneReport:
    return TuneReport(
        device=CPU,
        goal="throughput",
        effort="quick",
        seed=0,
        rows=(tuned(*us),),
        parts=(),
        seconds=1.0,
        whole=None,
    )


def shown_by_demo(ours_us: float, other_us: float) -> demo.Row:
    return demo.Row(
        what="model",
        sizes="-",
        sites="2 matmul",
        ours_us=ours_us,
        plain_us=other_us,
        ratio=1.0,  # a median of rounds
        error=0.0,
        plain_error=0.0,
        unit=1e-7,
    )


# module -> what it prints of our time and another one.
PRINTED: dict[str, Callable[[float, float], Any]] = {
    "bench/plot.py": lambda *us: bench_plot.Bar("site", timed(*us), "a site").text,
    "bench/report.py": site,
    "bench/timed.py": lambda *us: WholeTime(timed=timed(*us)),
    "campaign/plot.py": lambda *us: campaign_plot._winner(tuned(*us)),
    "campaign/report.py": report,
    "campaign/text.py": lambda a, b: (
        f"{times.microseconds(a)}, {text.compared(a, 'XLA', b)}"
    ),
    "campaign/whole.py": whole,
    "cli/entries.py": lambda *us: entries.compared(best(*us)),
    "demo/__init__.py": lambda *us: demo.Outcome(
        device=CPU, rows=(shown_by_demo(*us),)
    ),
    "tuning/store/records.py": best,
    "verdicts.py": verdict,
}


def test_these_modules_print_ratios():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for folder in (PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_dir()))
        for path in (folder.glob("*.py") if folder == PACKAGE else folder.rglob("*.py"))
        if _PRINTS.search(path.read_text())
    }
    assert found == set(PRINTED)


@pytest.mark.parametrize("module", PRINTED)
@hypothesis.given(US, US)
@hypothesis.settings(max_examples=30)
def test_a_ratio_is_the_quotient_of_times_in_its_line(module, ours_us, other_us):
    printed = str(PRINTED[module](ours_us, other_us))
    assert checked_text(printed) >= ("no difference" not in printed), printed


def test_explain_of_a_raced_program(monkeypatch):
    raced(monkeypatch, WINNING, step)
    explanation = tracea.explain(step)(*STEP_ARGUMENTS)
    assert checked(explanation) >= 1, str(explanation)

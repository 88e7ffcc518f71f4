"""Drawings of a report: their content, and that they are written."""

from __future__ import annotations

import pytest

import tracea_jax as tracea
from tracea_jax.campaign import plot, report
from tracea_jax.campaign.rows import Row, Times, Trial
from tracea_jax.device import local_cpu


def trial(us, variant="gemm_cpu", failure=None, **config):
    return Trial(
        variant=variant,
        config=config,
        time_us=us,
        cold_us=None,
        failure=failure,
        elapsed_s=0.0,
    )


TRIALS = (
    trial(90.0, variant="xla"),
    trial(80.0, kc=256, nc=64, tasks=1),
    trial(40.0, kc=256, nc=512, tasks=1),
    trial(None, kc=384, nc=512, tasks=2, failure="compile_error"),
    trial(75.0, kc=384, nc=64, tasks=1),
    trial(30.0, kc=384, nc=512, tasks=1),
    trial(36.0, kc=512, nc=512, tasks=1),
    trial(31.0, kc=384, nc=512, tasks=1),  # the race
)


def drawn(problem=None, trials=TRIALS, count=1):
    row = Row(
        problem=problem or tracea.GemmProblem(m=8, n=8, k=8),
        count=count,
        entry=None,
        steady=Times(before=80.0, after=31.0, xla=90.0),
        evals=6,
        compiles=6,
        seconds=1.0,
        stop="complete",
        trials=trials,
    )
    return row


def reported(*rows):
    return report.TuneReport(
        device=local_cpu(), goal="latency", effort="quick", seed=0, rows=rows
    )


def test_the_drawing_shows_the_search_without_the_race():
    searched = plot.searched(drawn())
    assert len(searched) == 7
    line = plot.best_so_far(searched)
    assert line == [90.0, 80.0, 40.0, 40.0, 40.0, 30.0, 30.0]
    assert str(plot.best_so_far([trial(None, failure="nan")])) == "[nan]"


def test_the_map_is_over_the_fields_that_matter_most():
    scores = plot.importance(plot.searched(drawn()))
    assert list(scores) == ["kc", "nc"]  # the number of tasks never changed
    assert 0.9 < scores["nc"] <= 1 and 0 <= scores["kc"] < 0.3
    found = plot.heat_map(plot.searched(drawn()))
    assert found is not None and (found.x, found.y) == ("nc", "kc")
    assert (found.columns, found.rows) == ((64, 512), (256, 384, 512))
    assert str(found.times_us) == "((80.0, 40.0), (75.0, 30.0), (nan, 36.0))"
    assert plot.heat_map(TRIALS[:2]) is None


def test_the_largest_problems_are_drawn_first():
    small = tracea.GemmProblem(m=1, n=1, k=1)
    rows = (drawn(), drawn(small, count=5), drawn(trials=()))
    assert [r.count for r in plot.ranked(reported(*rows))] == [5, 1]


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_drawing_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"drawing.{suffix}"
    plot.save(reported(drawn(), drawn(trials=TRIALS[:2])), path)
    start = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.save(reported(), path)

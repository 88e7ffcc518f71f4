"""Drawings of a report: their content, and that they are written."""

from __future__ import annotations

import dataclasses
import os
import re
import sys

import pytest

import tracea_jax as tracea
from tracea_jax import knowledge
from tracea_jax.campaign import plot, report
from tracea_jax.campaign.rows import Row, Trial
from tracea_jax.device import local_cpu
from tracea_jax.outputs import check_drawing
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry

pytestmark = pytest.mark.once

CPU = local_cpu()


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


def drawn(problem=None, trials=TRIALS, count=1, entry=None):
    row = Row(
        problem=problem or tracea.GemmProblem(m=8, n=8, k=8),
        count=count,
        entry=entry or answered(),
        evals=6,
        compiles=6,
        seconds=1.0,
        stop="complete",
        trials=trials,
    )
    return row


def reported(*rows):
    return report.TuneReport(
        device=CPU, goal="latency", effort="quick", seed=0, rows=rows
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
    assert found.variant == "gemm_cpu"
    assert (found.columns, found.rows) == ((64, 512), (256, 384, 512))
    assert str(found.times_us) == "((80.0, 40.0), (75.0, 30.0), (nan, 36.0))"
    assert plot.heat_map(TRIALS[:2]) is None


def test_the_largest_problems_are_drawn_first():
    small = tracea.GemmProblem(m=1, n=1, k=1)
    rows = (drawn(), drawn(small, count=5), drawn(trials=()))
    assert [r.count for r in plot.ranked(reported(*rows))] == [5, 1]


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_drawing_is_written(tmp_path, suffix):
    path = tmp_path / f"drawing.{suffix}"
    plot.save(reported(drawn(), drawn(trials=TRIALS[:2])), path)
    start = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.save(reported(), path)


# --- what a drawing says --------------------------------------------------------------


def answered(variant="gemm_cpu", xla_us=90.0, **config):
    best = Best(variant=variant, config=config, time_us=31.0, xla_us=xla_us)
    return Entry(
        problem=tracea.GemmProblem(m=8, n=8, k=8).to_json(),
        environment=environment(CPU),
        best=best,
        tuner={"untuned": {"time_us": 80.0}},
    )


def untimed():
    best = Best(variant="gemm_cpu", config={})
    return dataclasses.replace(answered(), best=best, tuner={})


def texts(axes):
    """Title, labels of both axes, and the legend."""
    found = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
    legend = axes.get_legend()
    return found + [[t.get_text() for t in legend.get_texts()] if legend else []]


def ticks(figure, axis):
    """Labels of the ticks inside the axis, large and small."""
    figure.canvas.draw()
    low, high = axis.get_view_interval()
    drawn = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    shown = [t.label1.get_text() for t in drawn if low <= t.get_loc() <= high]
    return [text for text in shown if text]


def agg(rows):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = plot.figure(rows, CPU)
    FigureCanvasAgg(figure)
    return figure


def test_the_titles_name_problem_device_winner_and_what_is_drawn():
    won = answered(kc=384, nc=512, tasks=1)
    figure = agg([dataclasses.replace(drawn(), entry=won)])
    assert figure.get_suptitle() == f"tuned on {CPU}"
    left, right, colors = figure.axes
    title, *labels, legend = texts(left)
    assert title.splitlines() == [
        "matmul 8x8x8 float32 nn",
        "winner: gemm_cpu [kc 384 nc 512 tasks 1], 31.0 µs, XLA 90.0 µs (2.90x)",
    ]
    assert labels == ["configs measured", "time of executions in a row (µs)"]
    assert legend == [
        "gemm_cpu",
        "best so far",
        "XLA in the race",
        "untuned in the race",
    ]
    title, *labels, _ = texts(right)
    assert title == "gemm_cpu: lowest time by nc and kc" and labels == ["nc", "kc"]
    assert ticks(figure, right.xaxis) == ["64", "512"]
    assert colors.get_ylabel() == "lowest time (µs)"


def test_the_map_names_its_variant_where_another_one_won():
    figure = agg([dataclasses.replace(drawn(), entry=answered("xla"))])
    left, right, _ = figure.axes
    assert left.get_title().endswith("winner: xla, 31.0 µs")  # by itself: no ratio
    assert right.get_title().startswith("gemm_cpu: ")


def test_a_long_title_is_broken():
    config = {f"field_{i}": i for i in range(12)}
    figure = agg([dataclasses.replace(drawn(), entry=answered("another", **config))])
    lines = figure.axes[0].get_title().splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 75


@pytest.mark.parametrize(
    "times_us",
    [(10.0, 12.0), (31.0, 31.4), (9.0, 95.0), (0.8, 7000.0), (1e5, 3e5)],
)
def test_ticks_are_plain_numbers(times_us):
    trials = [trial(us, kc=i) for i, us in enumerate(times_us)]
    row = drawn(trials=trials, entry=untimed())
    figure = agg([row])
    shown = ticks(figure, figure.axes[0].yaxis)
    assert 2 <= len(shown) <= 16, shown
    assert all(re.fullmatch(r"[\d.]+", text) for text in shown), shown
    assert len(set(shown)) == len(shown)
    assert all(re.fullmatch(r"[\d.]+", t) for t in ticks(figure, figure.axes[2].yaxis))


# --- where it is written --------------------------------------------------------------


def test_tune_draws(tmp_path):
    problem = tracea.GemmProblem(m=16, n=24, k=8)
    path = tmp_path / "search.svg"
    tracea.tune(problem, effort="none", budget_s=0.2, plot=path)
    assert "matplotlib" in path.read_text()


def refused(monkeypatch, path, error, match):
    """``tune`` fails before it measures anything, and leaves no file."""
    monkeypatch.setattr(knowledge, "open_lab", None)
    problem = tracea.GemmProblem(m=16, n=24, k=8)
    before = sorted(path.parent.glob("*"))
    with pytest.raises(error, match=match):
        tracea.tune(problem, plot=path)
    assert sorted(path.parent.glob("*")) == before


def test_a_drawing_that_cannot_be_written_fails_before_any_work(monkeypatch, tmp_path):
    (tmp_path / "directory.png").mkdir()
    (tmp_path / "file").touch()
    missing, why = tmp_path / "none" / "a.png", "no file can be written there"
    refused(monkeypatch, missing, FileNotFoundError, f"{why}.*none/a.png")
    refused(monkeypatch, tmp_path / "directory.png", IsADirectoryError, "directory.png")
    refused(monkeypatch, tmp_path / "file" / "a.png", NotADirectoryError, why)
    refused(monkeypatch, tmp_path / "a.txt", ValueError, "must end in one of .pdf")
    refused(monkeypatch, tmp_path / f"{'long' * 99}.png", OSError, "too long")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(monkeypatch, tmp_path / "a.png", ValueError, "needs matplotlib")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_others_is_refused(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    refused(monkeypatch, tmp_path / "a.png", PermissionError, "no file can be written")


def test_a_check_leaves_the_old_drawing(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    check_drawing(path)
    assert path.read_bytes() == b"old"


def test_what_cannot_be_drawn_at_the_end_warns(tmp_path):
    with pytest.warns(UserWarning, match="was not drawn: nothing was measured"):
        report = tracea.tune(tracea.Graph(), plot=tmp_path / "a.png")
    assert report.rows == ()

"""Pictures of what tracea.bench measured."""

from __future__ import annotations

import numpy as np
import pytest

import tracea_jax as tracea
from tracea_jax.bench import plot
from tracea_jax.bench.report import BenchReport, SiteTime, WholeTime
from tracea_jax.bench.timed import Timed
from tracea_jax.device import local_cpu

pytestmark = pytest.mark.once


def timed(ratio, spread=0.1, plain=100.0):
    return Timed(
        plain_us=plain,
        ours_us=plain / ratio,
        low=ratio - spread,
        high=ratio + spread,
        noise=1.05,
        rounds=9,
    )


def site(m, count: int | None = 1, **times):
    problem = tracea.GemmProblem(m=m, n=8, k=8)
    return SiteTime(
        where="layer",
        op="matmul",
        problem=problem,
        count=count,
        variant="gemm_cpu",
        plan=None,
        timed=timed(**times),
        by="wall clock",
        reason="",
    )


def reported(*sites, whole=None):
    return BenchReport(
        function="step",
        device=local_cpu(),
        versions={},
        whole=whole or WholeTime(timed=timed(1.25)),
        sites=sites,
    )


REPORT = reported(
    site(1, ratio=2.0),
    site(2, count=3, ratio=0.5),
    site(3, ratio=1.05),
    site(4, None, ratio=4),
)


def test_the_picture_has_a_bar_for_the_whole_and_for_each_site():
    (axes,) = plot.figure(REPORT).axes
    widths = sorted(
        bar.get_width() for group in axes.containers for bar in _bars(group)
    )
    assert widths == [0.5, 1.05, 1.25, 2.0, 4.0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "whole program",
        "3 x matmul 2x8x8 float32 nn",
        "1 x matmul 1x8x8 float32 nn",
        "1 x matmul 3x8x8 float32 nn",
        "? x matmul 4x8x8 float32 nn",
    ]
    by_place = {
        round(bar.get_y() + bar.get_height() / 2): bar.get_width()
        for group in axes.containers
        for bar in _bars(group)
    }
    assert [by_place[i] for i in range(5)] == [1.25, 0.5, 2.0, 1.05, 4.0]
    assert axes.get_title() == f"step: plain against transformed\n{local_cpu()}"
    assert "plain time / transformed time" in axes.get_xlabel()
    texts = [text.get_text() for text in axes.texts]
    assert texts[:2] == ["100 µs → 80 µs: 1.25x", "100 µs → 200 µs: 0.50x"]
    assert texts[3] == "100 µs → 95.2 µs: no difference measured"
    kinds = [text.get_text() for text in axes.get_legend().get_texts()]
    assert kinds == ["whole program", "slower", "faster", "no difference measured"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the whole program is on top


def _bars(group):
    return [patch for patch in getattr(group, "patches", ()) if patch.get_width()]


def test_the_picture_is_readable(tmp_path):
    """Every text lies inside of the picture, and none on another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    figure = plot.figure(REPORT)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (axes,) = figure.axes
    texts = [*axes.texts, *axes.get_yticklabels(), axes.title, axes.xaxis.label]
    boxes = [text.get_window_extent(renderer) for text in texts]
    edge = figure.bbox
    for box in boxes:
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1
        assert edge.y0 <= box.y0 and box.y1 <= edge.y1
    overlaps = [
        (texts[i].get_text(), texts[j].get_text())
        for i in range(len(boxes))
        for j in range(i)
        if boxes[i].overlaps(boxes[j])
    ]
    assert not overlaps
    path = tmp_path / "bench.png"
    plot.save(REPORT, path)
    pixels = imread(path)
    assert pixels.shape[1] == 1200 and pixels.shape[0] == round(120 * (1.8 + 5 * 0.5))
    for colour in ("C0", "C2", "C3", "0.6"):  # of the four kinds of bars
        near = np.abs(pixels[..., :3] - to_rgb(colour)).max(axis=-1) < 0.01
        assert near.sum() > 1000, colour


def test_few_of_many_sites_are_drawn():
    sites = [site(m, ratio=1.5, plain=float(m)) for m in range(1, 31)]
    (axes,) = plot.figure(reported(*sites)).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:2] == ["whole program", "1 x matmul 30x8x8 float32 nn"]
    assert len(labels) == 1 + plot.MOST_BARS
    assert "10 smaller sites are not drawn" in axes.get_title()


def test_nothing_cannot_be_drawn():
    nothing = reported(whole=WholeTime(reason="it has effects"))
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.figure(nothing)

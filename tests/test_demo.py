"""The demo: its tuning, its checks and its output."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from tracea_jax import cli, demo
from tracea_jax.campaign import graph_of
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.demo.residual_block import ResidualBlock
from tracea_jax.device import local_cpu
from tracea_jax.explain import explain
from tracea_jax.transform import transform
from tracea_jax.tuning import measure

pytestmark = pytest.mark.once

TINY = demo.Sizes(
    language_model=LanguageModel(
        batch=1,
        tokens=8,
        layers=1,
        vocabulary=32,
        width=16,
        hidden=32,
        heads=4,
        kv_heads=2,
        dtype="float32",
    ),
    residual_block=ResidualBlock(
        batch=1, size=5, channels=8, narrow=4, dtype="float32"
    ),
)


@pytest.fixture
def tuned(monkeypatch):
    """The tiny demo; the graphs that it would tune, with their time."""
    graphs = []

    def noted(fn, *args, budget_s, **how):
        graphs.append((graph_of(fn, args), budget_s))

    monkeypatch.setattr(demo, "tune", noted)
    monkeypatch.setitem(demo.SIZES, "cpu", TINY)
    timing = functools.partial(measure.Timing, slice_s=1e-3, race_s=0.05)
    monkeypatch.setattr(demo.measure, "Timing", timing)
    return graphs


def test_demo(capsys, tuned):
    assert cli.main(["demo", "--budget-s", "7"]) == 0
    out = capsys.readouterr().out
    assert out.count("(correct)") == 2 and "WRONG" not in out
    assert "1 layers, 1 x 8 tokens, width 16, 4/2 heads" in out
    assert "1 x 5 x 5 x 8" in out and "3 conv2d" in out
    # on CPUs a gradient of attention is that of the code itself
    (model, budget_s), (block, same) = tuned
    assert {n.problem.op for n in model} == {"matmul", "gated_matmul"}
    assert {n.problem.op for n in block} == {"conv2d"}
    assert budget_s == same == 7


@pytest.mark.parametrize(
    ("model", "function", "sites", "reasons"),
    [
        (
            TINY.language_model,
            TINY.language_model.loss,
            {"matmul": 6, "attention": 1, "gated_matmul": 1},
            ["8 x 32 logits fit in 256 MiB, too few for chunks to help"],
        ),
        (TINY.residual_block, TINY.residual_block.forward, {"conv2d": 3}, []),
    ],
)
def test_the_models_are_recognised_whole(model, function, sites, reasons):
    explanation = explain(transform(function))(*model.inputs())
    ops = [site.op for site in explanation.sites]
    assert {op: ops.count(op) for op in ops} == sites
    misses = explain(function)(*model.inputs()).misses
    assert [miss.reason for miss in misses] == reasons


def test_a_demo_that_computes_wrongly_fails(capsys, monkeypatch):
    def outcome(error):
        row = demo.Row(
            what="model",
            sizes="-",
            sites="-",
            ours_us=1.0,
            plain_us=1.0,
            ratio=1.0,
            error=error,
            plain_error=1e-6,
            unit=float(jnp.finfo("float32").eps) / 2,
        )
        return demo.Outcome(device=local_cpu(), rows=(row,))

    for error, status, word in ((3.5e-6, 0, "(correct)"), (1e-3, 1, "(WRONG)")):
        monkeypatch.setattr(demo, "demo", lambda *_, e=error, **__: outcome(e))
        assert cli.main(["demo"]) == status
        assert word in capsys.readouterr().out

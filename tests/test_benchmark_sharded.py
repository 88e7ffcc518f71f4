"""The benchmark of sharded steps: its bar, its splits, and small programs."""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import pytest

pytestmark = pytest.mark.once


@pytest.fixture
def sharded(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sharded.py"])
    return module("sharded")


def row(sharded, layout, plain_ms, ours_ms, **figures):
    side = {"kernels": {"k": 3}, "sent": 8, "moved": "-", "error": 0.01}
    return sharded.Row(
        program="p",
        layout=layout,
        is_gpu=True,
        plain=sharded.Side(**side, ms=plain_ms),
        ours=sharded.Side(**{**side, **figures}, ms=ours_ms),
    )


def test_the_bar_keeps_the_gain_and_the_communication_of_plain(sharded):
    one = row(sharded, "one device", 20.0, 10.0)
    assert one.misses(one) == []
    just, slow = (row(sharded, "DP", 12.0, ms) for ms in (7.2, 7.22))
    assert just.bar(one) == pytest.approx(1.03 * (5 + 2))
    assert just.misses(one) == [] and slow.misses(one) == ["time"]
    off_gpu = dataclasses.replace(slow, is_gpu=False)
    assert off_gpu.misses(one) == []


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"kernels": {}}, ["kernels"]),
        ({"sent": 9}, ["bytes"]),
        ({"sent": None}, ["bytes"]),
        ({"error": 0.015}, ["values"]),
        ({"error": float("nan")}, ["values"]),
        ({"error": 0.013, "sent": 7, "kernels": {"l": 1}}, []),
    ],
)
def test_what_a_row_misses(sharded, figures, missed):
    one = row(sharded, "one device", 20.0, 10.0)
    assert row(sharded, "DP", 12.0, 7.0, **figures).misses(one) == missed


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_split_divides_the_arrays(sharded, name, small):
    program = getattr(sharded, name)(small)
    arrays = jax.eval_shape(program.init, jax.random.key(0))
    for layout in sharded.LAYOUTS:
        shardings = layout.shardings(program)
        parts = jax.tree.map(lambda x, s: s.shard_shape(x.shape), arrays, shardings)
        of_state = zip(
            jax.tree.leaves(parts[0], is_leaf=lambda x: isinstance(x, tuple)),
            jax.tree.leaves(arrays[0]),
            strict=True,
        )
        split = sum(part != x.shape for part, x in of_state)
        assert bool(split) == (layout.splits is not None)


@pytest.mark.slow
def test_small_programs_miss_nothing(sharded, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["sharded.py", "--small", "--rounds", "1", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as stopped:
        sharded.main()
    out = capsys.readouterr().out
    assert stopped.value.code == 0, out
    (path,) = tmp_path.glob("*/sharded.json")
    rows = json.loads(path.read_text())["rows"]
    assert [r["layout"] for r in rows] == [x.name for x in sharded.LAYOUTS] * 2

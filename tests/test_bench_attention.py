"""The benchmarks of attention: suites, races, profiles, memory, tables."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_rows import WHERE

pytestmark = pytest.mark.once


def test_every_suite_of_attention_has_cases_with_bars(module):
    suite, tables = module("attention_suite"), module("attention_tables")
    cases = {name: suite.suite(name) for name in suite.SUITES}
    assert set(cases) == set(tables.SUITES)
    groups = [c.group for of in cases.values() for c in of]
    assert set(groups) == set(suite.BARS)
    for of in cases.values():
        assert len({(c.text, c.passes, c.group) for c in of}) == len(of)
        assert all(0 < c.seen <= 1 for c in of)
    used = {bar.figure for bars in suite.BARS.values() for bar in bars}
    assert used == set(tables.FIGURES)


def test_shares_of_scores_that_are_seen(module):
    sides = module("attention_sides")

    def seen(length=4096, **fields):
        return sides.seen(sides.problem_of(length, 64, **fields))

    assert seen() == 1
    assert seen(is_causal=True) == pytest.approx(4097 / 8192)
    at = np.arange(512)
    within = (at[:, None] >= at) & (at[:, None] - at <= 100)
    assert seen(512, is_causal=True, window=(100, 0)) == within.mean()
    assert (
        seen(512, window=(100, 30))
        == ((at[:, None] - at <= 100) & (at - at[:, None] <= 30)).mean()
    )


def small_attention(cases, passes, run, **sides):
    problem = cases.problem_of(64, 8, batch=1, heads=2)
    x = cases.operands(problem)
    made = {
        n: cases.Side(run=f, sets=(x, x)) for n, f in {"ours": run, **sides}.items()
    }
    return cases.Case(
        group="documents of 512",
        text="small",
        passes=passes,
        problem=problem,
        seen=0.5,
        sides=lambda: made,
        rivals=("ours",),
    )


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_race_of_attention(module, monkeypatch, passes):
    cases, bench = module("attention_sides"), module("bench_attention")

    def race(calls, rounds):
        for call in calls.values():
            assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(call()))
        return {name: [2.0, 4.0] for name in calls}

    monkeypatch.setattr(bench.common, "race", race)
    ours = cases.ours("xla", is_causal=True)
    peer = cases.peer("xla", is_causal=True)
    case = small_attention(cases, passes, ours, default=ours, cudnn=peer)
    row = bench.row_of(case, rounds=2)
    assert "error" not in row
    assert row["ratio_default"] == 1 and row["default_is"] == "ours"  # it raced once
    assert (row["own_us"], row["cudnn"]) == (3, 1) and row["tflops"] > 0
    assert bench.render([row]).count("small") == 1


def test_attention_that_no_kernel_takes_is_a_row(module):
    cases, bench = module("attention_sides"), module("bench_attention")
    ours = cases.ours("attention_sm90")
    row = bench.row_of(small_attention(cases, "forward", ours), rounds=1)
    assert row["error"].startswith("Unsupported")
    assert "Unsupported" in bench.render([row])


def test_tables_of_attention(module, tmp_path):
    suite, bench = module("attention_suite"), module("bench_attention")
    fine = {
        "group": "documents of 512",
        "text": "1x8x8",
        "passes": "both",
        "own_us": 10.0,
        "tflops": 123.4,
        "cudnn": 17.5,
        "separate": 0.75,
        "ratio_default": 0.98,
        "default_is": "ours",
    }
    failed = {"group": "window", "text": "2x8x8", "passes": "both", "error": "X: y"}
    rows = [fine, failed]
    groups = module("matmul_suite").summary(rows, suite.BARS, bench.FIGURES)
    device = tmp_path / "some_gpu"
    device.mkdir()
    result = {"environment": WHERE, "rows": rows, "groups": groups}
    (device / "attention_masks.json").write_text(json.dumps(result))
    memory = {"side": "ours", "passes": "both", "length": 9, "argument_bytes": 2e6}
    result = {"environment": WHERE, "rows": [memory]}
    (device / "attention_memory.json").write_text(json.dumps(result))
    tables = module("attention_tables")
    assert (
        "| 1x8x8 | both | 10.0 | 123 | 17.50 | - | documents as a batch 0.75 | 0.98 | "
        "ours |" in tables.rows(tmp_path)
    )
    assert "| 2x8x8 | both | failed |" in tables.rows(tmp_path)
    bars = tables.bars(tmp_path)
    assert (
        "| documents of 512 | cuDNN / ours, lowest | >= 16.00 | 17.500 | yes |" in bars
    )
    assert "| window | cuDNN / ours, lowest | >= 1.20 | - | no |" in bars
    assert "| ours, both | 9 | 2.0 | - | - | - | - |" in tables.memory(tmp_path)
    (tmp_path / "none").mkdir()
    assert tables.rows(tmp_path / "none") == tables.bars(tmp_path / "none") == "\n"


PROFILE = """
==PROF== Connected
  attention_rows_bf16_d64 (4, 1, 1)x(128, 1, 1), Context 1
    SM: Pipe Tensor Cycles Active                       %        76.67
    DRAM Throughput                   %        30.13
    Registers Per Thread             register/thread             1,168
    Stall Wait                      inst         2.15
    Selected                        inst         1.00
    Stall Long Scoreboard           inst         2.84
  attention_rows_bf16_d64 (4, 1, 1)x(128, 1, 1), Context 1
    DRAM Throughput                   %        99.13
  attention_sm90_x (4, 1, 1)x(128, 1, 1), Context 1
    DRAM Throughput                   %        50.00
"""


def test_profiles_are_read_and_shown(module, tmp_path):
    profile = module("profile_attention")
    rows = profile.rows_of(PROFILE)
    assert [r["kernel"] for r in rows] == [
        "attention_rows_bf16_d64",
        "attention_sm90_x",
    ]
    first = rows[0]
    assert (first["tensor"], first["dram"], first["registers"]) == (76.67, 30.13, 1168)
    assert list(first["stalls"].items()) == [("Long Scoreboard", 2.84), ("Wait", 2.15)]
    assert "Long Scoreboard 2.8" in profile.render(rows)
    assert len({(c.group, c.text) for c in profile.cases()}) == 7
    (tmp_path / "gpu").mkdir()
    result = json.dumps({"environment": WHERE, "rows": rows})
    (tmp_path / "gpu" / "attention_profile.json").write_text(result)
    line = "| attention_rows_bf16_d64 | 77 | - | - | - | - | - | 30 | - | 1168 |"
    assert line in module("attention_tables").profile(tmp_path)


def test_memory_of_attention_that_is_planned_only(module, monkeypatch):
    memory, sides = module("attention_memory"), module("attention_sides")
    monkeypatch.setattr(memory, "LENGTHS", (32,))
    monkeypatch.setattr(memory, "XLA_PLANNED", 32)
    monkeypatch.setattr(sides, "OURS", "xla")
    rows = memory.rows()
    own = [row["planned_bytes"] for row in rows if row["side"] == "ours"]
    assert own == sorted(own) and all(own)
    assert len(rows) == 4 and all("run" not in r for r in rows)
    assert memory.render(rows).count("xla, both") == 1

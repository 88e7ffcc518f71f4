"""The judge of models: what it measures, and the ratios that it prints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib

import pytest

from tracea_jax import policy
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.survey import ahead, rows
from tracea_jax.survey.candidates import PEERS
from tracea_jax.survey.measure import row_of
from tracea_jax.survey.problems import Numbered
from tracea_jax.tuning.measure import Race

pytestmark = pytest.mark.once

SURVEY = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "survey"
DEVICE = dataclasses.replace(local_cpu(), isa="amx")


@pytest.fixture
def judge(monkeypatch, module):
    monkeypatch.syspath_prepend(SURVEY)
    return module("judge")


@pytest.fixture
def last_hero_wins(monkeypatch):
    """A model that takes the default of the first candidate wherever it is asked."""

    def decide(diagnosis, model=None):
        found = policy.unmodelled(diagnosis)
        return dataclasses.replace(found, choice=found.heroes[0])

    monkeypatch.setattr(policy, "decide", decide)


def test_problems_of_all_seeds_have_their_turns(judge):
    drawn = list(itertools.islice(judge.fresh(("matmul",), (5, 7), "cpu"), 6))
    assert [(n.seed, n.index) for n in drawn] == [
        *((5, 0), (7, 0), (5, 1), (7, 1), (5, 2), (7, 2)),
    ]
    ops = {
        n.problem.op for n in itertools.islice(judge.fresh(judge.OPS, (5,), "cpu"), 10)
    }
    assert ops == {*judge.OPS}


@pytest.mark.parametrize("device", [DEVICE, NAMED["H200"]], ids=str)
def test_peers_and_the_choices_of_both_rules_are_measured(
    judge, tmp_path, device, last_hero_wins, monkeypatch
):
    monkeypatch.setattr("tracea_jax.runtime.nvrtc.key", lambda k: repr(k.source))
    numbered = list(itertools.islice(judge.fresh(judge.OPS, (9,), device.platform), 8))
    judge.plan(judge.Judge(device=device), numbered, tmp_path, "a model")
    planned = list(ahead.read(tmp_path, device.platform))
    judged = json.loads((tmp_path / judge.JUDGED).read_text())
    chosen = judged["chosen"]
    assert len(chosen) == len(numbered) == len(planned) + len(judged["same"])
    assert [p.numbered for p in planned] == [
        n for n in numbered if str(n.problem) not in {of[1] for of in judged["same"]}
    ]
    for p in planned:
        with compiled_elsewhere():
            diagnosis = diagnose(p.numbered.problem, device)
            unmodelled = policy.unmodelled(diagnosis)
        assert unmodelled.choice in p.choices and unmodelled.heroes[0] in p.choices
        peers = {c.variant for c in p.choices if c.variant in PEERS}
        assert peers == {*PEERS} & {*diagnosis.candidates}
        rules = chosen[f"{p.numbered.problem.op} 9 {p.numbered.index}"]
        assert rules["model"]["variant"] == diagnosis.candidates[0]
        assert rules["today"]["variant"] == unmodelled.choice.variant


def test_a_problem_that_both_rules_leave_to_the_only_peer_counts_with_1(
    judge, tmp_path, monkeypatch
):
    def xla(diagnosis, model=None):
        found = policy.unmodelled(diagnosis)
        own = next(h for h in found.heroes if h.variant == "xla")
        return dataclasses.replace(found, choice=own)

    monkeypatch.setattr(policy, "decide", xla)
    numbered = [Numbered.of("matmul", 9, "cpu", i) for i in range(12)]
    judge.plan(judge.Judge(device=DEVICE), numbered, tmp_path, "a model")
    raced = len(list(ahead.read(tmp_path, "cpu")))
    found, lacking = judge.ratios(tmp_path)
    assert lacking == 0 and 0 < raced < len(numbered)
    ratios = found["matmul"]
    assert [len(ratios[rule]) for rule in judge.RULES] == [len(numbered) - raced] * 2
    assert {(r.variant, r.log) for of in ratios.values() for r in of} == {("xla", 0.0)}


def test_ratios_are_those_of_the_best_peer(judge, tmp_path, last_hero_wins):
    """XLA takes 2 us, ours 1, 4 or, within the error, 2.1."""
    numbered = [Numbered.of("matmul", 9, "cpu", i) for i in range(4)]
    judge.plan(judge.Judge(device=DEVICE), numbered, tmp_path, "a model")
    planned = list(ahead.read(tmp_path, "cpu"))
    file = rows.path(tmp_path / "rows", DEVICE, "matmul")
    for p, ours_us in zip(planned, (1.0, 4.0, 2.1, None), strict=True):
        assert {c.variant for c in p.choices} == {"xla", "gemm_cpu"}
        us = {c: 2.0 if c.variant == "xla" else ours_us for c in p.choices}
        times = {c: (each,) * 5 for c, each in us.items() if each is not None}
        race = Race(times_us=times, repeats=dict.fromkeys(times, 1), failures={})
        failed = {c: "launch_error" for c in p.choices if c not in times}
        row = row_of(p.numbered, race, failed, DEVICE)
        noisy = (dataclasses.replace(t, spread=0.05) for t in row.times)
        rows.write(file, [dataclasses.replace(row, times=tuple(noisy))])
    found, lacking = judge.ratios(tmp_path)
    assert lacking == 1 and list(found) == ["matmul"]
    (group,) = found.values()
    logs = [r.log for r in group["model"]]
    assert logs == pytest.approx([math.log(2 / us) for us in (1.0, 4.0, 2.1)])
    for ratio in (*group["today"], *group["model"]):
        assert ratio.error == (
            0.0 if ratio.variant == "xla" else math.hypot(0.05, 0.05)
        )
    table = judge.report(tmp_path)
    (line,) = [line.split() for line in table if " model " in f"{line} "[:39]]
    assert line[2:] == ["3", "100%", "0.984", "33.3%", "33.3%", "0.50"]
    assert sum(line.startswith("matmul: 0.500 ") for line in table) == 1
    assert not any(line.startswith("matmul: 0.952") for line in table)


def test_only_what_was_planned_is_measured(judge, tmp_path):
    device = local_cpu()
    numbered = [Numbered.of("matmul", 9, "cpu", i) for i in (3, 1)]
    judge.plan(judge.Judge(device=device), numbered, tmp_path, None)
    for minutes, left in ((0.0, 0), (5.0, 2), (5.0, 0)):
        assert judge.run(tmp_path, device, minutes).counts["matmul"] == left
    measured = rows.read(rows.path(tmp_path / "rows", device, "matmul"))
    assert [row.index for row in measured] == [3, 1]
    planned = ahead.read(tmp_path, "cpu")
    for row, p in zip(measured, planned, strict=True):
        assert [t.choice.variant for t in row.times] == [c.variant for c in p.choices]
    found, lacking = judge.ratios(tmp_path)
    assert lacking == 0 and len(found["matmul"]["model"]) == 2

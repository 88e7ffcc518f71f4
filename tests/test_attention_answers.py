"""Which configs of attention race for the answers that ship, and who wins."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import pytest
from synthetic_bench import choice

from tracea_jax import knowledge
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.problem import AttentionProblem, problem_from_json
from tracea_jax.tuning.store.entries import Store

pytestmark = pytest.mark.once


def test_few_configs_of_attention_race_all_of_them_legal(module):
    answers, device = module("attention_answers"), NAMED["H200"]
    problems = module("model_attention").order()
    for problem in problems[::5]:
        found = answers.candidates(problem, device)
        assert 1 <= len(found) <= 12 and len(set(found)) == len(found)
        assert found[0] == answers.default(problem, device)
        assert any(choice.variant.endswith("_sm90") for choice in found)
    backward = next(p for p in problems if p.direction == "backward")
    own = [c for c in answers.candidates(backward, device) if "sm90" in c.variant]
    # The same bits from run to run.
    assert {c.config.dq for c in own} <= {"recomputed", "beside", "ordered"}


def test_the_default_of_attention_is_replaced_by_what_is_clearly_faster(module):
    winner = module("attention_answers").winner
    usual, ours, xla = (
        dataclasses.replace(choice(8), variant=name)
        for name in ("cudnn", "attention_sm90", "xla")
    )
    slow = {xla: [30.0] * 5}
    assert winner({usual: [10.0] * 5, ours: [9.95] * 5, **slow}, usual) == usual
    assert winner({usual: [10.0] * 5, ours: [9.8] * 5, **slow}, usual) == ours
    noisy = [9.0, 9.0, 9.0, 9.0, 10.1]
    assert winner({usual: [10.0] * 5, ours: noisy, **slow}, usual) == usual
    assert winner({ours: [9.9] * 5, **slow}, usual) == ours  # it did not run


def test_a_race_of_attention_becomes_an_entry(module, monkeypatch):
    answers, groups = module("attention_answers"), module("attention_groups")
    small = AttentionProblem(
        batch=2,
        q_len=40,
        kv_len=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        dtype="float32",
        scale=0.25,
    )
    monkeypatch.setattr(answers, "ROUNDS", 1)
    problems = [small, dataclasses.replace(small, is_causal=True)]
    found = list(groups.entries(problems, local_cpu(), 60.0))
    assert [problem for problem, _ in found] == problems
    for problem, made in found:
        assert made.problem == problem.to_json()
        assert made.best.variant in {o.variant for o in made.observations}
        assert made.best.time_us > 0 and made.best.ratio >= 1
    monkeypatch.setattr(groups, "TOGETHER", 1)
    monkeypatch.setattr(module("attention_ahead"), "CHUNK", 1)
    monkeypatch.setattr(groups, "verified", lambda found, *how: {})
    assert len(list(groups.entries(problems, local_cpu(), 0.0))) == 1  # time is over


class Brittle:
    """A racer that is lost by one problem, in races or in verifying them."""

    def __init__(self, breaks: AttentionProblem, method: str) -> None:
        self._breaks, self._method = breaks, method
        self.asked: list[int] = []

    def _lose(self, problems, method):
        if method == self._method:
            self.asked.append(len(problems))
            if self._breaks in problems:
                raise RuntimeError("lost")

    def race(self, group, following):
        self._lose(group, "race")
        return [(p, raced(p)) for p in group]

    def verify(self, found):
        self._lose([r.problem for r in found], "verify")
        return {}


def raced(problem: AttentionProblem):
    answers = sys.modules["attention_answers"]
    usual = answers.default(problem, NAMED["H200"])
    times = {usual: [10.0] * 5}
    return answers.Raced(
        problem=problem, best=usual, usual=usual, times=times, apart=0.0
    )


@pytest.mark.parametrize(
    ("method", "asked"),
    [("race", [4, 4, 2, 1, 1, 1, 1]), ("verify", [10, 5, 2, 3, 1, 2, 5])],
)
def test_a_problem_that_ends_the_process_costs_no_other_its_answer(
    method, asked, module, monkeypatch
):
    groups, device = module("attention_groups"), NAMED["H200"]
    monkeypatch.setattr(groups, "TOGETHER", 4)
    problems = module("model_attention").order()[:10]
    racer = Brittle(problems[2], method)
    found = dict(groups.entries(problems, device, 1e3, racer))
    missed = {p for p, made in found.items() if isinstance(made, str)}
    assert found.keys() | {problems[2]} == set(problems)
    assert missed <= {problems[2]}
    assert racer.asked == asked


@pytest.mark.slow
def test_attention_races_in_a_process_that_is_replaced(module, capsys):
    groups, apart = module("attention_groups"), module("attention_process").Apart()
    shape: Any = {"batch": 1, "q_len": 8, "kv_len": 8, "heads": 1, "kv_heads": 1}
    small = AttentionProblem(**shape, head_dim=8, dtype="float32", scale=0.5)
    with contextlib.closing(apart):
        (first,) = groups.entries([small], local_cpu(), 60.0, apart)
        apart._worker.kill()
        (second,) = groups.entries([small], local_cpu(), 60.0, apart)
        (third,) = groups.entries([small], local_cpu(), 60.0, apart)
    assert first[1].best.variant == third[1].best.variant
    assert "WorkerLost" in second[1]


def test_what_an_answer_of_attention_gained_is_in_its_entry(module, monkeypatch):
    answers, device = module("attention_answers"), NAMED["H100"]
    problem = module("model_attention").order()[0]
    usual, cudnn = (
        answers.default(problem, device),
        answers.candidates(problem, device)[-1],
    )
    assert (usual.variant, cudnn.variant) == ("attention_sm90", "cudnn")
    times = {usual: [10.0] * 5, cudnn: [8.0] * 5}
    for best, second in ((cudnn, 10.0), (usual, None)):
        made = answers.Raced(
            problem=problem, best=best, usual=usual, times=times, apart=0.0
        ).entry(device)
        assert (made.best.variant, made.best.time_us) == (best.variant, times[best][0])
        assert made.best.runner_up.get("time_us") == second
        assert len(made.observations) == 2
    for least, is_settled in ((8.0, False), (9.9, True)):
        noise = {usual: [10.0] * 5, cudnn: [least] * 3 + [10.5] * 2}
        assert answers.winner(noise, usual) == usual
        race = answers.Raced(
            problem=problem, best=usual, usual=usual, times=noise, apart=0.0
        )
        assert race.is_settled() == is_settled
    monkeypatch.setattr(answers, "_error", lambda *asked: 0.5)
    kept = answers.Raced(
        problem=problem, best=cudnn, usual=usual, times=times, apart=0.1
    )
    assert set(answers.verified([kept], local_cpu())) == {problem}


def test_no_shipped_answer_of_attention_is_slower_than_what_it_raced(module):
    asked, answers = set(module("model_attention").order()), module("attention_answers")
    store = Store(knowledge.SHIPPED, read_only=True)
    for name in store.names():
        if name.op != "attention":
            continue
        entry = store.read(name, complete=True)
        assert entry is not None and entry.best is not None
        problem, us = problem_from_json(entry.problem), entry.best.time_us
        assert problem in asked and us is not None
        seen = [o.time_us for o in entry.observations if o.time_us is not None]
        assert us <= answers.NOISE * min(seen), problem
        # What is not the default is the answer only if it gained something.
        second = entry.best.runner_up
        assert not second or second["time_us"] >= 1.009 * us, problem


def test_parts_of_the_problems_are_all_of_them(module):
    layers = module("tune_layers")
    problems = module("model_attention").order()
    parts = [problems[i::n] for i, n in map(layers._part, ("0/2", "1/2"))]
    assert sorted(map(str, sum(parts, ()))) == sorted(map(str, problems))
    for wrong in ("2/2", "-1/2", "1", "a/b"):
        with pytest.raises(ValueError):
            layers._part(wrong)

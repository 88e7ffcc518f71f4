"""Which configs of convolutions race for the answers that ship, and what is one."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from conv_problems import problem as asked

import tracea_jax as tracea
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.policy import Choice
from tracea_jax.survey.turns import Turns
from tracea_jax.variants import XLA


def test_few_configs_of_convolutions_race_the_default_first(module):
    answers, device = module("convolution_answers"), NAMED["H100"]
    problems = module("model_convolutions").order()
    assert len(set(problems)) == len(problems)
    for problem in problems[::40]:
        found = answers.candidates(problem, device)
        assert found[0] == answers.default(problem, device)
        assert len(found) <= 12 and len(set(found)) == len(found)


def test_parts_share_the_problems_and_keep_their_order(module):
    answers = module("convolution_answers")
    problems = module("model_convolutions").order()
    parts = [answers.share(problems, i, 3) for i in range(3)]
    assert sorted(map(problems.index, sum(parts, []))) == list(range(len(problems)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert sorted(part, key=problems.index) == part
        assert len({(p.direction, p.epilogue.is_identity) for p in part}) < 4


@pytest.fixture
def raced(module, monkeypatch, tmp_path):
    """Answers of two problems, where XLA beats what is not XLA."""
    answers, device = module("convolution_answers"), local_cpu()
    plain = asked(batch=1, height=6, width=5)
    problems = [plain, dataclasses.replace(plain, direction="weight_grad")]
    xla = Choice(variant="xla", config=XLA.config_type())
    monkeypatch.setattr(
        answers, "candidates", lambda p, d: [answers.default(p, d), xla]
    )
    monkeypatch.setattr(answers, "winner", lambda times, usual: xla)

    def run():
        with tracea.options(cache_dir=tmp_path):
            return dict(answers.entries(problems, device, 60.0))

    usual = {p: answers.default(p, device) for p in problems}
    return answers, usual, run


def test_each_raced_problem_has_an_answer_that_tells_what_was_gained(raced):
    _, usual, run = raced
    found = run()
    assert set(found) == set(usual)
    for problem, made in found.items():
        assert made.problem == problem.to_json() and made.best.variant == "xla"
        assert made.best.runner_up["variant"] == usual[problem].variant != "xla"


def test_a_problem_that_breaks_its_race_loses_only_itself(raced, monkeypatch):
    answers, usual, run = raced
    good, bad = usual
    races = answers.races

    def fragile(group, device):
        if any(ready.problem == bad for ready in group):
            raise RuntimeError("no memory")
        return races(group, device)

    monkeypatch.setattr(answers, "races", fragile)
    found = run()
    assert found[bad] == "RuntimeError: no memory"
    assert found[good].best.variant == "xla"


def test_one_that_measures_is_alone(tmp_path):
    turns = Turns(tmp_path)
    seen = []

    def alone():
        with turns.alone():
            seen.append("alone")

    with turns.together(), turns.together():
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join(0.05)
        seen.append("together")
    thread.join()
    assert seen == ["together", "alone"]

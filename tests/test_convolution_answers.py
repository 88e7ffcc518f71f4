"""Which configs of convolutions race for the answers that ship, and what is one."""

from __future__ import annotations

import dataclasses

from conv_problems import problem as asked

from tracea_jax.device import NAMED, local_cpu
from tracea_jax.policy import Choice
from tracea_jax.variants import XLA


def test_few_configs_of_convolutions_race_the_default_first(module):
    answers, device = module("convolution_answers"), NAMED["H100"]
    problems = module("model_convolutions").order()
    assert len(set(problems)) == len(problems)
    for problem in problems[::40]:
        found = answers.candidates(problem, device)
        assert found[0] == answers.default(problem, device)
        assert len(found) <= 12 and len(set(found)) == len(found)


def test_an_answer_of_a_convolution_beats_its_default(module, monkeypatch):
    answers, device = module("convolution_answers"), local_cpu()
    plain = asked(batch=1, height=6, width=5)
    gradient = dataclasses.replace(plain, direction="weight_grad")
    xla = Choice(variant="xla", config=XLA.config_type())
    monkeypatch.setattr(
        answers, "candidates", lambda p, d: [answers.default(p, d), xla]
    )
    monkeypatch.setattr(
        answers, "winner", lambda times, usual: xla if usual != xla else usual
    )
    found = dict(answers.entries([plain, gradient], device, 60.0))
    usual = {p: answers.default(p, device) for p in (plain, gradient)}
    assert set(found) == {p for p, choice in usual.items() if choice != xla} != set()
    for problem, made in found.items():
        assert made.problem == problem.to_json() and made.best.variant == "xla"
        assert made.best.runner_up["variant"] == usual[problem].variant

"""Which configs of attention race for the answers that ship, and who wins."""

from __future__ import annotations

import dataclasses

from synthetic_bench import choice

from tracea_jax.device import NAMED, local_cpu
from tracea_jax.problem import AttentionProblem


def test_few_configs_of_attention_race_all_of_them_legal(module):
    answers, device = module("attention_answers"), NAMED["H200"]
    problems = module("model_attention").order()
    for problem in problems[::5]:
        found = answers.candidates(problem, device)
        assert 1 <= len(found) <= 12 and len(set(found)) == len(found)
        assert any(choice.variant.endswith("_sm90") for choice in found)
    backward = next(p for p in problems if p.direction == "backward")
    names = {c.config.dq for c in answers.candidates(backward, device)[:-1]}
    assert names <= {"recomputed", "beside", "ordered"}  # the same bits from run to run


def test_attention_is_ours_only_where_it_is_faster_by_more_than_nothing(module):
    answers = module("attention_answers")
    ours, cudnn, xla = (
        dataclasses.replace(choice(8), variant=name)
        for name in ("attention_sm90", "cudnn", "xla")
    )
    assert answers._winner({ours: 10.0, cudnn: 10.05, xla: 30.0}) == cudnn
    assert answers._winner({ours: 10.0, cudnn: 10.2, xla: 30.0}) == ours
    assert answers._winner({ours: 10.0, cudnn: 12.0, xla: 9.0}) == xla
    assert answers._winner({ours: 10.0}) == ours


def test_a_race_of_attention_becomes_an_entry(module):
    answers = module("attention_answers")
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
    problems = [small, dataclasses.replace(small, is_causal=True)]
    found = list(answers.entries(problems, local_cpu(), 60.0))
    assert [problem for problem, _ in found] == problems
    for problem, made in found:
        assert made.problem == problem.to_json()
        assert made.best.variant in {o.variant for o in made.observations}
        assert made.best.time_us > 0 and made.best.ratio >= 1
    assert len(list(answers.entries(problems, local_cpu(), 0.0))) == 1  # time is over

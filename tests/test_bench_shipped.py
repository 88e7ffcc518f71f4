"""The tuning of the answers that ship: its order, its budgets, what is kept."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from synthetic_bench import choice, entry

from tracea_jax import knowledge
from tracea_jax.device import local_cpu
from tracea_jax.options import current
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.answers.answer import Answer
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.times import timed
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Observation

pytestmark = pytest.mark.once


def test_every_layer_gets_some_rows_before_any_gets_more(module):
    layers = module("model_layers")
    order = layers.order()
    assert len(set(order)) == len(order)
    bodies = [layer for layer in layers.LAYERS if not layer.is_head]
    shapes = {(layer.n, layer.k) for layer in bodies}
    first = order[: len(shapes)]
    assert {(p.n, p.k) for p in first} == shapes
    assert {p.m for p in first} == {layers.ROWS[0]}
    for layer in layers.LAYERS:
        for m in layer.rows:
            assert layer.plain(m) in order
            assert layer.asked(m) is None or layer.asked(m) in order


def test_attention_of_models_is_tuned_in_rounds(module):
    models = module("model_attention")
    order = models.order()
    assert len(set(order)) == len(order)
    backward = [p for p in order if p.direction == "backward"]
    first = backward[: len(models.MODELS)]
    heads = {(p.heads, p.head_dim) for p in first}
    assert heads == {(m.heads, m.head_dim) for m in models.MODELS}
    few = [p for p in order if p.q_len == 1]
    assert all(p.kv_lengths and not p.is_causal for p in few)
    assert {(p.batch, p.kv_len) for p in few} == set(models.DECODED)
    assert {(p.head_dim, p.columns) for p in order} >= {(192, 128), (256, 256)}


def test_layers_are_those_of_the_models(module):
    layers = module("model_layers")
    known = {layer.name: (layer.n, layer.k) for layer in layers.LAYERS}
    assert known["Llama 3 8B qkv"] == (6144, 4096)
    assert known["Llama 3 70B qkv"] == (10240, 8192)
    assert known["Qwen2.5 7B qkv"] == (4608, 3584)
    assert known["GPT-2 qkv"] == (2304, 768)
    assert known["ViT-L fc1"] == (4096, 1024)
    assert set(layers.ROWS) == {1, *(2**i for i in range(3, 15))}


def tuned(problem, config, count):
    """An entry of this machine: a race of some configs of ours and XLA."""
    raced = {"protocol": "race", "spread": 0.0123, "prepare_s": 0.4}
    ours = [
        Observation(
            **named(problem, choice(8 * (i + 1)), local_cpu()),
            time_us=10.123456789 + i,
            repeats=5,
            extra=raced if i < count else {"protocol": "steady"},
        )
        for i in range(count + 3)
    ]
    xla = Observation(variant="xla", config={}, time_us=99.0, repeats=5, extra=raced)
    best = Best(
        **named(problem, config, local_cpu()),
        time_us=10.123456789,
        xla_us=99.0,
    )
    made = entry(problem=problem, observations=(*ours, xla))
    return dataclasses.replace(made, best=best, environment=environment(local_cpu()))


def test_tuning_goes_on_where_an_earlier_run_ended(module, cache_dir, tmp_path):
    layers = module("tune_layers")
    device, done = local_cpu(), GemmProblem(m=96, n=80, k=64)
    other = dataclasses.replace(done, lhs="bfloat16", rhs="bfloat16")
    assert layers.left([done, other], device) == [done, other]
    Knowledge(cache_dir).own.record(tuned(done, choice(8), 10))
    knowledge.refresh(current())
    assert layers.left([done, other], device) == [other]

    out = tmp_path / "out"
    assert layers.export(out, device) == layers.export(out, device) == 1
    (file,) = out.glob("*/matmul/*.json")
    files = {p for p in out.rglob("*") if p.is_file()}
    assert files == {file, file.parent.parent / "environment.json"}
    assert len(file.read_bytes()) < 4096
    # The files ship: they are read as the package's own.
    answer = Knowledge(None, shipped=(out,)).lookup(done, device)
    assert answer is not None and answer.origin == "shipped"
    assert answer.choice == choice(8)

    for path in sorted(Store(cache_dir / "tuned").directory.rglob("*.json")):
        path.unlink()
    knowledge.refresh(current())
    assert layers.left([done], device) == [done]
    assert layers.take([out]) == 1
    assert layers.left([done], device) == []


def test_answers_that_ship_keep_what_raced_and_little_else(module):
    layers = module("tune_layers")
    slim = layers.slim(tuned(GemmProblem(m=96, n=80, k=64), choice(8), 10))
    assert len(slim.observations) == layers.KEPT + 1
    assert {o.variant for o in slim.observations} == {"gemm_cpu", "xla"}
    assert all(o.extra == {"protocol": "race"} for o in slim.observations)
    ours = [o.time_us for o in slim.observations if o.variant != "xla"]
    assert min(ours) == slim.best.time_us == 10.123
    assert max(ours) == pytest.approx(10.123 + layers.KEPT - 1)
    assert layers.slim(slim) == slim


def test_tuning_is_begun_again_until_the_time_is_over(module, monkeypatch, tmp_path):
    layers = module("tune_layers")
    now, asked = [0.0], []

    def tune_together(problems, *, budget_s, **_):
        asked.append((len(problems), budget_s))
        now[0] += budget_s
        return {problems[0]: "budget"}

    monkeypatch.setattr(layers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(layers.common, "tune_together", tune_together)
    problems = [GemmProblem(m=m, n=8, k=8) for m in range(1, 100)]
    how = {"effort": "none", "goal": "throughput", "each_s": 1.0, "budget_s": 40.0}
    texts = list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    assert asked == [(16, 16.0), (16, 16.0), (16, 8.0)]
    assert sum("not matmul" in text for text in texts) == 3
    asked.clear()
    how["budget_s"] = 990.0  # enough: each gets its share of what is left
    list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    assert asked == [*[(16, 160.0)] * 6, (3, 30.0)]


def test_who_missed_an_answer_has_another_turn_in_what_is_left(
    module, monkeypatch, tmp_path
):
    layers = module("tune_layers")
    now, asked, stubborn = [0.0], [], {3, 4}

    def tune_together(problems, *, budget_s, **_):
        """Takes a quarter of its time; some need two turns, one never has enough."""
        asked.append([p.m for p in problems])
        now[0] += budget_s / 4
        failed = {p: "budget" for p in problems if p.m in stubborn | {5}}
        stubborn.clear()
        return failed

    monkeypatch.setattr(layers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(layers.common, "tune_together", tune_together)
    problems = [GemmProblem(m=m, n=8, k=8) for m in range(1, 9)]
    how = {"effort": "none", "goal": "throughput", "each_s": 1.0, "budget_s": 100.0}
    list(layers.tune_all(problems, argparse.Namespace(out=tmp_path, **how)))
    # Where a turn brings nothing, another one would not either.
    assert asked == [list(range(1, 9)), [3, 4, 5], [5]]


@pytest.mark.parametrize(
    ("kc", "time_us"),
    [(8, 10.0), (24, 12.0), (7, 10.0)],
    ids=["best", "another", "never raced"],
)
def test_what_an_interpolated_choice_took(module, kc, time_us):
    made = tuned(GemmProblem(m=96, n=80, k=64), choice(8), 10)
    chosen = Answer(
        choice=choice(kc), origin="interpolated", time_us=1.0, xla_us=1.0, ratio=1.0
    )
    found = module("bench_interpolation").ratio
    times = timed(made.best, made.observations)
    assert found(chosen, times) == pytest.approx(99 / time_us, rel=0.02)
    other = dataclasses.replace(choice(kc), variant="gemm_sm90")
    assert found(dataclasses.replace(chosen, choice=other), times) is None

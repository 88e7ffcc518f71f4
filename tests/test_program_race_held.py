"""The race of whole programs: which are held, and that what is wrong never wins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from numerics import normal
from program_races import ARGUMENTS, LOSING, WINNING, Script, layers, raced, sites, step
from report_ratios import checked
from transformed import assert_near

import tracea_jax as tracea
from tracea_jax import knowledge, verdicts
from tracea_jax.campaign.executions import Executions, difference
from tracea_jax.options import current

pytestmark = pytest.mark.once

# --- races that are not held ----------------------------------------------------------


def printing(x, w, k):
    jax.debug.print("{}", x[0, 0])
    return layers(x, w, k)


def ours(x, w, k):
    return layers(tracea.ops.matmul(x, w), jnp.eye(8), k)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (printing, "it has effects"),
        (ours, "it calls our ops itself"),
        (lambda x, w, k: x + 1, "it has no sites"),
    ],
)
def test_programs_that_do_not_race(monkeypatch, fn, why):
    report = raced(monkeypatch, {}, fn)
    assert f"whole program: not raced: {why}" in str(report)
    assert report.whole.verdict is None


def test_no_race_where_none_is_wanted_or_possible(monkeypatch):
    assert raced(monkeypatch, {}, race=False).whole is None
    with tracea.options(implementation="xla"):
        report = raced(monkeypatch, {})
    assert report.whole.reason == "options(implementation='xla') is set"
    assert sites() == (1, 1)
    report = raced(monkeypatch, {}, budget_s=1e-9)
    assert report.whole.reason == "the budget was used up"


def test_an_error_of_the_race_does_not_end_the_tuning(monkeypatch):
    def fails(own):
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(Executions, "filled", fails)
    report = raced(monkeypatch, {})
    assert report.whole.reason == "RuntimeError: RESOURCE_EXHAUSTED: no memory"

    def interrupts(own):
        raise KeyboardInterrupt

    monkeypatch.setattr(Executions, "filled", interrupts)
    assert raced(monkeypatch, {}).whole.reason == "interrupted"


# --- correctness ----------------------------------------------------------------------


def test_wrong_results_never_win(monkeypatch):
    with monkeypatch.context() as patch:
        script = Script({**WINNING, (): 1.0}, spoil=((), ("matmul",)))
        script.install(patch)
        whole = tracea.tune(layers, *ARGUMENTS).whole
    assert whole is not None and whole.verdict is not None
    assert whole.verdict.without == ("conv2d",) and whole.every is None
    known = knowledge.known(current()).own.entries(complete=True)
    (entry,) = [e for e in known if e.problem["op"] == "program"]
    failed = [o.config["without"] for o in entry.observations if o.failure]
    assert sorted(failed) == [[], ["matmul"]]
    assert {o.failure for o in entry.observations} == {None, "wrong_result"}


def test_results_are_compared_as_wholes():
    x, noise = normal(100), normal(100, seed=1)
    assert difference([x], [x]) is None
    assert difference([x + 0.01 * noise], [x]) is None
    assert "differ from plain's by 1" in str(difference([2 * x], [x]))
    # A gradient that is zero but for rounding, beside one that is not.
    assert difference([x, 1e-6 * noise], [x, -1e-6 * noise]) is None
    assert "not finite" in str(difference([x.at[3].set(jnp.inf)], [x]))
    both = x.at[3].set(jnp.nan)
    assert difference([both], [both]) is None
    assert difference([jnp.arange(3)], [jnp.arange(3) + 1]) is None
    assert difference([1e30 * x], [1e30 * x]) is None
    zero = jnp.zeros(3)
    assert difference([zero], [zero]) is None and difference([zero + 1], [zero])


def test_the_callers_arrays_stay(monkeypatch):
    donating = jax.jit(layers, donate_argnums=(0, 1, 2))
    args = tuple(jnp.array(a) for a in ARGUMENTS)
    report = raced(monkeypatch, LOSING, donating, args)
    assert report.whole.verdict is not None
    assert not any(a.is_deleted() for a in args)


def test_abstract_arguments_are_random_arrays(monkeypatch):
    def fn(tree, key, flag):
        noise = jax.random.bernoulli(key, 0.5, tree["w"].shape)
        y = layers(tree["x"], jnp.where(noise, tree["w"], 0), tree["k"])
        return jnp.where(flag, y, 0)

    key = jax.random.key(0)
    tree = dict(zip("xwk", ARGUMENTS, strict=True))
    concrete = (tree, key, jnp.array(True))
    abstract = jax.eval_shape(lambda *args: args, *concrete)
    raced(monkeypatch, LOSING, fn, abstract)
    assert sites(fn, concrete) == (1, 0)


def test_a_real_race_has_real_times(monkeypatch):
    """Nothing is scripted but the protocol, which is short."""
    from tracea_jax.campaign import races, run
    from tracea_jax.tuning import measure

    short = measure.Timing(slice_s=0.001, settle_s=0.01, race_s=0.01, rounds=3)
    monkeypatch.setattr(races, "TIMING", short)
    monkeypatch.setattr(run.Run, "_rows", lambda *_: {})
    whole = tracea.tune(step, *ARGUMENTS).whole
    verdict = whole and whole.verdict
    assert verdict is not None and verdict.time_us > 0 and verdict.ratio >= 0.985
    assert tracea.explain(step)(*ARGUMENTS).verdict == verdict
    assert_near(tracea.transform(step)(*ARGUMENTS), step(*ARGUMENTS), 1e-5)


def test_a_small_program_is_raced_and_tuned_within_its_budget():
    report = tracea.tune(layers, *ARGUMENTS, effort="none", budget_s=100.0)
    assert report.whole is not None
    assert report.whole.verdict is not None, report.whole.reason
    assert report.whole.note == "" and checked(report) >= 2
    assert len(report.entries) == len(report.rows) == 2


def test_what_xla_serves_is_plain_already(monkeypatch, calls_cost):
    report = raced(monkeypatch, LOSING)
    assert "not raced: XLA serves every site" in str(report.whole)


def test_objects_of_nnx_race_with_what_they_change(monkeypatch):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.k = (nnx.Param(jnp.array(x)) for x in ARGUMENTS[1:])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return layers(x, self.w[...], self.k[...])

    def update(model, optimizer, x):
        def loss(model):
            return (model(x) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    args = model, optimizer, ARGUMENTS[0]
    report = raced(monkeypatch, LOSING, update, args)
    assert report.whole.verdict.without == ("conv2d",)
    assert model.calls[...] == 0  # a race changes nothing
    assert tracea.explain(update)(*args).verdict == report.whole.verdict

    calls = []
    monkeypatch.setattr(
        verdicts.Verdict, "of_entry", lambda entry: calls.append(entry) or None
    )
    tracea.transform(update)(*args)
    assert calls  # the very program that raced
    assert model.calls[...] == 1

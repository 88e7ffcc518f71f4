"""The fit of models: reproducible, and as good as it says on problems held out."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import random
from typing import Any

import numpy as np
import pytest

from tracea_jax import variants
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.model import decision
from tracea_jax.model.model import Model
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.variants import XLA

pytestmark = pytest.mark.once

SURVEY = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "survey"
DEVICE = CpuDevice(name="cpu", isa="amx", cores=2, l2_bytes=2 << 20)


@pytest.fixture
def survey(monkeypatch, module):
    monkeypatch.syspath_prepend(SURVEY)
    return module


def measured(cases, count: int, seed: int = 0):
    """Products whose times follow a rule: XLA pays for each row, ours for each call."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(0, 11)) for _ in range(3))
        problem = GemmProblem(m=m, n=n, k=k)
        variant = variants.get("matmul", "gemm_cpu")
        space = variant.space(problem, DEVICE)
        ours = [space.config(rng.randrange(len(space))) for _ in range(2)]
        work = problem.flops / 1e5
        times = {
            Choice(variant="xla", config=XLA.config_type()): 1 + work + m / 50,
            **{
                Choice(variant="gemm_cpu", config=c): 4 + work * (1 + c.tasks / 50)
                for c in ours
            },
        }
        noise = {c: us * math.exp(rng.gauss(0, 0.01)) for c, us in times.items()}
        found.append(
            cases.Case(
                problem=problem,
                device=DEVICE,
                measured=tuple(
                    cases.Measured(choice=c, time_us=us, error=0.01)
                    for c, us in noise.items()
                ),
            )
        )
    return found


def test_a_fit_is_the_same_again_and_decides_well(survey, capsys):
    fit, regret = survey("fit"), survey("regret")
    cases = measured(survey("cases"), 120)
    settings = fit.Settings(members=2, trees=20, rate=0.2, folds=3)
    (one,), (other,) = (fit.fit(cases, settings).values() for _ in range(2))
    data = one.to_bytes()
    assert data == other.to_bytes()
    assert "matmul" in capsys.readouterr().out
    again = Model.from_bytes(data)
    right = []
    for case in cases:
        space = variants.get("matmul", "gemm_cpu").space(case.problem, DEVICE)
        spaces = {"gemm_cpu": space, "xla": variants.XLA.space(case.problem, DEVICE)}
        runs = [
            decision.chosen(decision.best(m.predict(case.problem, DEVICE, spaces)), 0.0)
            for m in (one, again)
        ]
        assert runs[0] is not None and runs[0] == runs[1]
        xla, *ours = (m.time_us for m in case.measured)
        if abs(math.log(xla / min(ours))) > 0.1:
            right.append((runs[0].variant == "xla") == (xla < min(ours)))
    assert len(right) > 40 and np.mean(right) > 0.9
    _, outcomes = fit.fit_op(cases, settings, "")
    assert len(outcomes) == len(cases)
    margin = regret.margin_of(outcomes)
    ratios = np.array([o.ratio(margin) for o in outcomes])
    under = [o.is_under(r, 0.97) for o, r in zip(outcomes, ratios, strict=True)]
    assert np.mean(under) <= regret.SHARE
    assert 0 < ratios.mean() <= np.mean([o.oracle for o in outcomes])


def test_kernels_with_a_model_of_their_own_are_compared_in_microseconds(survey):
    """XLA takes 1.5 times as long as the best config of ours, or two thirds."""
    fit, cases, rng = survey("fit"), survey("cases"), random.Random(0)
    device, variant = NAMED["H200"], variants.get("matmul", "gemm_sm80")
    found = []
    for i in range(96):
        m, n = (64 * rng.randrange(1, 64) for _ in range(2))
        fields: Any = dict.fromkeys(("lhs", "rhs", "out"), "bfloat16")
        problem = GemmProblem(m=m, n=n, k=1024, layout=("nn", "nt")[i % 2], **fields)
        space = variant.space(problem, device)
        assert space.modelled_us is not None
        times = 1.2 * space.modelled_us
        places = [int(times.argmin()), rng.randrange(len(space))]
        us = times.min() * (1.5 if problem.layout == "nt" else 1 / 1.5)
        ours = {
            Choice(variant="gemm_sm80", config=space.config(p)): times[p]
            for p in places
        }
        every = {Choice(variant="xla", config=XLA.config_type()): us, **ours}
        measures = [
            cases.Measured(choice=c, time_us=float(t), error=0.01)
            for c, t in every.items()
        ]
        found.append(
            cases.Case(problem=problem, device=device, measured=tuple(measures))
        )
    settings = fit.Settings(members=2, trees=25, rate=0.3, folds=3)
    made, outcomes = fit.fit_op(found, settings, "")
    ratios = [math.exp(o.ratio(0.0)) for o in outcomes]
    expected = [1.5 if c.problem.layout == "nt" else 1.0 for c in found]
    np.testing.assert_allclose(ratios, expected, rtol=0.02)
    model = Model(device="", ops={"matmul": made})
    for case in found:
        space = variant.space(case.problem, device)
        seen = model.predict(case.problem, device, {"gemm_sm80": space})["gemm_sm80"]
        best = min(m.time_us for m in case.measured if m.choice.variant != "xla")
        assert math.exp(seen.log_us.min()) == pytest.approx(best, rel=0.05)


def test_a_margin_is_the_least_that_keeps_the_bars(survey):
    regret = survey("regret")
    (case,) = measured(survey("cases"), 1)
    rng = random.Random(2)

    def outcome(z: float, ours: float):
        fields = {"peer": 0.0, "oracle": max(ours, 0.0), "today": None, "error": 0.0}
        return regret.Outcome(case=case, z=z, ours=ours, **fields)

    wins = [outcome(rng.uniform(0, 3), 0.3) for _ in range(98)]
    assert regret.margin_of(wins) == 0.0
    slightly = outcome(1.0, math.log(0.95))
    assert regret.margin_of([*wins, slightly, slightly]) == 1.0  # two of a hundred
    assert regret.margin_of([*wins, outcome(-1.0, 0.1), slightly]) == 0.0
    badly = outcome(2.0, math.log(0.89))
    assert regret.margin_of([*wins, badly, *wins]) == 2.0
    doubtful = dataclasses.replace(badly, error=0.2)
    assert regret.margin_of([*wins, doubtful]) == 0.0
    assert badly.ratio(1.9) == badly.ours and badly.ratio(2.0) == badly.peer


def test_uncertainty_is_that_of_errors_with_both_parts(survey):
    random = np.random.default_rng(0)
    spread = random.exponential(0.1, 4000)
    measured = random.uniform(0.0, 0.1, 4000)
    sigma = np.sqrt(0.05**2 + (3.0 * spread) ** 2 + measured**2)
    errors = random.normal(size=4000) * sigma
    noise, gain = survey("fit").uncertainty(errors, spread, measured)
    assert noise == pytest.approx(0.05, rel=0.15) and gain == pytest.approx(3, rel=0.1)


def test_edges_tell_missing_values_and_all_of_few_apart(survey):
    edges_of = survey("fit").edges_of
    np.testing.assert_array_equal(edges_of(np.array([3.0, 1.0, 1.0]), 63), [2.0])
    few = edges_of(np.array([2.0, np.nan, 2.0]), 63)
    assert np.searchsorted(few, [2.0, np.nan]).tolist() == [0, 1]
    many = edges_of(np.random.default_rng(0).normal(size=9999), 63)
    assert len(many) <= 63 and (np.diff(many) > 0).all()

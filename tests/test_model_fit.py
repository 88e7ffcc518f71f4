"""The fit of models: reproducible, and as good as it says on problems held out."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
import warnings
from typing import Any

import numpy as np
import pytest

from tracea_jax import policy, variants
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model import decision, features, model
from tracea_jax.model.model import Kind, Model
from tracea_jax.model.shipped import DATA
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, GemmProblem
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
        random_one = space.config(rng.randrange(len(space)))
        ours = [variant.heuristic(problem, DEVICE), random_one]
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
    fit = survey("fit")
    cases = measured(survey("cases"), 120)
    settings = fit.Settings(members=2, trees=20, rate=0.2, folds=3)
    (one,), (other,) = (fit.fit(cases, settings).values() for _ in range(2))
    data = one.to_bytes()
    assert data == other.to_bytes()
    assert "matmul" in capsys.readouterr().out
    again = Model.from_bytes(data)
    (kind,) = one.ops["matmul"].kinds.values()
    assert kind.facts["model"]["problems"] == len(cases)
    right = []
    for case in cases:
        diagnosis = diagnose(case.problem, DEVICE)
        runs = [policy.modelled(diagnosis, m) for m in (one, again)]
        assert runs[0].choice == runs[1].choice and runs[0].reason == runs[1].reason
        xla, *ours = (m.time_us for m in case.measured)
        if abs(math.log(xla / min(ours))) > 0.1:
            right.append((runs[0].choice.variant == "xla") == (xla < min(ours)))
    assert len(right) > 40 and np.mean(right) > 0.8
    assert again.covers(cases[0].problem, DEVICE)
    assert not again.covers(dataclasses.replace(cases[0].problem, m=9999), DEVICE)
    facts = one.ops["matmul"].facts["held out"]
    assert facts["model"]["under"][0] <= 2 * survey("regret").SHARES[0]
    assert 1 < facts["model"]["geomean"] <= facts["oracle"]["geomean"]


def test_kernels_with_a_model_of_their_own_are_compared_with_xla(survey):
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
    settings = fit.Settings(members=2, trees=40, rate=0.3, folds=3)
    made, _ = fit.fit_op(found, settings, "")
    (kind,) = {features.kind(case.problem) for case in found}
    open_kind = Kind(margin=0.0, portfolio={}, facts={})  # only defaults are compared
    known = Model(
        device="nvidia-h200",
        ops={"matmul": dataclasses.replace(made, kinds={kind: open_kind})},
    )
    right = []
    with compiled_elsewhere():
        for case in found:
            runs = policy.decide(diagnose(case.problem, device), known).choice.variant
            right.append((runs != "xla") == (case.problem.layout == "nt"))
    assert np.mean(right) > 0.95


# ---- margins -------------------------------------------------------------------------


def outcomes_of(survey, kind: str, steps, today=0.0, count: int = 1, error=0.0):
    """Outcomes that choose ours up to a margin, with the ratios that come of it."""
    regret = survey("regret")
    (case,) = measured(survey("cases"), 1)

    def ratio(value: float):
        return regret.Ratio(log=math.log(value), error=error)

    z, ours = steps
    return count * [
        regret.Outcome(
            case=case,
            kind=kind,
            steps=((0.0, ratio(ours)), (z, regret.SAME))
            if z
            else ((0.0, regret.SAME),),
            today=ratio(today) if today else regret.SAME,
            oracle=ratio(max(ours, 1.0)),
        )
    ]


def test_a_margin_keeps_expected_losses_within_the_bars(survey):
    """With 598 wins, 5 losses are expected to be 6 / 604 of further problems."""
    margins = survey("regret").margins
    of = functools.partial(outcomes_of, survey, "a")
    wins = of((3.0, 1.3), count=598)
    assert margins(wins) == {"a": 0.0}
    slightly = of((1.0, 0.95), count=5)
    assert margins([*wins, *slightly]) == {"a": 0.0}
    assert margins([*wins, *slightly, *slightly]) == {"a": 1.0}
    badly = of((2.0, 0.89))
    assert margins([*wins, *badly]) == {"a": 0.0}
    assert margins([*wins, *badly, *badly, *badly]) == {"a": 2.0}
    doubtful = of((2.0, 0.89), count=9, error=0.2)
    assert margins([*wins, *doubtful]) == {"a": 0.0}
    forced = [
        dataclasses.replace(o, steps=((0.0, o.today),))
        for o in of((1.0, 0.5), today=0.5, count=9)
    ]
    assert margins([*wins, *forced]) == {"a": 0.0}  # no margin avoids these
    assert margins([*wins, *forced, *slightly]) == {"a": 1.0}
    assert margins(forced) == {"a": math.inf}


def test_few_problems_are_no_evidence(survey):
    wins = outcomes_of(survey, "a", (3.0, 1.3), count=40)
    assert survey("regret").margins(wins) == {"a": math.inf}


def test_outliers_of_one_kind_leave_another_open(survey):
    margins = survey("regret").margins
    of = functools.partial(outcomes_of, survey)
    many = of("many", (3.0, 1.3), count=250)
    others = of("others", (3.0, 1.3), count=250)
    bad = of("others", (2.0, 0.5), count=2)
    few = of("few", (3.0, 1.3), count=10)
    assert margins([*many, *others, *bad, *few]) == {
        "few": 2.0,
        "many": 0.0,
        "others": 2.0,
    }
    # A kind of few problems follows the op, but for losses that it has seen itself.
    lossy = of("few", (1.5, 0.95), count=2)
    assert margins([*many, *others, *few, *lossy])["few"] == 1.5


def test_kinds_for_which_today_is_better_keep_it(survey):
    regret = survey("regret")
    of = functools.partial(outcomes_of, survey)
    better = of("better", (3.0, 1.3), today=1.1, count=300)
    worse = of("worse", (3.0, 1.1), today=1.4, count=200)
    outcomes = [*better, *worse]
    ratios = regret.nested(outcomes, [i % 3 for i in range(500)])
    assert [r.log for r in ratios] == pytest.approx(
        [math.log(1.3)] * 300 + [math.log(1.1)] * 200
    )
    kinds = regret.covered(outcomes, ratios)
    assert kinds == {"better"}
    found = regret.summaries(outcomes, ratios, kinds)
    assert found["worse"]["model"].geomean == 1.1
    shipped = math.exp(0.6 * math.log(1.3) + 0.4 * math.log(1.4))
    assert found[""]["model"].geomean == pytest.approx(shipped, abs=1e-4)
    lossy = [*of("lossy", (3.0, 2.0), count=20), *of("lossy", (3.0, 0.9), count=2)]
    ratios = [o.at(0.0) for o in lossy]
    assert regret.covered(lossy, ratios) == set()  # many gains do not pay for losses


def test_decisions_of_outcomes_are_those_of_the_rule(survey):
    """Steps are where the choice changes, also of choices whose bits may vary."""
    regret, cases = survey("regret"), survey("cases")
    problem = AttentionProblem(
        **{"batch": 2, "q_len": 512, "kv_len": 512, "heads": 4, "kv_heads": 4},
        **{"head_dim": 64, "dtype": "bfloat16", "scale": 0.125},
    )
    device = NAMED["H200"]
    names = ("xla", "cudnn", "attention_sm90")
    choices = [
        Choice(
            variant=n, config=variants.get("attention", n).heuristic(problem, device)
        )
        for n in names
    ]

    def case(*us: float):
        every = zip(choices, us, strict=True)
        measures = (cases.Measured(choice=c, time_us=t, error=0.0) for c, t in every)
        return cases.Case(problem=problem, device=device, measured=tuple(measures))

    with compiled_elsewhere():
        today = policy.unmodelled(diagnose(problem, device)).choice
    rng = random.Random(0)
    for _ in range(40):
        us = [rng.uniform(1, 2) for _ in choices]
        guesses = {(0, i): (math.log(rng.uniform(1, 2)), i * 0.1) for i in range(3)}
        outcome = regret.Outcome.of(case(*us), 0, guesses)
        every = [
            decision.Guess(
                variant=n, index=0, log_us=g[0], sigma=g[1], varies=n == "cudnn"
            )
            for n, g in zip(names, guesses.values(), strict=True)
        ]
        base = every[names.index(today.variant)]
        for margin in (0.0, 0.5, 1.0, 2.0, 4.0, 99.0):
            runs = us[names.index(decision.chosen(every, base, margin).variant)]
            expected = math.log(min(us[:2]) / runs)
            assert outcome.at(margin).log == pytest.approx(expected)


# ---- portfolios ----------------------------------------------------------------------


def test_a_portfolio_has_what_saves_most(survey):
    greedy = survey("portfolio").greedy
    times = np.log([[1.0, 2.0, 1.3, 9.0], [2.0, 1.0, 1.3, 9.0], [4.0, 1.3, 1.0, 9.0]])
    costs = [0.0] * 4
    first, *others = greedy(times, costs)
    assert first == 2 and sorted(others) == [0, 1]
    assert greedy(times[:, [2, 2, 3]], [0.0] * 3) == [0]
    times[0, 1:] = np.inf
    assert greedy(times, costs)[0] in (1, 2) and 0 in greedy(times, costs)
    assert greedy(np.zeros((5, 2)), [0.01, 0.0]) == [1]


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


# ---- what ships ----------------------------------------------------------------------


def test_shipped_models_are_fitted_to_the_rows_of_the_repository(survey):
    fit, cases = survey("fit"), survey("cases")
    found: dict[tuple[str, str], list[Any]] = {}
    for case in cases.surveyed(SURVEY / "rows"):
        kind = model.device_kind(case.device)
        found.setdefault((kind, case.problem.op), []).append(case)
    files = sorted(DATA.glob("*.npz"))
    assert files
    for file in files:
        shipped = Model.from_bytes(file.read_bytes())
        assert shipped.device == file.stem
        assert {op for kind, op in found if kind == file.stem} == shipped.ops.keys()
        for op, known in shipped.ops.items():
            own = found[file.stem, op]
            assert known.facts["rows"] == fit.digest(own)
            assert known.facts["problems"] == len(own)
            assert known.facts["settings"] == dataclasses.asdict(fit.Settings())


@pytest.mark.slow
def test_shipped_models_are_reproduced(survey):
    fit, cases = survey("fit"), survey("cases")
    for kind, made in fit.fit(cases.surveyed(SURVEY / "rows"), fit.Settings()).items():
        assert made.to_bytes() == (DATA / f"{kind}.npz").read_bytes()


def test_shipped_models_decide_legally_about_what_was_surveyed(survey):
    """Also of problems that they do not cover; some of the choices are ours."""
    rng, variants_run = random.Random(0), set()
    every = survey("cases").surveyed(SURVEY / "rows")
    for case in rng.sample(every, 60):
        with compiled_elsewhere(), warnings.catch_warnings():
            warnings.simplefilter("error")
            diagnosis = diagnose(case.problem, case.device)
            found = policy.decide(diagnosis)
        variant = variants.get(case.problem.op, found.choice.variant)
        assert variant.name in diagnosis.candidates
        variant.check(case.problem, found.choice.config, case.device)
        if found.reason.startswith("model: "):
            variants_run.add(variant.name)
    assert "gemm_cpu" in variants_run

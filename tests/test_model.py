"""Models of times: what they cover and predict, and the decisions that they make."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings

import numpy as np
import pytest
from modelled import AMX, DEVICES, H200, attentions, drawn, of_products, products

from tracea_jax import policy, variants
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model import decision, features, model
from tracea_jax.model.model import Model, Prediction
from tracea_jax.problem import Epilogue, GatedMatmulProblem, GemmProblem
from tracea_jax.runtime import trust
from tracea_jax.tuning.search.candidates import Candidates

pytestmark = pytest.mark.once

# --- models ---------------------------------------------------------------------------


def test_a_file_is_written_as_it_was_read():
    own = of_products()
    data = own.to_bytes()
    assert data == of_products().to_bytes()
    again = Model.from_bytes(data)
    assert again.to_bytes() == data
    assert again.ops["matmul"].kinds.keys() == own.ops["matmul"].kinds.keys()
    for problem in drawn(30, draws=(products,)):
        if not isinstance(problem, GemmProblem):
            continue
        spaces = policy.decide(diagnose(problem, AMX)).spaces
        one, other = (m.predict(problem, AMX, spaces) for m in (own, again))
        assert one.keys() == other.keys() == {"gemm_cpu", "xla"}
        for name, found in one.items():
            np.testing.assert_array_equal(found.log_us, other[name].log_us)
            np.testing.assert_array_equal(found.sigma, other[name].sigma)


def test_a_file_of_another_format_is_an_error(monkeypatch):
    monkeypatch.setattr(model, "FORMAT", model.FORMAT + 1)
    data = of_products().to_bytes()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format"):
        Model.from_bytes(data)


def test_a_model_covers_what_was_measured():
    known = of_products()
    problem = GemmProblem(m=8, n=8, k=8)
    assert known.covers(problem, AMX)
    assert known.covers(dataclasses.replace(problem, m=999, layout="tt"), AMX)
    assert not known.covers(problem, DEVICES[1])
    assert not known.covers(problem, H200)
    assert not known.covers(dataclasses.replace(problem, out="bfloat16"), AMX)
    assert not known.covers(dataclasses.replace(problem, precision="highest"), AMX)
    assert not known.covers(GatedMatmulProblem(m=8, n=8, k=8), AMX)


def test_a_model_covers_nothing_beyond_its_survey():
    known = of_products().ops["matmul"]
    seen = [GemmProblem(m=m, n=64, k=8 * m) for m in (8, 512)]
    numbers = [features.of_problem(p, AMX) for p in seen]
    reach = {
        n: (min(a[n] for a in numbers), max(a[n] for a in numbers)) for n in numbers[0]
    }
    known = dataclasses.replace(known, reach=reach)
    for problem in (*seen, GemmProblem(m=64, n=64, k=512)):
        assert known.covers(problem, AMX)
    for field, size in (("m", 513), ("n", 65), ("k", 63), ("batch", 3)):
        beyond = dataclasses.replace(seen[1], **{field: size})
        assert not known.covers(beyond, AMX), field
    relu = dataclasses.replace(seen[0], epilogue=Epilogue(activation="relu"))
    assert not known.covers(relu, AMX)  # no problem of the survey had one
    assert not known.covers(seen[0], dataclasses.replace(AMX, cores=8))


def test_times_over_peers_of_other_versions_are_less_certain():
    surveyed = [{"jax": "0.11.2", "jaxlib": "0.11.2", "nvrtc": "13.0"}]
    known = of_products().ops["matmul"]
    known = dataclasses.replace(known, facts={"versions": surveyed})
    own = Model(device="cpu-amx", ops={"matmul": known})
    problem = GemmProblem(m=99, n=99, k=99)
    spaces = policy.decide(diagnose(problem, AMX)).spaces

    def sigma(installed: dict[str, str]) -> dict[str, float]:
        seen = own.with_versions(installed).predict(problem, AMX, spaces)
        return {name: float(found.sigma[0]) for name, found in seen.items()}

    same = sigma({"jax": "0.11.2", "jaxlib": "0.11.2"})
    assert sigma({"jax": "0.11.2", "jaxlib": "0.11.2", "driver": "13.1"}) == same
    other = sigma({"jax": "0.12.0", "jaxlib": "0.11.2"})
    assert other["gemm_cpu"] ** 2 == pytest.approx(same["gemm_cpu"] ** 2 + 0.05**2)


# --- decisions ------------------------------------------------------------------------


class Guessing(Model):
    """A model that covers everything and guesses at random."""

    def covers(self, problem, device):
        return True

    def predict(self, problem, device, spaces):
        rng = np.random.default_rng(len(str(problem)))
        return {
            name: Prediction(log_us=rng.normal(size=len(s)), sigma=np.ones(len(s)))
            for name, s in spaces.items()
        }

    def margin(self, problem):
        return 0.0

    def knows(self, op, variant):
        return not variant.endswith("sm80")

    def considered(self, problem, variant):
        """Configs of other problems too, and sometimes the default."""
        rng = random.Random(len(str(problem)))
        own = variants.get(problem.op, variant)
        others = [p for p in drawn(30, seed=3) if p.op == problem.op]
        found = []
        for device in DEVICES:
            for other in others:
                if own.why_not(other, device) is None:
                    space = own.space(other, device)
                    found.append(space.config(rng.randrange(len(space))))
        rng.shuffle(found)
        return (*found[:6], *[None] * rng.randrange(2))


@pytest.mark.parametrize("deterministic", [None, True, False])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_whatever_a_model_guesses_only_legal_choices_run(
    monkeypatch, device, deterministic
):
    guessing = Guessing(device="", ops={})
    monkeypatch.setattr(policy, "covering", lambda problem, device: guessing)
    ran, others = set(), 0
    for problem in drawn(16, seed=3):
        with compiled_elsewhere():
            found = diagnose(problem, device, deterministic)
        decided = policy.decide(found)
        for choice in (decided.choice, *decided.heroes):
            variant = variants.get(problem.op, choice.variant)
            assert choice.variant in found.candidates
            variant.check(problem, choice.config, device)
            others += choice.config != variant.heuristic(problem, device)
            if deterministic:
                assert found.may_vary(choice.variant, choice.config) is None
        assert decided.choice in decided.heroes
        assert [h.variant for h in decided.heroes] == list(found.candidates)
        assert decided.reason.startswith("model: ")
        ran.add(decided.choice.variant == "xla")
    assert ran == {True, False} and others


@pytest.mark.parametrize("method", ["covers", "considered", "predict"])
def test_a_model_that_fails_is_a_warning(monkeypatch, method):
    def fail(*of):
        raise FloatingPointError("no number")

    monkeypatch.setattr(Guessing, method, fail)
    monkeypatch.setattr(trust, "_warned", set())
    problem = GemmProblem(m=99, n=99, k=99)
    diagnosis = diagnose(problem, AMX)
    guessing = Guessing(device="", ops={})
    with pytest.warns(RuntimeWarning, match="matmul 99x99x99 .*FloatingPointError"):
        found = policy.decide(diagnosis, guessing)
    assert found == policy.unmodelled(diagnosis)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy.decide(diagnosis, guessing) == found


def test_the_fastest_prediction_runs_and_says_so():
    """Ours is guessed slower than XLA by e, and from 2^20 operations on faster."""
    small, large = GemmProblem(m=8, n=8, k=8), GemmProblem(m=99, n=99, k=99)
    known = of_products()
    mean, sigma = 0.05, math.hypot(0.05, 2.0 * 0.05)  # of the members

    def text(name: str, us: float) -> str:
        low, high = us * math.exp(-sigma), us * math.exp(sigma)
        return f"{name} {us:.2f} us ({low:.2f} to {high:.2f})"

    xla_us = math.exp(mean) * model.reference_us(small, AMX, 2.5)
    decided = policy.decide(diagnose(small, AMX), known)
    assert decided.choice.variant == "xla"
    others = text("gemm_cpu", xla_us * math.exp(1 + mean))
    assert decided.reason == f"model: {xla_us:.2f} us, {others}"
    xla_us = math.exp(1 + mean) * model.reference_us(large, AMX, 2.5)
    decided = policy.decide(diagnose(large, AMX), known)
    assert decided.choice.variant == "gemm_cpu"
    ours = text("model:", xla_us * math.exp(-1 + mean))
    assert decided.reason == f"{ours}, XLA {xla_us:.1f} us"


def guess(variant: str, us: float, sigma: float = 0.01, **fields) -> decision.Guess:
    return decision.Guess(
        variant=variant, index=0, log_us=math.log(us), sigma=sigma, **fields
    )


def test_another_choice_must_win_by_the_margin():
    own, slow = guess("gemm_cpu", math.e, 0.3), guess("cudnn", 9e9, 0.1)
    xla = guess("xla", math.e**2, 0.4)
    for margin, runs in ((1.99, own), (2.01, xla), (math.inf, xla)):
        assert decision.chosen((own, xla, slow), xla, margin) == runs
        assert decision.chosen((own, xla, slow), own, margin) == own
    for margin, runs in ((1.99, xla), (2.01, slow)):
        slower = dataclasses.replace(
            xla, log_us=math.log(9e9) - 2 * math.hypot(0.1, 0.4)
        )
        assert decision.chosen((slower, slow), slow, margin).variant == runs.variant
    assert decision.chosen([], own, 0.0) == own


def test_bits_that_may_vary_must_be_worth_it():
    """cuDNN's bits vary, and those of one config of ours."""
    xla, cudnn = guess("xla", 5.0), guess("cudnn", 2.0, varies=True)
    for ours_us, runs in ((1.0, "own"), (2.05, "own"), (2.07, "cudnn")):
        guesses = xla, cudnn, guess("own", ours_us)
        for margin in (0.0, 3.0):
            assert decision.chosen(guesses, cudnn, margin).variant == runs
    close, far = guess("own", 2.05), guess("own", 1.0)
    for deterministic, runs in ((False, cudnn), (True, close), (None, close)):
        found = decision.chosen((xla, cudnn, close), xla, 0.0, deterministic)
        assert found == runs
    atomic = guess("own", 0.98, varies=True)
    assert decision.chosen((xla, atomic, far), xla, 0.0) == far
    assert decision.chosen((xla, atomic, far), xla, 0.0, False) == atomic
    faster = guess("own", 0.96, varies=True)
    assert decision.chosen((xla, faster, far), xla, 0.0) == faster
    # Equal bits are no reason to run ours where it does not beat XLA by the margin.
    near = guess("xla", 2.0), guess("own", 1.99)
    for incumbent in (near[0], guess("cudnn", 1.98, varies=True)):
        assert decision.chosen((*near, incumbent), incumbent, 3.0) == near[0]


def test_the_best_of_equal_bits_is_a_guess_too():
    seen = Prediction(log_us=np.array([3.0, 1.0, 2.0]), sigma=np.ones(3))
    found = decision.best({"own": seen}, {"own": [False, True, False]})
    assert [(g.index, g.varies) for g in found] == [(1, True), (2, False)]
    found = decision.best({"own": seen}, {"own": [False, False, True]})
    assert [(g.index, g.varies) for g in found] == [(1, False)]
    found = decision.best({"own": seen}, {"own": [True] * 3})
    assert [(g.index, g.varies) for g in found] == [(1, True)]


def test_a_decision_compares_the_portfolio(monkeypatch):
    """No space is built; illegal configs and those of other versions do not count."""
    problem = GemmProblem(m=99, n=99, k=99)
    variant = variants.get("matmul", "gemm_cpu")
    config = variant.space(problem, AMX).config(1)
    assert config != variant.heuristic(problem, AMX)
    monkeypatch.setattr(type(variant), "space", None)
    seen = []

    def predict(self, problem, device, spaces):
        """The config is fast; XLA is slow."""
        seen.append([c for space in spaces.values() for c in space.configs()])
        return {
            name: Prediction(
                log_us=np.array(
                    [(name == "xla") - 1.0 * (c == config) for c in space.configs()]
                ),
                sigma=np.ones(len(space)),
            )
            for name, space in spaces.items()
        }

    monkeypatch.setattr(Model, "predict", predict)
    default = variant.heuristic(problem, AMX)
    fields = dataclasses.asdict(config)
    others = [{**fields, "kc": -1}, {**fields, "new": 1}]
    known = of_products(0.0, gemm_cpu=[*others, fields])
    found = policy.decide(diagnose(problem, AMX), known)
    assert found.choice.config == config and found.heroes[0] == found.choice
    assert {*seen[0]} <= {config, default, variants.XLA.config_type()}
    for own in ([*others], [None, *others]):
        known = of_products(0.0, gemm_cpu=own)
        found = policy.decide(diagnose(problem, AMX), known)
        assert found.choice.config == variant.heuristic(problem, AMX)


def test_without_a_model_the_policy_decides_as_it_did():
    for problem in drawn(20, draws=(attentions,)):
        found = diagnose(problem, dataclasses.replace(AMX, isa="baseline"))
        assert policy.decide(found).choice == policy.unmodelled(found).choice


def test_a_plan_asks_the_model_once(monkeypatch):
    known = of_products()
    monkeypatch.setattr(policy, "covering", lambda *asked: known)
    asked = []
    predict = Model.predict

    def counted(self, problem, device, spaces):
        asked.append(problem)
        return predict(self, problem, device, spaces)

    monkeypatch.setattr(Model, "predict", counted)
    found = [diagnose(GemmProblem(m=31, n=37, k=41), AMX) for _ in range(2)]
    assert policy.decide(found[0]) is policy.decide(found[1])
    assert len(asked) == 1


def test_a_search_begins_with_the_times_of_the_model(monkeypatch):
    class Ranking(Guessing):
        """Guesses less for each further config of a space."""

        def predict(self, problem, device, spaces):
            assert all(s.modelled_us is None for s in spaces.values())
            return {
                name: Prediction(log_us=-np.arange(len(s)) * 1.0, sigma=np.ones(len(s)))
                for name, s in spaces.items()
            }

    problem = GemmProblem(m=301, n=307, k=311)
    plain = policy.decide(diagnose(problem, AMX))
    assert Candidates.of(plain).log_prior is None
    ranking = Ranking(device="", ops={"matmul": of_products().ops["matmul"]})
    monkeypatch.setattr(policy, "covering", lambda *asked: ranking)
    policy.space_of.cache_clear()
    found = Candidates.of(policy.decide(diagnose(problem, AMX)))
    policy.space_of.cache_clear()
    count = len(plain.spaces["gemm_cpu"])
    assert found.choices == Candidates.of(plain).choices and count > 3
    assert found.log_prior is not None
    np.testing.assert_allclose(found.log_prior, -np.arange(count), atol=1e-12)


def test_a_model_that_is_given_decides_what_it_covers():
    known = of_products(margin=0.0)
    for problem in (GemmProblem(m=99, n=99, k=99), GemmProblem(m=3, n=5, k=7)):
        diagnosis = diagnose(problem, AMX)
        found = policy.decide(diagnosis, known)
        assert found == policy.modelled(diagnosis, known)
        assert found.reason.startswith("model: ")
    for problem, device in (
        (GemmProblem(m=9, n=9, k=9, out="bfloat16"), AMX),
        (GatedMatmulProblem(m=9, n=9, k=9), AMX),
        (GemmProblem(m=9, n=9, k=9), DEVICES[1]),
    ):
        diagnosis = diagnose(problem, device)
        assert policy.decide(diagnosis, known) == policy.unmodelled(diagnosis)

"""Models of times: their features, their files, and the decisions that they make."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest

from tracea_jax import policy, variants
from tracea_jax.device import NAMED, CpuDevice, local_cpu
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.doctor import doctor
from tracea_jax.model import decision, features, model, shipped, trees
from tracea_jax.model.model import Kind, Model, OpModel, Prediction, Regressor
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)
from tracea_jax.runtime import trust
from tracea_jax.tuning.search.candidates import Candidates

pytestmark = pytest.mark.once

AMX = CpuDevice(name="cpu", isa="amx", cores=2, l2_bytes=2 << 20, l3_bytes=64 << 20)
H200 = NAMED["H200"]
DEVICES = (AMX, dataclasses.replace(AMX, isa="avx2", l3_bytes=0), H200)
SIZES = (0, 1, 7, 8, 64, 509)


def products(rng: random.Random) -> GemmProblem | GatedMatmulProblem:
    dtype = rng.choice(("float32", "bfloat16"))
    sizes = {name: rng.choice(SIZES) for name in ("m", "n", "k")}
    fields = {**sizes, **dict.fromkeys(("lhs", "rhs", "out"), dtype)}
    layout = rng.choice(("nn", "nt", "tn", "tt"))
    if rng.random() < 0.3:
        return GatedMatmulProblem(layout=layout, **fields)
    epilogue = rng.choice((Epilogue(), Epilogue(bias="row", activation="gelu")))
    return GemmProblem(layout=layout, epilogue=epilogue, **fields)


def convolutions(rng: random.Random) -> Conv2dProblem:
    groups = rng.choice((1, 1, 3))
    names = ("batch", "height", "width", "kernel_height", "kernel_width")
    sizes: dict[str, Any] = {name: rng.choice((1, 2, 7, 13)) for name in names}
    return Conv2dProblem(
        direction=rng.choice(("forward", "input_grad", "weight_grad")),
        **sizes,
        in_channels=groups * rng.choice((1, 8, 61)),
        out_channels=groups * rng.choice((1, 8, 61)),
        groups=groups,
        strides=(rng.choice((1, 3)), 1),
        dilation=(1, rng.choice((1, 2))),
    )


def attentions(rng: random.Random) -> AttentionProblem:
    kv_heads = rng.choice((1, 3))
    return AttentionProblem(
        direction=rng.choice(("forward", "backward")),
        batch=rng.choice(SIZES[:4]),
        q_len=rng.choice(SIZES),
        kv_len=rng.choice(SIZES),
        heads=kv_heads * rng.choice((1, 5)),
        kv_heads=kv_heads,
        head_dim=rng.choice((8, 61, 128)),
        is_causal=rng.random() < 0.5,
        window=rng.choice((None, (3, 5), (1 << 40, 0))),
        scale=1.0,
    )


DRAWS = (products, convolutions, attentions)


def drawn(count: int, seed: int = 0, draws=DRAWS) -> list[Problem]:
    rng = random.Random(seed)
    return [rng.choice(draws)(rng) for _ in range(count)]


# --- features -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_features_are_finite_numbers_at_every_size(device):
    for problem in drawn(24):
        numbers = features.of_problem(problem, device)
        assert all(np.isfinite(value) for value in numbers.values()), problem
        assert all(np.ndim(value) == 0 for value in numbers.values())
        with compiled_elsewhere():
            names = diagnose(problem, device).candidates
        for name in names:
            space = policy.space_of(variants.get(problem.op, name), problem, device)
            own = features.of_space(problem, device, name, space)
            assert not own.keys() & numbers.keys()
            for value in own.values():
                assert np.isfinite(value).all()
                assert np.shape(value) in ((), (len(space),))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_described_configs_have_what_their_space_says(device):
    rng = random.Random(1)
    seen = set()
    for problem in drawn(60, seed=1):
        with compiled_elsewhere():
            names = diagnose(problem, device).candidates
        for name in names:
            variant = variants.get(problem.op, name)
            space = variant.space(problem, device)
            places = [rng.randrange(len(space)) for _ in range(3)]
            configs = [space.config(place) for place in places[: len(space)]]
            own = variants.described(variant, problem, configs, device)
            assert own.configs() == tuple(configs)
            assert own.derived.keys() == space.derived.keys()
            for field, values in own.derived.items():
                expected = space.derived[field][places[: len(configs)]]
                np.testing.assert_allclose(values, expected, rtol=1e-12, err_msg=field)
            assert (own.modelled_us is None) == (space.modelled_us is None)
            if own.modelled_us is not None and space.modelled_us is not None:
                np.testing.assert_allclose(
                    own.modelled_us, space.modelled_us[places[: len(configs)]], 1e-12
                )
            seen |= {name} if space.derived else set()
    assert seen


def test_a_part_of_the_scores_is_seen_as_a_mask_says():
    for problem in drawn(200, draws=(attentions,)):
        assert isinstance(problem, AttentionProblem)
        q, k = np.ogrid[: problem.q_len, : problem.kv_len]
        seen = np.ones((problem.q_len, problem.kv_len), bool)
        if problem.is_causal:
            seen &= k <= q
        if problem.window:
            seen &= (k >= q - problem.window[0]) & (k <= q + problem.window[1])
        part = seen.mean() if seen.size else 0.0
        found = features.of_problem(problem, AMX)["seen"]
        assert found == pytest.approx(part, abs=1e-12)


def test_the_product_of_a_convolution_has_its_operations():
    for problem in drawn(100, draws=(convolutions,)):
        assert isinstance(problem, Conv2dProblem)
        if problem.direction == "input_grad" and problem.strides != (1, 1):
            continue  # the product is over pixels of x, some of which see few taps
        if problem.direction == "input_grad" and problem.out_size != (
            problem.height,
            problem.width,
        ):
            continue
        m, n, k = features.conv_product(problem)
        assert 2 * m * n * k * problem.groups == problem.flops


# --- models ---------------------------------------------------------------------------


def stump(name: str, edge: float, low: float, high: float) -> trees.Ensemble:
    """Two members that both tell the values of one feature apart."""
    tree = trees.Tree(
        feature=np.zeros(3, int),
        step=np.zeros(3, int),
        left=np.array([1, 0, 0]),
        right=np.array([2, 0, 0]),
        value=np.array([0.0, low, high]),
        is_leaf=np.array([False, True, True]),
    )
    return trees.ensemble([[tree], [tree]], [0.0, 0.1], [name], [np.array([edge])])


ANYTHING = (-math.inf, math.inf)


def op_model(kinds: dict[str, Kind], ours: set[str], problems, device) -> OpModel:
    def regressor(*of: float) -> Regressor:
        return Regressor(trees=stump("flops", *of), noise=0.05, gain=2.0)

    names = {n for p in problems for n in features.of_problem(p, device)}
    return OpModel(
        regressors={
            "xla": regressor(20.0, 0.0, 1.0),
            "ours": regressor(20.0, 1.0, -1.0),  # relative to XLA
        },
        overhead_us=2.5,
        kinds=kinds,
        reach=dict.fromkeys(sorted(names), ANYTHING),
        variants=frozenset(ours),
        facts={"problems": 7},
    )


def of_products(margin: float = 1.0, **portfolio) -> Model:
    """Covers float32 products without an epilogue on a CPU with AMX."""
    plain = GemmProblem(m=1, n=1, k=1)
    kind = Kind(margin=margin, portfolio=portfolio, facts={})
    kinds = {features.kind(plain): kind}
    return Model(
        device="cpu-amx", ops={"matmul": op_model(kinds, {"gemm_cpu"}, [plain], AMX)}
    )


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


def test_shipped_models_are_small_and_as_written():
    for path in sorted(shipped.DATA.glob("*.npz")):
        data = path.read_bytes()
        assert len(data) <= 500 << 10
        assert Model.from_bytes(data).to_bytes() == data
        assert shipped.of_kind(path.stem) is not None
    assert shipped.of_kind("no such device") is None


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


def test_a_damaged_file_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    monkeypatch.setattr(trust, "_warned", set())
    shipped.forget()
    (tmp_path / "cpu-amx.npz").write_bytes(of_products().to_bytes()[:-99])
    diagnosis = diagnose(GemmProblem(m=99, n=99, k=99), AMX)
    with pytest.warns(RuntimeWarning, match="cpu-amx.npz cannot be read"):
        found = policy.decide(diagnosis)
    shipped.forget()
    assert found == policy.unmodelled(diagnosis)


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


def test_doctor_names_the_model_in_use(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    known = of_products().ops["matmul"]
    seen = {"model": {"geomean": 1.234, "under": [0.005, 0.0]}}
    here = {"jax": importlib.metadata.version("jax")}
    found = []
    for run in (here, {"jax": "0.0.1"}):
        facts = {"problems": 77, "held out": seen, "versions": [run]}
        own = dataclasses.replace(known, facts=facts)
        kind = model.device_kind(local_cpu())
        data = Model(device=kind, ops={"matmul": own}).to_bytes()
        (tmp_path / f"{kind}.npz").write_bytes(data)
        shipped.forget()
        report = doctor()
        found.append(report.models)
        text = (
            "1 kinds of problem, 77 problems surveyed; held out, 1.23 times as fast "
            "as the best peer, 0.5% under 0.97"
        )
        assert text in str(report)
    shipped.forget()
    assert [m.same_versions for (m,) in found] == [True, False]
    assert [m.op for (m,) in found] == ["matmul"] * 2


# --- which model serves a device ------------------------------------------------------


@pytest.fixture
def of_gpus(monkeypatch, tmp_path):
    """Writes models of GPUs with these shares of losses, by their names."""
    monkeypatch.setattr(shipped, "DATA", tmp_path)

    def write(**shares: float) -> None:
        for name, share in shares.items():
            known = of_products().ops["matmul"]
            facts = {"model": {"under": [share, 0.0]}}
            kinds = {
                n: dataclasses.replace(kind, facts=facts)
                for n, kind in known.kinds.items()
            }
            numbers = features.of_problem(GemmProblem(m=99, n=99, k=99), NAMED[name])
            reach = {n: (v - 1, v + 1) for n, v in numbers.items()}
            op = dataclasses.replace(known, kinds=kinds, reach=reach)
            kind = model.device_kind(NAMED[name])
            data = Model(device=kind, ops={"matmul": op}).to_bytes()
            (tmp_path / f"{kind}.npz").write_bytes(data)
        shipped.forget()

    yield write
    shipped.forget()


def test_a_gpu_without_a_survey_has_the_model_of_the_nearest_alike(of_gpus):
    asked = GemmProblem(m=99, n=99, k=99)
    of_gpus(A100=0.0, H200=0.01)
    for name, surveyed in (("H200", "H200"), ("H100", "H200"), ("A100", "A100")):
        device = NAMED[name]
        assert shipped.surveyed_for(device) == NAMED[surveyed]
        found = shipped.covering(asked, device)
        assert found is not None and found == shipped.serving(device)
        assert found.device == model.device_kind(device)
    served = (shipped.covering(asked, NAMED[n]) for n in ("H200", "H100"))
    own, other = (m.ops["matmul"] for m in served if m)
    assert other.regressors.keys() == own.regressors.keys()
    for name, regressor in own.regressors.items():
        assert other.regressors[name].noise >= regressor.noise
    larger = dataclasses.replace(asked, m=9999)
    for name in ("H200", "H100"):  # beyond the reach
        assert shipped.covering(larger, NAMED[name]) is None
    alone = dataclasses.replace(NAMED["H100"], capability=(10, 0))
    assert shipped.surveyed_for(alone) is None is shipped.serving(alone)
    assert shipped.surveyed_for(AMX) is None is shipped.covering(asked, AMX)


def test_elsewhere_a_model_leaves_kinds_that_lost_too_much(of_gpus):
    asked = GemmProblem(m=99, n=99, k=99)
    of_gpus(H200=0.02)
    assert shipped.covering(asked, NAMED["H200"]) is not None
    assert shipped.covering(asked, NAMED["H100"]) is None
    of_gpus(H100=0.02)
    assert shipped.covering(asked, NAMED["H100"]) is not None

"""Answers of one GPU on another GPU that runs the same kernels."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tracea_jax import dispatch, variants
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.answers.kindred import MEASURED, PREDICTED
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import environment as environments
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment, environment_key
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Best, Entry, Observation, union

pytestmark = pytest.mark.once

H200, H100, A100 = NAMED["H200"], NAMED["H100"], NAMED["A100"]
BF16: dict = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
ASKED = GemmProblem(m=512, n=1024, k=2048, **BF16)
NEAR = dataclasses.replace(ASKED, m=640)
GEMM_SM90 = variants.get("matmul", "gemm_sm90")
CONFIGS = [
    GEMM_SM90.heuristic(ASKED, H200),
    *sorted(GEMM_SM90.space(ASKED, H200).configs(), key=str),
]


@pytest.fixture(autouse=True)
def cuda_13(monkeypatch):
    """A driver and a compiler, whether or not they are installed."""
    monkeypatch.setattr(environments.nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(environments.devices, "cuda_driver_version", lambda: "13.0")
    yield
    environment.cache_clear()
    environment_key.cache_clear()


@pytest.fixture(autouse=True)
def no_memory():
    environment.cache_clear()
    environment_key.cache_clear()


def measured_in(place, config=0, *, ratio=1.5, problem=ASKED, variant="gemm_sm90"):
    """An entry in which a config beat XLA by a ratio, or did not run."""
    name = named(problem, Choice(variant="gemm_sm90", config=CONFIGS[config]), H200)
    chosen = {"variant": "xla", "config": {}} if variant == "xla" else name
    race = {"protocol": "race"}
    ours = Observation(**name, time_us=12.0 / ratio, extra=race)
    xla = Observation(variant="xla", config={}, time_us=12.0, extra=race)
    return Entry(
        problem=problem.to_json(),
        environment=place,
        best=Best(
            **chosen,
            time_us=12.0 / ratio if variant != "xla" else 12.0,
            xla_us=12.0,
            ratio=ratio if variant != "xla" else 1.0,
        ),
        observations=union([ours, xla]),
        written="2026-01-01",
    )


def on(device, **changed):
    return dataclasses.replace(environment(device), **changed)


def answer(directory, shipped=()):
    found = Knowledge(directory, shipped).lookup(ASKED, H100)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "kindred"),
    [
        ({}, True),
        ({"device": "NVIDIA GH200 480GB"}, True),
        ({"driver": "12", "nvrtc": "12.8"}, True),
        ({"units": 114}, False),
        ({"arch": "sm_100a"}, False),
        ({"unknown": {"sources": "of an older version"}}, False),
        ({"schema": 2}, False),
    ],
)
def test_kin_run_the_same_kernels_on_as_many_multiprocessors(changed, kindred):
    here, there = on(H100), dataclasses.replace(on(H200), **changed)
    assert here.is_kindred(there) == there.is_kindred(here) == kindred


def test_cpus_have_no_kin():
    one = CpuDevice(name="one", isa="avx512", cores=2)
    other = dataclasses.replace(one, name="other")
    assert not environment(one).is_kindred(environment(other))


@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.03, MEASURED, 1.3])
def test_what_won_clearly_is_inherited_and_otherwise_xla(tmp_path, ratio):
    Knowledge(tmp_path).own.record(measured_in(on(H200), 3, ratio=ratio))
    found = answer(tmp_path)
    assert (found.origin, found.is_exact) == ("inherited", False)
    assert found.measured_in == on(H200)
    if ratio >= MEASURED:
        assert found.choice.config == CONFIGS[3] and found.ratio == ratio
    else:
        assert found.choice.variant == "xla"
        assert (found.time_us, found.xla_us, found.ratio) == (12.0, 12.0, 1.0)
    # Who asks for a kernel of ours gets the best one, however it compares with XLA.
    ours = Knowledge(tmp_path).lookup(ASKED, H100, ("gemm_sm90", "gemm_sm80"))
    assert ours is not None and ours.choice.config == CONFIGS[3]
    assert Knowledge(tmp_path).lookup(ASKED, A100) is None


def test_what_xla_did_not_race_against_is_inherited(tmp_path):
    entry = measured_in(on(H200), 3)
    alone = dataclasses.replace(entry.best, xla_us=None, ratio=None)
    Knowledge(tmp_path).own.record(dataclasses.replace(entry, best=alone))
    found = answer(tmp_path)
    assert found.choice.config == CONFIGS[3] and found.origin == "inherited"


def test_an_answer_of_xla_is_inherited(tmp_path):
    Knowledge(tmp_path).own.record(measured_in(on(H200), variant="xla"))
    assert answer(tmp_path).choice.variant == "xla"


def test_own_answers_then_inherited_then_interpolated(tmp_path):
    shipped = tmp_path / "shipped"
    own = tmp_path / "own"
    known = (shipped / "tuned",)
    origins = []
    for keeper, entry in (
        (shipped, measured_in(on(H200), 1, problem=NEAR)),
        (own, measured_in(on(H100), 2, problem=NEAR)),
        (shipped, measured_in(on(H200), 3)),
        (own, measured_in(on(H100), 4, ratio=1.01)),
    ):
        Knowledge(keeper).own.record(entry)
        found = answer(own, known)
        origins.append((found.origin, found.measured_in and found.measured_in.device))
    assert origins == [
        ("interpolated", H200.name),
        ("interpolated", None),
        ("inherited", H200.name),
        ("tuned", None),
    ]
    assert answer(own, known).choice.config == CONFIGS[4]


@pytest.mark.parametrize("ratio", [0.5, 0.97, 1.02, 2.0])
def test_what_other_shapes_let_expect_of_kin_must_be_clear_too(tmp_path, ratio):
    Knowledge(tmp_path).own.record(measured_in(on(H200), 0, ratio=ratio, problem=NEAR))
    found = answer(tmp_path)
    assert (found.origin, found.measured_in) == ("interpolated", on(H200))
    assert found.choice.variant == "xla" or (found.ratio or 0) >= PREDICTED
    assert ratio != 0.5 or found.choice.variant == "xla"
    assert ratio != 2.0 or found.choice.variant == "gemm_sm90"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_same_device_is_the_nearest_kin(tmp_path, order):
    entries = [
        measured_in(on(H200), 1),
        measured_in(on(H100, driver="12"), 2),
        measured_in(on(H200, nvrtc="13.1"), 3),
    ]
    for i in order:
        Knowledge(tmp_path).own.record(entries[i])
    assert answer(tmp_path).choice.config == CONFIGS[2]


def test_damaged_and_renamed_kin_are_passed_over(tmp_path):
    Knowledge(tmp_path).own.record(measured_in(on(H200), 1))
    store = Store(tmp_path / "tuned")
    place = store.path(Name.of(ASKED.to_json(), on(H200).key))
    other = store.directory / on(A100).key / "matmul" / place.name
    other.parent.mkdir(parents=True)
    other.write_bytes(place.read_bytes())  # says that it is of an H200
    assert answer(tmp_path).measured_in == on(H200)
    place.write_bytes(b"garbage")
    assert Knowledge(tmp_path).lookup(ASKED, H100) is None


def test_processes_that_agree_have_the_same_kin(tmp_path):
    Knowledge(tmp_path).own.record(measured_in(on(H200), 1))
    before = Knowledge(tmp_path)
    digest = before.digest(H100)
    assert Knowledge(tmp_path).digest(H100) == digest
    Knowledge(tmp_path).own.record(measured_in(on(H200), 2, problem=NEAR))
    Knowledge(tmp_path).own.record(measured_in(on(H100, driver="12"), 3))
    assert Knowledge(tmp_path).digest(H100) != digest
    found = before.lookup(ASKED, H100)
    assert found is not None and found.choice.config == CONFIGS[1]
    near = before.lookup(NEAR, H100)
    assert near is not None and near.origin == "interpolated"


def test_a_plan_says_where_its_answer_was_measured(tmp_path, monkeypatch):
    knowledge = Knowledge(tmp_path)
    knowledge.own.record(measured_in(on(H200), 1, problem=ASKED))
    knowledge.own.record(measured_in(on(H200), 1, ratio=1.01, problem=NEAR))
    monkeypatch.setattr(dispatch.knowledge, "agreed", lambda *_: knowledge)
    inherited = dispatch.plan(ASKED, H100)
    assert (inherited.variant, inherited.origin) == ("gemm_sm90", "inherited")
    assert "it won its race on NVIDIA H200, sm_90a" in inherited.reason
    assert (inherited.time_us, inherited.xla_us) == (None, None)
    doubtful = dispatch.plan(NEAR, H100)
    assert (doubtful.variant, doubtful.origin) == ("xla", "inherited")
    assert "nothing was clearly faster on NVIDIA H200" in doubtful.reason

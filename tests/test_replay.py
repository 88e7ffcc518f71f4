"""The replay benchmark, and the search's quality on recorded spaces where they are."""

from __future__ import annotations

import gzip
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.once

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def module(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, made)  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


replay = module("replay")
RECORDED = replay.load(replay.directory())
NAMES = [space.name for space in RECORDED]
needs_data = pytest.mark.skipif(not RECORDED, reason="no recorded spaces beside")

FILE = """tile,kind,time_ms,compile_s,status
16,a,4.0,0.1,ok
32,a,,0.1,RuntimeFailedConfig
16,b,2.0,0.1,ok
32,b,5.0,0.1,ok
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.csv.gz"
    path.write_bytes(gzip.compress(FILE.encode()))
    return replay.read(path)


def synthetic(seed=0):
    """1,200 configs with a smooth landscape, a cliff and failures."""
    axes = np.meshgrid(
        2 ** np.arange(5), 16 * np.arange(1, 16), np.arange(8), [0, 1], indexing="ij"
    )
    a, b, c, d = (axis.ravel() for axis in axes)
    rng = np.random.default_rng(seed)
    slow = (np.log2(a) - 3) ** 2 / 8 + (np.log2(b / 96)) ** 2 / 4 + abs(c - 5) / 8
    slow += 0.3 * (b % 32 != 0) + 0.2 * d + 0.02 * rng.random(len(a))
    times = np.where(a * b > 2048, np.nan, np.exp(slow))
    return replay.Recorded(
        name="synthetic", columns={"a": a, "b": b, "c": c, "d": d}, times=times
    )


def test_a_file_is_read(tiny):
    assert tiny.name == "tiny"
    np.testing.assert_array_equal(tiny.columns["tile"], [16, 32, 16, 32])
    assert tiny.columns["kind"].tolist() == ["a", "a", "b", "b"]
    np.testing.assert_array_equal(tiny.times, [4.0, np.nan, 2.0, 5.0])
    assert tiny.best == 2.0


def test_the_fraction_counts_failures_and_lasts(tiny):
    seen = tiny.times[[1, 3, 0, 2]]
    np.testing.assert_allclose(tiny.fractions(seen, 6), [0, 0.4, 0.5, 1, 1, 1])


def test_nowhere_is_no_spaces(tmp_path):
    assert replay.load(tmp_path / "missing") == []


def test_the_interval_covers_the_mean_and_narrows():
    rng = np.random.default_rng(0)
    few, many = rng.random((3, 10)), rng.random((3, 1000))
    for samples in (few, many):
        low, high = replay.interval(samples)
        assert low < samples.mean() < high
    assert np.diff(replay.interval(many)) < np.diff(replay.interval(few)) / 3


def test_every_method_spends_its_evaluations_on_different_configs():
    space = synthetic()
    methods = {"ours": replay.tuned(), "random": replay.random, **replay.ablations()}
    for name, method in methods.items():
        order = method(space, 1, 40)
        assert len(order) == len(set(order)) == 40, name
        assert order == method(space, 1, 40), name


def test_the_search_beats_random_search():
    space = synthetic()

    def found(method):
        runs = [space.times[method(space, seed, 48)] for seed in range(4)]
        return np.mean([space.fractions(run, 48)[-1] for run in runs])

    assert found(replay.tuned()) > 0.97 > found(replay.random)


def test_the_search_stops_by_itself_near_the_best():
    space = synthetic()
    order, tuner = replay.search(space, 0, budget=256)
    assert tuner.stop == "converged" and len(order) < 160
    assert space.fractions(space.times[order], 160)[-1] > 0.95


@needs_data
@pytest.mark.parametrize("space", RECORDED, ids=lambda space: space.name)
def test_recorded_spaces_are_searched_well(space):
    """Six seeds; ``bench_tuner.py`` is the measurement."""
    runs = [space.times[replay.tuned()(space, seed, 96)] for seed in range(6)]
    drawn = [space.times[replay.random(space, seed, 96)] for seed in range(200)]

    def mean(group):
        return np.mean([space.fractions(times, 96)[-1] for times in group])

    assert mean(runs) > mean(drawn)
    assert mean(runs) > 0.75


@pytest.mark.skipif("gemm_rtx3090" not in NAMES, reason="no recorded GEMM space beside")
def test_an_analytic_model_speeds_up_the_gemm_space():
    space = RECORDED[NAMES.index("gemm_rtx3090")]
    order = replay.tuned(log_prior=replay.clblast_sgemm)(space, 0, 32)
    found = space.fractions(space.times[order], 32)
    assert found[15] > 0.9 and found[31] > 0.97

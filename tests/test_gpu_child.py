"""The measuring child on a GPU: real crashes and hangs cost one config each."""

from __future__ import annotations

import dataclasses

import pytest

from tracea_jax.device import local_cuda
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure
from tracea_jax.tuning.lab.child import ChildLab, Limits
from tracea_jax.tuning.lab.local import xla_choice
from tracea_jax.tuning.measure import CandidateError
from tracea_jax.tuning.verdict import kernel_race, verdict
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

pytestmark = pytest.mark.gpu

PROBLEM = GemmProblem(
    m=512, n=512, k=512, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
)
TIMING = measure.Timing(slice_s=1e-3, settle_s=0.05, candidate_s=0.05, cold_runs=3)
# The child compiles and opens the device within these; a hang costs ``run_s``.
LIMITS = Limits(run_s=15.0, slowdown=1.0)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    child = ChildLab(
        "gpu_faults:bench_of",
        local_cuda(0),
        TIMING,
        directory=directory,
        limits=LIMITS,
    )
    yield child
    child.close()


def choice(stages: int) -> Choice:
    config = GEMM_SM90.heuristic(PROBLEM, local_cuda(0))
    config = dataclasses.replace(config, stages=stages)
    return Choice(variant="gemm_sm90", config=config)


def is_measured(lab, wanted):
    sample = lab.sample(PROBLEM, wanted)
    return 1 < sample.time_us < 1e5 and sample.cold_us and sample.cold_us > 1


def test_sound_configs_are_measured_and_verified(lab):
    wanted = choice(4)
    lab.compile(PROBLEM, (wanted,))
    assert is_measured(lab, wanted) and is_measured(
        lab, xla_choice(PROBLEM, lab._device)
    )
    assert lab.verify(PROBLEM, wanted).ok


def test_a_verdict_is_by_kernel_times(lab):
    """Less than the time of executions in a row, and of both."""
    ours, xla = choice(4), xla_choice(PROBLEM, lab._device)
    found = kernel_race(lab, PROBLEM, ours, ours, xla)
    assert found is not None
    assert 0 < found.level_us(ours) < 1.05 * lab.sample(PROBLEM, ours).time_us
    assert 0 <= found.error(xla, ours) < 0.1
    chosen = verdict(found, ours, ours, xla)
    assert found.level_us(chosen) <= min(map(found.level_us, (ours, xla)))


@pytest.mark.parametrize(
    ("stages", "kind"), [(2, "launch_error"), (3, "timeout"), (2, "launch_error")]
)
def test_a_fault_costs_one_config(lab, stages, kind):
    with pytest.raises(CandidateError) as failed:
        lab.sample(PROBLEM, choice(stages))
    assert failed.value.kind == kind
    assert is_measured(lab, choice(4))


def test_a_race_goes_on_without_who_crashes(lab):
    good, bad = choice(4), choice(2)
    race = lab.race(PROBLEM, (good, bad, xla_choice(PROBLEM, lab._device)), limit_s=5.0)
    assert set(race.failures) == {bad}
    assert good in race.times_us and len(race.times_us) == 2

"""Surveys of GPUs: plans without the device, groups of problems, lost processes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import pathlib

import pytest

from tracea_jax import variants
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.policy import Choice
from tracea_jax.runtime import nvrtc
from tracea_jax.survey import ahead, gpu, loaded, rows
from tracea_jax.survey.ahead import Planned, Planner
from tracea_jax.survey.candidates import PEERS, Preferences, candidates
from tracea_jax.survey.measure import row_of
from tracea_jax.survey.problems import DRAWS, Numbered
from tracea_jax.tuning.lab.worker import WorkerHung, WorkerLost
from tracea_jax.tuning.measure import Race

pytestmark = pytest.mark.once

H100 = NAMED["H100"]


@pytest.fixture
def without_compiler(monkeypatch):
    """Keys of kernels that need no compiler."""

    def key(kernel):
        text = repr((kernel.source, kernel.entry, kernel.options, kernel.arch))
        return hashlib.sha256(text.encode()).hexdigest()

    monkeypatch.setattr(nvrtc, "key", key)


@pytest.mark.parametrize(
    ("op", "variant", "is_tuned"),
    [
        *(("conv2d", "xla", True), ("conv2d", "conv2d_product", True)),
        *(("conv2d", "conv2d_sm80", False), ("gated_matmul", "gated_fused", True)),
        *(("gated_matmul", "gated_unfused", True), ("attention", "cudnn", True)),
        *(("attention", "attention_sm90", False), ("matmul", "gemm_sm90", False)),
    ],
)
def test_what_xla_computes_is_tuned(op, variant, is_tuned):
    own = variants.get(op, variant)
    drawn = (Numbered.of(op, 0, "cuda", i).problem for i in range(200))
    problem = next(p for p in drawn if own.why_not(p, H100) is None)
    choice = Choice(variant=variant, config=own.heuristic(problem, H100))
    assert (loaded.compiler_options(problem, choice, H100) is None) == is_tuned
    assert loaded.compiler_options(problem, choice, local_cpu()) is None


# Plans.


@pytest.mark.parametrize("op", DRAWS)
def test_a_plan_is_what_was_planned(tmp_path, op, without_compiler):
    planner = Planner(H100)
    plan = [planner.planned(Numbered.of(op, 5, "cuda", i)) for i in range(3)]
    ahead.write(tmp_path, plan)
    assert list(ahead.read(tmp_path)) == plan
    for planned in plan:
        assert planned.choices[0].variant in PEERS
        assert "xla" in {c.variant for c in planned.choices}


def test_later_problems_need_fewer_kernels(without_compiler):
    """Those of the same form prefer random configs whose kernels are planned."""
    planner, fresh = Planner(H100), Planner(H100)
    problem = Numbered.of("matmul", 0, "cuda", 0)
    same = [
        Numbered(index=i, seed=0, problem=problem.problem) for i in range(4)
    ]  # other random configs of one problem
    counts = []
    for numbered in same:
        planned = planner.planned(numbered)
        counts.append(len(planner.kernels))
        assert len(set(planned.choices)) == len(planned.choices)
    new = [b - a for a, b in itertools.pairwise(counts)]
    assert max(new) <= 2 < counts[0]  # one is random, and one may be likely
    assert len(planned.choices) > len(fresh.planned(problem).choices)


def test_the_plan_of_a_window_goes_first(tmp_path, without_compiler):
    from tracea_jax.survey.run import survey

    device = local_cpu()
    plan = [
        Planned(numbered=Numbered.of("matmul", 0, "cpu", i), choices=())
        for i in (7, 3, 1)
    ]

    def measure_all(left):
        return (empty(n, device) for n in left)

    how = {"budget_s": 1e6, "ops": ("matmul",), "plan": plan}
    survey(tmp_path, device, most=5, measure_all=measure_all, **how)
    there = rows.read(rows.path(tmp_path, device, "matmul"))
    assert [row.index for row in there] == [7, 3, 1, 0, 2]


# Groups.


def planned_products(count):
    device = local_cpu()
    for i in range(count):
        numbered = Numbered.of("matmul", 0, "cpu", i)
        wishes = Preferences(count=2)
        choices = candidates(numbered.problem, device, numbered.name, wishes)
        yield Planned(numbered=numbered, choices=choices)


def empty(numbered, device):
    nothing = Race(times_us={}, repeats={}, failures={})
    return row_of(numbered, nothing, {}, device)


def raced(planned):
    times = {c: (2.0, 2.0, 2.0) for c in planned.choices}
    race = Race(times_us=times, repeats=dict.fromkeys(times, 1), failures={})
    return row_of(planned.numbered, race, {}, local_cpu())


def finished(error=None):
    future = concurrent.futures.Future()
    if error is None:
        future.set_result(())
    else:
        future.set_exception(error)
    return future


def in_groups(plan, monkeypatch, *, race, compile_peers=lambda p: finished(), **how):
    monkeypatch.setattr(gpu, "TOGETHER", 4)
    return list(
        gpu.in_groups(
            plan,
            local_cpu(),
            compile_peers=compile_peers,
            start_kernels=lambda planned: None,
            race=race,
            **how,
        )
    )


def test_groups_are_limited_by_number_and_memory(monkeypatch):
    plan = list(planned_products(11))
    monkeypatch.setattr(gpu, "TOGETHER", 4)
    assert [len(g) for g in gpu.groups(plan)] == [4, 4, 3]
    monkeypatch.setattr(gpu, "MOST_BYTES", 1)
    assert [len(g) for g in gpu.groups(plan)] == [1] * 11
    assert list(gpu.groups([])) == []


def test_peers_of_later_groups_compile_while_one_races(monkeypatch):
    began, seen = [], []

    def compile_peers(planned):
        began.append(planned.numbered.index)
        return finished()

    def race(group):
        seen.append((len(group), len(began)))
        return [raced(p) for p in group]

    plan = planned_products(14)
    found = in_groups(
        plan, monkeypatch, race=race, compile_peers=compile_peers, depth=2
    )
    assert [row.index for row in found] == [*range(14)]
    assert seen == [(4, 12), (4, 14), (4, 14), (2, 14)]


def test_a_lost_process_costs_only_the_problem_that_ends_it(monkeypatch):
    failures, asked = [], []

    def race(group):
        asked.append([p.numbered.index for p in group])
        if any(p.numbered.index == 2 for p in group):
            raise WorkerLost("ended by SIGSEGV", began=True)
        return [raced(p) for p in group]

    plan = planned_products(5)
    found = in_groups(plan, monkeypatch, race=race, on_failure=failures.append)
    assert [row.index for row in found] == [0, 1, 2, 3, 4]
    assert [len(row.times) for row in found] == [2, 2, 0, 2, 2]
    assert {kind for _, kind in found[2].failed} == {"launch_error"}
    assert asked == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [2], [3], [4]]
    assert len(failures) == 4 and "SIGSEGV" in failures[0]


def test_a_problem_whose_peers_hang_has_no_times(monkeypatch):
    def compile_peers(planned):
        hung = WorkerHung("no end after 120 s", began=True)
        return finished(hung if planned.numbered.index == 1 else None)

    found = in_groups(
        planned_products(3),
        monkeypatch,
        race=lambda group: [raced(p) for p in group],
        compile_peers=compile_peers,
    )
    assert sorted(row.index for row in found) == [0, 1, 2]
    (lost,) = [row for row in found if row.index == 1]
    assert not lost.times and {kind for _, kind in lost.failed} == {"timeout"}


def test_rows_that_came_before_the_loss_are_not_lost_twice(monkeypatch):
    """Each problem has one row, also where a group is asked again."""
    tries = []

    def race(group):
        tries.append(len(group))
        if len(tries) == 1:
            raise WorkerLost("ended", began=True)
        return [raced(p) for p in group]

    found = in_groups(planned_products(4), monkeypatch, race=race)
    assert [row.index for row in found] == [0, 1, 2, 3]
    assert tries == [4, 2, 2]


def test_processes_have_a_place_to_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    place = gpu.Place(cache=tmp_path / "a", programs=tmp_path / "b")
    found = place.environment
    assert found["TRACEA_CACHE_DIR"] == str(tmp_path / "a")
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "b")
    assert found["XLA_FLAGS"].split() == [
        "--xla_a=1",
        "--xla_gpu_enable_command_buffer=",
    ]
    assert found["JAX_PLATFORMS"] == "cuda,cpu"


@pytest.mark.slow
def test_problems_are_measured_in_other_processes(tmp_path):
    """All that a GPU needs, on this machine's CPU, which has wall times."""
    device = local_cpu()
    place = gpu.Place(
        cache=tmp_path, programs=pathlib.Path(tmp_path / "programs"), platforms="cpu"
    )
    plan = list(planned_products(3))
    found = list(gpu.measured(plan, device, place, compilers=1))
    assert [row.index for row in found] == [0, 1, 2]
    assert all(len(row.times) == 2 and not row.failed for row in found)
    assert list((tmp_path / "programs").iterdir())


# Memory.


def loaded_without_memory(monkeypatch, is_lost):
    """``loaded`` of a product whose choices of these names find no memory."""
    (planned,) = planned_products(1)
    subject = loaded.Subject.of(planned.numbered.problem, local_cpu())
    compiled = loaded.Subject.compiled

    def compile_or_fail(self, choice):
        if not is_lost(choice):
            return compiled(self, choice)

        def call(*inputs):
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

        return call

    monkeypatch.setattr(loaded.Subject, "compiled", compile_or_fail)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = loaded.loaded({0: (subject, planned.choices)}, threads)
    return planned.choices, found[0]


def test_a_choice_without_memory_fails_alone(monkeypatch):
    choices, found = loaded_without_memory(monkeypatch, lambda c: c.variant == "xla")
    assert found.failed == {choices[0]: "launch_error"}
    assert set(found.calls) == set(choices[1:])
    assert choices[1:]


def test_a_process_without_memory_is_replaced(monkeypatch):
    """Its problems are raced again; a row without times would be final."""
    with pytest.raises(loaded.GpuLost, match="memory"):
        loaded_without_memory(monkeypatch, lambda c: True)


def test_processes_that_compile_return_memory(tmp_path):
    place = gpu.Place(cache=tmp_path, programs=tmp_path)
    assert place.compiling["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" not in place.environment

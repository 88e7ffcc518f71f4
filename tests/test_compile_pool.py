"""Compiling ahead: a hang, a crash or a refusal costs one kernel only."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import os
import threading
import time

import pytest
import sample_kernels
import stubborn_kernels as stubborn
import synthetic_bench as synthetic
from synthetic_bench import Bench, Clock

from tracea_jax import device as devices
from tracea_jax import policy, variants
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab import ahead, compile_pool, local
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.measure import CandidateError

pytestmark = pytest.mark.once

nvrtc_needed = pytest.mark.nvrtc


@pytest.fixture
def pool(tmp_path):
    with contextlib.closing(CompilePool(tmp_path, workers=1, timeout_s=60)) as pool:
        yield pool


def pids(pool) -> list[int]:
    return [w.pid for w in pool._crew._workers]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@nvrtc_needed
def test_kernels_are_found_compiled(tmp_path, pool, monkeypatch):
    kernels = [stubborn.variation(i) for i in range(3)]
    for future in [pool.submit(k) for k in kernels]:
        assert future.result() is None
    assert len(pids(pool)) == 1  # one worker did them all
    monkeypatch.setattr(cubins, "_memory", {})
    monkeypatch.setattr(nvrtc, "compile", None)  # nobody compiles any more
    for kernel in kernels:
        assert cubins.get_or_compile(kernel, tmp_path).key == nvrtc.key(kernel)


@nvrtc_needed
def test_nothing_is_compiled_twice(tmp_path, pool):
    first = pool.submit(sample_kernels.scale())
    same = dataclasses.replace(sample_kernels.scale(), grid=(7, 1, 1))
    assert pool.submit(same) is first  # the launch is no part of the code
    first.result()
    with contextlib.closing(CompilePool(tmp_path)) as other:
        assert other.submit(sample_kernels.scale()).done()
        assert pids(other) == []


@nvrtc_needed
def test_a_refused_kernel_is_refused_for_ever(tmp_path, pool):
    bad = dataclasses.replace(sample_kernels.scale(), source="int broken = ;")
    good = pool.submit(sample_kernels.scale())
    with pytest.raises(nvrtc.CompileError, match="expected an expression"):
        pool.submit(bad).result()
    assert good.result() is None
    with contextlib.closing(CompilePool(tmp_path)) as other:
        future = other.submit(bad)
        assert future.done() and pids(other) == []
        with pytest.raises(cubins.KnownFailure, match="found before") as caught:
            future.result()
    assert caught.value.kind == "compile_error"
    assert "expected an expression" in caught.value.log


@nvrtc_needed
def test_a_compiler_that_hangs_is_killed_and_remembered(tmp_path):
    kernel = stubborn.with_source(stubborn.Hangs)
    with contextlib.closing(CompilePool(tmp_path, workers=1, timeout_s=0.5)) as pool:
        pool.submit(sample_kernels.scale()).result()
        (before,) = pids(pool)
        with pytest.raises(cubins.KnownFailure, match="within 0.5 s") as caught:
            pool.submit(kernel).result()
        assert caught.value.kind == "timeout"
        assert not is_running(before)
    # A patient successor does not even try, nor does a program that lowers the kernel.
    with contextlib.closing(CompilePool(tmp_path, workers=1)) as pool:
        after = pool.submit(stubborn.variation(1))
        assert pool.submit(kernel).done()
        assert after.result() is None
    with pytest.raises(cubins.KnownFailure, match="found before"):
        cubins.get_or_compile(kernel, tmp_path)


@nvrtc_needed
def test_a_compiler_that_crashes_costs_one_kernel(tmp_path, pool):
    crash = pool.submit(stubborn.with_source(stubborn.Aborts))
    good = pool.submit(sample_kernels.scale())
    with pytest.raises(nvrtc.CompileError, match="SIGABRT\n  out of registers"):
        crash.result()
    assert good.result() is None
    assert not list(tmp_path.rglob("*.failed.json"))  # it may have been bad luck


@nvrtc_needed
def test_a_worker_killed_while_idle_is_replaced(pool):
    pool.submit(stubborn.variation(1)).result()
    (worker,) = pool._crew._workers
    os.kill(worker.pid, 9)
    worker._process.wait()
    assert pool.submit(stubborn.variation(2)).result() is None
    assert pids(pool) != [worker.pid]


@nvrtc_needed
def test_workers_know_neither_jax_nor_scipy(pool):
    with pytest.raises(nvrtc.CompileError, match=r"loaded: \[\]"):
        pool.submit(stubborn.with_source(stubborn.Tells)).result()


@nvrtc_needed
@pytest.mark.parametrize("way", ["close", "forget"])
def test_ending_a_pool_ends_all_it_started(tmp_path, way):
    files, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    pool = CompilePool(tmp_path, workers=2)
    hanging = [pool.submit(stubborn.with_source(stubborn.Hangs, i)) for i in range(3)]
    end = time.monotonic() + 20
    while len(started := pids(pool)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(started) == 2
    if way == "close":
        pool.close()
        pool.close()
        assert pool.submit(stubborn.variation(1)).cancelled()
    else:
        del pool
        gc.collect()
    for future in hanging:
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(timeout=20)
    assert not any(map(is_running, started))
    assert set(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("cores", "free_gib", "expected"),
    [(1, 64, 1), (2, 64, 1), (4, 64, 3), (64, 64, 8), (64, 2, 2), (64, 0, 1)],
)
def test_as_many_workers_as_the_machine_can_bear(
    cores, free_gib, expected, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(compile_pool, "_available_bytes", lambda: free_gib << 30)
    assert compile_pool.default_workers() == expected


@pytest.mark.parametrize(
    ("limit", "left"), [("max", None), (str(65 << 24), 1 << 24), (str(1 << 20), 0)]
)
def test_the_memory_of_a_container_counts(tmp_path, monkeypatch, limit, left):
    monkeypatch.setattr(compile_pool, "_CGROUP", tmp_path / "none")
    free = compile_pool._available_bytes()
    monkeypatch.setattr(compile_pool, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 29}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 29}\n")
    found = compile_pool._available_bytes()
    assert found == left if left is not None else found > free // 2


# Labs that compile ahead.

GPU = devices.named("H200")
GEMM = GemmProblem(m=256, n=256, k=128, lhs="bfloat16", rhs="bfloat16", out="bfloat16")


def gpu_choice():
    config = variants.get("matmul", "gemm_sm90").heuristic(GEMM, GPU)
    return policy.Choice(variant="gemm_sm90", config=config)


@nvrtc_needed
def test_a_choice_is_prepared_when_its_kernel_is_in_the_store(tmp_path, pool):
    bench, there = Bench(Clock(), {}), []
    (kernel,) = ahead.kernels_of(GEMM, gpu_choice(), GPU)
    bench.hook = lambda step, c: there.append(cubins.has(tmp_path, kernel))
    timing = synthetic.timing(bench.clock)
    here = local.LocalLab(lambda p, d: bench, GPU, timing, pool=pool)
    here.compile(GEMM, (gpu_choice(), synthetic.XLA))
    assert here.sample(GEMM, gpu_choice()).time_us == pytest.approx(100.0)
    assert there and all(there)
    here.close()
    assert pids(pool) == []


@nvrtc_needed
@pytest.mark.parametrize(
    ("source", "kind"),
    [(stubborn.Hangs, "timeout"), (stubborn.Aborts, "compile_error")],
)
def test_a_kernel_that_cannot_be_had_fails_its_choice(
    tmp_path, monkeypatch, source, kind
):
    kernel, bench = stubborn.with_source(source), Bench(Clock(), {})
    kernels = {"gemm_sm90": (kernel,), "xla": ()}
    monkeypatch.setattr(ahead, "kernels_of", lambda p, c, d: kernels[c.variant])
    pool = CompilePool(tmp_path, workers=1, timeout_s=0.5)
    timing = synthetic.timing(bench.clock)
    with contextlib.closing(
        local.LocalLab(lambda p, d: bench, GPU, timing, pool=pool)
    ) as here:
        here.compile(GEMM, (gpu_choice(), synthetic.XLA))
        with pytest.raises(CandidateError) as caught:
            here.sample(GEMM, gpu_choice())
        assert caught.value.kind == kind
        assert here.race(GEMM, (gpu_choice(), synthetic.XLA)).failures.keys() == {
            gpu_choice()
        }
    assert bench.prepared == [synthetic.XLA]

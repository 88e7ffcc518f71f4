"""The executions of an op's bench, on a CPU that poses as a GPU where needed."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from tracea_jax import roofline
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.ops.common.bench import OpBench, Workload
from tracea_jax.ops.matmul.workload import MATMUL
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure

pytestmark = pytest.mark.once

XLA = Choice(variant="xla", config=None)
CPU = CpuDevice(name="a CPU", isa="baseline", cores=2)
H200, H100 = NAMED["H200"], NAMED["H100"]


@pytest.fixture(autouse=True)
def every_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices("cpu"))


class Executed(collections.Counter):
    """How often each input set was executed, by the seed that made it."""

    @property
    def workload(self):
        def execute(seed, *, problem, choice):
            jax.debug.callback(lambda s: self.update([int(s[0])]), seed)
            return [seed]

        return Workload(
            check=lambda problem: None,
            operands=lambda problem, seed: [jnp.full(1, seed)],
            execute=execute,
            ragged=lambda problem: problem,
            judge=lambda *_: lambda results: 0.0,
        )


def product(m, n, k):
    return GemmProblem(m=m, n=n, k=k, lhs="bfloat16", rhs="bfloat16", out="bfloat16")


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 96, 101])
def test_so_many_are_executed_as_are_asked_for(device, count):
    executed = Executed()
    run = OpBench(executed.workload, product(16, 512, 512), device).prepare(XLA)
    for _ in range(2):
        run(count)
    jax.effects_barrier()
    assert executed.total() == 2 * count
    assert (measure.batch_of(run) > 1) == (device is H200)


def test_all_input_sets_take_their_turns():
    executed = Executed()
    bench = OpBench(executed.workload, product(16, 512, 512), H200)
    run = bench.prepare(XLA)
    run(3 * run.batch)
    jax.effects_barrier()
    assert set(executed.values()) == {3}
    assert len(executed) == run.batch


@pytest.mark.parametrize("device", [H200, H100], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "problem",
    [
        product(1, 256, 256),
        product(16, 3072, 768),
        product(1, 4096, 4096),
        product(256, 4608, 3584),
        product(512, 8192, 8192),
    ],
    ids=str,
)
def test_a_call_keeps_a_gpu_busy_and_leaves_its_cache(device, problem):
    executed = Executed()
    batch = OpBench(executed.workload, problem, device).prepare(XLA).batch
    busy_us = batch * roofline.floor_us(problem, device)
    if batch < 32:
        assert busy_us >= 100
        assert batch * problem.bytes > 2 * device.l2_bytes
    assert 1 < batch <= 32
    assert batch * problem.bytes < 1 << 30


@pytest.mark.parametrize("name", ["NVIDIA H200", "a GPU that nobody knows"])
def test_input_sets_leave_a_gpu_most_of_its_memory(name):
    device = dataclasses.replace(H200, name=name)
    large = product(1 << 16, 1 << 16, 1 << 15)
    small = dataclasses.replace(device, memory_bytes=9 * large.bytes)
    batches = [
        OpBench(Executed().workload, large, d).prepare(XLA).batch
        for d in (device, small)
    ]
    assert 1 <= batches[0] * large.bytes <= device.memory_bytes / 8
    assert batches[1] == 1


def test_slices_are_of_whole_calls():
    counts = []

    def run(count):
        counts.append(count)
        clock[0] += count * 7_000

    run.batch = 12
    clock = [0]
    timing = measure.Timing(clock=lambda: clock[0])
    sample = measure.time_us(run, timing)
    assert sample.time_us == pytest.approx(7)
    assert all(count % 12 == 0 for count in counts)
    assert max(counts) * 7 >= 0.75 * timing.slice_s * 1e6


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "gpu"])
def test_a_product_is_run_and_verified(device):
    bench = OpBench(MATMUL, product(8, 24, 40), device)
    bench.prepare(XLA)(33)
    verified = bench.verify(XLA)
    assert verified.ok
    assert math.isfinite(verified.max_rel_error)

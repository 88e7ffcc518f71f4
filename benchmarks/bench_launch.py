"""The cost of launching and of compiling our kernels, apart from running them.

    python benchmarks/bench_launch.py [--chain 256] [--out DIRECTORY]

Launching (on a GPU): chains of tiny products, each of which needs the one before, on
our kernel and on XLA's, without command buffers, which would replay launches. For each
side

- ``interval_us``: from the start of one launch call to the start of the next, on the
  host, measured by the profiler and including the profiler's own cost. Launches do not
  wait for the device, so this is all the host's work for a launch: XLA's call of our
  handler, our encoding of tensor maps, the launch.
- ``call_us``: time of the driver's launch call alone, measured by the profiler.
- ``wall_us``: wall-clock time that one more product adds to an execution without a
  profiler: the longer of the host's and the device's time for it.
- ``processor_us``: processor time of the whole process that one more product adds.
- ``kernel_us``: time of the kernel.

- rows of kind "peer": host time of one launch of a tiny kernel after another, of a
  kernel of the user in programs of such kernels, and in cupy and torch where they are.

Compiling (anywhere with NVRTC): for some problems the kernel that runs on an H200 when
nothing is tuned, compiled several times without any cache, with its registers, spills,
stack, and warnings of the assembler.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from matmul_suite import GELU, SILU

import tracea_jax as tracea
from tracea_jax import variants
from tracea_jax.campaign import local_device
from tracea_jax.device import NAMED, CudaDevice
from tracea_jax.diagnosis import diagnose
from tracea_jax.emit.kernel import Kernel
from tracea_jax.ops.common import kernel_time
from tracea_jax.problem import GatedMatmulProblem, GemmProblem, Problem
from tracea_jax.runtime import nvrtc
from tracea_jax.tuning import measure

SIZE = 64  # of the products in a chain
SHORT = 32  # products of the shorter chain


# --- launching ------------------------------------------------------------------------


def launching(length: int, rounds: int) -> list[dict[str, Any]]:
    """A row for our kernel and one for XLA's."""
    rows = []
    chains = {
        (side, count): chain(side, count)
        for side in ("tracea", "xla")
        for count in (SHORT, length)
    }
    runs = {key: common.repeating(call) for key, call in chains.items()}
    timing = measure.Timing(slice_s=0.05, rounds=rounds, max_rounds=rounds)
    race = measure.race(runs, timing)
    for failure in race.failures.values():
        raise failure
    for side in ("tracea", "xla"):
        short, long = (side, SHORT), (side, length)
        added = length - SHORT
        wall = race.median_us(long) - race.median_us(short)
        busy = _processor_us(chains[long]) - _processor_us(chains[short])
        kernels = common.race({"long": chains[long]}, rounds)["long"]
        rows.append(
            {
                "kind": "launch",
                "name": side,
                "wall_us": wall / added,
                "processor_us": busy / added,
                "kernel_us": statistics.median(kernels) / length,
                **_host_us(chains[long], length),
            }
        )
    return rows


def chain(side: str, count: int) -> common.Call:
    """A compiled function of ``length`` products in a row."""

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(count):
            x = tracea.ops.matmul(x, w, implementation=side)
        return x

    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(k, (SIZE, SIZE)).astype(jnp.bfloat16) for k in keys)
    w = w / SIZE**0.5  # or else the chain overflows
    return lambda: run(x, w)


def _processor_us(call: common.Call, repeats: int = 50) -> float:
    """Processor time of one execution, all threads together."""
    run = common.repeating(call)
    run(repeats)
    start = time.process_time()
    run(repeats)
    return 1e6 * (time.process_time() - start) / repeats


def _host_us(call: common.Call, length: int) -> dict[str, float | None]:
    """Medians over the launch calls of a profiled execution; None if it has none."""
    jax.block_until_ready(call())
    found: list[tuple[float, float]] = []
    for plane in kernel_time.profiled([call]).planes:
        if plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            events = [e for e in line.events if e.name.startswith("cuLaunchKernel")]
            # Only the thread that enqueued the chain counts.
            if len(events) >= length > len(found):
                found = sorted((e.start_ns, e.duration_ns) for e in events)
    if not found:
        return {"interval_us": None, "call_us": None}
    starts = [start for start, _ in found]
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    return {
        "interval_us": statistics.median(gaps) * 1e-3,
        "call_us": statistics.median(duration for _, duration in found) * 1e-3,
    }


# --- peers ----------------------------------------------------------------------------

ADD_ONE = """
extern "C" __global__ void add_one(const float* x, float* y, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1.0f;
}
"""
ELEMENTS = 1024
LAUNCHES = 500


def peers(length: int) -> Iterator[dict[str, Any]]:
    """Rows of launches with each library that is installed."""
    yield {"kind": "peer", "name": "tracea.cuda_kernel", "wall_us": _in_program(length)}
    for name, prepare in (("cupy.RawKernel", _cupy), ("torch.add", _torch)):
        try:
            launch, wait = prepare()
        except ImportError:
            continue
        times = [_launched_us(launch, wait) for _ in range(7)]
        yield {"kind": "peer", "name": name, "wall_us": statistics.median(times)}


def _in_program(length: int) -> float:
    """Wall-clock time that one more launch adds to a program."""
    op = tracea.cuda_kernel(ADD_ONE, scalars={"n": lambda x: x.size})
    x = jnp.zeros(ELEMENTS)

    def run_us(count: int) -> float:
        @jax.jit
        def run(x: jax.Array) -> jax.Array:
            for _ in range(count):
                x = op(x)
            return x

        times = [_launched_us(lambda: run(x).block_until_ready(), lambda: None, 20)]
        times += [_launched_us(lambda: run(x).block_until_ready(), lambda: None, 20)]
        return times[-1]

    return (run_us(length) - run_us(SHORT)) / (length - SHORT)


def _launched_us(launch: Any, wait: Any, count: int = LAUNCHES) -> float:
    start = time.perf_counter()
    for _ in range(count):
        launch()
    wait()
    return 1e6 * (time.perf_counter() - start) / count


def _cupy() -> tuple[Any, Any]:
    cupy: Any = importlib.import_module("cupy")
    kernel = cupy.RawKernel(ADD_ONE, "add_one")
    x, y = cupy.zeros((2, ELEMENTS), cupy.float32)
    arguments = (x, y, np.int64(ELEMENTS))
    grid = (ELEMENTS // 256,)
    return (lambda: kernel(grid, (256,), arguments)), cupy.cuda.Device().synchronize


def _torch() -> tuple[Any, Any]:
    torch: Any = importlib.import_module("torch")
    x, y = torch.zeros((2, ELEMENTS), device="cuda")
    return (lambda: torch.add(x, 1.0, out=y)), torch.cuda.synchronize


# --- compiling ------------------------------------------------------------------------


def problems() -> list[Problem]:
    """Problems whose kernels are made of different parts."""
    half: Any = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
    square: Any = {"m": 4096, "n": 4096, "k": 4096}
    fp8: Any = {**half, "lhs": "float8_e4m3fn", "rhs": "float8_e4m3fn", "layout": "nt"}
    return [
        GemmProblem(**square, **half),
        GemmProblem(**square, **half, epilogue=GELU),
        GemmProblem(**square, **half, epilogue=SILU),
        GatedMatmulProblem(**square, **half),
        GemmProblem(m=16, n=28672, k=8192, **half),
        GemmProblem(m=4095, n=4097, k=4099, **half),
        GemmProblem(**square, precision="highest"),
        GemmProblem(**square),
        GemmProblem(**square, **fp8),
    ]


def kernels(problem: Problem, device: CudaDevice) -> Iterator[tuple[str, Kernel]]:
    """(variant, kernel) of each variant of ours that can serve a problem, untuned."""
    diagnosis = diagnose(problem, device)
    for name in diagnosis.candidates:
        variant = variants.get(problem.op, name)
        call = variant.call(problem, variant.heuristic(problem, device), device)
        for kernel in variants.kernels_in(call):
            yield name, kernel


def compiling(device: CudaDevice, times: int) -> Iterator[dict[str, Any]]:
    """A row for every kernel; the first compilation also loads NVRTC."""
    for problem in problems():
        for name, kernel in kernels(problem, device):
            cubins = [nvrtc.compile(kernel) for _ in range(times)]
            seconds = [cubin.compile_s for cubin in cubins]
            cubin = cubins[-1]
            yield {
                "kind": "compile",
                "name": f"{problem}: {name}",
                "entry": kernel.entry,
                "arch": cubin.arch,
                "first_s": seconds[0],
                "median_s": statistics.median(seconds),
                "longest_s": max(seconds),
                "registers": cubin.registers,
                "spill_bytes": cubin.spill_bytes,
                "stack_bytes": cubin.stack_bytes,
                "smem_static_bytes": cubin.smem_static_bytes,
                "warnings": list(cubin.warnings),
                "cubin_bytes": len(cubin.image),
            }


# --- the program ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--chain", type=int, default=256, help="products in a row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--times", type=int, default=3, help="to compile each kernel")
    args = parser.parse_args()
    # Set before the device is first used: a replayed graph would launch only once.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_command_buffer= {flags}"
    device = local_device()
    is_gpu = isinstance(device, CudaDevice)
    target = device if isinstance(device, CudaDevice) else NAMED["H200"]
    rows = list(compiling(target, args.times))
    print(render(rows))
    if is_gpu:
        launches = launching(args.chain, args.rounds)
        print(render(launches))
        rows += launches
        beside = list(peers(args.chain))
        print(render(beside))
        rows += beside
    print(common.save("launch", rows, args))


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A table of numbers, their names from the first row."""
    names = [k for k, v in rows[0].items() if isinstance(v, int | float | None)]
    body = [
        (
            row["name"],
            *("-" if row[n] is None else f"{row[n]:.4g}" for n in names),
        )
        for row in rows
    ]
    return common.table(("name", *names), body)


if __name__ == "__main__":
    main()

"""Matmul, convolution and attention on a CPU: python benchmarks/bench_cpu.py [--quick]

Every case races in turns, in one process, with default inputs of random normal numbers:

    ours       the fastest of our kernels by the known answers (without a tuned answer,
               by its heuristic)
    untuned    the same kernel with the heuristic's config, if a tuning found another
    XLA        the code people write, compiled by jit with XLA's defaults
    oneDNN     the same with XLA's oneDNN custom calls, where this jaxlib has them
    torch      the same on torch, with as many threads, where torch is installed

Ratios are of rounds in which the machine was quiet. Where other programs use the
machine, a long ``--race-s`` and short slices give more such rounds. The peak of f32
arithmetic is measured in the same run (cpu_peak.cc, by the system's compiler, if there
is one).
``--tune S`` tunes each case for S seconds first.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from bench_matmul import plain as plain_product
from cpu_suite import Case, Row, memory, suite, summary

from tracea_jax import dispatch, variants
from tracea_jax.campaign import local_device
from tracea_jax.device import Device
from tracea_jax.ops.attention import workload as attention_workload
from tracea_jax.ops.conv2d import workload as conv2d_workload
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, Conv2dProblem, GemmProblem, Problem
from tracea_jax.tuning import measure

try:
    import torch
except ImportError:
    torch = None

WORKLOADS = {
    "matmul": matmul_workload.MATMUL,
    "conv2d": conv2d_workload.CONV2D,
    "attention": attention_workload.ATTENTION,
}
ONEDNN = {"xla_cpu_experimental_onednn_custom_call": True}
PEAK_S = 0.05  # of each measurement of the peak
_MOST_ROUNDS = 1000

Call = Callable[[], Any]


# --- contenders -----------------------------------------------------------------------


def plain(*operands: jax.Array, problem: Problem) -> jax.Array:
    """The problem as people write it."""
    if isinstance(problem, GemmProblem):
        return plain_product(*operands, problem=problem)
    if isinstance(problem, AttentionProblem):
        return jax.nn.dot_product_attention(*operands, is_causal=problem.is_causal)
    assert isinstance(problem, Conv2dProblem)
    return jax.lax.conv_general_dilated(
        *operands,
        problem.strides,
        problem.padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def contenders(case: Case, device: Device, inputs: list[jax.Array]) -> dict[str, Call]:
    """The calls that race, by name; ours first, if a kernel of ours runs at all."""
    problem = case.problem
    calls: dict[str, Call] = {}
    choice = own(problem, device)
    if choice is not None:
        calls["ours"] = _ours(problem, choice, inputs)
        untuned = heuristic(problem, device, choice.variant)
        if untuned != choice:
            calls["untuned"] = _ours(problem, untuned, inputs)
    compiled = jax.jit(functools.partial(plain, problem=problem))
    calls["xla"] = functools.partial(compiled, *inputs)
    if (onednn := _onednn(problem, inputs)) is not None:
        calls["onednn"] = onednn
    if (other := torch_call(problem, inputs)) is not None:
        calls["torch"] = other
    return calls


def own(problem: Problem, device: Device) -> Choice | None:
    """The choice that ``implementation="tracea"`` runs, if any kernel of ours can."""
    try:
        plan = dispatch.plan(problem, device, implementation="tracea")
    except dispatch.Unsupported:
        return None
    return Choice(variant=plan.variant, config=plan.config)


def heuristic(problem: Problem, device: Device, name: str) -> Choice:
    config = variants.get(problem.op, name).heuristic(problem, device)
    return Choice(variant=name, config=config)


def _ours(problem: Problem, choice: Choice, inputs: list[jax.Array]) -> Call:
    execute = WORKLOADS[problem.op].execute
    run = jax.jit(functools.partial(execute, problem=problem, choice=choice))
    return lambda: run(*inputs)[0]


def _onednn(problem: Problem, inputs: list[jax.Array]) -> Call | None:
    """XLA with the flag of oneDNN; None where this jaxlib does not know the flag."""
    run = jax.jit(functools.partial(plain, problem=problem), compiler_options=ONEDNN)
    try:
        jax.block_until_ready(run(*inputs))
    except Exception as e:
        print(f"no oneDNN: {str(e).splitlines()[0]}", file=sys.stderr)
        return None
    return functools.partial(run, *inputs)


def torch_call(problem: Problem, inputs: list[jax.Array]) -> Call | None:
    """The problem on torch, in its own favourite memory layout; None without torch."""
    if torch is None:
        return None
    arrays = [_to_torch(x) for x in inputs]
    functional = torch.nn.functional
    if isinstance(problem, GemmProblem):
        return functools.partial(_torch_product, functional, problem, arrays)
    if isinstance(problem, AttentionProblem):
        q, k, v = (x.transpose(1, 2) for x in arrays)  # batch, heads, rows, width
        return functools.partial(
            functional.scaled_dot_product_attention,
            q,
            k,
            v,
            is_causal=problem.is_causal,
        )
    assert isinstance(problem, Conv2dProblem)
    x = arrays[0].permute(0, 3, 1, 2)  # "channels last" in memory
    w = arrays[1].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    (top, bottom), (left, right) = problem.padding
    pads = (left, right, top, bottom)
    symmetric = (top, left) if (top, left) == (bottom, right) else None

    def convolve() -> Any:
        if symmetric is not None:
            return functional.conv2d(x, w, stride=problem.strides, padding=symmetric)
        return functional.conv2d(functional.pad(x, pads), w, stride=problem.strides)

    return convolve


def _torch_product(functional: Any, problem: GemmProblem, arrays: list[Any]) -> Any:
    lhs, rhs, *bias = arrays
    lhs, rhs = (
        x.T if how == "t" else x
        for x, how in zip((lhs, rhs), problem.layout, strict=True)
    )
    y = torch.addmm(bias[0], lhs, rhs) if bias else lhs @ rhs
    if problem.epilogue.activation == "gelu":
        return functional.gelu(y, approximate="tanh")
    return functional.relu(y) if problem.epilogue.activation == "relu" else y


def _to_torch(x: jax.Array) -> Any:
    wide = torch.from_numpy(np.array(x.astype(jnp.float32)))
    return wide.to(getattr(torch, str(x.dtype)))


# --- measuring ------------------------------------------------------------------------


def measured(case: Case, args: argparse.Namespace, peak: Peak | None) -> Row:
    """The row of a case."""
    problem, device = case.problem, local_device()
    workload = WORKLOADS[problem.op]
    inputs = workload.operands(problem, 1)
    calls = contenders(case, device, inputs)
    judge = workload.judge(problem, device, inputs, 1)
    errors = {name: judge([calls[name]()]) for name in ("ours", "xla") if name in calls}
    runs = {name: common.repeating(call) for name, call in calls.items()}
    timing = measure.Timing(
        slice_s=args.slice_s,
        rounds=args.rounds,
        max_rounds=_MOST_ROUNDS,
        race_s=args.race_s,
    )
    gflops = peak.gflops() if peak else None
    race = measure.race(runs, timing)
    for failure in race.failures.values():
        raise failure
    if "ours" not in calls:
        raise dispatch.Unsupported(f"no kernel of ours takes {problem}")
    choice = own(problem, device)
    assert choice is not None
    us = race.median_us("ours")

    def ratio(name: str) -> float | None:
        return race.ratio(name, "ours") if name in calls else None

    rate = 1e-3 * work(problem) / us
    return {
        "variant": choice.variant,
        "config": dataclasses.asdict(choice.config),
        "ours_us": us,
        **{
            f"{name}_us": race.median_us(name) if name in calls else None
            for name in ("xla", "onednn", "torch")
        },
        "ratio": ratio("xla"),
        "ratio_onednn": ratio("onednn"),
        "ratio_torch": ratio("torch"),
        "ratio_tuned": ratio("untuned"),
        "gflops": rate,
        "of_peak": rate / gflops if gflops else None,
        "error_of_bound": errors.get("ours"),
        "xla_error_of_bound": errors.get("xla"),
        "rounds": len(race.quiet_us("ours")),
    }


def work(problem: Problem) -> float:
    """Floating-point operations that a problem needs: half of all if it is causal."""
    is_causal = isinstance(problem, AttentionProblem) and problem.is_causal
    return problem.flops * (0.5 if is_causal else 1.0)


class Peak:
    """Measures the highest rate of f32 multiply-adds, on all threads (cpu_peak.cc)."""

    def __init__(self, isa: str, threads: int) -> None:
        """Compiles the program.

        Raises:
          OSError, subprocess.CalledProcessError: without a compiler.
        """
        self._threads = threads
        flags = {"avx2": "-mavx2"}
        flags |= dict.fromkeys(("avx512", "avx512_bf16", "amx"), "-mavx512f")
        with tempfile.TemporaryDirectory() as directory:
            library = pathlib.Path(directory) / "peak.so"
            command = ["g++", "-O3", "-shared", "-fPIC"]
            command += ["-mfma", flags[isa]] if isa in flags else []
            command += [str(common.ROOT / "cpu_peak.cc"), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True)
            self._run = ctypes.CDLL(str(library)).multiply_adds
        self._run.restype = ctypes.c_double
        self._run.argtypes = [ctypes.c_int64]

    def gflops(self) -> float:
        """Runs the program; the rate in GFLOP/s."""
        rounds, operations = 1 << 14, 0.0
        while True:
            start = time.perf_counter()
            results = [0.0] * self._threads

            def work(i: int, results: list[float], rounds: int) -> None:
                results[i] = self._run(rounds)

            threads = [
                threading.Thread(target=work, args=(i, results, rounds))
                for i in range(self._threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            elapsed, operations = time.perf_counter() - start, sum(results)
            if elapsed >= PEAK_S:
                return 1e-9 * operations / elapsed
            rounds *= 4


# Runs in its own process, because not every system can reset a peak of memory.
_LONG_ATTENTION = """
import jax, jax.numpy as jnp, pathlib
from tracea_jax import ops

def kilobytes(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(name + ":"))

q = jax.random.normal(jax.random.key(0), (1, 16384, 8, 64), jnp.float32)
run = jax.jit(lambda q: ops.attention(q, q, q, implementation="tracea"))
run = run.lower(jax.block_until_ready(q)).compile()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = kilobytes("VmRSS")
y = jax.block_until_ready(run(q))
print((kilobytes("VmHWM") - before - y.nbytes / 1024) / 1024)
"""


def attention_growth_mb() -> float:
    """By how much attention over 16384 tokens (8 heads of 64, f32) lifts the peak."""
    command = [sys.executable, "-W", "ignore", "-c", _LONG_ATTENTION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


# --- the program ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few of each group")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="groups with this")
    parser.add_argument("--tune", type=float, metavar="S", help="seconds for each case")
    parser.add_argument("--rounds", type=int, default=11, help="least of each race")
    parser.add_argument("--race-s", type=float, default=0.0, help="least of a race")
    parser.add_argument("--slice-s", type=float, default=0.05, help="least of a slice")
    common.add_arguments(parser)
    args = parser.parse_args()
    device = local_device()
    threads = len(os.sched_getaffinity(0))
    if torch is not None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
    peak = _peak(device.arch, threads)
    chosen = [c for c in suite(args.quick) if _is_meant(c, args.only)]
    rows: list[Row] = []
    for case in chosen:
        if args.tune:
            common.tune_together(
                [case.problem],
                budget_s=args.tune,
                goal="throughput",
            )
        rows.append(row_of(case, args, peak))
        print(line(rows[-1]), flush=True)
        save(rows, [], args)
    extra = [memory(attention_growth_mb())] if sys.platform == "linux" else []
    path = save(rows, extra, args)
    print(render(rows))
    print(render_figures([*summary(rows), *extra]))
    print(path)


def save(rows: list[Row], extra: list[Row], args: argparse.Namespace) -> pathlib.Path:
    figures = [*summary(rows), *extra]
    return common.save("cpu", rows, args, isa=local_device().arch, figures=figures)


def _is_meant(case: Case, only: Sequence[str] | None) -> bool:
    return only is None or any(text in case.group for text in only)


def _peak(isa: str, threads: int) -> Peak | None:
    try:
        return Peak(isa, threads)
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"the peak is not measured: {e}", file=sys.stderr)
        return None


def row_of(case: Case, args: argparse.Namespace, peak: Peak | None) -> Row:
    """The row of a case, with the error if it fails."""
    head: Row = {
        "group": case.group,
        "problem": case.problem.to_json(),
        "text": str(case.problem),
        "must": case.must,
        "stretch": case.stretch,
    }
    try:
        return {**head, **measured(case, args, peak)}
    except Exception as e:  # recorded, and the rest goes on
        return {**head, "error": f"{type(e).__name__}: {e}"[:1000]}


# --- tables ---------------------------------------------------------------------------


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['text']}: {row['error'].splitlines()[0]}"
    return f"{row['text']}: {row['ratio']:.2f} (goal {row['must']:.2f})"


def render(rows: Sequence[Row]) -> str:
    head = ("problem", "group", "ours us", "XLA/ours", "must", "stretch", "oneDNN/ours")
    head += ("torch/ours", "untuned/ours", "GFLOP/s", "of peak", "error", "XLA's")
    return common.table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        empty = ("-",) * 10
        return row["text"], row["group"], *empty, row["error"].splitlines()[0]
    names = ("ratio", "must", "stretch", "ratio_onednn", "ratio_torch", "ratio_tuned")
    return (
        row["text"],
        row["group"],
        f"{row['ours_us']:.1f}",
        *(_number(row[name]) for name in names),
        f"{row['gflops']:.0f}",
        _number(row["of_peak"]),
        _number(row["error_of_bound"]),
        _number(row["xla_error_of_bound"]),
    )


def render_figures(figures: Sequence[Row]) -> str:
    head = ("figure", "value", "must", "stretch")
    body = [
        (f["name"], *(_number(f[name]) for name in ("value", "must", "stretch")))
        for f in figures
    ]
    return common.table(head, body)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()

"""Elementwise functions beside XLA, and on a CPU beside numpy.

    python benchmarks/bench_elementwise.py [--sizes 262144 16777216] [--out DIRECTORY]

A row is a function of two arrays (or one) of a dtype. On a GPU times are those of
kernels. On a CPU they are of whole calls from Python, in turns, each of them waited for
as numpy's are, and there are two comparisons, each of like with like: calls that make
an array for the result (``tracea_us``, ``xla_us``, ``numpy_us``), and calls that are
given one (``..._into_us``): numpy by ``out=``, JAX by an operand that is donated. A
ratio is the peer's time divided by ours, the worse one of the two.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import common
import jax
import numpy as np

from tracea_jax.campaign import local_device
from tracea_jax.device import CudaDevice
from tracea_jax.ops import elementwise
from tracea_jax.problem.elementwise import ELEMENTS, FUNCTIONS, ElementwiseProblem

PEERS = ("tracea", "xla", "numpy")


def operands(problem: ElementwiseProblem) -> list[np.ndarray]:
    rng = np.random.default_rng(0)

    def array() -> np.ndarray:
        parts = rng.standard_normal((1 + problem.is_complex, problem.size))
        whole = parts[0] + 1j * parts[1] if problem.is_complex else parts[0]
        return whole.astype(problem.dtype)

    return [array() for _ in range(problem.row.operands)]


def row(problem: ElementwiseProblem, rounds: int) -> dict[str, Any]:
    function = getattr(elementwise, problem.function)
    on_device = [jax.numpy.asarray(a) for a in operands(problem)]
    calls: dict[str, Callable[[], Any]] = {}
    for name in PEERS[:2]:
        of_arrays = functools.partial(function, implementation=name)
        calls[name] = making(of_arrays, on_device)
        if not isinstance(local_device(), CudaDevice):
            calls[f"{name}_into"] = given(of_arrays, on_device)
    if not isinstance(local_device(), CudaDevice):
        arrays = [np.asarray(a) for a in on_device]  # the same memory
        theirs = getattr(np, problem.function)
        calls["numpy"] = functools.partial(theirs, *arrays)
        calls["numpy_into"] = functools.partial(theirs, *arrays, out=theirs(*arrays))
    for call in calls.values():
        jax.block_until_ready(call())
    times = common.race(calls, rounds)
    found = {f"{name}_us": statistics.median(us) for name, us in times.items()}
    for peer in PEERS[1:]:
        ratios = [
            common.median_ratio(times, f"{peer}{how}", f"tracea{how}")
            for how in ("", "_into")
            if f"{peer}{how}" in times
        ]
        if ratios:
            found[f"{peer}_ratio"] = min(ratios)
    gbs = problem.bytes / found["tracea_us"] / 1e3
    return {**problem.to_json(), **found, "gb_per_s": gbs}


def making(function: Callable[..., jax.Array], arrays: list[jax.Array]) -> common.Call:
    """A call that makes an array, and is over when it is filled."""
    jitted = jax.jit(function)
    return lambda: jitted(*arrays).block_until_ready()


def given(function: Callable[..., jax.Array], arrays: list[jax.Array]) -> common.Call:
    """A call that fills the array of the call before it."""
    jitted = jax.jit(
        lambda _, *arrays: function(*arrays), donate_argnums=0, keep_unused=True
    )
    last = jax.numpy.array(function(*arrays))

    def call() -> jax.Array:
        nonlocal last
        place = last.unsafe_buffer_pointer()
        last = jitted(last, *arrays).block_until_ready()
        assert last.unsafe_buffer_pointer() == place
        return last

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1 << 18, 1 << 24])
    parser.add_argument("--dtypes", nargs="+", default=[*ELEMENTS])
    parser.add_argument("--functions", nargs="+", default=[*FUNCTIONS])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for size in args.sizes:
        for dtype in args.dtypes:
            for name in args.functions:
                problem = ElementwiseProblem(function=name, size=size, dtype=dtype)
                rows.append(row(problem, args.rounds))
    names = [n for n, v in rows[0].items() if isinstance(v, float)]
    body = [
        (f"{r['function']} {r['size']} {r['dtype']}", *(f"{r[n]:.4g}" for n in names))
        for r in rows
    ]
    print(common.table(("function", *names), body))
    load = os.getloadavg()[1]  # of everything on the machine, ourselves too
    print(common.save("elementwise", rows, args, load=load))


if __name__ == "__main__":
    main()

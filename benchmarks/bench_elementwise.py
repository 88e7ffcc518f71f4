"""Elementwise functions beside XLA, and on a CPU beside numpy.

    python benchmarks/bench_elementwise.py [--sizes 262144 16777216] [--out DIRECTORY]

A row is a function of two arrays (or one) of a dtype. On a GPU times are those of
kernels; on a CPU they are of whole calls, in turns, and numpy writes into an array that
is there already (``numpy_us``), or makes one as we do (``numpy_new_us``). A ratio is
the peer's time divided by ours, that of numpy the better one of its two.
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
    arrays = [np.asarray(a) for a in on_device]  # on a CPU the same memory

    def compiled(implementation: str) -> Callable[[], Any]:
        call = jax.jit(functools.partial(function, implementation=implementation))
        return functools.partial(call.lower(*on_device).compile(), *on_device)

    calls = {"tracea": compiled("tracea"), "xla": compiled("xla")}
    if not isinstance(local_device(), CudaDevice):
        theirs = getattr(np, problem.function)
        out = theirs(*arrays)
        calls["numpy"] = functools.partial(theirs, *arrays, out=out)
        calls["numpy_new"] = functools.partial(theirs, *arrays)
    for call in calls.values():
        jax.block_until_ready(call())
    times = common.race(calls, rounds)
    found = {f"{name}_us": statistics.median(us) for name, us in times.items()}
    ratios = {"xla_ratio": common.median_ratio(times, "xla", "tracea")}
    if "numpy" in calls:
        peers = [
            common.median_ratio(times, n, "tracea") for n in ("numpy", "numpy_new")
        ]
        ratios["numpy_ratio"] = min(peers)
    gbs = problem.bytes / found["tracea_us"] / 1e3
    return {**problem.to_json(), **found, **ratios, "gb_per_s": gbs}


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

"""The same products by other libraries, where they are installed.

    python benchmarks/bench_peers.py [--budget-s 60] [--out DIRECTORY]

Pallas Mosaic GPU's Hopper matmul (part of jax; the best of its own sweep of configs),
``torch.matmul``, and tokamax's gated linear unit, each in one race with XLA and with
our op after tuning. bfloat16, random normal inputs, kernel times. Each library that
cannot run here is reported with the reason.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import bench_matmul
import common
import jax
import jax.numpy as jnp

from tracea_jax.problem import GatedMatmulProblem, GemmProblem

Problem = GemmProblem | GatedMatmulProblem

PALLAS = "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"
SWEEP_S = 30.0  # for Pallas, whose configs take seconds to compile


class Missing(RuntimeError):
    """A library is not installed, or cannot run the problem."""


def problems() -> list[Problem]:
    dtypes: Any = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
    sizes: list[Any] = [{"m": s, "n": s, "k": s} for s in (4096, 8192)]
    plain = [GemmProblem(**size, **dtypes) for size in sizes]
    return [*plain, *(GatedMatmulProblem(**size, **dtypes) for size in sizes)]


def pallas(problem: Problem, operands: list[jax.Array], sweep_s: float) -> common.Call:
    """The fastest of the configs that the module's own program sweeps.

    Raises:
      Missing: if the module cannot be imported, or none of its configs runs.
    """
    if not isinstance(problem, GemmProblem):
        raise Missing("it has no gated product")
    module = _imported(PALLAS)
    calls: dict[str, common.Call] = {}
    reason, end = "no config", time.monotonic() + sweep_s
    for config in _pallas_configs(module):
        if time.monotonic() > end:
            break
        run = jax.jit(functools.partial(module.matmul, config=config))
        call = functools.partial(run, *operands, None)
        try:
            jax.block_until_ready(call())
        except Exception as e:  # too much shared memory, a compiler's refusal
            reason = f"{type(e).__name__}: {e}"
        else:
            calls[str(config)] = call
    if not calls:
        raise Missing(f"none of its configs runs: {reason[:200]}")
    times = common.race(calls, 3)
    return calls[min(times, key=lambda name: statistics.median(times[name]))]


def _pallas_configs(module: Any) -> Iterator[Any]:
    """The configs that jax's own program sweeps, wide tiles first."""
    tiles = ((128, 128), (256, 64), (128, 64), (256, 128))
    dimension = module.MatmulDimension
    for (m, n), width in itertools.product(tiles, (8, 16, 4)):
        for minor, group in itertools.product(dimension, dimension):
            yield module.TuningConfig(
                tile_m=m,
                tile_n=n,
                tile_k=64,
                max_concurrent_steps=4,
                grid_minor_dim=minor,
                grid_tile_width=width,
                wg_dimension=group,
            )


def torch(problem: Problem, operands: list[jax.Array], sweep_s: float) -> common.Call:
    """torch.matmul on the same numbers; the call waits for the device.

    Raises:
      Missing: if torch is not installed or has no GPU.
    """
    if not isinstance(problem, GemmProblem):
        raise Missing("a gated product is no single function of it")
    library = _imported("torch")
    if not library.cuda.is_available():
        raise Missing("it sees no GPU")
    a, b = (library.from_dlpack(x) for x in operands)

    def call() -> None:
        library.matmul(a, b)
        library.cuda.synchronize()

    return call


def tokamax(problem: Problem, operands: list[jax.Array], sweep_s: float) -> common.Call:
    """tokamax's gated linear unit, whose weights are one array (k, 2, n).

    Raises:
      Missing: if tokamax is not installed.
    """
    library = _imported("tokamax")
    if not isinstance(problem, GatedMatmulProblem):
        raise Missing("it has no plain product")
    x, gate, up = operands
    weights = jnp.stack([gate, up], axis=1)
    unit = functools.partial(library.gated_linear_unit, activation=jax.nn.silu)
    return functools.partial(jax.jit(unit), x, weights)


PEERS = {"pallas": pallas, "torch": torch, "tokamax": tokamax}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as e:  # tokamax's own imports may raise anything
        what = "not installed" if isinstance(e, ImportError) else "cannot be imported"
        raise Missing(f"{what}: {e}") from e


def measured(problem: Problem, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each peer, raced with XLA and ours."""
    operands = bench_matmul.operands(problem)
    sides = {
        "ours": functools.partial(bench_matmul.ours, implementation=None),
        "xla": bench_matmul.plain,
    }
    calls: dict[str, common.Call] = {
        name: functools.partial(
            jax.jit(functools.partial(side, problem=problem)), *operands
        )
        for name, side in sides.items()
    }
    reasons: dict[str, str] = {}
    for name, make in PEERS.items():
        try:
            call = make(problem, operands, args.sweep_s)
            jax.block_until_ready(call())
            calls[name] = call
        except Exception as e:  # a peer's failure is a result like any other
            is_told = isinstance(e, Missing)
            reasons[name] = str(e) if is_told else f"{type(e).__name__}: {e}"[:300]
    times = common.race(calls, args.rounds)
    rows = []
    for name in ("ours", *PEERS):
        row = {"problem": problem.to_json(), "text": str(problem), "peer": name}
        if name in reasons:
            rows.append({**row, "missing": reasons[name]})
            continue
        us = statistics.median(times[name])
        row |= {"time_us": us, "xla_us": statistics.median(times["xla"])}
        row |= {"ratio": common.median_ratio(times, "xla", name)}
        rows.append({**row, "tflops": problem.flops / us * 1e-6})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--effort", default="quick", help="of tuning ours")
    parser.add_argument("--goal", default="throughput", help="of tuning ours")
    parser.add_argument("--budget-s", type=float, default=20.0, help="of tuning ours")
    parser.add_argument("--sweep-s", type=float, default=SWEEP_S, help="for Pallas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, help="one square of this size, to try it")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some
    chosen = problems()
    if args.size:
        square: Any = {"m": args.size, "n": args.size, "k": args.size}
        chosen = [type(problem)(**square) for problem in chosen[::2]]
    how: dict[str, Any] = {"effort": args.effort, "goal": args.goal}
    common.tune_together(chosen, budget_s=args.budget_s, **how)
    rows: list[dict[str, Any]] = []
    for problem in chosen:
        rows += measured(problem, args)
        common.save("peers", rows, args)
    print(render(rows))
    print(common.save("peers", rows, args))


def render(rows: list[dict[str, Any]]) -> str:
    head = ("problem", "by", "us", "XLA us", "XLA/it", "TFLOP/s", "")
    return common.table(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "missing" in row:
        return row["text"], row["peer"], "-", "-", "-", "-", row["missing"][:100]
    times = f"{row['time_us']:.1f}", f"{row['xla_us']:.1f}"
    rates = f"{row['ratio']:.3f}", f"{row['tflops']:.3g}"
    return row["text"], row["peer"], *times, *rates, ""


if __name__ == "__main__":
    main()

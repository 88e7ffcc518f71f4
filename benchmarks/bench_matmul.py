"""matmul against XLA on a GPU: python benchmarks/bench_matmul.py [--quick] [--only ...]

Three sides race in turns: the peer, which is the code people write, compiled by jit
with XLA's defaults; the fastest of our own kernels; and the default, which a call
without ``implementation`` runs after the tuning and which may be XLA. Inputs are random
normal.

The problems of a group are tuned together first. Results are saved after every case.
With ``--only``, the rows of other groups stay as they are; with ``--resume``, existing
rows are not measured again. Both need the same device, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from matmul_suite import FIGURES, Case, Row, suite, summary

from tracea_jax import dispatch
from tracea_jax.campaign import local_device
from tracea_jax.ops.common import epilogue as epilogues
from tracea_jax.ops.common.precision import precision_from_name
from tracea_jax.ops.gated_matmul import workload as gated_workload
from tracea_jax.ops.gated_matmul.primitive import gated_matmul_p
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.ops.matmul.primitive import matmul_p, split
from tracea_jax.problem import ITEMSIZE, GatedMatmulProblem, GemmProblem

Problem = GemmProblem | GatedMatmulProblem

COPY_FLOATS = 1 << 29  # 2 GiB that the copy reads, and as many that it writes
HEAVY_BYTES = 100e6  # weights above are held to the bandwidth of a copy
CHECKED_COLUMNS = 256  # columns checked for errors, besides every 64th row


# --- the three sides ------------------------------------------------------------------


def ours(
    *operands: jax.Array, problem: Problem, implementation: str | None
) -> jax.Array:
    """The problem on the op, as it plans it."""
    how: dict[str, Any] = {
        "layout": problem.layout,
        "out": jnp.dtype(problem.out),
        "precision": precision_from_name(problem.precision),
        "implementation": implementation,
        "config": None,
    }
    if isinstance(problem, GatedMatmulProblem):
        how |= {"activation": problem.activation, "save_products": False}
        return gated_matmul_p.bind(*operands, **how)[0]
    return matmul_p.bind(*operands, epilogue=problem.epilogue, **how)[0]


def plain(*operands: jax.Array, problem: Problem) -> jax.Array:
    """The problem as people write it, every step in the output's dtype."""
    lhs, *rest = operands
    left = lhs if problem.layout[0] == "n" else lhs.swapaxes(-1, -2)

    def product(rhs: jax.Array) -> jax.Array:
        return jnp.matmul(
            left,
            rhs if problem.layout[1] == "n" else rhs.swapaxes(-1, -2),
            precision=precision_from_name(problem.precision),
            preferred_element_type=problem.out,
        )

    if isinstance(problem, GatedMatmulProblem):
        gate, up = rest
        activation = epilogues.ACTIVATION_FUNCTIONS[problem.activation]
        return activation(product(gate)) * product(up)
    _, rhs, bias, residual = split(operands, problem.epilogue)
    y = product(rhs)
    y = y if bias is None else y + bias
    y = epilogues.ACTIVATION_FUNCTIONS[problem.epilogue.activation](y)
    return y if residual is None else y + residual


def planned(problem: Problem) -> tuple[dispatch.Plan | None, str]:
    """The plan of ``implementation="tracea"``; None and why, if we have no kernel."""
    try:
        plan = dispatch.plan(problem, local_device(), implementation="tracea")
    except dispatch.Unsupported as e:
        return None, str(e)
    return plan, ""


# --- measuring ------------------------------------------------------------------------


def measure(case: Case, rounds: int) -> Row:
    """Races the three sides of a case that was tuned."""
    problem, device = case.problem, local_device()
    own, why = planned(problem)
    default = dispatch.plan(problem, device)
    inputs = operands(problem)
    compiled = sides(problem, with_own=own is not None)
    with warnings.catch_warnings():
        # A kernel that cannot be compiled would be replaced by XLA, under our name.
        warnings.filterwarnings("error", message=".*is left to XLA")
        results = {name: side(*inputs) for name, side in compiled.items()}
    errors = {name: error(problem, inputs, y) for name, y in results.items()}
    if bad := [name for name, worst in errors.items() if not math.isfinite(worst)]:
        raise ValueError(f"not-a-number or infinity computed by {', '.join(bad)}")
    del results  # the race needs the memory
    calls = {name: functools.partial(side, *inputs) for name, side in compiled.items()}
    row: Row = {
        "variant": own and own.variant,
        "config": own and dataclasses.asdict(own.config),
        "origin": own and own.origin,
        "why_no_own": why or None,
        "default_variant": default.variant,
        **_times(problem, common.race(calls, rounds)),
        **_errors(errors),
    }
    weights = problem.n * problem.k * ITEMSIZE.get(problem.rhs, 4)
    if case.group == "skinny" and weights > HEAVY_BYTES and device.platform == "cuda":
        row["copy_gbs"] = copy_gbs()
        row["copy_fraction"] = row["gbs"] / copy_gbs() if own else None
    return row


def sides(problem: Problem, *, with_own: bool) -> dict[str, Any]:
    """The compiled functions that race."""
    ways: dict[str, Any] = {"own": "tracea"} if with_own else {}
    ways["default"] = None
    on_op = {
        name: jax.jit(functools.partial(ours, problem=problem, implementation=way))
        for name, way in ways.items()
    }
    return {**on_op, "xla": jax.jit(functools.partial(plain, problem=problem))}


def _times(problem: Problem, times: dict[str, list[float]]) -> Row:
    """The times in a row; rates are of our kernel if there is one."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratios = {n: common.median_ratio(times, "xla", n) for n in times if n != "xla"}
    us = medians.get("own", medians["default"])
    return {
        "own_us": medians.get("own"),
        "default_us": medians["default"],
        "xla_us": medians["xla"],
        "ratio_own": ratios.get("own"),
        "ratio_default": ratios["default"],
        "tflops": problem.flops / us * 1e-6,
        "gbs": problem.bytes / us * 1e-3,
    }


def _errors(errors: dict[str, float]) -> Row:
    ours = errors.get("own", errors["default"])
    return {
        "error_of_bound": ours,
        "xla_error_of_bound": errors["xla"],
        "error_by_xla": ours / max(errors["xla"], 1e-9),
    }


def operands(problem: Problem) -> list[jax.Array]:
    """Random normal operands on the device, in the primitive's order."""
    with jax.default_device(jax.local_devices()[0]):
        return _bench(problem).operands(problem, 1)


def error(problem: Problem, inputs: list[jax.Array], result: jax.Array) -> float:
    """The largest error in some rows and columns, in units of the allowed rounding."""
    rng = np.random.default_rng(0)
    count = min(CHECKED_COLUMNS, problem.n)
    inner = rng.choice(problem.n, count, replace=False)
    columns = jnp.asarray(np.unique([0, problem.n - 1, *inner]))

    def cut(x: jax.Array, axis: int = -1) -> jax.Array:
        return jnp.take(x, columns, axis=axis)

    rhs_axis = -1 if problem.layout[1] == "n" else -2
    lhs, *rest = inputs
    products = 2 if isinstance(problem, GatedMatmulProblem) else 1
    weights = [cut(x, rhs_axis) for x in rest[:products]]
    cut_inputs = [lhs, *weights, *(cut(x) for x in rest[products:])]
    fewer = dataclasses.replace(problem, n=len(columns))
    return _bench(problem).judge(fewer, local_device(), cut_inputs, 1)([cut(result)])


@functools.cache
def copy_gbs() -> float:
    """GB/s, read and written, of adding one to every element of an array."""
    with jax.default_device(jax.local_devices()[0]):
        x = jnp.ones(COPY_FLOATS, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    times = common.race({"copy": lambda: copy(x)})
    return 2 * x.nbytes / statistics.median(times["copy"]) * 1e-3


def _bench(problem: Problem) -> Any:
    is_gated = isinstance(problem, GatedMatmulProblem)
    return gated_workload.GATED_MATMUL if is_gated else matmul_workload.MATMUL


# --- the program ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few of each group")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups")
    parser.add_argument("--resume", action="store_true", help="what is missing only")
    parser.add_argument("--effort", default="default", help="of tuning each case")
    parser.add_argument("--goal", default="throughput", help="of tuning")
    parser.add_argument(
        "--budget-s", type=float, default=3.0, help="of tuning, for each case"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each race")
    common.add_arguments(parser)
    args = parser.parse_args()
    if local_device().platform != "cuda":
        parser.error("it needs an NVIDIA GPU; on a CPU there is bench_cpu.py")
    cases = suite(args.quick)
    if unknown := set(args.only or ()) - {case.group for case in cases}:
        names = ", ".join(dict.fromkeys(case.group for case in cases))
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {names}")
    run(cases, args)


def run(cases: list[Case], args: argparse.Namespace) -> None:
    """Tunes and measures the cases that are asked for, group by group, and reports."""
    chosen = [c for c in cases if args.only is None or c.group in args.only]
    rows = kept(common.saved("matmul", args), chosen, args)
    done = {str(row["problem"]) for row in rows}
    left = [c for c in chosen if str(c.problem.to_json()) not in done]
    start = time.monotonic()
    for group in dict.fromkeys(case.group for case in left):
        own = [case for case in left if case.group == group]
        untuned = common.tune_together(
            [case.problem for case in own],
            budget_s=args.budget_s * len(own),
            effort=args.effort,
            goal=args.goal,
        )
        for case in own:
            rows.append(row_of(case, args.rounds, untuned.get(case.problem)))
            rows = ordered(rows, cases)
            save(rows, args)
            print(line(rows, case), f"{time.monotonic() - start:.0f} s", flush=True)
            if not _works():
                print("the device stopped working; a new process goes on", flush=True)
                again = [] if "--resume" in sys.argv else ["--resume"]
                os.execv(sys.executable, [sys.executable, *sys.argv, *again])
    path = save(rows, args)
    print(render(rows))
    print(path)
    print(render_groups(summary(rows)))


def save(rows: list[Row], args: argparse.Namespace) -> pathlib.Path:
    return common.save("matmul", rows, args, groups=summary(rows))


def kept(
    earlier: list[Row], chosen: Sequence[Case], args: argparse.Namespace
) -> list[Row]:
    """The rows of an earlier run that stay: those of other groups, or all of them."""
    if args.resume:
        return earlier
    groups = {case.group for case in chosen}
    return [r for r in earlier if r["group"] not in groups] if args.only else []


def ordered(rows: list[Row], cases: Sequence[Case]) -> list[Row]:
    """The rows in the order of the cases; others last."""
    places = {str(case.problem.to_json()): i for i, case in enumerate(cases)}
    return sorted(rows, key=lambda r: places.get(str(r["problem"]), len(places)))


def row_of(case: Case, rounds: int, untuned: str | None) -> Row:
    """The row of a case, with the error if it fails."""
    head: Row = {
        "group": case.group,
        "problem": case.problem.to_json(),
        "text": str(case.problem),
    }
    if untuned:
        head["untuned"] = untuned
    try:
        return {**head, **measure(case, rounds)}
    except Exception as e:  # recorded, and the rest goes on
        return {**head, "error": f"{type(e).__name__}: {e}"[:1000]}


def _works() -> bool:
    """True if the device still computes; an illegal access ends a process's use."""
    try:
        return float(jnp.ones(2).sum()) == 2
    except Exception:
        return False


# --- tables ---------------------------------------------------------------------------


def line(rows: Sequence[Row], case: Case) -> str:
    """The line to print for a case when it is done."""
    (row,) = [r for r in rows if r["problem"] == case.problem.to_json()]
    if "error" in row:
        return f"{row['group']}: {row['text']}: {row['error'].splitlines()[0]}"
    ratios = f"own {_number(row['ratio_own'], 3)}, default {row['ratio_default']:.3f}"
    return f"{row['group']}: {row['text']}: {ratios}"


def render(rows: Sequence[Row]) -> str:
    head = ("problem", "group", "own us", "default us", "XLA us", "XLA/own")
    head += ("XLA/default", "TFLOP/s", "GB/s", "error", "XLA's", "default", "own")
    return common.table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        empty = ("-",) * 9
        return row["text"], row["group"], *empty, "-", row["error"].splitlines()[0]
    config = ",".join(str(v) for v in (row["config"] or {}).values())
    return (
        row["text"],
        row["group"],
        *(_number(row[name], 1) for name in ("own_us", "default_us", "xla_us")),
        *(_number(row[name], 3) for name in ("ratio_own", "ratio_default")),
        f"{row['tflops']:.3g}",
        f"{row['gbs']:.0f}",
        f"{row['error_of_bound']:.2f}",
        f"{row['xla_error_of_bound']:.2f}",
        row["default_variant"],
        f"{row['variant']} {config}" if row["variant"] else row["why_no_own"][:80],
    )


def render_groups(groups: Sequence[Row], figures: Mapping[str, str] = FIGURES) -> str:
    """Each bar, the figure, and whether it is met."""
    head = ("group", "cases", "failed", "no own", "figure", "bar", "is", "met")
    body = [
        (
            *(str(g[name]) for name in ("group", "cases", "failed", "without_own")),
            figures[bar["figure"]],
            f"{'<=' if bar['is_upper'] else '>='} {bar['limit']:.2f}",
            _number(bar["value"], 3),
            "yes" if bar["is_met"] else "NO",
        )
        for g in groups
        for bar in g["bars"]
    ]
    return common.table(head, body)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()

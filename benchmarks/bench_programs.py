"""Whole programs as users compile them, plain and on our ops.

    python benchmarks/bench_programs.py [--only NAME ...] [--effort quick] [--out DIR]

Each program is a step that differentiates inside, or a forward pass, and runs in turns
as ``jax.jit(step)``, as ``jax.jit(tracea.transform(step))`` and, on a CPU or where it
is asked for, with ``transform`` applied to what the step differentiates. On a GPU:
training steps of GPT-2 124M, ViT-B/16 and ResNet-50, a block of Llama 3 8B with its
gradients and its decoding, inference of ResNet-50, and blocks of a U-Net. On a CPU:
the steps of a small GPT-2 and of a small ViT, in float32 and in bfloat16.

A row has, for each side, the time, the bytes of arguments, results and temporary
buffers, and the errors of results against the plain program in float32; and what the
sites of ``explain`` run on. ``ratio`` is that of kernel times on a GPU and of
wall-clock times on a CPU. A program that fails is a row with the reason, and makes
the exit status 1. The result file is written after every program.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
from whole_programs import Program, programs

import tracea_jax as tracea
from tracea_jax.campaign import local_device, tune
from tracea_jax.device import CudaDevice
from tracea_jax.explain import explain
from tracea_jax.tuning import measure

# Autotuning a program of which only the results count would be wasted time.
_UNTUNED_XLA = {"xla_gpu_autotune_level": 0}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument(
        "--only", nargs="*", help="programs whose name has one of these"
    )
    parser.add_argument("--effort", default="quick", help="of tuning, or none")
    parser.add_argument("--goal", default="latency", help="of tuning")
    parser.add_argument(
        "--budget-s", type=float, default=120.0, help="for each program"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", choices=("full", "cpu", "small"))
    parser.add_argument(
        "--inside", action="store_true", help="race transform inside grad on a GPU too"
    )
    parser.add_argument(
        "--no-errors", action="store_true", help="compile no program in float32"
    )
    args = parser.parse_args(arguments)
    is_gpu = isinstance(local_device(), CudaDevice)
    only, rows, path = args.only or [""], [], None
    name = "_".join(["programs", *map(common.slug, args.only or ())])
    for program in programs(args.sizes or ("full" if is_gpu else "cpu")):
        if any(text in program.name for text in only):
            rows.append(row_of(program, args))
            path = common.save(name, rows, args)
    print(table(rows))
    print(path)
    return int(any("failed" in row for row in rows))


def row_of(program: Program, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a program; if it fails, with the reason."""
    row = {"name": program.name, "text": program.text, "effort": args.effort}
    print(f"{program.name}: {program.text}", flush=True)
    try:
        figures = measured(program, args)
        bars = [
            {**dataclasses.asdict(bar), "is_met": bar.is_met(figures)}
            for bar in program.bars
        ]
        return {**row, **figures, "bars": bars}
    except Exception as e:  # one program must not end the run
        traceback.print_exc()
        return {**row, "failed": f"{type(e).__name__}: {e}"}
    finally:
        gc.collect()  # what the program's functions captured holds device memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to compile a program.

    Attributes:
      function: jitted, and compiled already.
      compile_s: seconds of tracing and compiling.
      bytes: of arguments, results and temporary buffers together.
    """

    function: Any
    compile_s: float
    bytes: int


@dataclasses.dataclass(slots=True)
class Chained:
    """Calls of a function, each on what the call before it returned.

    Attributes:
      function: what is called.
      carried: how many of the first results are the next first arguments.
      inputs: the next arguments.
    """

    function: Callable[..., Any]
    carried: int
    inputs: tuple[Any, ...]

    def __call__(self) -> Any:
        results = self.function(*self.inputs)
        if self.carried:
            carried = results[: self.carried]
            self.inputs = (*carried, *self.inputs[self.carried :])
        return results


def measured(program: Program, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a program: tuned, compiled, checked, and timed in a race."""
    inputs = program.inputs()
    steps = _steps(program, args.inside or not _is_gpu())
    if args.effort != "none":
        how = {"effort": args.effort, "goal": args.goal, "budget_s": args.budget_s}
        print(tune(steps["ours"], *inputs, **how), flush=True)
    explanation = explain(program.step(program.dtype, _itself))(*inputs)
    print(explanation, flush=True)
    sides = {name: _side(program, step, inputs) for name, step in steps.items()}
    row: dict[str, Any] = {
        "sites": dict(collections.Counter(s.variant for s in explanation.sites)),
        "misses": len(explanation.misses),
        "compile_s": {name: side.compile_s for name, side in sides.items()},
        "bytes": {name: side.bytes for name, side in sides.items()},
        "memory_ratio": sides["ours"].bytes / sides["plain"].bytes,
    }
    if not args.no_errors:
        row |= _errors(program, sides, inputs)
    calls = {
        name: Chained(side.function, program.carried, _own(program, inputs))
        for name, side in sides.items()
    }
    del inputs
    return row | _times(calls, args.rounds)


def _steps(program: Program, with_inside: bool) -> dict[str, Any]:
    plain = program.step(program.dtype, _itself)
    steps = {"ours": tracea.transform(plain), "plain": plain}
    if with_inside and program.differentiates:
        steps["inside"] = program.step(program.dtype, tracea.transform)
    return steps


def _itself(function: Any) -> Any:
    return function


def _is_gpu() -> bool:
    return isinstance(local_device(), CudaDevice)


def _side(program: Program, step: Any, inputs: tuple[Any, ...]) -> Side:
    donated = tuple(range(program.carried)) if program.donated else ()
    function = jax.jit(step, donate_argnums=donated)
    start = time.perf_counter()
    compiled = function.lower(*inputs).compile()  # calls use what is compiled here
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    used += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Side(function=function, compile_s=compile_s, bytes=used)


def _own(program: Program, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with copies of those that are donated."""
    if not program.donated:
        return inputs
    copies = jax.tree.map(jnp.copy, inputs[: program.carried])
    return (*copies, *inputs[program.carried :])


def _times(calls: dict[str, Chained], rounds: int) -> dict[str, Any]:
    """Medians and ratios: of kernel times and wall-clock times, on a CPU the latter."""
    runs = {name: common.repeating(call) for name, call in calls.items()}
    timing = measure.Timing(rounds=rounds, max_rounds=3 * rounds)
    wall = measure.race(runs, timing)
    for failure in wall.failures.values():
        raise failure
    us = {name: wall.median_us(name) for name in runs}
    row: dict[str, Any] = {"wall_us": us, "wall_ratio": wall.ratio("plain", "ours")}
    if not _is_gpu():
        ratios = {name: wall.ratio(name, "ours") for name in runs}
    else:
        times = common.race(calls, rounds)
        us = {name: statistics.median(kernel_us) for name, kernel_us in times.items()}
        ratios = {name: common.median_ratio(times, name, "ours") for name in runs}
    row |= {"us": us, "ratio": ratios["plain"]}
    return {**row, "inside_ratio": ratios["inside"]} if "inside" in runs else row


def _errors(
    program: Program, sides: dict[str, Side], inputs: tuple[Any, ...]
) -> dict[str, Any]:
    """Errors of results against those of the plain program in float32.

    An error is the norm of the difference divided by the norm of the exact array. What
    is carried on is compared by its change in the call, so that parameters do not hide
    the errors of gradients. ``errors`` are medians over the arrays. Some arrays are
    nothing but rounding, such as gradients of the biases of keys; so in
    ``error_by_plain``, the largest quotient of our error and plain JAX's, an error of
    plain JAX counts as at least what the result's rounding makes of this array, what
    arguments that differ by their dtype's epsilon do, and what these do of the median
    array.
    """
    wide, epsilon = jax.tree.map(_widened, inputs), float(jnp.finfo(program.dtype).eps)
    near = _perturbed(wide, epsilon)
    exact_step = program.step("float32", _itself)
    with jax.default_matmul_precision("highest"):
        function = jax.jit(exact_step, compiler_options=_untuned_xla())
        results, near_results = (function(*x) for x in (wide, near))
    exact = _changes(results, wide, program.carried)
    changed = _changes(near_results, near, program.carried)
    rounding = [epsilon * float(x) for x in _sizes(results, exact)]
    del wide, near, results, near_results
    errors = {"moved": _distances(changed, exact)}
    for name, side in sides.items():
        results = side.function(*_own(program, inputs))
        errors[name] = _distances(_changes(results, inputs, program.carried), exact)
    errors = {name: [float(x) for x in found] for name, found in errors.items()}
    moved = errors.pop("moved")
    least = statistics.median(moved)
    pairs = zip(errors["ours"], errors["plain"], moved, rounding, strict=True)
    return {
        "errors": {name: statistics.median(found) for name, found in errors.items()},
        "error_by_plain": max(ours / max(*floor, least) for ours, *floor in pairs),
    }


@functools.partial(jax.jit, static_argnums=1)
def _perturbed(inputs: Any, by: float) -> Any:
    """The same with numbers of floating point made larger or smaller by a fraction."""
    leaves, tree = jax.tree.flatten(inputs)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    moved = [
        x * (1 + by * jax.random.rademacher(key, x.shape, x.dtype))
        if _is_float(x)
        else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def _untuned_xla() -> dict[str, Any] | None:
    return _UNTUNED_XLA if _is_gpu() else None


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.jit, static_argnums=2)
def _changes(results: Any, inputs: tuple[Any, ...], carried: int) -> list[jax.Array]:
    """All results of floating point in float32, less the arguments they replace."""
    if not carried:
        leaves = [(x, jnp.zeros((), x.dtype)) for x in jax.tree.leaves(results)]
    else:
        new, old = map(jax.tree.leaves, (results[:carried], inputs[:carried]))
        rest = jax.tree.leaves(results[carried:])
        leaves = list(zip(new, old, strict=True))
        leaves += [(x, jnp.zeros((), x.dtype)) for x in rest]
    return [_widened(x) - _widened(y) for x, y in leaves if _is_float(x)]


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


@jax.jit
def _sizes(results: Any, changes: list[jax.Array]) -> list[jax.Array]:
    """The norm of each result by that of its change."""
    leaves = [_widened(x) for x in jax.tree.leaves(results) if _is_float(x)]
    norms = [[jnp.linalg.norm(x.ravel()) for x in xs] for xs in (leaves, changes)]
    return [x / y for x, y in zip(*norms, strict=True)]


@jax.jit
def _distances(results: list[jax.Array], exact: list[jax.Array]) -> list[jax.Array]:
    def distance(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return [distance(x, y) for x, y in zip(results, exact, strict=True)]


def table(rows: list[dict[str, Any]]) -> str:
    head = ("program", "plain us", "ours us", "ratio", "wall", "inside", "memory")
    head += ("error", "of plain", "by plain", "bars")
    return common.table(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return (row["name"], row["failed"].partition("\n")[0][:60], *9 * ("",))
    us, errors = row["us"], row.get("errors")
    inside, by_plain = row.get("inside_ratio"), row.get("error_by_plain")
    cells = (row["name"], f"{us['plain']:.1f}", f"{us['ours']:.1f}")
    cells += tuple(f"{row[name]:.2f}" for name in ("ratio", "wall_ratio"))
    cells += ("-" if inside is None else f"{inside:.2f}", f"{row['memory_ratio']:.2f}")
    cells += tuple(
        "-" if errors is None else f"{errors[side]:.1e}" for side in ("ours", "plain")
    )
    cells += ("-" if by_plain is None else f"{by_plain:.2f}",)
    missed = [bar["figure"] for bar in row["bars"] if not bar["is_met"]]
    met = "met" if row["bars"] else "-"
    return (*cells, f"missed: {', '.join(missed)}" if missed else met)


if __name__ == "__main__":
    sys.exit(main())

"""matmul against XLA: python benchmarks/bench_matmul.py [--quick] [--out DIRECTORY]

The peer is the code people write, compiled by jit with XLA's defaults. Ours is the op
with the kernel named in the row, at its tuned config. Inputs are random normal.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import common
import jax
import jax.numpy as jnp

from tracea_jax import variants
from tracea_jax.cli import Progress
from tracea_jax.ops import epilogue as epilogues
from tracea_jax.ops import matmul_bench as benches
from tracea_jax.ops.matmul import split
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.tune import local_device, tune

GELU = Epilogue(bias="row", activation="gelu")
SILU = Epilogue(bias="row", activation="silu", residual=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the suite."""

    group: str
    problem: GemmProblem


def suite(platform: str, quick: bool) -> list[Case]:
    """The problems of a platform; ``quick`` keeps those that the bars name."""
    if platform == "cuda":
        sizes = [(s, s, s) for s in ((4096, 8192) if quick else (2048, 4096, 8192))]
        wide = [] if quick else [(4096, 14336, 4096), (512, 4096, 4096)]
        dtypes = ("bfloat16",) if quick else ("bfloat16", "float16")
        plain = [_case("plain", s, d) for d in dtypes for s in sizes]
        fused = [
            _case("fused", s, "bfloat16", epilogue=e)
            for s in (*sizes, *wide)
            for e in (GELU, SILU)
        ]
        layouts = (
            []
            if quick
            else [
                _case("layouts", (4096, 4096, 4096), "bfloat16", layout=layout)
                for layout in ("nt", "tn", "tt")
            ]
        )
        return [*plain, *fused, *layouts]
    sizes = [(s, s, s) for s in (1024, 2048, 4096)]
    mlp = [(512, 3072, 768), (512, 768, 3072)]
    plain = [_case("plain", s, "float32") for s in sizes]
    if quick:
        return plain
    small = [_case("plain", (s, s, s), "float32") for s in (256, 512)]
    fused = [_case("fused", s, "float32", epilogue=GELU) for s in (*mlp, sizes[0])]
    half = [_case("bf16", s, "bfloat16") for s in sizes[:1]]
    return [*small, *plain, *fused, *half]


def _case(group: str, sizes: tuple[int, int, int], dtype: str, **rest: Any) -> Case:
    m, n, k = sizes
    problem = GemmProblem(m=m, n=n, k=k, lhs=dtype, rhs=dtype, out=dtype, **rest)
    return Case(group=group, problem=problem)


def plain(*operands: jax.Array, problem: GemmProblem) -> jax.Array:
    """The problem as people write it, every step in the output's dtype."""
    lhs, rhs, bias, residual = split(operands, problem.epilogue)
    lhs = lhs if problem.layout[0] == "n" else lhs.swapaxes(-1, -2)
    rhs = rhs if problem.layout[1] == "n" else rhs.swapaxes(-1, -2)
    y = jnp.matmul(lhs, rhs, preferred_element_type=problem.out)
    y = y if bias is None else y + bias
    y = epilogues.ACTIVATION_FUNCTIONS[problem.epilogue.activation](y)
    return y if residual is None else y + residual


def measure(case: Case, effort: str, progress: Any) -> dict[str, Any]:
    """Tunes our kernels for one case and races the best against the peer."""
    problem = case.problem
    entry = tune(problem, effort=effort, progress=progress).entry
    ours = _best_of_ours(entry)
    variant = variants.get("matmul", ours.variant)
    config = variants.config_from_json(variant, ours.config)
    choice = Choice(variant=ours.variant, config=config)
    device = jax.local_devices()[0]
    with jax.default_device(device):
        operands = benches.operands(problem, seed=1)
    mine = jax.jit(lambda *x: benches.execute(*x, problem=problem, choice=choice)[0])
    peer = jax.jit(lambda *x: plain(*x, problem=problem))
    times = common.race(
        {"ours": lambda: mine(*operands), "xla": lambda: peer(*operands)}
    )
    ours_us = statistics.median(times["ours"])
    error = benches.relative_error(
        problem, local_device(), operands, mine(*operands), "y", seed=1
    )
    return {
        "group": case.group,
        "problem": problem.to_json(),
        "text": str(problem),
        "variant": ours.variant,
        "config": ours.config,
        "ours_us": ours_us,
        "xla_us": statistics.median(times["xla"]),
        "tflops": problem.flops / ours_us * 1e-6,
        "ratio": common.median_ratio(times, "xla", "ours"),
        "error_of_bound": error,
        "default": entry.best.variant,
    }


def _best_of_ours(entry: Any) -> Any:
    """The fastest of our own kernels, whether or not XLA beat it."""
    if entry.best.variant != "xla":
        return entry.best
    ours = [o for o in entry.observations if o.variant != "xla" and o.time_us]
    return min(ours, key=lambda o: o.time_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    common.add_arguments(parser)
    parser.add_argument("--effort", default="default", help="of tuning each case")
    args = parser.parse_args()
    progress = Progress()
    rows = []
    for case in suite(local_device().platform, args.quick):
        rows.append(measure(case, args.effort, progress))
        progress.close()
        path = common.save("matmul", rows, args)
    print(render(rows))
    print(path)


def render(rows: list[dict[str, Any]]) -> str:
    head = ("problem", "ours us", "XLA us", "XLA/ours", "TFLOP/s", "error", "config")
    body = [
        (
            r["text"],
            f"{r['ours_us']:.1f}",
            f"{r['xla_us']:.1f}",
            f"{r['ratio']:.3f}",
            f"{r['tflops']:.1f}" if r["tflops"] >= 10 else f"{r['tflops']:.3f}",
            f"{r['error_of_bound']:.2f}",
            f"{r['variant']} {','.join(str(v) for v in r['config'].values())}",
        )
        for r in rows
    ]
    return common.table(head, body)


if __name__ == "__main__":
    main()

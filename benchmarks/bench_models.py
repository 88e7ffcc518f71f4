"""Whole models through ``tracea.transform`` against plain ``jax.jit``.

    python benchmarks/bench_models.py [--effort quick] [--out DIRECTORY]

On a GPU: a block of Llama 3 8B's sizes (width 4096, 32/8 heads, MLP 14336, 2 x 4096
tokens, bfloat16), forward, and forward with gradients of parameters and input. On a
CPU the demo's language model. Both functions are compiled by ``jax.jit``; the model is
written in plain JAX with ``jax.nn.dot_product_attention`` and its defaults. Every
problem that the rewritten model asks for is tuned first. Times are sums of kernel times
on a GPU, wall-clock times on a CPU, both sides in one run and in turns; ``wall_ratio``
is of wall-clock times on either.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.cli import Progress
from tracea_jax.demo import SIZES
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.device import CudaDevice
from tracea_jax.explain import explain
from tracea_jax.transform import transform
from tracea_jax.tune import local_device, tune
from tracea_jax.tuning import measure

LLAMA_3_8B = LanguageModel(
    batch=2,
    tokens=4096,
    layers=1,
    vocabulary=128256,
    width=4096,
    hidden=14336,
    heads=32,
    kv_heads=8,
    dtype="bfloat16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--effort", default="quick", help="of tuning")
    parser.add_argument("--budget-s", type=float, default=120.0, help="for each case")
    parser.add_argument("--tune", nargs="*", help="ops; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    gpu = isinstance(local_device(), CudaDevice)
    model = LLAMA_3_8B if gpu else SIZES["cpu"].language_model
    rows = [
        measured(name, model, plain, ours, inputs, args)
        for name, plain, ours, inputs in cases(model)
    ]
    path = common.save("models", rows, args)
    head = ("case", "ours us", "plain us", "ratio", "wall", "error", "plain error")
    body = [
        (r["name"], f"{r['ours_us']:.1f}", f"{r['plain_us']:.1f}")
        + (f"{r['ratio']:.2f}", f"{r['wall_ratio']:.2f}")
        + (f"{r['error']:.1e}", f"{r['plain_error']:.1e}")
        for r in rows
    ]
    print(common.table(head, body))
    print(path)


def cases(model: LanguageModel) -> Any:
    """(name, plain function, ours, arguments) of what is measured."""
    keys = jax.random.split(jax.random.key(0), 3)
    layer = model.layer_parameters(keys[0])
    shape = (model.batch, model.tokens, model.width)
    x, ct = (jax.random.normal(k, shape).astype(model.dtype) for k in keys[1:])

    def step(block: Any) -> Any:
        def both(layer: Any, x: jax.Array, ct: jax.Array) -> Any:
            y, pull = jax.vjp(block, layer, x)
            return y, pull(ct)

        return both

    ours = transform(model.block)
    yield "block forward", model.block, ours, (layer, x)
    yield "block forward+backward", step(model.block), step(ours), (layer, x, ct)


def measured(
    name: str, model: LanguageModel, plain: Any, ours: Any, inputs: Any, args: Any
) -> dict[str, Any]:
    """One row: tuned, checked and timed."""
    progress = Progress()
    how = {"effort": args.effort, "budget_s": args.budget_s, "ops": args.tune}
    print(tune(ours, *inputs, **how, progress=progress))
    progress.close()
    calls = {"ours": jax.jit(ours), "plain": jax.jit(plain)}
    errors = _errors(calls, plain, inputs)
    bound = {n: (lambda f=f: f(*inputs)) for n, f in calls.items()}
    times = common.race(bound, args.rounds)
    wall = measure.race(
        {n: common.repeating(f) for n, f in bound.items()}, measure.Timing()
    )
    explanation = explain(ours)(*inputs)
    print(explanation)
    return {
        "name": name,
        "model": dataclasses.asdict(model),
        "ours_us": statistics.median(times["ours"]),
        "plain_us": statistics.median(times["plain"]),
        "ratio": common.median_ratio(times, "plain", "ours"),
        "wall_ratio": wall.ratio("plain", "ours"),
        "error": errors["ours"],
        "plain_error": errors["plain"],
        "sites": [
            {"problem": str(s.problem), "variant": s.plan.variant}
            for s in explanation.sites
            if s.problem and s.plan
        ],
    }


def _errors(calls: dict[str, Any], plain: Any, inputs: Any) -> dict[str, float]:
    """Largest error of any result by the root mean square of the exact one.

    Exact is the plain function in float32 with products of the highest precision.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.map(np.asarray, jax.jit(plain)(*wide))
    return {
        name: max(
            float(np.abs(np.asarray(x, np.float32) - y).max() / np.sqrt((y**2).mean()))
            for x, y in zip(
                jax.tree.leaves(call(*inputs)), jax.tree.leaves(exact), strict=True
            )
        )
        for name, call in calls.items()
    }


if __name__ == "__main__":
    main()

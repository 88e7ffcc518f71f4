"""The time that transform adds to tracing a deep model: python bench_tracing.py

Both sides are traced in turns, from empty caches, and timed in processor seconds, which
a busy machine changes less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp

import tracea_jax as tracea
from tracea_jax.demo.language_model import LanguageModel

Model = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


def mlp(layers: int) -> Model:
    """Dense layers with gelu, as people write them."""

    def apply(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for w, b in weights:
            x = jax.nn.gelu(x @ w + b)
        return x

    weights = [(jnp.ones((16, 16)), jnp.ones(16)) for _ in range(layers)]
    return apply, (weights, jnp.ones((4, 16)))


def llama(layers: int) -> Model:
    """The demo's language model, its layers unrolled."""
    model = LanguageModel(
        batch=1,
        tokens=16,
        layers=layers,
        vocabulary=64,
        width=32,
        hidden=64,
        heads=4,
        kv_heads=2,
        dtype="float32",
    )
    return model.loss, model.inputs()


MODELS = {"gelu MLP": mlp, "Llama": llama}


def measure(model: Model, rounds: int) -> dict[str, float]:
    """Medians of both sides' processor times, and of their ratio."""
    fn, arguments = model
    sides = {"plain": fn, "ours": tracea.transform(fn)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(_trace_s(side, arguments))
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    medians = {f"{name}_ms": 1e3 * statistics.median(t) for name, t in seconds.items()}
    return {**medians, "ratio": statistics.median(ratios)}


def _trace_s(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    jax.clear_caches()
    gc.collect()  # so that no trace pays for the garbage of another
    start = time.process_time()
    # A new function each time: a jitted one remembers its traces.
    jax.jit(lambda *args: fn(*args)).trace(*arguments)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for name, make in MODELS.items():
        times = measure(make(args.layers), args.rounds)
        rows.append({"name": name, "layers": args.layers, **times})
        print(f"{args.layers}-layer {name}: ", end="")
        print(", ".join(f"{key} {value:.3g}" for key, value in times.items()))
    print(common.save("tracing", rows, args))


if __name__ == "__main__":
    main()

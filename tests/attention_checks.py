"""How kernels of attention are checked on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ahead import compiled_ahead
from numerics import array, normal
from spaces import one_of_each

from tracea_jax.ops import attention
from tracea_jax.ops.attention import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem

# Sizes that fill no tile, and the options that kernels know since they are there.
BASE = AttentionProblem(
    batch=2,
    q_len=331,
    kv_len=457,
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
BACKWARD = dataclasses.replace(BASE, direction="backward")
SCORES = (BASE.heads, BASE.q_len, BASE.kv_len)
BIAS = {"bias": (1, *SCORES), "bias_dtype": "bfloat16"}
LENGTHS = {"q_lengths": True, "kv_lengths": True}
EVERYTHING = {"window": (200, 90), "is_causal": True, **LENGTHS}
ALL = {
    **EVERYTHING,
    **BIAS,
    "saves_lse": True,
    "window": (300, 90),
    "segments": True,
    "mask": (1, *SCORES),
    "soft_cap": 5.0,
    "sinks": True,
}


def run_and_check(variant: Any, problem: AttentionProblem, config: Any = None) -> None:
    """Runs a variant in buffers full of NaN and compares with float64.

    Two runs must give the same bits, but where dq is added up in no order.
    """
    device = device_for("cuda")
    config = config or variant.heuristic(problem, device)
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    with on_host():
        drawn = bench.operands(problem, seed=3)
        shapes = jax.eval_shape(run, *drawn)
    inputs = [array(np.asarray(x)) for x in drawn]
    poison, again = ([poisoned(s) for s in shapes] for _ in range(2))
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    found = call(poison, *inputs)
    in_no_order = getattr(config, "dq", None) == "atomic"  # the first result
    pairs = list(zip(found, call(again, *inputs), strict=True))
    for first, second in pairs[in_no_order:]:
        np.testing.assert_array_equal(first, second, strict=True)
    with on_host():
        results = [array(np.asarray(x)) for x in found]
        error = bench.error(problem, device, drawn, results, seed=3)
    assert error <= 1, f"{error:.3g} of the allowed error: {config}"


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Runs what is not tested on the CPU, where XLA compiles it in less time."""
    return jax.default_device(jax.devices("cpu")[0])


def poisoned(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """NaN on the device; nothing is compiled for it."""
    return array(np.full(shape.shape, np.nan, shape.dtype))


def sweep(variant: Any, problem: AttentionProblem, *fields: str) -> int:
    """``run_and_check`` of a config for each combination of these fields."""
    device = device_for("cuda")
    configs = one_of_each(variant.space(problem, device), *fields)
    choices = [Choice(variant=variant.name, config=config) for config in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            run_and_check(variant, problem, config)
    return len(configs)


def arguments(q_len: int, kv_len: int, head_dim: int = 64) -> list[jax.Array]:
    """Random q, k, v of two examples; two heads share keys."""
    k = (2, kv_len, 2, head_dim)
    shapes = ((2, q_len, 4, head_dim), k, k)
    return [normal(*s, seed=i).astype("bfloat16") for i, s in enumerate(shapes)]


def assert_as_xla(
    implementation: str, args: Any, rows: np.ndarray | None = None, **settings: Any
) -> None:
    """Within rounding of XLA; ``rows``: whether a query and head are compared."""
    ours = functools.partial(attention, implementation=implementation, **settings)
    xla = functools.partial(
        attention, implementation="xla", precision="highest", **settings
    )
    wide = [x.astype("float32") for x in args]
    found = np.asarray(jax.jit(ours)(*args), np.float64)
    expected = np.asarray(jax.jit(xla)(*wide), np.float64)
    if rows is not None:
        found, expected = found[:, rows], expected[:, rows]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def assert_gradients_as_xla(implementation: str, args: Any, **settings: Any) -> None:
    """Gradients through our forward attention and our backward pass."""

    def gradients(args: Any, **how: Any) -> Any:
        def loss(*args: Any) -> Any:
            o = attention(*args, **settings, **how).astype("float32")
            return (o * jnp.cos(jnp.arange(o.shape[-1]) + o.shape[1])).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    wide = [x.astype("float32") for x in args]
    found = gradients(args, implementation=implementation)
    assert_close(found, gradients(wide, implementation="xla", precision="highest"))


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert np.nanmax(np.abs(x - y)) <= 3e-2 * max(np.nanmax(np.abs(y)), 1e-3)

"""Arguments of wrong types: TypeError or ValueError, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracea_jax as tracea
from tracea_jax import masks, ops


class Thing:
    """A value that no argument may be."""


WRONG: dict[str, Any] = {
    "integer": 3,
    "text": "no such",
    "object": Thing(),
    "dict": {1: 2},
    "array": np.ones(3),
}
MORE: dict[str, Any] = {
    "fraction": -1.5,
    "nan": float("nan"),
    "bytes": b"x",
    "list": [1, "a"],
    "dots": ...,
    "set": {1},
    "nested": [[1]],
    "complex": 1j,
}
NOWHERE = ("object", "dots")  # what no argument may be, but for configs

SOURCE = 'extern "C" __global__ void twice(const float* x, float* y, int n) {}'
X, W = jnp.ones((4, 8)), jnp.ones((8, 8))
IMAGES, Q = jnp.ones((1, 4, 4, 2)), jnp.ones((1, 4, 2, 8))
PAGES = jnp.ones((2, 3, 8, 16))


def layer(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x.T)


def set_options(**changes: Any) -> None:
    with tracea.options(**changes):
        pass


def explain(fn: Any, **how: Any) -> Any:
    return tracea.explain(fn, **how)(X)


def add(problem: Any, count: Any) -> None:
    tracea.Graph().add(problem, count)


def from_function(fn: Any, **how: Any) -> Any:
    return tracea.Graph.from_function(fn, X, **how)


def bench(fn: Any, **how: Any) -> Any:
    return tracea.bench(fn, X, **how)


def elementwise(x: Any, y: Any, **how: Any) -> Any:
    return ops.elementwise.add(x, y, **how)


HOW: dict[str, Any] = {"implementation": None}
PRODUCT: dict[str, Any] = {
    "activation": "none",
    "precision": None,
    "preferred_element_type": None,
    **HOW,
}
ADDED: dict[str, Any] = {"bias": None, "residual": None}

# name -> function, right arguments; every one of them is replaced by wrong values.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "cuda_kernel": (
        tracea.cuda_kernel,
        {
            **dict.fromkeys(("name", "out", "grid", "block", "cluster", "scalars")),
            **dict.fromkeys(("scratch", "maps", "headers", "reference", "backward")),
            "source": SOURCE,
            "shared": 0,
            "inplace": (),
            "zeroed": False,
            "options": (),
            "vmap": "sequential",
            "tolerance": None,
        },
    ),
    "space": (tracea.cuda_kernel(SOURCE).space, {"BLOCK": (1, 2)}),
    "TensorMap": (tracea.TensorMap, {"box": (4, 4), "of": "x", "swizzle": 0}),
    "Graph": (tracea.Graph, {"problems": []}),
    "Graph.add": (add, {"problem": tracea.GemmProblem(m=4, n=4, k=4), "count": 1}),
    "from_function": (from_function, {"fn": layer, "ops": None, "after_grad": False}),
    "options": (
        set_options,
        {
            "on_miss": "heuristic",
            **dict.fromkeys(("implementation", "device", "cache_dir", "cache_path")),
            "cubin_limit": 1,
        },
    ),
    "transform": (tracea.transform, {"fn": layer, "ops": None, "after_grad": False}),
    "explain": (explain, {"fn": layer, "ops": None, "after_grad": False}),
    "bench": (bench, {"fn": layer, "ops": "no such"}),
    "causal": (masks.causal, {"from_end": False}),
    "window": (masks.window, {"left": 1, "right": 2, "from_end": False}),
    "segments": (masks.segments, {"ids": jnp.zeros(4, jnp.int32), "kv_ids": None}),
    "lengths": (masks.lengths, {"q": None, "kv": None}),
    "from_array": (masks.from_array, {"mask": jnp.ones((4, 4), bool)}),
    "block_sparse": (
        masks.block_sparse,
        {"blocks": jnp.ones((1, 1), bool), "block": (8, 8)},
    ),
    "matmul": (ops.matmul, {"a": X, "b": W, **ADDED, **PRODUCT}),
    "gated_matmul": (ops.gated_matmul, {"x": X, "w_gate": W, "w_up": W, **PRODUCT}),
    "conv2d": (
        ops.conv2d,
        {
            "x": IMAGES,
            "w": jnp.ones((1, 1, 2, 2)),
            "strides": 1,
            "padding": "SAME",
            "dilation": 1,
            "groups": 1,
            "layout": "NHWC",
            **ADDED,
            **PRODUCT,
        },
    ),
    "attention": (
        ops.attention,
        {
            **dict.fromkeys(("query", "key", "value"), Q),
            **dict.fromkeys(("bias", "mask", "scale", "local_window_size", "sinks")),
            **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths")),
            **dict.fromkeys(("query_segment_ids", "logits_soft_cap", "alibi_slopes")),
            **dict.fromkeys(("precision", "preferred_element_type")),
            "is_causal": False,
            "alibi": "distance",
            "return_residual": False,
            **HOW,
        },
    ),
    "linear_cross_entropy": (
        ops.linear_cross_entropy,
        {
            "x": X,
            "w": W,
            "labels": jnp.zeros(4, jnp.int32),
            **dict.fromkeys(("bias", "chunk", "precision", "preferred_element_type")),
            "layout": "nt",
            **HOW,
        },
    ),
    "paged_attention": (
        ops.paged_attention,
        {
            "q": jnp.ones((1, 2, 16)),
            "k_pages": PAGES,
            "v_pages": PAGES,
            "lengths": jnp.ones(1, jnp.int32),
            "page_indices": jnp.zeros((1, 2), jnp.int32),
            "scale": 1.0,
            **HOW,
        },
    ),
    "elementwise": (elementwise, {"x": X, "y": X, **HOW}),
}
# Functions are named in place of an argument that needs no name: fn of transform(fn).
CALLS = ("takes a function", "Graph takes", "a graph has problems", "elementwise.add")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments(name):
    check(name, WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_more_wrong_arguments(name):
    check(name, MORE)


def check(name: str, wrong: dict[str, Any]) -> None:
    function, right = FUNCTIONS[name]
    for argument in right:
        for label, value in wrong.items():
            given = {**right, argument: value}
            try:
                jax.eval_shape(lambda given=given: (function(**given), None)[1])
            except (TypeError, ValueError) as e:
                text = str(e)
                told = (argument in text, *(call in text for call in CALLS))
                assert any(told), (argument, label, text)
            except FileNotFoundError:  # of text in place of a path
                assert argument == "source"
            else:
                assert label not in NOWHERE, (argument, label)


@pytest.mark.parametrize("budget", ["1", None, -1, [1]])
def test_a_budget_that_is_no_time(budget):
    with pytest.raises((TypeError, ValueError), match="budget_s"):
        tracea.bench(layer, X, budget_s=budget)


def test_a_name_of_a_kernel():
    with pytest.raises(TypeError, match="name must be a str or None, not 3"):
        tracea.cuda_kernel(SOURCE, name=as_any(3))


def as_any(value: Any) -> Any:
    return value

"""Functions beside their transformed selves, for the tests of the rewrite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import equations
from numerics import normal

import tracea_jax as tracea
from tracea_jax.rewrite import rules, splice

# Other ops may take sites with several products.
transform = functools.partial(tracea.transform, ops=["matmul"])

# What is tested is what programs compute; compiling them takes most of the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def matmuls(f: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
    """Parameters of the products of ours that f becomes."""
    found = equations(transform(f), *args, name="tracea_matmul")
    return [e.params for e in found]


def epilogues(f: Callable[..., Any], *args: Any) -> list[str]:
    """The epilogues of the products that f becomes, "none" where there is none."""
    return [str(params["epilogue"]) for params in matmuls(f, *args)]


def remaining(f: Callable[..., Any], *args: Any, name: str = "dot_general") -> int:
    """How many equations of a primitive are left of f."""
    return len(equations(transform(f), *args, name=name))


def only_matmul(f: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Parameters of the one product of ours that f becomes, with none of lax left."""
    (params,) = matmuls(f, *args)
    assert remaining(f, *args) == 0
    return params


def filled(tree: Any) -> Any:
    """Random arrays of the shapes and dtypes of a tree, as a model's parameters."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [normal(*x.shape, dtype=x.dtype, seed=i) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, arrays)


def values_and_gradients(f: Callable[..., Any], *args: Any) -> Any:
    """Results of f, and cotangents of its arguments for arbitrary ones of its results.

    Integers and keys among arguments and results have no part in the derivatives.
    """
    out, vjp = jax.vjp(f, *args)
    return out, vjp(jax.tree.map(_cotangent, out))


def _cotangent(y: jax.Array) -> Any:
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return np.zeros(y.shape, jax.dtypes.float0)
    return normal(*y.shape, dtype=y.dtype, seed=9)


def assert_alike(
    f: Callable[..., Any],
    *args: Any,
    tolerance: float = 2e-5,
    gradients: bool = True,
    fast: Callable[..., Any] | None = None,
) -> None:
    """Asserts that only rounding separates a transformed function from the plain one.

    Args:
      f: the plain function.
      *args: arrays; with ``gradients``, floating ones.
      tolerance: relative to the largest entry of each result.
      gradients: whether to compare derivatives too.
      fast: what to compare with it; its transformation by default.
    """
    of = values_and_gradients if gradients else lambda f, *args: f(*args)
    pair = (fast or transform(f), f)
    found, expected = jit(lambda *args: [of(g, *args) for g in pair])(*args)
    assert_near(found, expected, tolerance)


def assert_all_alike(
    cases: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    tolerance: float = 2e-5,
) -> None:
    """``assert_alike`` for many functions and their arguments, compiled at once."""

    @jit
    def compare(arguments: dict[str, Sequence[Any]]) -> Any:
        pairs = {name: (transform(f), f) for name, (f, _) in cases.items()}
        return [
            {n: values_and_gradients(pairs[n][i], *arguments[n]) for n in pairs}
            for i in range(2)
        ]

    found, expected = compare({name: args for name, (_, args) in cases.items()})
    for name in cases:
        assert_near(found[name], expected[name], tolerance, name)


def assert_near(found: Any, expected: Any, tolerance: float, name: str = "") -> None:
    """Asserts equal trees, shapes, dtypes and weak types, and close values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), name
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert kind(x) == kind(y), name
        if x.dtype == jax.dtypes.float0:
            continue
        wide = "complex128" if jnp.issubdtype(x.dtype, jnp.complexfloating) else float
        x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), name)
        finite = np.isfinite(y)
        error = np.abs(x[finite] - y[finite]).max(initial=0)
        scale = np.abs(y[finite]).max(initial=1e-3)
        assert error <= tolerance * scale, f"{name}: {error:.3g} beside {scale:.3g}"


def kind(x: Any) -> tuple[Any, ...]:
    """Shape, dtype and weakness of the type of an array."""
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def assert_left(f: Callable[..., Any], *args: Any) -> None:
    """Asserts that nothing of f is replaced: the very same jaxpr, and equal bits."""
    jaxpr = jax.make_jaxpr(f)(*args)
    assert splice(jaxpr, rules(), []) is jaxpr
    found, expected = tracea.transform(f)(*args), jax.jit(f)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def assert_one(
    f: Callable[..., Any],
    *args: Any,
    layout: str = "nn",
    epilogue: str = "none",
    **how: Any,
) -> dict[str, Any]:
    """Asserts that f becomes one product like this, and keeps values and gradients."""
    params = assert_becomes(f, *args, layout=layout, epilogue=epilogue)
    assert_alike(f, *args, **how)
    return params


def assert_becomes(
    f: Callable[..., Any], *args: Any, layout: str = "nn", epilogue: str = "none"
) -> dict[str, Any]:
    """Asserts that f becomes one product like this."""
    params = only_matmul(f, *args)
    assert (params["layout"], str(params["epilogue"])) == (layout, epilogue)
    assert params["implementation"] is None and params["config"] is None
    return params

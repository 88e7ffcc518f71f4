"""Architectures that people write: every site is found, and values stay the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from zoo import MODELS, Model
from zoo.model import normal

import tracea_jax as tracea

OPS = ("matmul", "gated_matmul", "conv2d", "attention")
PRODUCTS = ("dot_general", "conv_general_dilated")
# Most of the time goes to XLA's compilation, and results need not come fast.
COMPILER = {"xla_backend_optimization_level": 0}


@functools.cache  # several tests take each model
def _built(model: Model) -> Any:
    return model.build()


def _each(models: Any) -> Any:
    return pytest.mark.parametrize("model", models, ids=lambda m: m.name)


def _counts(fn: Any, args: Any, names: tuple[str, ...]) -> dict[str, int]:
    found = {name: len(equations(fn, *args, name=name)) for name in names}
    return {name: n for name, n in found.items() if n}


@_each(MODELS)
def test_the_sites_of_the_zoo_account_for_every_product(model):
    fn, args = _built(model)
    sites = {op: model.sites.get(op, 0) for op in OPS}
    pairs = sites["gated_matmul"] + sites["attention"]
    expected = {
        "dot_general": sites["matmul"] + 2 * pairs,
        "conv_general_dilated": sites["conv2d"],
    }
    expected = {name: n + model.misses.get(name, 0) for name, n in expected.items()}
    found = _counts(jax.jit(fn), args, PRODUCTS)
    assert found == {name: n for name, n in expected.items() if n}


@_each(MODELS)
def test_every_site_is_rewritten_and_nothing_else(model):
    fn, args = _built(model)
    fast = jax.jit(tracea.transform(fn))  # jit keeps the trace
    names = tuple(f"tracea_{op}" for op in OPS)
    assert _counts(fast, args, names) == {
        f"tracea_{op}": n for op, n in model.sites.items()
    }
    assert _counts(fast, args, PRODUCTS) == dict(model.misses), model.why_missed


_compile = functools.partial(jax.jit, compiler_options=COMPILER)


def _derivative(fn: Any) -> Any:
    """(args, cotangent of the outputs) -> (outputs, gradients of the parameters)."""

    def outputs_and_gradients(args: Any, cotangent: Any) -> Any:
        outputs, pull = jax.vjp(lambda params: fn(params, *args[1:]), args[0])
        return outputs, pull(cotangent)[0]

    return _compile(outputs_and_gradients)


@functools.cache  # one compilation serves several tests
def _plain(model: Model) -> Any:
    return _derivative(_built(model)[0])


def _cotangent(fn: Any, args: Any) -> Any:
    outputs = jax.eval_shape(fn, *args)
    return jax.tree.map(lambda o: normal(*o.shape, seed=9).astype(o.dtype), outputs)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def _named(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(x).astype(np.float64)
        for path, x in leaves
    }


def _assert_close(found: Any, expected: Any, within: float) -> None:
    """Each leaf, relative to its largest entry.

    Some gradients are zero but for rounding, as those of the biases of attention's
    keys: they are compared with a hundredth of the largest of all.
    """
    found, expected = _named(found), _named(expected)
    assert found.keys() == expected.keys()
    floor = 0.01 * max(np.abs(y).max() for y in expected.values())
    for name, y in expected.items():
        error = np.abs(found[name] - y).max() / max(np.abs(y).max(), floor)
        assert error <= within, f"{name}: {error:.2g}"


# The others are larger, or have the layers of these: slow tests. Gradients of residual
# networks are in test_rewrite_layouts and test_rewrite_conv2d, and those of an encoder
# are in test_whole_programs (vit_step).
COMPILED = ("llama_scan", "experts", "lstm")


def _slow_unless(names: tuple[str, ...], models: Any) -> Any:
    params = [
        pytest.param(m, id=m.name, marks=[pytest.mark.slow] * (m.name not in names))
        for m in models
    ]
    return pytest.mark.parametrize("model", params)


@pytest.mark.once
@_slow_unless(COMPILED, [m for m in MODELS if m.exact is None])
def test_outputs_and_gradients_in_float32(model):
    fn, args = _built(model)
    cotangent = _cotangent(fn, args)
    outputs, gradients = _derivative(tracea.transform(fn))(args, cotangent)
    expected_outputs, expected_gradients = _plain(model)(args, cotangent)
    _assert_close(outputs, expected_outputs, model.outputs_within)
    _assert_close(gradients, expected_gradients, model.gradients_within)


def _assert_as_good(found: Any, plain: Any, exact: Any) -> None:
    """Each leaf's error is at most twice that of plain JAX, and a rounding or two.

    Those of leaves that are smaller than others stem from sums of larger terms.
    """
    found, plain, exact = _named(found), _named(plain), _named(exact)
    assert found.keys() == exact.keys()
    floor = 0.5 * max(np.linalg.norm(y) / y.size**0.5 for y in exact.values())
    for name, y in exact.items():
        rounding = 2**-7 * max(np.linalg.norm(y), floor * y.size**0.5)
        allowed = 2 * np.linalg.norm(plain[name] - y) + rounding
        error = np.linalg.norm(found[name] - y)
        assert error <= allowed, f"{name}: {error / allowed:.2g} of what is allowed"


@pytest.mark.slow
@_each([m for m in MODELS if m.narrow and m.exact is None])
def test_outputs_of_bfloat16_are_as_near_to_float32_as_plain_ones(model):
    fn, args = _built(model)
    args = _cast(args, jnp.bfloat16)
    cotangent = _cast(_cotangent(fn, args), jnp.float32)
    exact, _ = _plain(model)(_cast(args, jnp.float32), cotangent)
    _assert_as_good(_compile(tracea.transform(fn))(*args), _compile(fn)(*args), exact)


@pytest.mark.once
@_slow_unless(("gpt_linen_bf16",), [m for m in MODELS if m.exact])
def test_gradients_of_mixed_precision_are_as_near_to_float32_as_plain_ones(model):
    fn, args = _built(model)
    cotangent = _cotangent(fn, args)
    found = _derivative(tracea.transform(fn))(args, cotangent)
    plain = _derivative(fn)(args, cotangent)
    (exact,) = (m for m in MODELS if m.name == model.exact)
    expected = _plain(exact)(args, _cast(cotangent, jnp.float32))
    for f, p, e in zip(found, plain, expected, strict=True):
        _assert_as_good(f, p, e)

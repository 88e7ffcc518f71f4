"""What a newcomer gets wrong, and what the errors say: what came, and what to do."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import normal

import tracea_jax as tracea
from tracea_jax import mistakes, ops

SMALL = tracea.GemmProblem(m=8, n=4, k=16)


def layer(x, w):
    return jax.nn.gelu(x @ w)


def message_of(error: type[Exception], call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --- values in errors -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (None, "None"),
        ("matmul", "'matmul'"),
        ("x" * 1000, f"'{'x' * 79}..."),
        (np.ones((8, 4), np.float32), "an array float32[8,4]"),
        (jnp.ones(3, jnp.bfloat16), "an array bfloat16[3]"),
        (jax.ShapeDtypeStruct((), "int32"), "an array int32[]"),
        ([jnp.ones(3)] * 2, "a list of 2"),
        ({}, "a dict of 0"),
        (layer, "the function layer"),
        (jax.nn.relu, "the function relu"),
        (functools.partial(jax.jit(layer), 3), "the function layer"),
        (tracea.GemmProblem, "the class GemmProblem"),
        (SMALL, "a GemmProblem"),
        (tracea.Options(), "an Options"),
    ],
)
def test_a_value_is_shown_in_a_few_words(value, text):
    assert mistakes.shown(value) == text


def test_a_traced_value_is_shown_by_its_shape():
    seen = []
    jax.jit(lambda x: seen.append(mistakes.shown(x)))(normal(2, 3))
    assert seen == ["an array float32[2,3]"]


def test_similar_names():
    assert mistakes.similar("GELU", ["relu", "gelu"]) == "; did you mean 'gelu'?"
    assert mistakes.similar("banana", ["relu", "gelu"]) == ""
    assert mistakes.similar("b200", ["H200"], least=1.0) == ""
    assert "'H200'" in mistakes.similar("h200", ["H200"], least=1.0)


# --- functions ------------------------------------------------------------------------


@pytest.mark.parametrize("public", [tracea.transform, tracea.explain, tracea.tune])
@pytest.mark.parametrize(
    ("what", "came"),
    [
        (3, "not 3"),
        (normal(64, 64) @ normal(64, 64), r"not an array float32\[64,64\]"),
        ((normal(2), normal(2)), "not a tuple of 2"),
        (tracea.Options(), "not an Options"),
    ],
    ids=["number", "array", "tuple", "object"],
)
def test_what_is_no_function_is_refused_and_not_printed(public, what, came):
    text = message_of(TypeError, lambda: public(what))
    name = public.__name__
    assert re.search(f"{name} takes a function.*, {came}; write {name}\\(f", text)
    assert len(text) < 120


def test_the_result_of_a_function_is_no_function():
    x, w = normal(8, 16), normal(16, 4)
    text = message_of(TypeError, lambda: tracea.tune(layer(x, w)))
    assert "an array float32[8,4]; write tune(f, *args)" in text
    with pytest.raises(TypeError, match=r"write tune\(f, \*args\)"):
        tracea.tune(x, w)
    with pytest.raises(TypeError, match=r"write transform\(f\)"):
        tracea.transform()(layer(x, w))
    with pytest.raises(TypeError, match=r"from_function takes a function.*float32"):
        tracea.Graph.from_function(layer(x, w))


@pytest.mark.parametrize("public", [tracea.transform, tracea.explain])
def test_arguments_belong_to_the_result(public):
    x, w = normal(8, 16), normal(16, 4)
    name = public.__name__
    for args in ((x,), (x, w), (None,), ("",), ([],)):
        text = message_of(TypeError, functools.partial(public, layer, *args))
        assert f"{name}(f)(x), not {name}(f, x)" in text
    text = message_of(TypeError, lambda: public(layer, ["matmul"]))
    assert f"{name}(f, ops=['matmul'])" in text
    assert next(iter(inspect.signature(public).parameters)) == "fn"


def test_problems_and_names_are_tuned_as_graphs():
    with pytest.raises(TypeError, match=r"graph.add_matmul\(...\); tune\(graph\)"):
        tracea.tune("matmul", 64, 64, 64)
    with pytest.raises(TypeError, match=r"write tune\(tracea.Graph\(problems\)\)"):
        tracea.tune([SMALL])


# --- ops ------------------------------------------------------------------------------


@pytest.mark.parametrize("ops_given", [["matmul"], ("matmul",), "matmul", {"matmul"}])
def test_transform_with_ops_is_a_decorator(ops_given):
    @tracea.transform(ops=ops_given)
    def decorated(x, w):
        """Its own docstring."""
        return layer(x, w)

    x, w = normal(8, 16), normal(16, 4)
    np.testing.assert_allclose(decorated(x, w), layer(x, w), rtol=1e-5, atol=1e-5)
    assert "tracea_matmul" in str(jax.make_jaxpr(decorated)(x, w))
    assert decorated.__name__ == "decorated" and "own" in (decorated.__doc__ or "")

    @tracea.transform(ops=["conv2d"])
    def other(x, w):
        return layer(x, w)

    assert "tracea_matmul" not in str(jax.make_jaxpr(other)(x, w))


@pytest.mark.parametrize(
    "take",
    [
        lambda ops: tracea.transform(layer, ops=ops),
        lambda ops: tracea.transform(ops=ops),
        lambda ops: tracea.explain(layer, ops=ops),
        lambda ops: tracea.tune(layer, normal(8, 16), normal(16, 4), ops=ops),
        lambda ops: tracea.tune(SMALL, ops=ops),
    ],
    ids=["transform", "decorator", "explain", "tune", "tune a problem"],
)
def test_ops_are_names_of_ops(take):
    with pytest.raises(ValueError, match="must be some of .*; did you mean 'matmul'"):
        take("matmull")
    with pytest.raises(TypeError, match="ops must be names of ops, not 3"):
        take(3)
    for given in (ops.matmul, [ops.matmul]):
        with pytest.raises(TypeError, match="the function matmul; did you mean 'matm"):
            take(given)


# --- devices and numbers --------------------------------------------------------------


def test_a_device_is_a_name_or_a_profile():
    x, w = normal(8, 16), normal(16, 4)
    h200 = tracea.explain(layer, device="H200")(x, w)
    assert tracea.explain(layer, device=h200.device)(x, w) == h200
    with pytest.raises(ValueError, match="device='h200' .*cpu, H200,.*mean 'H200'"):
        tracea.explain(layer, device="h200")
    with pytest.raises(ValueError, match="device='gpu' must be one of cpu, H200"):
        tracea.tune(layer, x, w, device="gpu")
    with pytest.raises(ValueError, match="only the local device can be tuned"):
        tracea.tune(SMALL, device="H200")


@pytest.mark.parametrize("name", ["budget_s", "portfolio"])
def test_numbers_are_numbers(name):
    how: dict[str, Any] = {name: "10"}
    with pytest.raises(TypeError, match=f"{name} must be a number or None, not '10'"):
        tracea.tune(SMALL, **how)

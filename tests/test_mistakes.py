"""Mistakes of newcomers, and errors that say what came and what to do."""

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


class Strange:
    """A value that must not be asked for more than its type."""

    @property
    def dtype(self):
        raise RuntimeError("not yet")

    def __repr__(self):
        raise RuntimeError("not yet")


def graph_of(problems: Any) -> tracea.Graph:
    return tracea.Graph(problems)


def as_any(value: Any) -> Any:
    """For wrong arguments, which a type checker would refuse."""
    return value


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
        (1 << 2000, "an integer of 2001 bits"),
        (Strange(), "a Strange"),
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
    wrong: Any = layer(x, w)
    text = message_of(TypeError, lambda: tracea.tune(wrong))
    assert "an array float32[8,4]; write tune(f, *args)" in text
    with pytest.raises(TypeError, match=r"write tune\(f, \*args\)"):
        tracea.tune(as_any(x), w)
    with pytest.raises(TypeError, match=r"write transform\(f\)"):
        tracea.transform()(wrong)
    with pytest.raises(TypeError, match=r"from_function takes a function.*float32"):
        tracea.Graph.from_function(wrong)


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
        tracea.tune(as_any("matmul"), 64, 64, 64)
    with pytest.raises(TypeError, match=r"write tune\(tracea.Graph\(problems\)\)"):
        tracea.tune(as_any([SMALL]))


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


# --- activations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (jax.nn.gelu, "gelu"),
        (functools.partial(jax.nn.gelu, approximate=True), "gelu"),
        (functools.partial(jax.nn.gelu, approximate=False), "gelu_exact"),
        (jax.nn.relu, "relu"),
        (jax.nn.silu, "silu"),
        (jax.nn.swish, "silu"),
        (jax.jit(jax.nn.relu), "relu"),
        (None, "none"),
        ("GELU", "gelu"),
        ("swish", "silu"),
        ("gelu_tanh", "gelu"),
        ("gelu_erf", "gelu_exact"),
        ("gleu", "gelu"),
    ],
)
def test_an_activation_is_a_name_and_the_error_says_which(given, meant):
    x, w, image = normal(8, 16), normal(16, 4), normal(1, 4, 4, 2)
    calls = [
        lambda: ops.matmul(x, w, activation=given),
        lambda: ops.gated_matmul(x, w, w, activation=given),
        lambda: ops.conv2d(image, normal(3, 3, 2, 4), activation=given),
        lambda: tracea.Epilogue(activation=given),
        lambda: tracea.Graph().add_matmul(8, 4, 16, activation=given),
    ]
    for call in calls:
        text = message_of(ValueError, call)
        assert f"did you mean {meant!r}?" in text and "none, relu, gelu," in text
        assert " at 0x" not in text


@pytest.mark.parametrize("given", [jnp.tanh, jax.nn.elu, lambda y: y, normal(4)])
def test_other_activations_are_applied_to_the_result(given):
    text = message_of(
        ValueError, lambda: ops.matmul(normal(8, 16), normal(16, 4), activation=given)
    )
    assert "it must be one of none, relu, gelu, gelu_exact, silu" in text
    assert "did you mean" not in text
    assert ("to the result" in text) == callable(given)


# --- configs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kc": 64}, r"gemm_cpu: it lacks nc, tasks; its fields are kc, nc, tasks"),
        ({"kc": 64, "nc": 64, "task": 1}, r"no config field task;.*mean 'tasks'"),
        ({"kc": "64", "nc": 64, "tasks": 1}, r"kc='64' must be an integer"),
        ({"kc": [64], "nc": 64, "tasks": 1}, r"kc=\(64,\) must be an integer"),
        ({1: 64, "nc": 64}, r"no config field 1; its fields are kc, nc, tasks"),
        ({"tile_m": 64}, r"gemm_sm90, .*gemm_sm80: it runs on NVIDIA GPUs"),
        (64, r"config=64 does not fit gemm_cpu: pass GemmCpuConfig or a dict of kc"),
        (normal(3), r"config=an array float32\[3\] must be a variant's config, or a"),
        ({"kc": normal(3)}, "config=a dict of 1 must be a variant's config"),
    ],
    ids=str,
)
def test_a_wrong_config_names_the_fields(config, message):
    x, w = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
    text = message_of(ValueError, lambda: ops.matmul(x, w, config=config))
    assert re.search(message, text), text
    assert "__init__" not in text and "positional" not in text


def test_a_wrong_config_of_a_gpu_kernel_names_the_fields():
    x = jax.ShapeDtypeStruct((512, 512), "bfloat16")

    def reason(**config):
        def fn(x):
            return ops.matmul(x, x, implementation="gemm_sm90", config=config)

        (site,) = tracea.explain(fn, device="H200")(x).sites
        assert site.variant is None and "__init__" not in site.reason
        return site.reason

    assert "it lacks tile_m, stages; its fields are tile_m, tile_n" in reason(tile_n=64)
    assert "no config field tile_k" in reason(tile_m=64, tile_n=64, stages=4, tile_k=64)
    assert "tile_m" in reason(tile_m="64", tile_n=64, stages=4)


# --- graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda g: g.add_attention(1, 2, 3),
            r"^add_attention: missing a required .*'heads'; it is add_attention\("
            r"batch, q_len, kv_len, heads, head_dim, \*, dtype='float32', .*count=1",
        ),
        (
            lambda g: g.add_conv2d(1, 2),
            r"^add_conv2d: missing .*'width'; it is add_conv2d\(batch, height, width",
        ),
        (
            lambda g: g.add_matmul(1, 2, 3, 4),
            r"^add_matmul: too many .*; it is add_matmul\(m, n, k, \*",
        ),
        (
            lambda g: g.add_gated_matmul(1, 2, 3, dtyp="bfloat16"),
            r"^add_gated_matmul: .*unexpected.*'dtyp'; it is add_gated_matmul\(m, n, k",
        ),
        (lambda g: g.add_matmul(normal(8, 16), normal(16, 4)), "^add_matmul: missing"),
        (lambda g: g.add(normal(8, 16)), r"not an array float32\[8,16\]"),
        (lambda g: g.add(layer), "not the function layer; Graph.from_function"),
        (lambda g: graph_of(layer), "not the function layer; .*from_function"),
        (lambda g: graph_of(SMALL), r"not a GemmProblem; write Graph\(\[problem\]\)"),
    ],
)
def test_methods_of_a_graph_err_by_their_own_names(add, message):
    with pytest.raises(TypeError, match=f"(?s){message}"):
        add(tracea.Graph())


def test_methods_of_a_graph_know_their_signatures():
    add = tracea.Graph().add_attention
    assert (add.__name__, add.__qualname__) == ("add_attention", "Graph.add_attention")
    parameters = inspect.signature(add).parameters
    assert list(parameters)[:5] == ["batch", "q_len", "kv_len", "heads", "head_dim"]
    assert parameters["count"].default == 1
    with pytest.raises(AttributeError, match="'add_conv'; did you mean 'add_conv2d'"):
        tracea.Graph().add_conv(1)


def test_a_problem_has_full_names_of_dtypes():
    short: Any = tracea.GemmProblem(m=8, n=4, k=16, lhs="bf16", rhs="bf16")
    with pytest.raises(ValueError, match="'bf16' is unknown.*did you mean 'bfloat16'"):
        tracea.tune(short)


def test_the_scale_of_attention_is_a_number():
    q = normal(1, 4, 2, 8)
    wrong: Any = "small"
    for scale, came in ((wrong, "'small'"), (normal(3), r"an array float32\[3\]")):
        with pytest.raises(ValueError, match=f"scale must be a number, not {came}"):
            ops.attention(q, q, q, scale=scale)


def test_problems_of_wrong_types_are_refused():
    wrong: Any = {"m": "8", "n": 4, "k": 16}
    with pytest.raises(ValueError, match="m must be int, not '8'"):
        tracea.tune(tracea.GemmProblem(**wrong))


# --- names ----------------------------------------------------------------------------


def test_a_name_that_is_not_there_has_a_neighbour():
    for name, hint in (
        ("transfrom", "did you mean 'transform'"),
        ("option", "did you mean 'option"),
        ("matmul", "it is tracea_jax.ops.matmul"),
        ("linear_cross_entropy", "it is tracea_jax.ops.linear_cross_entropy"),
    ):
        with pytest.raises(AttributeError, match=f"attribute '{name}'; {hint}"):
            getattr(tracea, name)
    with pytest.raises(AttributeError) as found:  # an op that programs do not call
        _ = tracea.max_pool
    assert "tracea_jax.ops" not in str(found.value)
    with pytest.raises(AttributeError, match="no attribute '__wrapped__'$"):
        _ = tracea.__wrapped__


def test_an_implementation_that_is_not_there_has_a_neighbour():
    x, w = normal(8, 16), normal(16, 4)
    for name, meant in (("gem_cpu", "gemm_cpu"), ("XLA", "xla"), ("Tracea", "tracea")):
        with pytest.raises(ValueError, match=f"'{name}' is unknown; .*mean '{meant}'"):
            ops.matmul(x, w, implementation=as_any(name))
    wrong: Any = jnp.ones(3)
    with pytest.raises(
        ValueError, match=r"implementation=an array float32\[3\] is unk"
    ):
        ops.matmul(x, w, implementation=wrong)


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
    how = {"seed": "a"}
    with pytest.raises(TypeError, match="seed must be an integer, not 'a'"):
        tracea.tune(SMALL, **how)

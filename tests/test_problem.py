"""Problems and epilogues as values: equality, JSON, text, sizes."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import pytest

from tracea_jax.problem import ACTIVATIONS, Epilogue, GemmProblem

GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)
SIZES = st.integers(0, 2**33)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int8"])
OTHER = st.none() | DTYPES

EPILOGUES = st.builds(
    Epilogue,
    bias=st.sampled_from(["none", "row", "batched_row"]),
    activation=st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
    save_preactivation=st.booleans(),
    bias_dtype=OTHER,
    residual_dtype=OTHER,
)
PROBLEMS = st.builds(
    GemmProblem,
    batch=SIZES,
    m=SIZES,
    n=SIZES,
    k=SIZES,
    lhs=DTYPES,
    rhs=DTYPES,
    out=DTYPES,
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    lhs_batched=st.booleans(),
    rhs_batched=st.booleans(),
    precision=st.sampled_from(["default", "high", "highest", "BF16_BF16_F32"]),
    epilogue=EPILOGUES | st.just(GRADIENT),
)


@hypothesis.given(PROBLEMS)
def test_json_round_trip(problem):
    data = json.loads(json.dumps(problem.to_json()))
    assert data["op"] == "matmul"
    assert GemmProblem.from_json(data) == problem
    assert hash(GemmProblem.from_json(data)) == hash(problem)


@hypothesis.given(PROBLEMS)
def test_text_and_json_are_stable_names(problem):
    again = dataclasses.replace(problem)
    assert str(again) == str(problem) and again.to_json() == problem.to_json()
    assert "\n" not in str(problem)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "matmul 2x3x4 float32 nn"),
        ({"batch": 7, "lhs_batched": True}, "matmul 7x2x3x4 float32 nn"),
        ({"lhs": "bfloat16"}, "matmul 2x3x4 bfloat16,float32->float32 nn"),
        ({"out": "bfloat16", "layout": "tn"}, "matmul 2x3x4 float32->bfloat16 tn"),
        ({"precision": "highest"}, "matmul 2x3x4 float32 nn highest"),
        (
            {"epilogue": Epilogue(bias="row", activation="gelu", residual=True)},
            "matmul 2x3x4 float32 nn bias+gelu+residual",
        ),
        (
            {"epilogue": Epilogue(activation="relu", save_preactivation=True)},
            "matmul 2x3x4 float32 nn relu &z",
        ),
        (
            {"epilogue": Epilogue(bias="row", bias_dtype="float16")},
            "matmul 2x3x4 float32 nn bias:float16",
        ),
        ({"epilogue": GRADIENT}, "matmul 2x3x4 float32 nn gelu' &sums"),
        (
            {"epilogue": dataclasses.replace(GRADIENT, column_sums=False)},
            "matmul 2x3x4 float32 nn gelu'",
        ),
    ],
)
def test_text(changes, text):
    assert str(GemmProblem(m=2, n=3, k=4, **changes)) == text


def test_names_of_problems_without_sums_are_those_from_before_there_were_any():
    epilogue = GemmProblem(m=2, n=3, k=4).to_json()["epilogue"]
    assert "column_sums" not in epilogue
    assert GemmProblem(m=2, n=3, k=4, epilogue=GRADIENT).to_json()["epilogue"] == {
        **epilogue,
        "activation": "gelu",
        "residual": True,
        "residual_op": "derivative",
        "column_sums": True,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": "row"}, "neither a bias nor a z"),
        ({"save_preactivation": True}, "neither a bias nor a z"),
        ({"residual": False}, "column_sums are of an epilogue with a derivative"),
        ({"residual_op": "add"}, "column_sums are of an epilogue with a derivative"),
    ],
)
def test_a_derivative_excludes_what_it_has_no_meaning_with(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GRADIENT, **changes)


def test_flops_and_bytes():
    problem = GemmProblem(m=2, n=3, k=4)
    assert problem.flops == 2 * 2 * 3 * 4
    assert problem.bytes == 4 * (2 * 4 + 4 * 3 + 2 * 3)
    batched = dataclasses.replace(
        problem,
        batch=5,
        lhs="bfloat16",
        rhs="bfloat16",
        out="float16",
        lhs_batched=True,
    )
    assert batched.flops == 5 * problem.flops
    assert batched.bytes == 2 * (5 * 2 * 4 + 4 * 3 + 5 * 2 * 3)
    epilogue = Epilogue(residual=True, save_preactivation=True)
    more = dataclasses.replace(batched, epilogue=epilogue)
    assert more.bytes - batched.bytes == 2 * (2 * 5 * 2 * 3)


def test_identity():
    assert Epilogue().is_identity
    for change in (
        {"bias": "row"},
        {"activation": "relu"},
        {"residual": True},
        {"save_preactivation": True},
    ):
        assert not dataclasses.replace(Epilogue(), **change).is_identity


def test_an_unknown_activation_lists_the_known():
    with pytest.raises(ValueError, match="'swish'.*none, relu, gelu, gelu_exact, silu"):
        Epilogue(activation="swish")  # pyright: ignore[reportArgumentType]


def test_a_field_of_another_version_is_an_error():
    data = GemmProblem(m=1, n=1, k=1).to_json()
    with pytest.raises(TypeError, match="sparsity"):
        GemmProblem.from_json({**data, "sparsity": 0.5})

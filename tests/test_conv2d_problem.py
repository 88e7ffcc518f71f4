"""Convolutions as problems: text, JSON, tracing, the Doctor and the tuner."""

from __future__ import annotations

import dataclasses
import functools
import json

import convolutions
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import arguments
from jaxprs import equations

import tracea_jax as tracea
from tracea_jax import knowledge
from tracea_jax.campaign import local_device
from tracea_jax.device import named
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops.conv2d import workload as bench
from tracea_jax.ops.conv2d.primitive import problem_of
from tracea_jax.options import current
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue, problem_from_json
from tracea_jax.variants import XLA

pytestmark = pytest.mark.once

SIZES, SMALL = st.integers(0, 2**33), st.integers(1, 9)
PADS = st.tuples(st.integers(-3, 9), st.integers(-3, 9))
PROBLEMS = st.builds(
    Conv2dProblem,
    direction=st.sampled_from(["forward", "input_grad", "weight_grad"]),
    **dict.fromkeys(("batch", "height", "width", "in_channels", "out_channels"), SIZES),
    kernel_height=SMALL,
    kernel_width=SMALL,
    strides=st.tuples(SMALL, SMALL),
    padding=st.tuples(PADS, PADS),
    dilation=st.tuples(SMALL, SMALL),
    groups=SMALL,
    layout=st.sampled_from(["nhwc", "nchw"]),
    lhs=st.sampled_from(["float32", "bfloat16"]),
    out=st.sampled_from(["float32", "bfloat16"]),
    precision=st.sampled_from(["default", "highest"]),
    epilogue=st.builds(
        Epilogue, bias=st.sampled_from(["none", "row"]), residual=st.booleans()
    ),
)
DIRECTIONS = ("forward", "input_grad", "weight_grad")
PROBLEM = Conv2dProblem(
    batch=2,
    height=6,
    width=5,
    in_channels=4,
    kernel_height=3,
    kernel_width=2,
    out_channels=6,
    strides=(2, 1),
    padding=((1, 0), (0, 1)),
    groups=2,
)


@hypothesis.given(PROBLEMS)
def test_json_round_trip(problem):
    data = json.loads(json.dumps(problem.to_json()))
    again = problem_from_json(data)
    assert again == problem and hash(again) == hash(problem)
    assert str(again) == str(problem) and "\n" not in str(problem)
    assert dataclasses.replace(problem).to_json() == problem.to_json()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "stride 2x1 pad 1,0x0,1 groups 2"),
        ({"strides": (1, 1), "padding": ((0, 0), (0, 0)), "groups": 1}, ""),
        (
            {"direction": "input_grad", "dilation": (1, 2)},
            "input_grad stride 2x1 pad 1,0x0,1 dilation 1x2 groups 2",
        ),
        (
            {"epilogue": Epilogue(bias="row", activation="relu", residual=True)},
            "stride 2x1 pad 1,0x0,1 groups 2 bias+relu+residual",
        ),
    ],
)
def test_text(changes, text):
    problem = dataclasses.replace(PROBLEM, **changes)
    assert str(problem) == f"conv2d 2x6x5x4 * 3x2x6 float32 nhwc {text}".strip()


def test_flops_and_bytes():
    assert PROBLEM.out_size == (3, 5)
    assert PROBLEM.flops == 2 * (2 * 3 * 5 * 6) * (3 * 2 * 2)
    x, w, y = 2 * 6 * 5 * 4, 3 * 2 * 2 * 6, 2 * 3 * 5 * 6
    assert PROBLEM.bytes == 4 * (x + w + y)
    narrow = dataclasses.replace(PROBLEM, direction="weight_grad", lhs="bfloat16")
    assert narrow.bytes == 2 * x + 4 * (w + y)
    epilogue = Epilogue(residual=True, save_preactivation=True)
    more = dataclasses.replace(PROBLEM, epilogue=epilogue)
    assert more.bytes - PROBLEM.bytes == 2 * 4 * y


# --- problems that are traced ---------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_derivatives_are_problems_of_the_same_convolution(layout):
    args = arguments(layout, groups=2, size=(6, 5), stride=2)
    args = [x.astype("bfloat16") for x in args]
    args[2] = args[2].astype("float32")

    def loss(*args):
        how = dict(strides=(2, 2), groups=2, layout=layout, precision="highest")
        return convolutions.ours(*args, activation="gelu", **how).sum()

    found = [
        problem_of([v.aval for v in e.invars], **e.params)
        for e in equations(jax.grad(loss, (0, 1)), *args, name="tracea_conv2d")
    ]
    dtypes = dict(lhs="bfloat16", rhs="bfloat16", out="bfloat16")
    expected = dataclasses.replace(
        PROBLEM,
        strides=(2, 2),
        padding=((0, 1), (0, 1)),
        layout=layout.lower(),
        precision="highest",
        epilogue=Epilogue(
            bias="row",
            bias_dtype="float32",
            activation="gelu",
            residual=True,
            save_preactivation=True,
        ),
        **dtypes,
    )
    gradients = [
        dataclasses.replace(expected, direction=direction, epilogue=Epilogue())
        for direction in ("weight_grad", "input_grad")
    ]
    assert found == [expected, *gradients]


def test_the_problem_of_a_bench_is_that_of_its_primitive():
    for direction in DIRECTIONS:
        problem = dataclasses.replace(PROBLEM, direction=direction)
        run = functools.partial(bench.execute, problem=problem, choice=_XLA)
        inputs = jax.eval_shape(functools.partial(bench.operands, problem, 0))
        (equation,) = equations(run, *inputs, name="tracea_conv2d")
        avals = [v.aval for v in equation.invars]
        assert problem_of(avals, **equation.params) == problem
        assert (
            equation.outvars[0].aval.shape
            == {
                "forward": (2, 3, 5, 6),
                "input_grad": (2, 6, 5, 4),
                "weight_grad": (3, 2, 2, 6),
            }[direction]
        )


# --- the Doctor, the tuner and what it verifies with ----------------------------------

_XLA = Choice(variant="xla", config=XLA.config_type())


@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_the_doctor_knows_xla(device):
    device = local_device() if device == "cpu" else named(device)
    diagnosis = diagnose(PROBLEM, device)
    assert diagnosis.candidates[-1] == "xla"
    assert diagnosis.reason("xla") is None
    assert str(PROBLEM) in str(diagnosis)


def test_tuning_finds_and_remembers_xla():
    problem = dataclasses.replace(PROBLEM, direction="weight_grad", layout="nchw")
    entry = tracea.tune(problem, effort="none").entry
    assert entry.best is not None and entry.best.variant == "xla"
    answer = knowledge.known(current()).lookup(problem, local_device(), ("xla",))
    assert answer is not None and answer.choice == _XLA and answer.origin == "tuned"
    assert answer.xla_us is not None and answer.xla_us > 0


def results(problem):
    inputs = bench.operands(problem, 1)
    return inputs, bench.execute(*inputs, problem=problem, choice=_XLA)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_error_of_right_results_is_small_and_of_wrong_ones_large(direction, layout):
    problem = dataclasses.replace(PROBLEM, direction=direction, layout=layout)
    inputs, (y,) = results(problem)
    y = np.array(y)
    corner, nothing = y.copy(), y.copy()
    corner[-1, -1, -1, -1] += 1e-3
    nothing[1, 1, 1, 1] = np.nan

    def judged(y):
        return bench.error(problem, local_device(), inputs, [jnp.asarray(y)], 0)

    assert judged(y) < 0.5
    assert judged(y * np.float32(1 + 1e-4)) > 2
    assert judged(corner) > 2
    assert judged(y[::-1]) > 100 and judged(y[:, :, ::-1]) > 100
    assert judged(nothing) == float("inf")


def test_the_error_knows_the_epilogue():
    epilogue = Epilogue(
        bias="row", activation="silu", residual=True, save_preactivation=True
    )
    problem = dataclasses.replace(PROBLEM, epilogue=epilogue)
    inputs, (y, z) = results(problem)
    assert bench.error(problem, local_device(), inputs, [y, z], 0) < 0.5
    assert bench.error(problem, local_device(), inputs, [z, z], 0) > 100
    assert bench.error(problem, local_device(), inputs, [y, y], 0) > 100


@pytest.mark.parametrize(
    ("groups", "strides"), [(1, (1, 1)), (1, (2, 3)), (2, (2, 1)), (4, (1, 2))]
)
def test_ragged_problems_are_of_the_same_kind(groups, strides):
    problem = dataclasses.replace(
        PROBLEM, groups=groups, strides=strides, out_channels=4, height=64
    )
    ragged = bench.ragged(problem)
    assert ragged.out_size == (13, 11)
    assert (ragged.groups == 1) == (groups == 1)
    assert (ragged.groups == ragged.in_channels) == (groups == 4)
    inputs, found = results(ragged)
    assert bench.error(ragged, local_device(), inputs, found, 0) < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, "groups must divide.*problem.groups=3"),
        ({"lhs": "float3"}, "'float3' is unknown"),
        ({"precision": "best"}, "precision 'best' is unknown"),
        ({"epilogue": Epilogue(residual_op="multiply")}, "adds a bias and a residual"),
        (
            {"epilogue": Epilogue(bias="row"), "direction": "input_grad"},
            "only a forward convolution has an epilogue",
        ),
    ],
)
def test_problems_that_cannot_be_run_are_refused(changes, message):
    problem = dataclasses.replace(PROBLEM, **changes)
    with pytest.raises(ValueError, match=message):
        tracea.tune(problem, effort="none")

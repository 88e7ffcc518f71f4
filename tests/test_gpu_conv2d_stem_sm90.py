"""conv2d_stem_sm90 on a Hopper GPU, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from conv_gpu import executed, expected, run_and_check

import tracea_jax as tracea
from tracea_jax.options import device_for
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.conv2d_stem_sm90 import CONV2D_STEM_SM90

pytestmark = pytest.mark.gpu

FULL = Epilogue(bias="row", activation="silu", residual=True, save_preactivation=True)
AWKWARD: dict[str, Any] = {
    **{"batch": 3, "height": 37, "width": 151, "in_channels": 3, "out_channels": 72},
    **{"kernel_height": 7, "kernel_width": 7, "padding": ((3, 3), (3, 3))},
    "strides": (2, 2),
}


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_STEM_SM90.why_not(stem(), device):
        pytest.skip(why)
    return device


def stem(dtype: Any = "bfloat16", **changes: Any) -> Conv2dProblem:
    fields: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": dtype, **AWKWARD}
    return Conv2dProblem(**{**fields, **changes})


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_every_config_at_one_awkward_shape(out, gpu):
    problem = stem(out=out)
    for config in CONV2D_STEM_SM90.space(problem, gpu).configs():
        run_and_check(CONV2D_STEM_SM90, problem, config)


SHAPES: dict[str, dict[str, Any]] = {
    "as JAX pads": {"padding": ((2, 3), (2, 3)), "height": 64, "width": 224},
    "one pixel": {"batch": 1, "height": 1, "width": 1},
    "one result": {"height": 7, "width": 7, "padding": ((0, 0), (0, 0))},
    "padding beyond the kernel": {"padding": ((9, 8), (11, 40))},
    "cropped": {"padding": ((-2, 1), (-3, -1))},
    "small kernel": {"kernel_height": 3, "kernel_width": 3},
    "wide kernel": {"kernel_height": 2, "kernel_width": 13},
    "dilated rows": {"dilation": (3, 1)},
    "rows one by one": {"strides": (1, 2)},
    "few rows": {"strides": (4, 2)},
    "one row": {"height": 1, "kernel_height": 1, "padding": ((0, 0), (2, 3))},
    "many": {"batch": 40, "height": 112, "width": 130, "out_channels": 136},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_awkward_shape(shape):
    for channels in (1, 2, 3, 4):
        run_and_check(CONV2D_STEM_SM90, stem(in_channels=channels, **SHAPES[shape]))


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_every_epilogue(activation):
    for residual, saves in itertools.product((False, True), (False, True)):
        epilogue = Epilogue(
            bias="row",
            bias_dtype="float32",
            activation=activation,
            residual=residual,
            save_preactivation=saves,
        )
        for dtype in ("bfloat16", "float16"):
            run_and_check(CONV2D_STEM_SM90, stem(dtype, epilogue=epilogue))


def test_results_are_equal_from_run_to_run():
    problem = stem(batch=20, epilogue=FULL)
    _, first = executed(CONV2D_STEM_SM90, problem)
    _, again = executed(CONV2D_STEM_SM90, problem)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_a_network_begins_with_it():
    problem = stem(epilogue=Epilogue(bias="row", activation="relu"))
    inputs, _ = executed(CONV2D_STEM_SM90, problem)
    x, w, bias = inputs

    def first(x, w, bias):
        return tracea.ops.conv2d(
            *(x, w),
            bias=bias,
            activation="relu",
            strides=(2, 2),
            padding=problem.padding,
            implementation="conv2d_stem_sm90",
        )

    (y,) = expected(problem, inputs)
    y.assert_near(jax.jit(first)(x, w, bias))
    assert jnp.issubdtype(x.dtype, jnp.floating)

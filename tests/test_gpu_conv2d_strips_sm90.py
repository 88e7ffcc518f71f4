"""conv2d_strips_sm90 on a Hopper GPU, against float64."""

from __future__ import annotations

import functools
from typing import Any

import conv_gpu
import numpy as np
import pytest
from conv_gpu import FULL, SHAPES, conv, executed

from tracea_jax.options import device_for
from tracea_jax.variants.conv2d_strips_sm90 import CONV2D_STRIPS_SM90

pytestmark = pytest.mark.gpu

run_and_check = functools.partial(
    conv_gpu.run_and_check, CONV2D_STRIPS_SM90, ties_to_even=True
)


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_STRIPS_SM90.why_not(conv(), device):
        pytest.skip(why)
    return device


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_config_at_one_awkward_shape(direction, dtype, out, gpu):
    problem = conv(dtype, direction=direction, out=out)
    run_and_check(problem, *CONV2D_STRIPS_SM90.space(problem, gpu).configs())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_awkward_shape(shape, direction, dtype, gpu):
    problem = conv(dtype, direction=direction, **SHAPES[shape])
    if CONV2D_STRIPS_SM90.why_not(problem, gpu) is None:
        run_and_check(problem)


@pytest.mark.parametrize("channels", [8, 16, 40, 64, 96, 200])
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_number_of_channels(direction, channels):
    for out in (8, 72):
        problem = conv(direction=direction, in_channels=channels, out_channels=out)
        run_and_check(problem)
    fields = {"in_channels": channels + 4, "out_channels": 68}
    run_and_check(conv("float32", direction=direction, **fields))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_follow_each_other_with_residuals(dtype, gpu):
    """More tiles than blocks: buffers, barriers and turns go on from tile to tile."""
    large: dict[str, Any] = {"batch": 24, "height": 40, "width": 40}
    problem = conv(dtype, **large, epilogue=FULL, out_channels=136)
    run_and_check(problem, *CONV2D_STRIPS_SM90.space(problem, gpu).configs())


def test_results_are_equal_from_run_to_run():
    problem = conv(batch=20, height=40, width=40, epilogue=FULL)
    _, first = executed(CONV2D_STRIPS_SM90, problem)
    _, again = executed(CONV2D_STRIPS_SM90, problem)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)

"""Convolutions of few channels a group on a GPU: every entry compared exactly."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from ahead import compiled_ahead
from depthwise import FULL, depthwise
from gpu_images import check, executed
from spaces import one_of_each

import tracea_jax as tracea
from tracea_jax.ops.conv2d import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.conv2d_grouped import CONV2D_GROUPED
from tracea_jax.variants.conv2d_grouped_images import CONV2D_GROUPED_IMAGES

pytestmark = pytest.mark.gpu

SHAPES = {
    "pairs": depthwise(2, 9, 20, 32, 3, group=2),
    "fours": depthwise(2, 13, 17, 48, 3, group=4),
    "eights": depthwise(2, 10, 19, 48, 3, group=8),
    "steps": depthwise(1, 9, 40, 48, 3, group=8, stride=2),
    "sixteens": depthwise(2, 7, 33, 80, 3, group=16),
    "pairs of fragments": depthwise(1, 9, 20, 96, 3, group=32),
    "one pixel": depthwise(1, 1, 1, 16, 1, group=8),
    "dilated": depthwise(1, 20, 35, 32, 3, group=4, dilation=2),
    "dilated with steps": depthwise(1, 15, 34, 32, 3, group=4, dilation=3, stride=2),
    "wide kernel": depthwise(1, 12, 18, 32, (1, 7), group=4),
    "padding beyond the kernel": depthwise(
        1, 5, 4, 16, 3, group=4, padding=((5, 6), (4, 7))
    ),
    "cropped": depthwise(1, 9, 8, 16, 3, group=8, padding=((-1, -2), (-2, 1))),
}

SMALL = {
    "sixteens": depthwise(3, 9, 5, 48, 3, group=16),
    "more images than a block": depthwise(19, 3, 3, 64, 3, group=32),
    "channels of half a block": depthwise(5, 7, 7, 160, 3, group=32),
    "steps": depthwise(5, 9, 14, 96, 3, group=32, stride=2),
    "dilated with steps": depthwise(2, 15, 14, 32, 3, group=16, dilation=3, stride=2),
    "one pixel": depthwise(1, 1, 1, 16, 1, group=16),
    "wide kernel": depthwise(2, 5, 9, 64, (1, 5), group=16),
    "cropped": depthwise(1, 9, 8, 32, 3, group=16, padding=((-1, -2), (-2, 1))),
    "padding beyond the kernel": depthwise(
        1, 5, 4, 32, 3, group=32, padding=((5, 6), (4, 7))
    ),
}


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes(name, direction):
    problem = dataclasses.replace(SHAPES[name], direction=direction)
    if (why := CONV2D_GROUPED.why_not(problem, device_for("cuda"))) is not None:
        assert "the gradient of strides" in why
        return
    check(CONV2D_GROUPED, problem)


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("name", SMALL)
def test_awkward_small_images(name, direction):
    problem = dataclasses.replace(SMALL[name], direction=direction)
    why = CONV2D_GROUPED_IMAGES.why_not(problem, device_for("cuda"))
    if why is not None:
        assert "the gradient of strides" in why
        return
    check(CONV2D_GROUPED_IMAGES, problem)


@pytest.mark.parametrize("group", [16, 32])
def test_every_kind_of_config_of_small_images(group):
    problem = depthwise(11, 5, 7, 128, 3, group=group)
    space = CONV2D_GROUPED_IMAGES.space(problem, device_for("cuda"))
    configs = one_of_each(space, "channels", "tiles", "parts")
    choices = [Choice(variant="conv2d_grouped_images", config=c) for c in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(CONV2D_GROUPED_IMAGES, problem, config)


def test_every_kind_of_config():
    problem = depthwise(2, 14, 40, 64, 3, group=4)
    space = CONV2D_GROUPED.space(problem, device_for("cuda"))
    configs = one_of_each(space, "channels", "tile_w", "rows")
    choices = [Choice(variant="conv2d_grouped", config=config) for config in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(CONV2D_GROUPED, problem, config)


@pytest.mark.parametrize(
    ("variant", "group"),
    [
        *((CONV2D_GROUPED.name, group) for group in (8, 16, 32)),
        *((CONV2D_GROUPED_IMAGES.name, group) for group in (16, 32)),
    ],
)
def test_not_a_number_stays_in_its_group(variant, group):
    x = numerics.normal(2, 9, 20, 64, dtype="bfloat16").at[0, 4, 4, 63].set(jnp.nan)
    w = numerics.normal(3, 3, group, 64, dtype="bfloat16")
    y = tracea.ops.conv2d(x, w, groups=64 // group, implementation=variant)
    finite = np.ones((2, 9, 20, 64), bool)
    finite[0, 3:6, 3:6, 64 - group :] = False
    np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), finite)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("variant", "group"),
    [(CONV2D_GROUPED, 4), (CONV2D_GROUPED_IMAGES, 16), (CONV2D_GROUPED_IMAGES, 32)],
)
def test_dtypes_and_epilogues(variant, group, dtype):
    plain = depthwise(2, 14, 13, 64, 3, group=group, dtype=dtype)
    check(variant, plain)
    for out in (dtype, "float32"):
        problem = dataclasses.replace(plain, epilogue=FULL, out=out)
        inputs = workload.operands(problem, seed=1)
        results = executed(variant, problem, inputs)
        assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1

"""conv2d_stem_weights on a GPU: poisoned results, every entry compared exactly."""

from __future__ import annotations

import pytest
from weight_gradients import check, dense

from tracea_jax.options import device_for
from tracea_jax.variants.conv2d_stem_weights import CONV2D_STEM_WEIGHTS

pytestmark = pytest.mark.gpu

SHAPES = {
    "resnet": dense(5, 64, 64, 3, 64, 7, strides=(2, 2), padding=((2, 3), (2, 3))),
    "narrow": dense(3, 20, 32, 3, 72, 3, strides=(2, 2), padding=((0, 1), (0, 1))),
    "without steps": dense(2, 9, 16, 3, 8, 3),
    "seven channels": dense(2, 16, 48, 7, 16, 3),
    "one channel": dense(
        2, 16, 64, 1, 136, 5, strides=(1, 2), padding=((2, 2), (2, 1))
    ),
    "padding beyond the kernel": dense(
        2, 32, 32, 3, 64, 4, strides=(4, 4), padding=((3, 3), (20, 12))
    ),
    "cropped": dense(2, 34, 34, 3, 64, 3, strides=(2, 2), padding=((-1, 0), (-1, 0))),
    "many rows": dense(67, 40, 32, 3, 64, 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes(name):
    check(CONV2D_STEM_WEIGHTS, SHAPES[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_config(dtype):
    problem = dense(3, 20, 32, 3, 72, 3, dtype=dtype, out=dtype)
    for config in CONV2D_STEM_WEIGHTS.space(problem, device_for("cuda")).configs():
        check(CONV2D_STEM_WEIGHTS, problem, config)

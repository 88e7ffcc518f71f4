"""conv2d_weights_sm90 on a GPU: poisoned results, every entry compared exactly."""

from __future__ import annotations

import dataclasses

import pytest
from ahead import compiled_ahead
from spaces import one_of_each
from weight_gradients import check, dense

from tracea_jax.ops.conv2d import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_WEIGHTS_SM90.why_not(dense(1, 5, 5, 8, 8, 3), device):
        pytest.skip(why)
    return device


AWKWARD = {
    "one pixel": dense(1, 1, 1, 8, 8, 1),
    "prime": dense(3, 13, 11, 40, 72, 3),
    "slabs over taps": dense(2, 9, 17, 200, 136, 3),
    "rectangular": dense(2, 7, 30, 64, 64, (1, 5)),
    "padding beyond the kernel": dense(2, 5, 4, 64, 8, 3, padding=((5, 6), (4, 7))),
    "cropped": dense(2, 9, 8, 64, 64, 3, padding=((-1, -2), (-2, 1))),
    "steps": dense(3, 13, 14, 64, 128, 3, strides=(2, 2)),
    "uneven steps": dense(2, 30, 29, 8, 64, 3, strides=(3, 4)),
    "dilated": dense(2, 20, 21, 64, 64, 3, dilation=(2, 3), padding=((2, 2), (3, 3))),
    "dilated with steps": dense(1, 20, 21, 64, 64, 3, dilation=(2, 3), strides=(2, 2)),
    "many images": dense(131, 5, 5, 64, 64, 3),
    "groups of 4": dense(3, 13, 11, 72, 72, 3, groups=18),
    "groups of 16": dense(2, 13, 14, 80, 80, 3, strides=(2, 2), groups=5),
    "groups of 64": dense(2, 9, 7, 192, 192, (3, 2), groups=3),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shapes(name):
    check(CONV2D_WEIGHTS_SM90, AWKWARD[name])


def test_every_kind_of_config():
    problem = dense(3, 19, 17, 72, 200, 3)
    space = CONV2D_WEIGHTS_SM90.space(problem, device_for("cuda"))
    fields = ("tile_m", "tile_n", "consumers_m", "consumers_n", "stages", "taps")
    configs = one_of_each(space, *fields)
    choices = [Choice(variant="conv2d_weights_sm90", config=c) for c in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(CONV2D_WEIGHTS_SM90, problem, config)


@pytest.mark.parametrize("name", AWKWARD)
def test_taps_that_share_copies(name):
    problem = AWKWARD[name]
    configs = CONV2D_WEIGHTS_SM90.space(problem, device_for("cuda")).configs()
    for tile in {(c.tile_m, c.tile_n): c for c in configs if c.taps > 1}.values():
        check(CONV2D_WEIGHTS_SM90, problem, tile)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_parts(parts):
    problem = dense(2, 16, 17, 64, 64, 3)
    config = CONV2D_WEIGHTS_SM90.heuristic(problem, device_for("cuda"))
    check(CONV2D_WEIGHTS_SM90, problem, dataclasses.replace(config, parts=parts))


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype, out):
    problem = dense(2, 14, 13, 64, 64, 3, dtype=dtype, out=out)
    check(CONV2D_WEIGHTS_SM90, problem)
    inputs = workload.operands(problem, seed=1)
    config = CONV2D_WEIGHTS_SM90.heuristic(problem, device_for("cuda"))
    choice = Choice(variant="conv2d_weights_sm90", config=config)
    results = workload.execute(*inputs, problem=problem, choice=choice)
    assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1

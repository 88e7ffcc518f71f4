"""conv2d_bands on a GPU: poisoned results, every entry compared with float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from depthwise import FULL, depthwise
from gpu_images import check, executed
from spaces import one_of_each

from tracea_jax.ops.conv2d import workload
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.conv2d_bands import CONV2D_BANDS

pytestmark = pytest.mark.gpu

EPILOGUE = dataclasses.replace(FULL, residual=False, save_preactivation=False)
SHAPES = {
    "one pixel": depthwise(1, 1, 1, 8, 1),
    "prime": depthwise(3, 13, 11, 24, 3),
    "a column more than a strip": depthwise(17, 7, 9, 40, 5),
    "fifteen strips": depthwise(2, 9, 115, 16, 7),
    "several blocks of columns": depthwise(1, 5, 301, 16, 3),
    "wide kernel": depthwise(2, 17, 19, 72, (3, 9)),
    "high kernel": depthwise(2, 17, 19, 16, (9, 1)),
    "even kernel": depthwise(2, 8, 9, 24, (2, 4)),
    "padding beyond the kernel": depthwise(1, 5, 4, 16, 3, padding=((5, 6), (4, 7))),
    "cropped": depthwise(1, 9, 8, 16, 3, padding=((-1, -2), (-2, 1))),
    "images smaller than the kernel": depthwise(40, 2, 3, 48, 7),
    "many channels": depthwise(2, 7, 7, 776, 7),
    "many tiles of a block": depthwise(70, 30, 30, 256, 3),
}


@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes(name, direction):
    check(CONV2D_BANDS, dataclasses.replace(SHAPES[name], direction=direction))


@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("kernel", [3, 7])
def test_every_kind_of_config(kernel, direction):
    problem = depthwise(21, 14, 59, 40, kernel, direction=direction)
    space = CONV2D_BANDS.space(problem, device_for("cuda"))
    configs = one_of_each(space, "channels", "strips", "stages", "rows")
    choices = [Choice(variant="conv2d_bands", config=config) for config in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(CONV2D_BANDS, problem, config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_and_epilogues(dtype):
    plain = depthwise(3, 14, 13, 24, 5, dtype=dtype)
    for activation in ("none", "relu", "gelu_exact"):
        epilogue = dataclasses.replace(EPILOGUE, activation=activation)
        problem = dataclasses.replace(plain, epilogue=epilogue)
        inputs = workload.operands(problem, seed=1)
        results = executed(CONV2D_BANDS, problem, inputs)
        assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1
    for direction in ROLES:
        check(CONV2D_BANDS, dataclasses.replace(plain, direction=direction))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_where_it_is(value, dtype):
    problem = depthwise(2, 9, 21, 8, 3, dtype=dtype)
    x, w = workload.operands(problem, seed=1)
    clean = np.asarray(executed(CONV2D_BANDS, problem, [x, w])[0], np.float32)
    y = executed(CONV2D_BANDS, problem, [x.at[0, 4, 4, 3].set(value), w])[0]
    found = np.asarray(y.astype(jnp.float32))
    seen = np.zeros(found.shape, bool)
    seen[0, 3:6, 3:6, 3] = True
    np.testing.assert_array_equal(np.isfinite(found), ~seen)
    # Those of the same block are summed in another order.
    np.testing.assert_allclose(found[~seen], clean[~seen], rtol=2**-7, atol=2**-7)

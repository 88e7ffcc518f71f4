"""conv2d_depthwise on a GPU: poisoned results, every entry compared with float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from depthwise import AWKWARD, FULL, depthwise
from gpu_images import check, executed
from spaces import one_of_each

from tracea_jax.ops.conv2d import workload
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue
from tracea_jax.variants.conv2d_depthwise import CONV2D_DEPTHWISE

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shapes(name, direction):
    problem = dataclasses.replace(AWKWARD[name], direction=direction)
    if (why := CONV2D_DEPTHWISE.why_not(problem, device_for("cuda"))) is not None:
        assert "the gradient of" in why
        return
    check(CONV2D_DEPTHWISE, problem)


@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("kernel", [3, 7])
def test_every_kind_of_config(kernel, direction):
    problem = depthwise(3, 13, 11, 40, kernel, direction=direction)
    space = CONV2D_DEPTHWISE.space(problem, device_for("cuda"))
    # Larger kernels take seconds to compile.
    fields = ("channels", "tile_w") if kernel == 3 else ("tile_w",)
    configs = one_of_each(space, *fields)
    choices = [Choice(variant="conv2d_depthwise", config=config) for config in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(CONV2D_DEPTHWISE, problem, config)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_epilogues(dtype, stride):
    problem = depthwise(2, 14, 13, 24, 5, stride=stride, dtype=dtype)
    for epilogue in (FULL, dataclasses.replace(FULL, activation="relu")):
        problem = dataclasses.replace(problem, epilogue=epilogue)
        inputs = workload.operands(problem, seed=1)
        results = executed(CONV2D_DEPTHWISE, problem, inputs)
        assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1
    for direction in ROLES:
        check(
            CONV2D_DEPTHWISE,
            dataclasses.replace(problem, epilogue=Epilogue(), direction=direction),
        )


def test_many_tiles_of_a_block():
    problem = depthwise(150, 30, 30, 256, 3, direction="weight_grad", dtype="float32")
    inputs = workload.operands(problem, seed=1)
    results = executed(CONV2D_DEPTHWISE, problem, inputs)
    assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1


def test_values_that_are_not_numbers_stay_where_they_are():
    problem = depthwise(1, 9, 9, 8, 3)
    x, w = workload.operands(problem, seed=1)
    clean = np.asarray(executed(CONV2D_DEPTHWISE, problem, [x, w])[0], np.float32)
    y = np.asarray(
        executed(CONV2D_DEPTHWISE, problem, [x.at[0, 4, 4, 3].set(jnp.nan), w])[0],
        np.float32,
    )
    seen = np.zeros(y.shape, bool)
    seen[0, 3:6, 3:6, 3] = True
    np.testing.assert_array_equal(np.isnan(y), seen)
    np.testing.assert_array_equal(y[~seen], clean[~seen])

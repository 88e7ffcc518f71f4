"""group_norm_sm90 and layer_norm on a GPU: poisoned memory, compared with float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from numerics import normal
from spaces import one_of_each

from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.group_norm.primitive import gradients_p, group_norm_p
from tracea_jax.ops.group_norm.workload import GROUP_NORM
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import GroupNormProblem
from tracea_jax.variants.group_norm_sm90 import GROUP_NORM_SM90
from tracea_jax.variants.layer_norm import LAYER_NORM

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

DIRECTIONS = ("forward", "gradients")


def norm(images: int, pixels: int, channels: int, groups: int, **how: Any) -> Any:
    how = {"dtype": "bfloat16", "activation": "silu", **how}
    return GroupNormProblem(
        images=images, pixels=pixels, channels=channels, groups=groups, **how
    )


SHAPES = {
    "one pixel": norm(1, 1, 40, 4),
    "fewer pixels than blocks": norm(2, 5, 40, 4),
    "primes": norm(3, 1009, 88, 11),
    "one group": norm(2, 131, 72, 1),
    "a group each": norm(2, 67, 24, 24),
    "a slab that ends early": norm(3, 57, 56, 7),
    "groups of seven": norm(2, 61, 56, 8),
    "many images": norm(517, 3, 8, 2),
    "wide groups": norm(1, 19, 4096, 1),
    "a row of a layer norm": norm(33, 1, 768, 1, activation="none"),
}


ROWS = {
    "one row": norm(1, 1, 8, 1),
    "half a pack": norm(5, 1, 4, 1, dtype="float32"),
    "lanes without packs": norm(1009, 1, 88, 1),
    "more rows than blocks": norm(20_011, 1, 96, 1, activation="none"),
    "wide": norm(301, 1, 1024, 1, activation="none"),
    "wide float32": norm(7, 1, 500, 1, dtype="float32", activation="gelu"),
}


def check(
    problem: GroupNormProblem, config: Any = None, variant: Any = GROUP_NORM_SM90
) -> None:
    device = device_for("cuda")
    assert variant.why_not(problem, device) is None
    config = config or variant.heuristic(problem, device)
    choice = Choice(variant=variant.name, config=config)
    result = OpBench(GROUP_NORM, problem, device).verify(choice)
    assert result.ok and result.repeatable, f"{config}: {result.message}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes(name, direction):
    check(dataclasses.replace(SHAPES[name], direction=direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ROWS)
def test_awkward_rows(name, direction):
    check(dataclasses.replace(ROWS[name], direction=direction), variant=LAYER_NORM)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_config_of_rows(direction):
    problem = norm(517, 1, 72, 1, direction=direction)
    device = device_for("cuda")
    configs = LAYER_NORM.space(problem, device).configs()
    choices = [Choice(variant="layer_norm", config=c) for c in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            check(problem, config, LAYER_NORM)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_kind_of_config(direction):
    problem = norm(2, 301, 240, 24, direction=direction)
    device = device_for("cuda")
    space = GROUP_NORM_SM90.space(problem, device)
    configs = one_of_each(space, "cluster", "threads", "keeps")
    choices = [Choice(variant="group_norm_sm90", config=c) for c in configs]
    with compiled_ahead(problem, choices, device):
        for config in configs:
            check(problem, config)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_exact"])
def test_activations(activation, direction):
    check(norm(2, 77, 48, 6, activation=activation, direction=direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtypes", ["float16", "float32", "float32 bfloat16"])
def test_dtypes(dtypes, direction):
    dtype, *parameters = dtypes.split()
    for name in parameters or ("float32", dtype):
        how = {"dtype": dtype, "parameters": name, "direction": direction}
        check(norm(2, 77, 48, 6, **how))


def call(x: Any, scale: Any, bias: Any, *more: Any, groups: int, **how: Any) -> Any:
    how = {"implementation": "group_norm_sm90", "config": None, **how}
    how = {"groups": groups, "epsilon": 1e-5, "activation": "silu", **how}
    primitive = gradients_p if more else group_norm_p
    return primitive.bind(x, scale, bias, *more, **how)


def test_images_without_variance_are_the_bias():
    x = jnp.full((2, 301, 40), 1000.0, jnp.bfloat16)
    scale, bias = normal(40), normal(40)
    y, mean, inverse = call(x, scale, bias, groups=4)
    np.testing.assert_array_equal(mean, 1000.0)
    np.testing.assert_allclose(inverse, 1e-5**-0.5, rtol=1e-6)
    wanted = jax.nn.silu(bias).astype(jnp.bfloat16)
    np.testing.assert_allclose(
        *(np.asarray(v, np.float32) for v in (y[1, 7], wanted)), rtol=2**-7
    )


def test_means_that_are_large_do_not_drown_variances():
    """As in float32 images whose mean is 4096 times their deviation."""
    x = normal(2, 301, 40) + 4096
    exact = np.asarray(x, np.float64).reshape(2, 301, 4, 10)
    _, mean, inverse = call(x, jnp.ones(40), jnp.zeros(40), groups=4)
    np.testing.assert_allclose(mean, exact.mean((1, 3)), rtol=2**-22)
    deviation = np.sqrt(exact.var((1, 3)) + 1e-5)
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_group(value):
    for pixel in (0, 150, 300):
        x = normal(2, 301, 40, dtype="bfloat16").at[1, pixel, 23].set(value)
        scale, bias, dy = (
            jnp.ones(40),
            jnp.zeros(40),
            normal(2, 301, 40, dtype="bfloat16"),
        )
        is_lost = np.zeros((2, 301, 40), bool)
        is_lost[1, :, 20:30] = True
        y, mean, inverse = call(x, scale, bias, groups=4)
        np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), is_lost)
        dx, *sums = call(x, scale, bias, mean, inverse, dy, groups=4)
        np.testing.assert_array_equal(np.isnan(np.asarray(dx, np.float32)), is_lost)
        for total in sums:
            np.testing.assert_array_equal(np.isnan(total), is_lost[1, 0])

"""conv2d_sm90 on a Hopper GPU, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import conv_gpu
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from conv_gpu import FULL, SHAPES, conv

import tracea_jax as tracea
from tracea_jax.emit.conv2d_sm90 import Conv2dSm90Config
from tracea_jax.ops.conv2d import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue
from tracea_jax.variants.conv2d_sm90 import CONV2D_SM90

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_SM90.why_not(conv(), device):
        pytest.skip(why)
    return device


executed = functools.partial(conv_gpu.executed, CONV2D_SM90)
run_and_check = functools.partial(
    conv_gpu.run_and_check, CONV2D_SM90, ties_to_even=True
)


DTYPES = ("bfloat16", "float32")


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_config_at_one_awkward_shape(direction, dtype, out, gpu):
    problem = conv(dtype, direction=direction, out=out)
    configs = CONV2D_SM90.space(problem, gpu).configs()
    assert len(configs) >= 12
    run_and_check(problem, *configs)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_every_depth_of_the_ring(stages, gpu):
    problem = conv(in_channels=200, epilogue=FULL)
    config = CONV2D_SM90.heuristic(problem, gpu)
    plain = {"ping_pong": False, "cluster": 1}
    small = dataclasses.replace(config, tile_m=128, tile_n=64, consumers=2, **plain)
    run_and_check(problem, dataclasses.replace(small, stages=stages))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_awkward_shape(shape, direction, dtype):
    run_and_check(conv(dtype, direction=direction, **SHAPES[shape]))


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_number_of_channels(direction, strides):
    for channels in (8, 16, 24, 40, 64, 96, 128, 200, 264):
        for out in (8, 72):
            run_and_check(
                conv(
                    **{"direction": direction, "strides": strides},
                    **{"in_channels": channels, "out_channels": out},
                )
            )


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_number_of_channels_of_float32(direction):
    for channels, out in ((4, 36), (12, 4), (28, 132), (36, 4), (64, 36), (100, 68)):
        asked = conv("float32", in_channels=channels, out_channels=out)
        run_and_check(dataclasses.replace(asked, direction=direction))
        run_and_check(dataclasses.replace(asked, direction=direction, strides=(2, 2)))


@pytest.mark.parametrize("strides", [(3, 3), (4, 1), (8, 5)])
def test_larger_strides(strides):
    run_and_check(conv(strides=strides, height=37, width=41))


def test_turns_without_products_are_seen_by_every_warp(gpu):
    """Three of the four phases of a gradient of strided pixels have no taps."""
    problem = conv(**SHAPES["strided pixels"] | SHAPES["many"], in_channels=256)
    problem = dataclasses.replace(problem, direction="input_grad")
    tiles = ({"tile_m": 128, "tile_n": 128}, {"tile_m": 64, "tile_n": 256})
    for tile in tiles:
        turns = {"stages": 4, "consumers": 2, "ping_pong": True, "cluster": 1}
        config = Conv2dSm90Config(**tile, **turns)
        choice = Choice(variant=CONV2D_SM90.name, config=config)
        inputs = bench.operands(problem, seed=3)
        call = functools.partial(bench.execute, problem=problem, choice=choice)
        call = jax.jit(call)
        (first,) = call(*inputs)
        for _ in range(100):
            (last,) = call(*inputs)
        np.testing.assert_array_equal(first, last, strict=True)


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_every_epilogue(residual, activation):
    others = itertools.cycle((None, "float32", "float16"))
    same = {"bfloat16": "float16", "float16": "bfloat16", "float32": None}
    for out, saves in itertools.product(same, (False, True)):
        epilogue = Epilogue(
            bias="row",
            bias_dtype=next(others),
            activation=activation,
            residual=residual,
            residual_dtype=same[out] if residual and saves else None,
            save_preactivation=saves,
        )
        run_and_check(conv(out=out, epilogue=epilogue))
        run_and_check(conv("float32", out=out, epilogue=epilogue))
        plain = dataclasses.replace(epilogue, bias="none", bias_dtype=None)
        run_and_check(conv("float16", out=out, epilogue=plain))


@pytest.mark.parametrize(
    ("dtype", "tile_n"),
    [("bfloat16", 64), ("bfloat16", 160), ("bfloat16", 256), ("float32", 128)],
)
def test_tiles_follow_each_other_with_residuals(dtype, tile_n, gpu):
    """More tiles than blocks: buffers and barriers go on from tile to tile."""
    large: dict[str, Any] = {"batch": 24, "height": 40, "width": 40}
    problem = conv(dtype, **large, epilogue=FULL, out_channels=328)
    configs = CONV2D_SM90.space(problem, gpu).configs()
    run_and_check(
        problem, *(c for c in configs if (c.tile_m, c.tile_n) == (128, tile_n))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_equal_from_run_to_run(dtype):
    problem = conv(dtype, batch=20, height=40, width=40, epilogue=FULL)
    _, first = executed(problem)
    for _ in range(3):
        _, again = executed(problem)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_where_a_kernel_sees_it(dtype):
    """Also in a channel beside the zeros of a chunk, and in a pixel at the padding."""
    x = numerics.normal(2, 9, 9, 40, dtype=dtype).at[0, 8, 8, 39].set(jnp.nan)
    w = numerics.normal(3, 3, 40, 24, dtype=dtype).at[0, 0, 39, 23].set(jnp.inf)
    y = tracea.ops.conv2d(x, w, implementation="conv2d_sm90")
    finite = np.ones((2, 9, 9, 24), bool)
    finite[0, 7:, 7:] = False
    finite[..., 23] = False  # the zeros of the padding times inf, too
    np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), finite)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_op_run_on_the_kernel(dtype):
    x = numerics.normal(2, 14, 14, 64, dtype=dtype)
    w = numerics.normal(3, 3, 64, 128, dtype=dtype) / 24

    def loss(x, implementation):
        y = tracea.ops.conv2d(
            x, w, activation="relu", strides=(2, 2), implementation=implementation
        )
        return (y.astype("float32") ** 2).sum()

    found = jax.jit(jax.grad(loss), static_argnums=1)(x, "conv2d_sm90")
    wanted = jax.grad(loss)(x.astype("float32"), "xla")
    error = np.abs(np.asarray(found, np.float32) - np.asarray(wanted))
    assert error.max() <= 2e-2 * np.abs(np.asarray(wanted)).max()

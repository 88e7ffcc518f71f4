"""conv2d_sm80 on a GPU, against float64 and exact sums."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import conv_gpu
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
import weight_gradients
from ahead import compiled_ahead
from conv_gpu import FULL, SHAPES, conv
from spaces import one_of_each
from weight_gradients import dense

import tracea_jax as tracea
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.conv2d_sm80 import CONV2D_SM80

pytestmark = pytest.mark.gpu

run_and_check = functools.partial(conv_gpu.run_and_check, CONV2D_SM80)
check_weights = functools.partial(weight_gradients.check, CONV2D_SM80)
DTYPES = ("bfloat16", "float32")
SMALL = tuple(name for name in SHAPES if name != "many")


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_SM80.why_not(conv(), device):
        pytest.skip(why)
    return device


@contextlib.contextmanager
def every_config(problem: Conv2dProblem) -> Iterator[list[Any]]:
    """One of each tile and its split, compiled; depths take turns."""
    device = device_for("cuda")
    fields = ("tile_m", "tile_n", "warps_m", "warps_n")
    configs = one_of_each(CONV2D_SM80.space(problem, device), *fields)
    assert len(configs) >= 8
    choices = [Choice(variant="conv2d_sm80", config=config) for config in configs]
    with compiled_ahead(problem, choices, device):
        yield configs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_config_at_one_awkward_shape(direction, dtype):
    problem = conv(dtype, direction=direction)
    with every_config(problem) as configs:
        run_and_check(problem, *configs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_config_of_weights(dtype):
    problem = dense(3, 13, 11, 72, 200, 3, dtype=dtype)
    with every_config(problem) as configs:
        for config in configs:
            check_weights(problem, config)


@pytest.mark.parametrize("tile_k", [16, 32])
@pytest.mark.parametrize("stages", [2, 3, 6])
def test_every_depth_of_the_ring(stages, tile_k):
    """Rings that are longer than the depth, and shorter."""
    config = GemmSm80Config(
        **{"tile_m": 64, "tile_n": 64, "warps_m": 2, "warps_n": 2},
        **{"tile_k": tile_k, "stages": stages},
    )
    for channels in (8, 72):
        run_and_check(conv("float32", in_channels=channels, epilogue=FULL), config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("shape", SMALL)
def test_every_awkward_shape(shape, direction, dtype):
    run_and_check(conv(dtype, direction=direction, **SHAPES[shape]))


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_many_tiles(direction):
    run_and_check(conv(direction=direction, **SHAPES["many"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SMALL)
def test_weights_of_every_awkward_shape(shape, dtype):
    fields = {"out": "float32", "direction": "weight_grad", **SHAPES[shape]}
    check_weights(conv(dtype, **fields))


@pytest.mark.parametrize("groups", [2, 5])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
@pytest.mark.parametrize("channels", [(8, 16), (72, 136)])
def test_groups(channels, strides, groups):
    """Channels of a group that are less than a tile, or more than one."""
    for dtype, direction in itertools.product(DTYPES, ("forward", "input_grad")):
        fields: dict[str, Any] = {"direction": direction, "strides": strides}
        run_and_check(
            conv(
                dtype,
                **{**fields, "groups": groups, "in_channels": groups * channels[0]},
                out_channels=groups * channels[1],
            )
        )
    inputs, outputs = (groups * count for count in channels)
    how: dict[str, Any] = {"groups": groups, "strides": strides}
    check_weights(dense(2, 9, 11, inputs, outputs, 3, **how))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_number_of_channels(dtype):
    unit = 4 if dtype == "float32" else 8
    for units, out in ((1, 9), (2, 1), (3, 9), (5, 1), (8, 9), (13, 9), (33, 1)):
        channels = {"in_channels": units * unit, "out_channels": out * unit}
        for direction in ("forward", "input_grad"):
            run_and_check(conv(dtype, direction=direction, **channels))


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_every_epilogue(residual, activation):
    others = itertools.cycle((None, "float32", "float16"))
    for out, saves in itertools.product(("bfloat16", "float32"), (False, True)):
        epilogue = Epilogue(
            bias="row",
            bias_dtype=next(others),
            activation=activation,
            residual=residual,
            residual_dtype=next(others) if residual else None,
            save_preactivation=saves,
        )
        run_and_check(conv(out=out, epilogue=epilogue))
        run_and_check(conv("float32", out=out, epilogue=epilogue))


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_of_weights(dtype, out):
    check_weights(dense(2, 14, 13, 64, 64, 3, dtype=dtype, out=out))


def test_results_are_equal_from_run_to_run():
    problem = conv(batch=20, height=40, width=40, epilogue=FULL)
    _, first = conv_gpu.executed(CONV2D_SM80, problem)
    for _ in range(3):
        _, again = conv_gpu.executed(CONV2D_SM80, problem)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y, strict=True)


def test_arrays_of_more_elements_than_31_bits_count():
    """The last image is computed as if it were alone."""
    shape = (260, 1024, 1024, 8)
    x = (jax.lax.iota(jnp.uint32, math.prod(shape)) % 7).astype("bfloat16")
    x = x.reshape(shape) - 3
    w = jnp.round(numerics.normal(3, 3, 8, 8)).astype("bfloat16")
    f = functools.partial(tracea.ops.conv2d, padding=((1, 1), (1, 1)))
    y = f(x, w, implementation="conv2d_sm80")
    np.testing.assert_array_equal(y[-1:], f(x[-1:], w, implementation="xla"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_where_a_kernel_sees_it(dtype):
    """Also in a channel beside the end of the depth, and in a pixel at the padding."""
    x = numerics.normal(2, 9, 9, 40, dtype=dtype).at[0, 8, 8, 39].set(jnp.nan)
    w = numerics.normal(3, 3, 40, 24, dtype=dtype).at[0, 0, 39, 23].set(jnp.inf)

    def f(x, w):
        return tracea.ops.conv2d(x, w, implementation="conv2d_sm80")

    y, transposed = jax.vjp(f, x, w)
    finite = np.ones((2, 9, 9, 24), bool)
    finite[0, 7:, 7:] = False
    finite[..., 23] = False  # the zeros of the padding times inf, too
    np.testing.assert_array_equal(np.isfinite(np.asarray(y, np.float32)), finite)
    dx, dw = transposed(jnp.ones_like(y))
    finite = np.ones((2, 9, 9, 40), bool)
    finite[..., 39] = False
    np.testing.assert_array_equal(np.isfinite(np.asarray(dx, np.float32)), finite)
    # Taps of the first row and column do not see the last pixel.
    finite = np.ones((3, 3, 40, 24), bool)
    finite[1:, 1:, 39] = False
    np.testing.assert_array_equal(np.isfinite(np.asarray(dw, np.float32)), finite)


def test_gradients_of_the_op_run_on_the_kernel():
    x = numerics.normal(2, 14, 14, 64)
    w = numerics.normal(3, 3, 64, 128) / 24

    def loss(x, w, implementation):
        how: dict[str, Any] = {"activation": "relu", "strides": (2, 2)}
        y = tracea.ops.conv2d(x, w, implementation=implementation, **how)
        return (y**2).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    found, wanted = (gradients(x, w, name) for name in ("conv2d_sm80", "xla"))
    for ours, theirs in zip(found, wanted, strict=True):
        error = np.abs(np.asarray(ours) - np.asarray(theirs))
        assert error.max() <= 5e-3 * np.abs(np.asarray(theirs)).max()

"""conv2d_strips_sm90 without a GPU: how pixels are counted, reasons, and text."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from conv_problems import (
    FLOAT32,
    FULL,
    H200,
    assert_compiles,
    cases,
    joined,
    problem,
    rows_only,
)

from tracea_jax.emit import conv2d_strips_sm90 as emit
from tracea_jax.emit.conv2d_strips_sm90 import Conv2dStripsSm90Config
from tracea_jax.emit.kernel import Im2colMap
from tracea_jax.variants.conv2d_strips_sm90 import CONV2D_STRIPS_SM90

pytestmark = pytest.mark.once

CONFIG = Conv2dStripsSm90Config(tile_m=256, tile_n=64, stages=4)


def counted(asked, images: int) -> np.ndarray:
    """[out, source] of some images in a row, as the kernel joins them by distances."""
    axis, _ = emit.strip_axes(asked)
    is_gradient = asked.direction == "input_grad"
    # What is behind the last image is zero, as what is behind any other.
    strip = np.full(images * axis.counted + axis.reach, -1)
    for image, at in itertools.product(range(images), range(axis.size)):
        strip[image * axis.counted + axis.before + at] = image * axis.size + at
    found = np.zeros((images * axis.extent, images * axis.size), int)
    for image, out in itertools.product(range(images), range(axis.extent)):
        row = image * axis.counted + out
        for tap in range(axis.taps):
            moved = axis.taps - 1 - tap if is_gradient else tap
            if (source := strip[row + moved * axis.step]) >= 0:
                found[image * axis.extent + out, source] = tap + 1
    return found


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_zeros_behind_an_image_are_those_in_front_of_the_next(direction):
    tried = 0
    for case in cases(strides=(1,)):
        asked = rows_only(direction, case)
        if CONV2D_STRIPS_SM90.why_not(asked, H200):
            continue
        of_one = joined(case)
        of_one = of_one.T if direction == "input_grad" else of_one
        wanted = np.kron(np.eye(3, dtype=int), of_one)
        np.testing.assert_array_equal(counted(asked, 3), wanted, err_msg=str(case))
        tried += 1
    assert tried >= 40


def test_tensor_maps_count_the_same_pixels():
    asked = problem(padding=((1, 2), (3, 0)), height=20)
    asked = dataclasses.replace(asked, epilogue=FULL)
    maps = emit.kernel(asked, CONFIG, H200).params
    pixels, residual = (m for m in maps if isinstance(m, Im2colMap))
    for axis, name in enumerate(strip_names := ("columns", "rows")):
        counts = [
            m.dims[1 + axis] + m.upper[axis] - m.lower[axis] for m in (pixels, residual)
        ]
        expected = emit.strip_axes(asked)[1 - axis].counted
        assert counts == [expected] * 2, strip_names and name


def test_a_strip_is_whole_copies_that_a_tile_sees():
    for width, taps in itertools.product((1, 13, 56, 100), (1, 3, 5)):
        asked = problem(width=width, kernel_width=taps, kernel_height=taps)
        asked = dataclasses.replace(asked, padding=((taps // 2,) * 2,) * 2)
        count, each = emit.copies(asked, 256)
        rows, columns = emit.strip_axes(asked)
        assert each <= 256 and each % 8 == 0
        needed = 256 + rows.reach * columns.counted + columns.reach
        assert needed <= count * each < needed + 8 * count


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strides": (2, 1)}, "its strides are (2, 1)"),
        ({"kernel_height": 1, "kernel_width": 1}, "one tap"),
        ({"padding": ((-1, 1), (1, 1))}, "cropped"),
        ({"kernel_height": 1, "padding": ((0, 0), (3, 3))}, "larger than the image"),
        ({"width": 4000}, "do not fit in shared memory"),
        ({"layout": "nchw"}, "nchw"),
        ({"in_channels": 12}, "in_channels=12"),
    ],
)
def test_a_refusal_names_its_reason(changes, why):
    reason = CONV2D_STRIPS_SM90.why_not(problem(**changes), H200)
    assert reason is not None and why in reason


@pytest.mark.parametrize("channels", [8, 64, 320])
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_every_config_of_the_space_is_legal(direction, channels):
    asked = problem(direction, in_channels=channels, out_channels=channels + 8)
    configs = CONV2D_STRIPS_SM90.space(asked, H200).configs()
    assert CONV2D_STRIPS_SM90.heuristic(asked, H200) in configs
    for config in configs:
        CONV2D_STRIPS_SM90.check(asked, config, H200)


@pytest.mark.parametrize(
    ("size", "channels", "fields", "wins"),
    [
        *((7, 512, FLOAT32, True), (14, 256, FLOAT32, False)),
        *((7, 512, {}, False), (56, 64, {}, True)),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_it_is_chosen_where_larger_tiles_are_few(
    direction, size, channels, fields, wins
):
    """98 tiles of 128 x 128 are fewer than 132 multiprocessors; 196 are not."""
    image = {"batch": 64, "height": size, "width": size}
    both = {"in_channels": channels, "out_channels": channels}
    asked = problem(direction, **image, **both, **fields)
    assert CONV2D_STRIPS_SM90.expects_to_win(asked, H200) == wins


@pytest.mark.parametrize(("channels", "wins"), [(320, True), (640, False)])
def test_it_is_chosen_where_few_tiles_have_a_narrow_slab(channels, wins):
    """Tiles of 160 channels are those that divide 320, and 128 divides 640."""
    image = {"batch": 1, "height": 64, "width": 64}
    asked = problem(**image, in_channels=640, out_channels=channels)
    assert CONV2D_STRIPS_SM90.expects_to_win(asked, H200) == wins


def test_few_tiles_are_one_round_where_they_can():
    """With tiles of 64 x 64 there would be two waves."""
    found = CONV2D_STRIPS_SM90.heuristic(problem(batch=8), H200)
    assert found.tile_m * found.tile_n == 2 * 64**2


def test_all_weights_stay_or_a_ring_of_them_turns():
    narrow = problem(in_channels=64, out_channels=64)
    configs = CONV2D_STRIPS_SM90.space(narrow, H200).configs()
    assert {c.stages for c in configs if c.resident} == {9}
    with pytest.raises(ValueError, match="must be 9"):
        resident = dataclasses.replace(CONFIG, resident=True)
        CONV2D_STRIPS_SM90.check(narrow, resident, H200)
    # A block whose weights stay has tiles of the same channels.
    wide = dataclasses.replace(narrow, out_channels=200)
    config = Conv2dStripsSm90Config(tile_m=128, tile_n=64, stages=9, resident=True)
    assert emit.kernel(wide, config, H200).grid[0] % 4 == 0


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, CONFIG),
        ({**FLOAT32, "epilogue": FULL, "width": 14}, CONFIG),
        (
            {"in_channels": 64, "epilogue": FULL, "out": "float32"},
            Conv2dStripsSm90Config(tile_m=128, tile_n=64, stages=9, resident=True),
        ),
    ],
)
def test_kernels_compile_without_spills(changes, config):
    asked = problem(**changes)
    CONV2D_STRIPS_SM90.check(asked, config, H200)
    assert_compiles(emit.kernel(asked, config, H200))


def compiled_problems() -> list[Any]:
    halves: dict[str, Any] = {"lhs": "float16", "rhs": "float16"}
    return [
        problem(**dtypes, direction=direction, epilogue=epilogue, width=14)
        for dtypes in (
            {**halves, "out": "float16"},
            {**halves, "out": "float32"},
            FLOAT32,
        )
        for direction, epilogue in (
            ("forward", problem().epilogue),
            ("forward", FULL),
            ("input_grad", problem().epilogue),
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("asked", compiled_problems(), ids=str)
def test_every_config_compiles_without_spills(asked):
    for channels in (64, 128):
        one = dataclasses.replace(asked, in_channels=channels)
        for config in CONV2D_STRIPS_SM90.space(one, H200).configs():
            assert_compiles(emit.kernel(one, config, H200))

"""conv2d_sm90 and its kin without a GPU: index formulas, reasons, configs, text."""

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

from tracea_jax import dispatch, policy
from tracea_jax.device import NAMED
from tracea_jax.emit import conv2d_sm90 as emit
from tracea_jax.emit.conv2d_sm90 import Conv2dSm90Config
from tracea_jax.emit.conv_axes import refused_walks, source_size, walks
from tracea_jax.emit.conv_operands import weights_map
from tracea_jax.emit.kernel import Im2colMap, Kernel
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.conv2d_sm90 import CONV2D_SM90
from tracea_jax.variants.steps import Expression, Steps

pytestmark = pytest.mark.once

# ---- positions, taps and corners -----------------------------------------------------


def walked(asked: Conv2dProblem, out_size: int) -> np.ndarray:
    """The same by what the kernel is told, each output written once."""
    source = source_size(asked)[0]
    found = np.full((out_size, source), -1)
    for walk in walks(asked)[0]:
        for i in range(walk.extent):
            out = walk.out_first + i * walk.out_step
            assert (found[out] == -1).all()
            found[out] = 0
            for j in range(walk.taps):
                offset = walk.first_offset + j * walk.offset_step
                assert offset >= 0
                at = walk.first + i * walk.stride + offset
                if 0 <= at < source:
                    found[out, at] = 1 + walk.first_tap + j * walk.tap_step
    assert (found >= 0).all()
    return found


def test_a_walk_joins_what_the_convolution_joins():
    for case in cases():
        asked = rows_only("forward", case)
        np.testing.assert_array_equal(
            walked(asked, asked.out_size[0]), joined(case), err_msg=str(case)
        )


def test_the_phases_of_a_gradient_join_what_the_convolution_joins():
    for case in cases():
        asked = rows_only("input_grad", case)
        np.testing.assert_array_equal(
            walked(asked, case[0]), joined(case).T, err_msg=str(case)
        )


def test_tensor_maps_count_the_positions_of_a_walk():
    """Positions go on from the lower corner until they pass the upper one."""
    for direction, case in itertools.product(("forward", "input_grad"), cases()):
        asked = rows_only(direction, case)
        source = source_size(asked)[0]
        for walk in walks(asked)[0]:
            positions = range(walk.first, source + walk.upper(source), walk.stride)
            assert len(positions) == walk.extent


def test_phases_share_the_taps():
    rows, columns = walks(problem("input_grad", strides=(2, 2)))
    assert [walk.taps for walk in rows] == [2, 1] == [walk.taps for walk in columns]


# ---- reasons -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layout": "nchw"}, "nchw"),
        ({"lhs": "float64", "rhs": "float64"}, "float64"),
        ({**FLOAT32, "precision": "highest"}, "as TF32, which is the default"),
        ({**FLOAT32, "in_channels": 6}, "in_channels=6 is not a multiple of 4"),
        ({**FLOAT32, "out": "bfloat16", "in_channels": 12}, "not a multiple of 8"),
        ({"lhs": "float16"}, "float16 and bfloat16"),
        ({"out": "float64"}, "output of dtype float64"),
        ({"in_channels": 3}, "in_channels=3 is not a multiple of 8"),
        ({"out_channels": 12}, "out_channels=12 is not a multiple of 8"),
        ({"batch": 0}, "empty"),
        ({"groups": 2}, "2 groups"),
        ({"direction": "weight_grad"}, "no gradients of weights"),
        ({"direction": "input_grad", "strides": (3, 1)}, "more than 2 phases"),
        ({"strides": (9, 1)}, "stride along rows is 9"),
        ({"padding": ((129, 0), (1, 1))}, "129 pixels from the image's edge"),
        ({"kernel_width": 257, "padding": ((1, 1), (128, 128))}, "257 columns"),
        (
            {"epilogue": Epilogue(residual=True, residual_dtype="float32")},
            "as wide as the output",
        ),
        ({"precision": "BF16_BF16_F32"}, "only XLA"),
    ],
)
def test_a_refusal_names_its_reason(changes, why):
    reason = CONV2D_SM90.why_not(problem(**changes), H200)
    assert reason is not None and why in reason


def test_other_devices_are_refused():
    assert "sm_80" in str(CONV2D_SM90.why_not(problem(), NAMED["A100"]))


def test_the_largest_corners_are_served():
    wide = problem(padding=((128, 127 + 2), (128, 127 + 2)))
    assert CONV2D_SM90.why_not(wide, H200) is None
    assert list(refused_walks(dataclasses.replace(wide, padding=((129, 0),) * 2)))


POINTS: dict[str, Any] = {
    **{"kernel_height": 1, "kernel_width": 1, "padding": ((0, 0), (0, 0))}
}

# ---- configs -------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, FLOAT32], ids=["16 bits", "float32"])
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("channels", [8, 24, 64, 96, 320])
def test_every_config_of_the_space_is_legal(channels, direction, fields):
    channels = {"in_channels": channels, "out_channels": channels + 8}
    asked = problem(direction, **channels, **fields)
    configs = CONV2D_SM90.space(asked, H200).configs()
    assert CONV2D_SM90.heuristic(asked, H200) in configs
    for config in configs:
        CONV2D_SM90.check(asked, config, H200)


@pytest.mark.parametrize(
    ("direction", "size", "channels", "fields", "expected"),
    [
        ("forward", 32, 640, {"batch": 1}, {"tile_n": 128}),
        ("forward", 8, 1280, {"batch": 8}, {"tile_n": 128}),
        ("input_grad", 64, 320, {"batch": 8}, {"tile_n": 160}),
        ("input_grad", 16, 1280, {"batch": 8, "strides": (2, 2)}, {"tile_m": 64}),
        ("forward", 64, 320, {"epilogue": FULL}, {"stages": 4}),
    ],
)
def test_the_default_has_what_was_fastest(direction, size, channels, fields, expected):
    """Tiles divide the channels, the longest phase is shared, rings are deep."""
    both = {"in_channels": channels, "out_channels": channels}
    asked = problem(direction, height=size, width=size, **both, **fields)
    found = CONV2D_SM90.heuristic(asked, H200)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tile_m": 192}, "must share tile_m=192"),
        ({"tile_m": 256, "tile_n": 256}, "256 sums"),
        ({"stages": 9}, "bytes of shared memory"),
        ({"tile_n": 8}, "tile_n=8 must be one of"),
        ({"stages": 1}, "stages=1 must be an integer from 2"),
    ],
)
def test_an_illegal_config_is_refused(changes, why):
    config = dataclasses.replace(WIDE, **changes)
    with pytest.raises(ValueError, match=why):
        CONV2D_SM90.check(problem(), config, H200)


@pytest.mark.parametrize(
    ("channels", "chunk"), [(8, 16), (16, 16), (40, 48), (64, 64), (96, 48), (128, 64)]
)
def test_a_chunk_wastes_least(channels, chunk):
    assert emit.chunk(problem(in_channels=channels)) == chunk
    # Rows of float32 hold half as many.
    asked = problem(**FLOAT32, in_channels=channels // 2)
    assert emit.chunk(asked) == chunk // 2


STEM: dict[str, Any] = {
    **{"height": 224, "width": 224, "in_channels": 3, "out_channels": 64},
    **{"kernel_height": 7, "kernel_width": 7, "padding": ((3, 3), (3, 3))},
    "strides": (2, 2),
}
CHOSEN = {  # by who is expected to win
    "conv2d_sm90": (
        {},
        {"direction": "input_grad"},
        {"height": 7, "width": 7, "in_channels": 512, "out_channels": 512},
        *({"batch": n, "strides": (2, 2), "epilogue": FULL} for n in (1, 256)),
        {**POINTS, "strides": (2, 2), "in_channels": 512, "out_channels": 1024},
        {**POINTS, "strides": (2, 2), "direction": "input_grad", "batch": 256},
        {**POINTS, "out_channels": 512, "epilogue": FULL},
        FLOAT32,
        {**FLOAT32, "direction": "input_grad"},
        {**FLOAT32, "strides": (2, 2), "batch": 32},
        {**FLOAT32, **POINTS, "out_channels": 512},
    ),
    "conv2d_stem_sm90": (STEM, {**STEM, "batch": 1, "epilogue": FULL}),
    "conv2d_strips_sm90": (
        *({"batch": 1}, {"batch": 8}),
        {"height": 56, "width": 56, "in_channels": 64, "out_channels": 64},
        {**FLOAT32, "batch": 8},
        {**FLOAT32, "out_channels": 64},
    ),
    "conv2d_weights_sm90": (
        {"direction": "weight_grad"},
        {"direction": "weight_grad", "strides": (2, 2), "batch": 256},
        *({"direction": "weight_grad", "batch": n} for n in (1, 8)),
        {**POINTS, "direction": "weight_grad", "batch": 8},
        {**POINTS, "direction": "weight_grad", "strides": (2, 2), "batch": 64},
    ),
    "conv2d_product": (
        {**POINTS, "out_channels": 512},
        {**POINTS, "out_channels": 512, "direction": "weight_grad"},
    ),
    "xla": (
        {"batch": 1, "height": 7, "width": 7},
        {"batch": 1, "height": 6, "width": 8, "in_channels": 1024},
        {**STEM, "strides": (4, 2)},
        {"dilation": (2, 2)},
        {"in_channels": 120},
        {"kernel_width": 5, "batch": 128},
        {"out": "float32"},
        {**FLOAT32, "precision": "high"},
        {**FLOAT32, "batch": 1},
        {**FLOAT32, "batch": 1, "height": 14, "in_channels": 1024, "out_channels": 960},
        {**FLOAT32, **POINTS, "in_channels": 256, "out_channels": 448},
        {**FLOAT32, **POINTS, "out_channels": 512, "strides": (2, 2), "batch": 256},
        {**POINTS, "strides": (2, 2), "direction": "input_grad", "batch": 8},
        {**POINTS, "batch": 1, "direction": "weight_grad"},
        {**POINTS, "out_channels": 512, "direction": "weight_grad", "batch": 8},
    ),
}


@pytest.mark.parametrize(
    ("variant", "changes"),
    [(name, changes) for name, asked in CHOSEN.items() for changes in asked],
)
def test_runs_unmeasured_only_where_it_was_measured_to_win(variant, changes):
    diagnosis = dispatch.diagnose(problem(**changes), H200)
    decision = policy.decide(diagnosis)  # whatever answers ship
    assert decision.choice.variant == variant, diagnosis


# ---- kernels -------------------------------------------------------------------------

WIDE = Conv2dSm90Config(tile_m=128, tile_n=128, stages=4)
STRIDED = problem("input_grad", strides=(2, 2))


def test_a_phase_has_a_tensor_map_of_its_own():
    kernel = emit.kernel(STRIDED, WIDE, H200)
    maps = [p for p in kernel.params if isinstance(p, Im2colMap)]
    assert [m.lower for m in maps] == [(0, 0)] * 4
    assert [m.upper for m in maps] == [(0, 0)] * 4
    assert len(kernel.params) <= 64


def test_weights_of_float32_lie_along_the_channels_that_are_summed():
    channels: dict[str, Any] = {"in_channels": 40, "out_channels": 72}
    for direction, columns in (("forward", 40), ("input_grad", 72)):
        asked = problem(direction, **FLOAT32, **channels)
        assert weights_map(asked, 128).dims == (columns, 112 - columns, 9)
    backward = CONV2D_SM90.call(asked, WIDE, H200)
    assert isinstance(backward, Kernel)
    forward = CONV2D_SM90.call(problem(**FLOAT32, **channels), WIDE, H200)
    assert isinstance(forward, Steps)
    transpose, _ = forward.steps
    assert isinstance(transpose, Expression)
    (found,) = transpose(np, w := np.arange(3 * 3 * 40 * 72).reshape(3, 3, 40, 72))
    assert found.shape == forward.scratch[0].shape
    np.testing.assert_array_equal(found, np.einsum("rsio->rsoi", w))


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        (problem(), WIDE),
        (problem(**FLOAT32, epilogue=FULL), WIDE),
        (problem(epilogue=FULL), Conv2dSm90Config(tile_m=128, tile_n=256, stages=3)),
        (STRIDED, Conv2dSm90Config(tile_m=192, tile_n=128, stages=4, consumers=3)),
    ],
)
def test_kernels_compile_without_spills(asked, config):
    CONV2D_SM90.check(asked, config, H200)
    assert_compiles(emit.kernel(asked, config, H200))


def compiled_problems():
    for dtype, out in (
        ("float16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float32"),
    ):
        rounded: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": out}
        yield problem(**rounded)
        yield problem(**rounded, epilogue=FULL)
        yield problem(**rounded, epilogue=Epilogue(bias="row", activation="relu"))
        yield problem(**rounded, direction="input_grad")
        yield problem(**rounded, direction="input_grad", strides=(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("asked", list(compiled_problems()), ids=str)
def test_every_config_compiles_without_spills(asked):
    for config in CONV2D_SM90.space(asked, H200).configs():
        assert_compiles(emit.kernel(asked, config, H200))

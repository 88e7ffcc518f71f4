"""Convolutions of few channels a group without a GPU: refusals; they compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from depthwise import FULL, depthwise
from spaces import one_of_each

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.problem import Conv2dProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.conv2d_grouped import CONV2D_GROUPED
from tracea_jax.variants.conv2d_grouped_images import CONV2D_GROUPED_IMAGES
from tracea_jax.variants.conv2d_stem_weights import CONV2D_STEM_WEIGHTS

pytestmark = pytest.mark.once

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
RESNEXT = depthwise(64, 56, 56, 128, 3, group=4)
SMALL = depthwise(64, 7, 7, 1024, 3, group=32)
STEM = Conv2dProblem(
    direction="weight_grad",
    batch=64,
    height=224,
    width=224,
    in_channels=3,
    out_channels=64,
    kernel_height=7,
    kernel_width=7,
    strides=(2, 2),
    padding=((3, 3), (3, 3)),
    lhs="bfloat16",
    rhs="bfloat16",
    out="bfloat16",
)


def grouped(**changes: Any) -> Conv2dProblem:
    return dataclasses.replace(RESNEXT, **changes)


def small(**changes: Any) -> Conv2dProblem:
    return dataclasses.replace(SMALL, **changes)


def stem(**changes: Any) -> Conv2dProblem:
    return dataclasses.replace(STEM, **changes)


@pytest.mark.parametrize(
    ("variant", "asked", "device", "words"),
    [
        (CONV2D_GROUPED, RESNEXT, CPU, "the device is cpu"),
        (CONV2D_GROUPED, grouped(direction="weight_grad"), H200, "weight_grad"),
        (CONV2D_GROUPED, grouped(groups=128), H200, "groups of 1 channels"),
        (CONV2D_GROUPED, grouped(out_channels=256), H200, "give 8"),
        (CONV2D_GROUPED, depthwise(1, 9, 9, 24, 3, group=8), H200, "24 channels"),
        (CONV2D_GROUPED, grouped(lhs="float32", rhs="float32"), H200, "float32"),
        (
            CONV2D_GROUPED,
            grouped(direction="input_grad", strides=(2, 2)),
            H200,
            "the gradient of strides",
        ),
        (CONV2D_GROUPED, depthwise(1, 40, 40, 64, 9, group=32), H200, "9x9 taps"),
        (CONV2D_GROUPED_IMAGES, SMALL, CPU, "the device is cpu"),
        (CONV2D_GROUPED_IMAGES, RESNEXT, H200, "groups of 4 channels"),
        (CONV2D_GROUPED_IMAGES, small(direction="weight_grad"), H200, "weight_grad"),
        (CONV2D_GROUPED_IMAGES, small(height=90, width=90), H200, "bytes of shared"),
        (CONV2D_GROUPED_IMAGES, small(kernel_width=7), H200, "3x7 taps"),
        (CONV2D_GROUPED_IMAGES, small(batch=0), H200, "empty"),
        (
            CONV2D_GROUPED_IMAGES,
            small(direction="input_grad", strides=(2, 2)),
            H200,
            "the gradient of strides",
        ),
        (CONV2D_STEM_WEIGHTS, STEM, CPU, "the device is cpu"),
        (CONV2D_STEM_WEIGHTS, stem(direction="forward"), H200, "direction forward"),
        (CONV2D_STEM_WEIGHTS, stem(in_channels=9), H200, "9 channels"),
        (CONV2D_STEM_WEIGHTS, stem(width=220), H200, "110 columns"),
        (CONV2D_STEM_WEIGHTS, stem(out_channels=60), H200, "60 output channels"),
        (CONV2D_STEM_WEIGHTS, stem(dilation=(2, 1)), H200, "dilation (2, 1)"),
        (CONV2D_STEM_WEIGHTS, stem(strides=(8, 2)), H200, "stride of 8 rows"),
        (CONV2D_STEM_WEIGHTS, stem(kernel_height=13), H200, "13 rows of taps"),
        (CONV2D_STEM_WEIGHTS, stem(batch=0), H200, "empty"),
    ],
)
def test_refuses_with_a_reason(variant, asked, device, words):
    assert words in (variant.why_not(asked, device) or "")


@pytest.mark.parametrize(
    ("variant", "asked"),
    [
        (CONV2D_GROUPED, RESNEXT),
        (CONV2D_GROUPED, SMALL),
        (CONV2D_GROUPED_IMAGES, SMALL),
        (CONV2D_GROUPED_IMAGES, depthwise(1, 5, 3, 48, 3, group=16)),
        (CONV2D_STEM_WEIGHTS, STEM),
        (CONV2D_STEM_WEIGHTS, stem(kernel_height=3, kernel_width=3, height=9)),
    ],
)
def test_the_default_is_a_legal_config_of_the_space(variant, asked):
    space = variant.space(asked, H200)
    assert space.index(variant.heuristic(asked, H200)) is not None
    assert len(set(space.configs())) == len(space)
    for config in space.configs():
        variant.check(asked, config, H200)


@pytest.mark.parametrize("name", ["A100", "H200"])
def test_as_many_blocks_as_have_room_hold_small_images(name):
    device = NAMED[name]
    for config in CONV2D_GROUPED_IMAGES.space(small(), device).configs():
        (kernel,) = kernels_in(CONV2D_GROUPED_IMAGES.call(small(), config, device))
        on_one = config.blocks * (kernel.smem_bytes + 1024)
        assert on_one <= device.smem_per_block_bytes + 1024


def compiles(variant: Any, problem: Conv2dProblem, config: Any) -> None:
    for kernel in kernels_in(variant.call(problem, config, H200)):
        cubin = nvrtc.compile(kernel)
        found = (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings)
        assert found == (0, 0, ()), f"{problem} {config}"


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("variant", "asked"),
    [
        (CONV2D_GROUPED, RESNEXT),
        (CONV2D_GROUPED_IMAGES, SMALL),
        (CONV2D_STEM_WEIGHTS, STEM),
    ],
)
def test_compiles_without_spills(variant, asked):
    compiles(variant, asked, variant.heuristic(asked, H200))


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize(
    ("variant", "size", "group", "fields"),
    [
        *((CONV2D_GROUPED, 56, group, ("channels", "tile_w")) for group in (4, 16, 32)),
        *((CONV2D_GROUPED_IMAGES, 7, n, ("channels", "tiles")) for n in (16, 32)),
    ],
)
def test_every_kind_of_config_compiles(variant, size, group, fields, direction):
    problem = depthwise(64, size, size, 128, 3, group=group, direction=direction)
    if direction == "forward":
        problem = dataclasses.replace(problem, epilogue=FULL)
    for config in one_of_each(variant.space(problem, H200), *fields):
        compiles(variant, problem, config)

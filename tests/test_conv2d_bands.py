"""conv2d_bands without a GPU: refusals, its configs, that both kernels compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from depthwise import FULL, depthwise
from spaces import one_of_each

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.conv2d_bands import CONV2D_BANDS

pytestmark = pytest.mark.once

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
CONVNEXT = depthwise(64, 56, 56, 96, 7)
EPILOGUE = dataclasses.replace(FULL, residual=False, save_preactivation=False)


def changed(**changes: Any) -> Any:
    return dataclasses.replace(CONVNEXT, **changes)


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (CONVNEXT, CPU, "the device is cpu"),
        (CONVNEXT, A100, "sm_90"),
        (changed(groups=48), H200, "in 48 groups"),
        (depthwise(1, 9, 9, 12, 3), H200, "12 channels"),
        (depthwise(1, 9, 9, 8, 3, dtype="float32"), H200, "operands float32"),
        (changed(out="float32"), H200, "a result of float32"),
        (changed(epilogue=FULL), H200, "a residual"),
        (depthwise(1, 9, 9, 8, 3, stride=2), H200, "strides (2, 2)"),
        (depthwise(1, 9, 9, 8, 3, dilation=2), H200, "dilation (2, 2)"),
        (depthwise(1, 9, 9, 8, (3, 10)), H200, "3x10"),
        (changed(batch=0), H200, "empty"),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (CONV2D_BANDS.why_not(asked, device) or "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 64}, "channels=64"),
        ({"strips": 17}, "strips=17"),
        ({"stages": 5}, "stages=5"),
        ({"channels": 32, "blocks": 2}, "registers"),
        ({"channels": 32, "strips": 1, "stages": 8, "blocks": 1}, "shared memory"),
    ],
)
def test_refuses_a_config_with_a_reason(change, words):
    problem = depthwise(64, 7, 7, 768, 7, direction="weight_grad")
    legal = CONV2D_BANDS.heuristic(problem, H200)
    with pytest.raises(ValueError, match=words):
        CONV2D_BANDS.check(problem, dataclasses.replace(legal, **change), H200)


def test_a_bias_beside_an_activation_leaves_narrow_blocks_fewer_registers():
    biased = dataclasses.replace(EPILOGUE, activation="none")
    usual = dataclasses.replace(CONVNEXT, epilogue=biased)
    activated = dataclasses.replace(CONVNEXT, epilogue=EPILOGUE)
    config = CONV2D_BANDS.heuristic(usual, H200)
    assert (config.channels, config.blocks) == (16, 2)
    with pytest.raises(ValueError, match="7 rows of taps take 130 registers; 2 blocks"):
        CONV2D_BANDS.check(activated, config, H200)
    wide = dataclasses.replace(config, channels=32, blocks=1)
    CONV2D_BANDS.check(activated, wide, H200)


def test_every_config_of_a_space_is_legal():
    for direction in ROLES:
        for problem in (CONVNEXT, depthwise(3, 1, 301, 8, (1, 9))):
            asked = dataclasses.replace(problem, direction=direction)
            for config in CONV2D_BANDS.space(asked, H200).configs():
                CONV2D_BANDS.check(asked, config, H200)


@pytest.mark.parametrize(
    ("asked", "wins"),
    [
        (CONVNEXT, True),
        (changed(direction="weight_grad", batch=8), True),
        (changed(batch=1, height=14, width=14), False),
        (changed(kernel_width=5), False),
        (depthwise(64, 14, 14, 672, 5), True),
        (depthwise(64, 7, 7, 1152, 5), False),
        (depthwise(64, 112, 112, 32, 3), True),
        (depthwise(64, 14, 14, 480, 3), False),
    ],
)
def test_runs_unmeasured_only_where_it_was_measured_to_win(asked, wins):
    assert CONV2D_BANDS.expects_to_win(asked, H200) == wins


def compiles(problem: Any, config: Any = None) -> None:
    config = config or CONV2D_BANDS.heuristic(problem, H200)
    for kernel in kernels_in(CONV2D_BANDS.call(problem, config, H200)):
        assert nvrtc.compile(kernel).spill_bytes == 0, (problem, config)


@pytest.mark.nvrtc
@pytest.mark.parametrize("direction", ROLES)
def test_the_default_compiles_without_spills(direction):
    compiles(dataclasses.replace(CONVNEXT, direction=direction))


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("taps", range(1, 10))
def test_every_kernel_compiles_without_spills(taps, direction):
    problem = depthwise(64, 28, 28, 96, taps, direction=direction)
    if direction == "forward":
        problem = dataclasses.replace(problem, epilogue=EPILOGUE)
    space = CONV2D_BANDS.space(problem, H200)
    for config in one_of_each(space, "channels", "strips", "blocks"):
        compiles(problem, config)

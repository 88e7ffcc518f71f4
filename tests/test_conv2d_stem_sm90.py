"""conv2d_stem_sm90 without a GPU: windows in memory, reasons, configs, and text."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from conv_problems import FULL, H200, assert_compiles, problem
from convolutions import exact

from tracea_jax.emit import conv2d_stem_sm90 as emit
from tracea_jax.emit.conv2d_stem_sm90 import Conv2dStemSm90Config
from tracea_jax.variants import Steps
from tracea_jax.variants.conv2d_stem_sm90 import (
    CONV2D_STEM_SM90,
    padded_pixels,
    padded_taps,
)

pytestmark = pytest.mark.once

CONFIG = Conv2dStemSm90Config(lines=4, line_slabs=2, tile_n=64, stages=3)


def stem(**changes: Any):
    fields: dict[str, Any] = {
        **{"height": 224, "width": 224, "in_channels": 3, "out_channels": 64},
        **{"kernel_height": 7, "kernel_width": 7, "padding": ((3, 3), (3, 3))},
        "strides": (2, 2),
    }
    return problem(**{**fields, **changes})


@pytest.mark.parametrize("pads", [((3, 3), (3, 3)), ((2, 3), (2, 3)), ((0, 1), (9, 4))])
@pytest.mark.parametrize("taps", [(7, 7), (3, 3), (2, 6)])
def test_windows_begin_two_pixels_apart(taps, pads):
    """Rows of the implicit product by the addresses that the kernel multiplies."""
    asked = stem(
        **{"batch": 2, "height": 9, "width": 13, "out_channels": 8, "padding": pads},
        **{"kernel_height": taps[0], "kernel_width": taps[1]},
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 9, 13, 3))
    w = rng.standard_normal((*taps, 3, 8))
    width, window = emit.padded_width(asked), emit.window(asked)
    lead = emit.lead(asked)
    pixels = padded_pixels(np, x, lead=lead, width=width, channels=4)
    matrix = padded_taps(np, w, width=window, channels=4)
    assert matrix.shape == (emit.depth(asked), 8)
    (top, _), (left, _) = pads
    around = np.pad(pixels, ((0, 0), (top, 40), (left - lead, 40), (0, 0)))
    assert (left - lead) % 2 == 0  # two pixels are 16 bytes
    y = np.zeros((2, *asked.out_size, 8))
    for p, q in itertools.product(*map(range, asked.out_size)):
        lines = around[:, 2 * p : 2 * p + taps[0]].reshape(2, taps[0], -1)
        seen = lines[:, :, 8 * q : 8 * q + 4 * window]  # 8 entries are 16 bytes
        y[:, p, q] = seen.reshape(2, -1) @ matrix
    wanted = exact(x, w, strides=(2, 2), padding=pads)
    np.testing.assert_allclose(y, wanted.value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"direction": "input_grad"}, "no gradients"),
        ({"in_channels": 5}, "5 channels"),
        ({"strides": (2, 1)}, "a stride of 1"),
        ({"dilation": (1, 2)}, "dilated along lines"),
        ({"out_channels": 60}, "out_channels=60"),
        ({"kernel_height": 40}, "1280 weights"),
        ({"layout": "nchw"}, "nchw"),
        ({"dilation": (40, 1)}, "do not fit in shared memory"),
    ],
)
def test_a_refusal_names_its_reason(changes, why):
    padded = {"padding": ((200, 200), (3, 3))} if "dilation" in changes else {}
    reason = CONV2D_STEM_SM90.why_not(stem(**padded, **changes), H200)
    assert reason is not None and why in reason


def test_the_steps_make_what_the_kernel_reads():
    call = CONV2D_STEM_SM90.call(stem(width=223, epilogue=FULL), CONFIG, H200)
    assert isinstance(call, Steps)
    assert [buffer.shape for buffer in call.scratch] == [
        (64, 224, 224, 4),
        (7 * 8 * 4, 64),
    ]


def test_every_config_of_the_space_is_legal():
    configs = CONV2D_STEM_SM90.space(stem(), H200).configs()
    assert len(configs) >= 12 and CONFIG in configs
    assert CONV2D_STEM_SM90.heuristic(stem(), H200) == CONFIG
    for config in configs:
        CONV2D_STEM_SM90.check(stem(), config, H200)
    with pytest.raises(ValueError, match="256 sums"):
        wide = dataclasses.replace(CONFIG, tile_n=128)
        CONV2D_STEM_SM90.check(stem(), wide, H200)


@pytest.mark.parametrize("asked", [stem(), stem(epilogue=FULL, out="float32")])
def test_kernels_compile_without_spills(asked):
    config = CONV2D_STEM_SM90.heuristic(asked, H200)
    assert_compiles(emit.kernel(asked, config, H200))


@pytest.mark.slow
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_every_config_compiles_without_spills(out):
    for changes in ({}, {"epilogue": FULL}, {"kernel_width": 3, "kernel_height": 3}):
        asked = stem(out=out, **changes)
        for config in CONV2D_STEM_SM90.space(asked, H200).configs():
            assert_compiles(emit.kernel(asked, config, H200))

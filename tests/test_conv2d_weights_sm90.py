"""conv2d_weights_sm90 without a GPU: refusals, configs, and that it compiles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import conv2d_weights_sm90 as emit
from tracea_jax.emit.conv2d_weights_sm90 import ConvWeightsSm90Config
from tracea_jax.emit.kernel import Im2colMap
from tracea_jax.problem import Conv2dProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90

pytestmark = pytest.mark.once

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
RESNET = Conv2dProblem(
    direction="weight_grad",
    batch=64,
    height=28,
    width=28,
    in_channels=128,
    out_channels=128,
    kernel_height=3,
    kernel_width=3,
    padding=((1, 1), (1, 1)),
    lhs="bfloat16",
    rhs="bfloat16",
    out="bfloat16",
)


def changed(**changes: Any) -> Conv2dProblem:
    return dataclasses.replace(RESNET, **changes)


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (RESNET, CPU, "the device is cpu"),
        (RESNET, A100, "capability 9.0"),
        (changed(direction="forward"), H200, "direction forward"),
        (changed(layout="nchw"), H200, "layout nchw"),
        (changed(in_channels=48, out_channels=48, groups=2), H200, "groups of 24"),
        (changed(in_channels=64, groups=32), H200, "groups of 2 channels give 4"),
        (changed(lhs="float32", rhs="float32"), H200, "operands float32"),
        (changed(out="float64"), H200, "output of dtype float64"),
        (changed(precision="bf16_bf16_f32"), H200, "precision"),
        (changed(in_channels=3), H200, "pixels of x have 6 bytes"),
        (changed(out_channels=100), H200, "pixels of dy have 200 bytes"),
        (changed(batch=0), H200, "empty"),
        (changed(strides=(9, 9)), H200, "stride"),
        (changed(padding=((200, 200), (1, 1))), H200, "pixels from the image's edge"),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (CONV2D_WEIGHTS_SM90.why_not(asked, device) or "")


WIDE = ConvWeightsSm90Config(
    tile_m=128, tile_n=192, consumers_m=2, consumers_n=1, stages=5, parts=22
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile_m": 96}, "tile_m=96"),
        ({"parts": 0}, "parts=0"),
        ({"tile_m": 64, "consumers_m": 2}, "whole slabs"),
        ({"tile_n": 576, "stages": 2}, "accumulators"),
        ({"parts": 4000}, "there are 784 steps"),
        ({"stages": 10}, "shared memory"),
    ],
)
def test_refuses_a_config_with_a_reason(change, words):
    config = dataclasses.replace(WIDE, **change)
    with pytest.raises(ValueError, match=words):
        CONV2D_WEIGHTS_SM90.check(RESNET, config, H200)


SHARED = ConvWeightsSm90Config(
    tile_m=64, tile_n=192, consumers_m=1, consumers_n=1, stages=4, parts=2, taps=3
)


@pytest.mark.parametrize(
    ("batch", "size", "channels", "each", "wins"),
    [
        (64, 56, 128, 4, True),
        (64, 7, 1024, 32, True),
        (8, 14, 1024, 32, False),
        (64, 7, 2048, 64, True),
        (8, 7, 2048, 64, False),
        (64, 56, 128, 2, False),
    ],
)
def test_runs_groups_unmeasured_only_where_it_was_measured_to_win(
    batch, size, channels, each, wins
):
    asked = changed(
        **{"batch": batch, "height": size, "width": size, "groups": channels // each},
        **{"in_channels": channels, "out_channels": channels},
    )
    assert CONV2D_WEIGHTS_SM90.expects_to_win(asked, H200) == wins
    stepped = dataclasses.replace(asked, strides=(2, 2))
    assert not CONV2D_WEIGHTS_SM90.expects_to_win(stepped, H200)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("pads", [((1, 1), (1, 1)), ((0, 2), (0, 3)), ((4, 1), (2, 0))])
def test_taps_find_their_pixels_in_one_copy(pads, dilation):
    """The sums by what tensor maps copy: pixels counted with zeros behind lines."""
    p = changed(
        **{"batch": 2, "height": 7, "width": 6, "in_channels": 8, "out_channels": 8},
        **{"padding": pads, "dilation": (1, dilation)},
    )
    CONV2D_WEIGHTS_SM90.check(p, SHARED, H200)
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (2, 7, 6, 8)).astype(float)
    dy = rng.integers(-4, 5, (2, *p.out_size, 8)).astype(float)
    of_x, of_dy = emit.kernel(p, SHARED, H200).params[:2]
    assert isinstance(of_x, Im2colMap) and isinstance(of_dy, Im2colMap)
    count = emit.pixels(p, SHARED)
    found = np.zeros((3, 3, 8, 8))
    for r, s in itertools.product(range(3), range(3)):
        seen = counted(x, of_x, r)[s * dilation :][:count]
        given = counted(dy, of_dy, 0)[: len(seen)]
        found[r, s] = seen.T @ given[: len(seen)]
    wanted = np.zeros_like(found)
    around = np.pad(x, ((0, 0), *pads, (0, 0)))
    height, width = p.out_size
    for r, s in itertools.product(range(3), range(3)):
        first = s * dilation
        seen = around[:, r : r + height, first : first + width]
        wanted[r, s] = np.einsum("nhwc,nhwk->ck", seen, dy)
    np.testing.assert_array_equal(found, wanted)


def counted(images: np.ndarray, copies: Im2colMap, row: int) -> np.ndarray:
    """The pixels of a map one after another, as a tap of this row sees them."""
    _, width, height, batch = copies.dims
    (left, top), (right, bottom) = copies.lower, copies.upper
    around = np.pad(images, ((0, 0), (200, 200), (200, 200), (0, 0)))
    rows = range(200 + top + row, 200 + height + bottom + row)
    columns = range(200 + left, 200 + width + right)
    return around[:, rows][:, :, columns].reshape(-1, images.shape[-1])


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"strides": (1, 2)}, {}),
        ({"kernel_width": 2}, {}),
        ({"padding": ((1, 1), (-1, 1))}, {}),
        ({"dilation": (1, 97), "padding": ((1, 1), (97, 97))}, {}),
        ({}, {"tile_n": 128}),
    ],
)
def test_taps_that_cannot_share_are_refused(change, shape):
    config = dataclasses.replace(SHARED, **shape)
    with pytest.raises(ValueError, match="share a copy"):
        CONV2D_WEIGHTS_SM90.check(changed(**change), config, H200)


SIZES = [(1, 1, 8, 8), (64, 56, 64, 64), (64, 7, 512, 512), (8, 64, 320, 640)]


def test_tiles_of_groups_are_their_channels_by_themselves():
    problem = changed(groups=16)
    for config in CONV2D_WEIGHTS_SM90.space(problem, H200).configs():
        assert config.tile_m == 64
        m_tiles, n_tiles = emit.tiles(problem, config)
        assert (m_tiles, n_tiles) == (2, -(-9 * 64 // config.tile_n))
    with pytest.raises(ValueError, match="of groups it is 64"):
        CONV2D_WEIGHTS_SM90.check(problem, WIDE, H200)


@pytest.mark.parametrize(("batch", "size", "inputs", "outputs"), SIZES)
def test_the_default_is_a_legal_config_of_the_space(batch, size, inputs, outputs):
    problem = changed(
        batch=batch, height=size, width=size, in_channels=inputs, out_channels=outputs
    )
    space = CONV2D_WEIGHTS_SM90.space(problem, H200)
    default = CONV2D_WEIGHTS_SM90.heuristic(problem, H200)
    assert space.index(default) is not None
    assert len(set(space.configs())) == len(space)
    for config in space.configs():
        CONV2D_WEIGHTS_SM90.check(problem, config, H200)
        kernel, *total = kernels_in(CONV2D_WEIGHTS_SM90.call(problem, config, H200))
        assert len(total) == (config.parts > 1)
        tiles = emit.tiles(problem, config)
        assert kernel.grid == (tiles[0] * tiles[1] * config.parts, 1, 1)


def compiles(problem: Conv2dProblem, config: Any) -> None:
    kernel = kernels_in(CONV2D_WEIGHTS_SM90.call(problem, config, H200))[0]
    cubin = nvrtc.compile(kernel)
    found = (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings)
    assert found == (0, 0, ()), str(config)


@pytest.mark.nvrtc
def test_compiles_without_spills():
    compiles(RESNET, WIDE)
    compiles(RESNET, dataclasses.replace(SHARED, parts=1))
    compiles(changed(groups=16), SHARED)


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_config_compiles_without_spills(dtype):
    problem = changed(lhs=dtype, rhs=dtype)
    seen = {}
    for config in CONV2D_WEIGHTS_SM90.space(problem, H200).configs():
        seen[dataclasses.replace(config, parts=min(config.parts, 2))] = config
    for config in seen.values():
        compiles(problem, config)

"""conv2d_sm80 without a GPU: its product, its refusals, and that it compiles."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
from conv_problems import FULL, assert_compiles, problem
from gpus import DEVICES
from spaces import one_of_each

from tracea_jax import dispatch
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.emit import conv2d_sm80 as emit
from tracea_jax.emit import conv_product as products
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.ir.fast_divide import FastDivisor
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.conv2d_sm80 import CONV2D_SM80, parts_of

A100, H200 = NAMED["A100"], NAMED["H200"]
DIRECTIONS = ("forward", "input_grad", "weight_grad")
USUAL = GemmSm80Config(
    tile_m=128, tile_n=128, tile_k=32, warps_m=2, warps_n=2, stages=4
)
# The most registers: everything in f32, and the longest activation.
WIDEST = dataclasses.replace(
    FULL, activation="gelu_exact", bias_dtype="float32", residual_dtype="float32"
)


def of(dtype: str, direction: Any = "forward", **changes: Any) -> Conv2dProblem:
    return problem(direction, lhs=dtype, rhs=dtype, **{"out": dtype, **changes})


# ---- division ------------------------------------------------------------------------


def test_a_product_and_a_shift_divide():
    random.seed(0)
    some = [random.randrange(1, 2**31) for _ in range(200)]
    for divisor in (*range(1, 70), *some, 2**30, 2**30 + 1, 2**31 - 1):
        fast = FastDivisor.of(divisor)
        assert fast.multiplier < 2**32 and fast.shift < 64
        multiples = [k * divisor for k in (1, 2, 3, (2**31 - 1) // divisor)]
        near = [m + d for m in multiples for d in (-1, 0, 1)]
        for n in (0, 1, 2**31 - 1, *near, *some):
            if 0 <= n < 2**31:
                assert fast.divide(n) == n // divisor


@pytest.mark.parametrize("divisor", [0, -3, 2**31])
def test_a_divisor_out_of_range_is_refused(divisor):
    with pytest.raises(ValueError, match="from 1 to"):
        FastDivisor.of(divisor)


# ---- reasons -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layout": "nchw"}, "nchw"),
        ({"lhs": "float16"}, "float16 and bfloat16"),
        ({"out": "float64"}, "float64"),
        ({"in_channels": 12}, "12 in_channels of a group; pixels and weights are"),
        ({"groups": 32}, "4 in_channels of a group"),
        ({"out_channels": 12}, "12 out_channels"),
        ({"batch": 0}, "empty"),
        ({"kernel_width": 16}, "16 taps"),
        ({"batch": 2**21}, "units of 16 bytes"),
        ({"direction": "input_grad", "strides": (3, 1)}, "more than 2 phases"),
        ({"precision": "BF16_BF16_F32"}, "only XLA"),
        ({"lhs": "float32", "rhs": "float32", "precision": "highest"}, "TF32"),
    ],
)
def test_a_refusal_names_its_reason(changes, why):
    reason = CONV2D_SM80.why_not(problem(**changes), H200)
    assert reason is not None and why in reason


def test_devices():
    cpu = CpuDevice(name="cpu", isa="avx2", cores=8)
    assert "the device is cpu" in str(CONV2D_SM80.why_not(problem(), cpu))
    old = dataclasses.replace(A100, capability=(7, 5))
    assert "8.0" in str(CONV2D_SM80.why_not(problem(), old))
    assert CONV2D_SM80.why_not(problem(), A100) is None


DENSE: dict[str, Any] = {"direction": "weight_grad"}
MEASURED: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 8, "height": 14, "width": 14, "in_channels": 256, "out_channels": 256},
    {"batch": 128, "height": 56, "width": 56, "in_channels": 64, "out_channels": 64},
    {"groups": 32, "in_channels": 256, "out_channels": 256},
)
UNMEASURED: tuple[dict[str, Any], ...] = (
    {"direction": "forward"},
    {"direction": "input_grad"},
    {"dtype": "float16"},
    {"height": 7, "width": 7, "in_channels": 512, "out_channels": 512},
    {"batch": 1, "height": 14, "width": 14},
    {"kernel_height": 5, "kernel_width": 5, "padding": ((2, 2), (2, 2))},
    {"strides": (2, 2)},
    {"dilation": (2, 2)},
    {"in_channels": 64},
    {"in_channels": 192, "out_channels": 192},
    {"batch": 8, "groups": 32, "in_channels": 256, "out_channels": 256},
    {"batch": 512},
    {"groups": 32},
    {"groups": 2},
)


@pytest.mark.parametrize("changes", MEASURED + UNMEASURED, ids=str)
def test_it_runs_unmeasured_only_where_it_was_measured_to_win(changes):
    asked = of(**{"dtype": "float32", **DENSE, **changes})
    is_ours = dispatch.plan(asked, H200).variant == "conv2d_sm80"
    assert is_ours == (changes in MEASURED)
    assert dispatch.plan(asked, A100).variant == "xla"


# ---- the product ---------------------------------------------------------------------


def test_all_directions_are_products_of_as_many_terms():
    for groups, strides in itertools.product((1, 4), ((1, 1), (2, 1))):
        asked = problem(groups=groups, out_channels=256, strides=strides)
        for direction in DIRECTIONS:
            one = dataclasses.replace(asked, direction=direction)
            stride = strides[0] if direction == "input_grad" else 1
            assert products.product(one).flops == asked.flops * stride


def test_every_phase_has_its_tiles():
    strided = problem("input_grad", height=9, width=5, batch=3, strides=(2, 2))
    sizes = [3 * h * w for h, w in itertools.product((5, 4), (3, 2))]
    config = dataclasses.replace(USUAL, tile_m=32, tile_n=32)
    assert emit.tile_count(strided, config) == sum(-(-n // 32) for n in sizes) * 4
    assert len(emit.kernel(strided, config, A100).params) <= 64


def test_parts_share_all_pixels():
    for size, batch in itertools.product((1, 7, 56), (1, 64)):
        asked = problem("weight_grad", height=size, width=size, batch=batch)
        parts = parts_of(asked, USUAL, H200)
        steps = -(-products.product(asked).k // USUAL.tile_k)
        assert 1 <= parts <= steps
        kernel, total = kernels_in(CONV2D_SM80.call(asked, USUAL, H200))
        assert kernel.grid == (parts * 9, 1, 1)
        assert total.entry.startswith("sum_of_parts")


def test_sizes_stay_out_of_the_source():
    def kernel(**changes: Any):
        return emit.kernel(of("bfloat16", **changes), USUAL, H200)

    same = {"height": 9, "in_channels": 8, "strides": (3, 1), "dilation": (2, 2)}
    assert kernel().source == kernel(**same, groups=1, kernel_width=5).source
    different = [
        kernel(),
        kernel(out="float32"),
        kernel(epilogue=FULL),
        kernel(direction="input_grad"),
        kernel(direction="input_grad", strides=(2, 1)),
        kernel(direction="input_grad", strides=(2, 2)),
    ]
    assert len({k.source for k in different}) == len(different)
    assert len({k.entry for k in different}) == len(different)


# ---- configs -------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", [8, 64, 520])
def test_every_config_of_the_space_is_legal(channels, dtype, direction):
    asked = of(dtype, direction, in_channels=channels, out_channels=channels)
    space = CONV2D_SM80.space(asked, H200)
    assert CONV2D_SM80.heuristic(asked, H200) in space.configs()
    assert space.modelled_us is not None and np.isfinite(space.modelled_us).all()
    for config in space.configs():
        CONV2D_SM80.check(asked, config, H200)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tile_m": 256, "tile_n": 64, "warps_m": 4, "warps_n": 1}, "places of pixels"),
        ({"tile_k": 16}, "tile_k=16 must be one of"),
        ({"stages": 16}, "shared memory"),
        ({"tile_n": 8}, "tile_n=8 must be one of"),
    ],
)
def test_an_illegal_config_is_refused(changes, why):
    config = dataclasses.replace(USUAL, **{"tile_k": 64, "stages": 3} | changes)
    with pytest.raises(ValueError, match=why):
        CONV2D_SM80.check(problem(), config, H200)


# ---- kernels -------------------------------------------------------------------------


def compiles(asked: Conv2dProblem, config: Any, device: Any) -> None:
    CONV2D_SM80.check(asked, config, device)
    for kernel in kernels_in(CONV2D_SM80.call(asked, config, device)):
        assert_compiles(kernel)


ASKED = (
    of("bfloat16", epilogue=WIDEST, out="float32"),
    of("float32", "input_grad", strides=(2, 2)),
    of("float32", "weight_grad"),
)


@pytest.mark.nvrtc
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
def test_every_architecture_compiles(device):
    for asked in ASKED:
        compiles(asked, CONV2D_SM80.heuristic(asked, device), device)


def compiled_problems():
    for dtype in ("float16", "float32"):
        yield of(dtype, epilogue=WIDEST, out="float32")
        yield of(dtype, epilogue=Epilogue(bias="row", activation="relu"))
        yield of(dtype, "input_grad")
        yield of(dtype, "input_grad", strides=(2, 2))
        yield of(dtype, "weight_grad")


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("asked", list(compiled_problems()), ids=str)
def test_every_config_compiles_without_spills(asked):
    space = CONV2D_SM80.space(asked, H200)
    fields = ("tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages")
    for config in one_of_each(space, *fields):
        compiles(asked, config, H200)

"""conv2d_depthwise without a GPU: refusals, walks along an axis, that it compiles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from depthwise import AWKWARD, FULL, depthwise
from slow_cases import slow_unless
from spaces import one_of_each

from tracea_jax.device import NAMED, CpuDevice, CudaDevice
from tracea_jax.emit import image_axis
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.problem import Conv2dProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.conv2d_depthwise import CONV2D_DEPTHWISE

pytestmark = pytest.mark.once

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
CONVNEXT = depthwise(64, 56, 56, 96, 7)


def changed(**changes: Any) -> Conv2dProblem:
    return dataclasses.replace(CONVNEXT, **changes)


# ---- what it refuses -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        (CONVNEXT, CPU, "the device is cpu"),
        (CONVNEXT, dataclasses.replace(A100, capability=(7, 5)), "capability 8.0"),
        (changed(groups=48), H200, "in 48 groups"),
        (changed(out_channels=192), H200, "96 channels give 192"),
        (changed(layout="nchw"), H200, "layout nchw"),
        (changed(rhs="float32"), H200, "operands bfloat16 and float32"),
        (changed(out="float64"), H200, "dtype float64"),
        (changed(precision="bf16_bf16_f32"), H200, "precision"),
        (depthwise(1, 5, 5, 3, 3), H200, "must be even"),
        (changed(batch=0), H200, "empty"),
        (changed(kernel_width=13), H200, "7x13"),
        (changed(strides=(5, 1)), H200, "strides (5, 1)"),
        (depthwise(1, 99, 99, 8, 3, dilation=17), H200, "dilation (17, 17)"),
        (changed(height=2**24), H200, "2^31"),
        (
            depthwise(1, 30, 30, 8, 11, direction="weight_grad"),
            H200,
            "gradient of 121 taps",
        ),
        (
            depthwise(1, 9, 9, 8, 3, stride=2, dilation=3, direction="input_grad"),
            H200,
            "gradient of strides",
        ),
    ],
)
def test_refuses_with_a_reason(asked, device, words):
    assert words in (CONV2D_DEPTHWISE.why_not(asked, device) or "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 40}, "channels=40"),
        ({"strips": 33}, "strips=33"),
        ({"channels": 16, "strips": 3}, "threads"),
        ({"tile_w": 3}, "multiples of"),
        ({"rows": 3}, "multiples of"),
        ({"stages": 1}, "stages=1"),
    ],
)
def test_refuses_a_config_with_a_reason(change, words):
    problem = depthwise(2, 14, 14, 32, 3, stride=2, direction="input_grad")
    legal = CONV2D_DEPTHWISE.heuristic(problem, H200)
    with pytest.raises(ValueError, match=words):
        CONV2D_DEPTHWISE.check(problem, dataclasses.replace(legal, **change), H200)


@pytest.mark.parametrize(
    ("asked", "wins"),
    [
        (CONVNEXT, True),
        (changed(direction="input_grad"), True),
        (changed(direction="weight_grad"), True),
        (changed(batch=1), False),
        (changed(strides=(2, 2)), False),
        (changed(lhs="float32", rhs="float32", out="float32"), False),
        (depthwise(64, 56, 56, 144, 5, stride=2), True),
        (depthwise(64, 112, 112, 96, 3, stride=2), True),
        (depthwise(8, 112, 112, 32, 3), False),
        (depthwise(64, 7, 7, 1152, 3), True),  # as many bytes, in more blocks
        (depthwise(64, 7, 7, 1152, 3, direction="weight_grad"), True),
        (depthwise(8, 7, 7, 1152, 3), False),
    ],
)
def test_runs_unmeasured_only_where_it_was_measured_to_win(asked, wins):
    assert CONV2D_DEPTHWISE.expects_to_win(asked, H200) == wins
    assert not CONV2D_DEPTHWISE.expects_to_win(asked, A100)


# ---- what follows from a problem -----------------------------------------------------


@pytest.mark.parametrize("direction", ROLES)
def test_an_axis_joins_what_the_convolution_joins(direction):
    """Every pair of an entry and a result, by the tap that joins them, once."""
    sizes = itertools.product(
        (1, 4, 9), (1, 2, 3, 5), (1, 2, 3), (1, 2, 3), (-1, 0, 2, 6)
    )
    for size, taps, stride, dilation, before in sizes:
        problem = depthwise(
            1,
            size,
            7,
            2,
            (taps, 1),
            stride=stride,
            dilation=dilation,
            padding=((before, 4), (0, 0)),
            direction=direction,
        )
        if 0 in problem.out_size or "gradient of" in (
            CONV2D_DEPTHWISE.why_not(problem, H200) or ""
        ):
            continue
        axis, _ = image_axis.axes(problem)
        wanted: set[tuple[int, int, int]] = set()
        for out, tap in itertools.product(range(problem.out_size[0]), range(taps)):
            entry = out * stride + tap * dilation - before
            if 0 <= entry < size:
                pair = (out, entry) if direction != "input_grad" else (entry, out)
                flipped = taps - 1 - tap if direction == "input_grad" else tap
                wanted.add((*pair, flipped))
        assert wanted == set(joined(axis)), problem


def joined(axis: image_axis.Axis):
    """(result, entry, tap) as the kernel goes through the axis."""
    of_class = range(-(-(axis.result - axis.first_result) // axis.classes))
    for number, index, tap in itertools.product(
        range(axis.classes), of_class, range(axis.taps)
    ):
        result = axis.first_result + number + axis.classes * index
        place, rest = divmod(index * axis.stride + tap, axis.between)
        entry = axis.first_read + number * axis.class_stride + axis.step * place
        if rest == 0 and 0 <= result < axis.result and 0 <= entry < axis.read:
            yield result, entry, tap


@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("name", slow_unless(list(AWKWARD)[::2], AWKWARD))
def test_the_default_is_a_legal_config_of_the_space(name, direction):
    for dtype in ("float32", "bfloat16"):
        problem = dataclasses.replace(
            AWKWARD[name], direction=direction, lhs=dtype, rhs=dtype
        )
        if CONV2D_DEPTHWISE.why_not(problem, H200) is not None:
            continue
        space = CONV2D_DEPTHWISE.space(problem, H200)
        default = CONV2D_DEPTHWISE.heuristic(problem, H200)
        assert space.index(default) is not None
        assert len(set(space.configs())) == len(space)
        for config in space.configs():
            CONV2D_DEPTHWISE.check(problem, config, H200)


# ---- that it compiles ----------------------------------------------------------------


def compiles(problem: Conv2dProblem, device: CudaDevice, config: Any = None) -> None:
    """Without local memory; assertions in the source prove the shared memory."""
    config = config or CONV2D_DEPTHWISE.heuristic(problem, device)
    for kernel in kernels_in(CONV2D_DEPTHWISE.call(problem, config, device)):
        cubin = nvrtc.compile(kernel)
        found = (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings)
        assert found == (0, 0, ()), f"{problem} {config}"


@pytest.mark.nvrtc
@pytest.mark.parametrize("direction", ROLES)
def test_compiles_without_spills(direction):
    compiles(depthwise(64, 56, 56, 96, 3, direction=direction), H200)


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (8, 9), (12, 0)])
def test_compiles_on_every_gpu(arch, direction):
    device = dataclasses.replace(A100, capability=arch, smem_per_block_bytes=101376)
    for problem in AWKWARD.values():
        problem = dataclasses.replace(problem, direction=direction)
        if CONV2D_DEPTHWISE.why_not(problem, device) is None:
            compiles(problem, device)


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("direction", ROLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_every_kind_of_config_compiles(kernel, dtype, direction):
    problem = depthwise(64, 56, 56, 96, kernel, dtype=dtype, direction=direction)
    if direction == "forward":
        problem = dataclasses.replace(problem, epilogue=FULL)
    for config in one_of_each(CONV2D_DEPTHWISE.space(problem, H200), "tile_w"):
        compiles(problem, H200, config)

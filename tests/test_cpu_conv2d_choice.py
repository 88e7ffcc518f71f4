"""conv2d_cpu: what it takes, where it expects to win, which configs it chooses."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from conv2d_runs import DIRECTIONS, conv, run_and_check

from tracea_jax.device import local_cpu
from tracea_jax.variants import cpu_calls
from tracea_jax.variants.conv2d_cpu import (
    CONV2D_CPU,
    Conv2dCpuConfig,
    on_amx,
    plain_product,
)
from tracea_jax.variants.conv2d_product import CONV2D_PRODUCT
from tracea_jax.variants.gemm_cpu import GEMM_CPU

pytestmark = pytest.mark.once


def test_every_direction_is_of_tiles_on_amx():
    """Unless the groups are of one channel; blocks are as deep as in vectors of f32."""
    device = dataclasses.replace(local_cpu(), isa="amx", l2_bytes=2 << 20)
    for direction in DIRECTIONS:
        how: dict[str, Any] = {"dtype": "bfloat16", "direction": direction}
        problem = conv((8, 28, 28), (64, 96), **how)
        assert on_amx(problem, device)
        config = CONV2D_CPU.heuristic(problem, device)
        wide = dataclasses.replace(problem, lhs="float32", rhs="float32")
        assert config.kc == 2 * CONV2D_CPU.heuristic(wide, device).kc
        assert config in list(CONV2D_CPU.space(problem, device).configs())
        assert not on_amx(conv(channels=(16, 16), groups=16, **how), device)


def test_blocks_of_pairs():
    """As deep in vectors as those of f32."""
    device = dataclasses.replace(local_cpu(), isa="avx512_bf16", l2_bytes=1 << 20)
    vectors = dataclasses.replace(device, isa="avx512")
    for direction, channels in itertools.product(DIRECTIONS, ((64, 32), (64, 33))):
        problem = conv(channels=channels, dtype="bfloat16", direction=direction)
        found = CONV2D_CPU.heuristic(problem, device)
        same = CONV2D_CPU.heuristic(problem, vectors)
        if direction != "input_grad" or channels[1] % 2 == 0:
            same = dataclasses.replace(same, kc=2 * same.kc)
        assert found == same
        assert found in list(CONV2D_CPU.space(problem, device).configs())


def test_short_convolutions_are_cut_once_for_each_thread():
    device = dataclasses.replace(local_cpu(), cores=2)

    def tasks(batch: int) -> int:
        return CONV2D_CPU.heuristic(conv((batch, 56, 56), (64, 64)), device).tasks

    assert tasks(1) == 1 and tasks(8) == 2


def test_the_gradient_of_pointwise_weights_is_a_plain_product():
    """It has the configs of that product."""
    how = {"direction": "weight_grad", "kernel": (1, 1), "dtype": "bfloat16"}
    how["padding"] = ((0, 0), (0, 0))
    problem = conv((2, 9, 15), (40, 34), **how)
    product = plain_product(problem)
    assert product is not None
    assert (product.m, product.n, product.k) == (40, 34, 2 * 9 * 15)
    configs = [
        Conv2dCpuConfig(**dataclasses.asdict(config))
        for config in GEMM_CPU.space(product, local_cpu()).configs()
    ]
    assert list(CONV2D_CPU.space(problem, local_cpu()).configs()) == configs
    config = CONV2D_CPU.heuristic(problem, local_cpu())
    assert config in configs
    run_and_check(problem, config=config)
    for other in (
        {"groups": 2},
        {"strides": (1, 2)},
        {"padding": ((0, 0), (0, 1))},
        {"kernel": (1, 3)},
        {"direction": "forward"},
    ):
        assert plain_product(conv((2, 9, 15), (40, 34), **{**how, **other})) is None


def test_it_says_what_it_does_not_take():
    def why(**changes: Any) -> str:
        return CONV2D_CPU.why_not(conv(**changes), local_cpu()) or ""

    assert why() == ""
    assert "layout nchw; it takes nhwc" in why(layout="nchw")
    assert "share a dtype" in why(rhs="bfloat16")
    assert "float64; it takes float32" in why(dtype="float64")
    assert "precision" in why(precision="BF16_BF16_F32_X3")
    assert "strides" in why(strides=(2**31, 1))


def test_it_expects_to_lose_only_where_registers_stay_empty():
    def wins(isa: str = "avx512", **changes: Any) -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa)
        return CONV2D_CPU.expects_to_win(conv(**changes), device)

    assert wins() and wins(dtype="bfloat16") and wins(channels=(8, 8), groups=8)
    assert not wins(channels=(3, 64), direction="input_grad")
    assert wins("amx", channels=(3, 64), direction="input_grad", dtype="bfloat16")
    one_channel: dict[str, Any] = {"channels": (8, 16), "groups": 8}
    assert wins(**one_channel) and not wins(**one_channel, dtype="bfloat16")
    assert wins(**one_channel, dtype="bfloat16", direction="weight_grad")


def test_tiny_convolutions_are_left_to_xla(calls_cost):
    device = dataclasses.replace(local_cpu(), isa="avx512_bf16")
    for tiny in (
        conv((1, 5, 5), (59, 4)),
        conv((4, 7, 7), (20, 21)),
        conv((4, 12, 12), (8, 35)),
        conv((1, 25, 25), (10, 7), (1, 1), padding=((0, 0), (0, 0))),
    ):
        assert CONV2D_CPU.doubt(tiny, device) == cpu_calls.REASON
        assert not CONV2D_CPU.expects_to_win(tiny, device)
    large = conv((4, 28, 28), (64, 64))
    assert CONV2D_CPU.doubt(large, device) is None


def test_gradients_of_few_weights_are_left_to_xla():
    """Where packing takes longest; tiles and groups are worth it in any case."""

    def wins(isa: str = "avx2", **changes: Any) -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa)
        how: dict[str, Any] = {"size": (2, 56, 56), "direction": "weight_grad"}
        return CONV2D_CPU.expects_to_win(conv(**{**how, **changes}), device)

    assert not wins(channels=(64, 32)) and not wins("avx512", channels=(64, 63))
    assert wins(channels=(64, 64)) and wins(channels=(8, 64)) and wins(channels=(3, 96))
    assert not wins(channels=(3, 64)) and wins(channels=(3, 64), kernel=(7, 7))
    assert wins(channels=(64, 32), groups=32)
    assert wins(channels=(64, 32), direction="forward")
    assert wins("amx", channels=(64, 32), dtype="bfloat16")


def test_gradients_of_the_weights_of_patches_are_products_on_avx2():
    def wins(isa: str, **changes: Any) -> bool:
        device = dataclasses.replace(local_cpu(), isa=isa)
        how: dict[str, Any] = {"size": (1, 56, 56), "channels": (96, 192)}
        how |= {"kernel": (2, 2), "strides": (2, 2), "padding": ((0, 0), (0, 0))}
        how |= {"direction": "weight_grad"}
        return CONV2D_PRODUCT.expects_to_win(conv(**{**how, **changes}), device)

    assert wins("avx2") and not wins("avx512")
    assert not wins("avx2", direction="forward") and not wins("avx2", dtype="bfloat16")

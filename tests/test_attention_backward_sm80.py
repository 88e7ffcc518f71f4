"""attention_backward_sm80 without a GPU: refusals, its steps, its machine code."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention_problems import EVERY_OPTION, problem
from compiled import assert_clean
from gpus import A100, DEVICES, H200, small_gpu
from spaces import one_of_each

from tracea_jax.device import CpuDevice, CudaDevice
from tracea_jax.dispatch import plan
from tracea_jax.emit import attention_backward_sm80 as emit
from tracea_jax.emit.attention_backward_sm80 import AttentionBackwardSm80Config
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants import Launch
from tracea_jax.variants.attention_backward_sm80 import ATTENTION_BACKWARD_SM80

pytestmark = pytest.mark.once

OPTIONS = {
    name: value
    for name, value in EVERY_OPTION.items()
    if name not in ("saves_lse", "bias", "bias_dtype")
}


def backward(head_dim: int = 128, **fields: Any) -> AttentionProblem:
    return problem(head_dim, direction="backward", **fields)


# ---- what it takes -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
def test_it_runs_on_every_gpu_since_ampere(device):
    blocks = {"mask": (1, 12, 8, 11), "mask_block": (128, 128)}
    for head_dim, fields in itertools.product((8, 64, 128), ({}, OPTIONS, blocks)):
        asked = backward(head_dim, **fields)
        assert ATTENTION_BACKWARD_SM80.why_not(asked, device) is None
        config = ATTENTION_BACKWARD_SM80.heuristic(asked, device)
        ATTENTION_BACKWARD_SM80.check(asked, config, device)
        space = ATTENTION_BACKWARD_SM80.space(asked, device)
        assert space.index(config) is not None
        for legal, side in itertools.product(space.configs(), SIDES):
            found = emit.smem_bytes(asked, legal, of_keys=side is emit.side_of_keys)
            assert found <= device.smem_per_block_bytes


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 136}, "head_dim=136; it takes multiples of 8 up to 128"),
        ({"kv_len": 0}, "there is nothing to compute"),
        ({"bias": (1, 12, 1, 1), "bias_dtype": "bfloat16"}, "it computes no gradient"),
        ({"value_dim": 64}, "values of 64 columns for keys of 128"),
        (
            {"mask": (1, 1, 1 << 24, 1 << 24), "q_len": 1 << 24, "kv_len": 1 << 24},
            "the map of a mask would have more than 2^31 - 1 words",
        ),
    ],
)
def test_what_it_refuses(fields, reason):
    found = ATTENTION_BACKWARD_SM80.why_not(backward(**fields), A100)
    assert found and found.startswith(reason)


def test_it_runs_nowhere_else():
    cpu = CpuDevice(name="any", isa="avx2", cores=8)
    assert "NVIDIA" in str(ATTENTION_BACKWARD_SM80.why_not(backward(), cpu))
    assert ATTENTION_BACKWARD_SM80.why_not(problem(), A100) == (
        "it computes gradients only"
    )


def test_warps_own_bands_of_16_rows():
    config = ATTENTION_BACKWARD_SM80.heuristic(backward(), A100)
    narrow = dataclasses.replace(config, warps=8)
    with pytest.raises(ValueError, match="tiles of 64 and 64 rows for 8 warps"):
        ATTENTION_BACKWARD_SM80.check(backward(), narrow, A100)


def config(
    keys: tuple[int, int], queries: tuple[int, int], warps: int = 4, stages: int = 2
) -> AttentionBackwardSm80Config:
    """Own rows of a tile and other ones of a block, of either kernel."""
    tile_kv, block_q = keys
    tile_q, block_kv = queries
    return AttentionBackwardSm80Config(
        tile_kv=tile_kv,
        block_q=block_q,
        tile_q=tile_q,
        block_kv=block_kv,
        warps=warps,
        stages=stages,
    )


SEGMENTS: dict[str, Any] = {"segments": True, "is_causal": True}
CAPPED = {**SEGMENTS, "soft_cap": 50.0}
MASKED = {"mask": (2, 1, 1000, 1300), "is_causal": True, "soft_cap": 50.0}
USUAL = config((64, 32), (64, 64))


@pytest.mark.parametrize(
    ("device", "head_dim", "fields", "spills", "fits"),
    [
        (H200, 128, OPTIONS, config((64, 32), (64, 64), stages=3), USUAL),
        (A100, 128, CAPPED, config((64, 32), (64, 64), stages=3), USUAL),
        (A100, 64, OPTIONS, config((128, 16), (128, 32)), USUAL),
        (A100, 96, SEGMENTS, config((64, 64), (128, 32)), USUAL),
        (A100, 88, MASKED, config((128, 64), (128, 64), warps=8), USUAL),
        (
            small_gpu(12, 0),
            *(120, CAPPED),
            *(config((64, 32), (64, 64)), config((64, 16), (64, 64))),
        ),
    ],
)
def test_what_the_loop_keeps_leaves_no_registers(
    device, head_dim, fields, spills, fits
):
    asked = backward(head_dim, **fields)
    with pytest.raises(ValueError, match="registers of a thread; there are"):
        ATTENTION_BACKWARD_SM80.check(asked, spills, device)
    ATTENTION_BACKWARD_SM80.check(asked, fits, device)
    # A loop without a map keeps less.
    positions = {k: v for k, v in fields.items() if k not in ("segments", "mask")}
    ATTENTION_BACKWARD_SM80.check(backward(head_dim, **positions), spills, device)


def test_long_blocks_of_capped_scores_leave_none_for_a_place_in_a_ring():
    asked = backward(88, soft_cap=50.0, window=(100, 0))
    usual = config((64, 64), (64, 64))
    ATTENTION_BACKWARD_SM80.check(asked, usual, H200)
    deeper = dataclasses.replace(usual, stages=3)
    with pytest.raises(ValueError, match="take 172 and 124 registers of a thread"):
        ATTENTION_BACKWARD_SM80.check(asked, deeper, H200)
    ATTENTION_BACKWARD_SM80.check(backward(88, window=(100, 0)), deeper, H200)


# ---- its steps -----------------------------------------------------------------------

SIDES = (emit.side_of_keys, emit.side_of_queries)


def test_each_side_has_its_own_map_and_words():
    config = ATTENTION_BACKWARD_SM80.heuristic(backward(), A100)
    call = ATTENTION_BACKWARD_SM80.call(backward(**OPTIONS), config, A100)
    assert [s.name for s in call.steps] == [
        *("prepare", "mean", "sinks"),
        *("mask_of_keys", "map_of_keys", "keys", "map", "queries"),
    ]
    keys, queries = (s for s in call.steps if s.name in ("keys", "queries"))
    assert isinstance(keys, Launch) and isinstance(queries, Launch)
    assert keys.writes == ("dk", "dv") and queries.writes == ("dq",)
    shared = {"q", "k", "v", "do", "rows", "q_lengths", "kv_lengths"}
    shared |= {"q_segments", "kv_segments"}
    maps = [s for s in call.steps if s.name.startswith("map")]
    assert maps[0].reads == ("kv_segments", "q_segments", "mask_of_keys")
    assert maps[1].reads == ("q_segments", "kv_segments", "mask")
    assert set(keys.reads) & set(queries.reads) == shared


def test_lengths_and_heads_share_a_source():
    config = ATTENTION_BACKWARD_SM80.heuristic(backward(), A100)
    for of in SIDES:
        sources = {
            emit.kernel(p, config, A100, of(p, config), False).source
            for p in (
                backward(is_causal=True),
                backward(is_causal=True, batch=7, q_len=77, heads=8, kv_heads=8),
            )
        }
        assert len(sources) == 1


# ---- machine code --------------------------------------------------------------------


def check_compiles(
    asked: AttentionProblem, config: AttentionBackwardSm80Config, device: CudaDevice
) -> None:
    for of in SIDES:
        assert_clean(emit.kernel(asked, config, device, of(asked, config), True))


COMPILED: list[tuple[CudaDevice, int, dict[str, Any]]] = [
    (A100, 64, {"is_causal": True}),
    (small_gpu(12, 0), 128, OPTIONS),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("device", "head_dim", "fields"), COMPILED, ids=str)
def test_it_compiles_without_spilling(device, head_dim, fields):
    asked = backward(head_dim, **fields)
    check_compiles(asked, ATTENTION_BACKWARD_SM80.heuristic(asked, device), device)


KINDS: tuple[dict[str, Any], ...] = (
    {"is_causal": True},
    {"soft_cap": 50.0, "window": (100, 0)},
    {"segments": True, "dtype": "float16"},
    OPTIONS,
)


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("head_dim", [64, 88, 96, 112, 128])
@pytest.mark.parametrize("fields", KINDS, ids=len)
def test_every_config_compiles_without_spilling(device, head_dim, fields):
    asked = backward(head_dim, **fields)
    space = ATTENTION_BACKWARD_SM80.space(asked, device)
    for config in one_of_each(space, "tile_kv", "block_q", "warps", "block_kv"):
        check_compiles(asked, config, device)


# ---- the default ---------------------------------------------------------------------


def test_nothing_is_chosen_that_was_not_measured():
    capped = backward(is_causal=True, soft_cap=50.0, q_len=2048, kv_len=2048)
    assert plan(capped, A100).variant == "xla"
    assert plan(capped, H200).variant == "attention_backward_sm90"

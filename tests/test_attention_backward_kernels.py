"""The machine code of attention_backward_sm90."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from attention_gradients import ALL, BIASED, EVERYTHING, LENGTHS, TILED, USUAL, problem
from compiled import assert_clean

from tracea_jax.device import NAMED
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
COLUMNS = dataclasses.replace(USUAL, dq="ordered")  # each consumer has some of dq
ROWS = dataclasses.replace(COLUMNS, block_q=128)
SMALL = AttentionBackwardSm90Config(  # two blocks of one multiprocessor, in one launch
    tile_kv=64, block_q=64, tile_q=64, block_kv=64, dq="beside"
)
COMPILED: list[Any] = [
    (64, {}, None),
    (64, EVERYTHING, None),
    (72, {"dtype": "float16", "is_causal": True}, None),
    (128, {"is_causal": True}, None),
    (128, EVERYTHING, None),
    (128, {"window": (100, 100), **LENGTHS}, None),
    (
        64,
        EVERYTHING,
        AttentionBackwardSm90Config(tile_kv=128, block_q=80, tile_q=192, block_kv=80),
    ),
    (64, {"is_causal": True}, ROWS),
    (64, {**EVERYTHING, "window": None, "dtype": "float16"}, ROWS),
    (128, {"is_causal": True}, COLUMNS),
    (128, EVERYTHING, COLUMNS),
    (128, {}, dataclasses.replace(COLUMNS, dq="atomic")),
    (128, {**EVERYTHING, "soft_cap": 30.0}, None),
    (64, {**EVERYTHING, "soft_cap": 30.0}, None),
    (192, {**EVERYTHING, "soft_cap": 30.0, "value_dim": 128}, None),
    (64, TILED, None),
    (128, {**TILED, "is_causal": True, **LENGTHS}, COLUMNS),
    (128, ALL, None),
    (256, {"is_causal": True}, None),
    (128, EVERYTHING, USUAL),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (128, {**TILED, "is_causal": True}, None),
            (128, {**BIASED, "bias": (2, 1, 1, 1300), "bias_dtype": "float32"}, None),
            (128, {"alibi": "linear", "is_causal": True}, None),
            (128, {"mask": (1, 1, 1000, 1300)}, None),
            (64, ALL, None),
            (192, {**ALL, "value_dim": 128}, None),
            (200, ALL, None),
            (128, {"alibi": "distance"}, COLUMNS),
            (64, {**TILED, "kv_heads": 12}, SMALL),
            (128, {"mask": (1, 1, 1000, 1300)}, dataclasses.replace(SMALL, block_q=48)),
            (64, {"alibi": "linear", "is_causal": True}, ROWS),
        )
    ),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("head_dim", "fields", "config"), COMPILED, ids=str)
def test_every_kind_of_kernel_compiles_without_spilling(head_dim, fields, config):
    asked = problem(head_dim, **fields)
    config = config or ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
    ATTENTION_BACKWARD_SM90.check(asked, config, H200)
    for kernel in ATTENTION_BACKWARD_SM90.call(asked, config, H200).kernels:
        assert_clean(kernel)

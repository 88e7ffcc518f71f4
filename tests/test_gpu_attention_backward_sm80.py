"""attention_backward_sm80 on a GPU since Ampere: configs and awkward shapes."""

from __future__ import annotations

import dataclasses
import functools

import attention_checks as checks
import jax.numpy as jnp
import pytest
from attention_cases import BackwardCases
from attention_checks import BACKWARD, EVERYTHING, SCORES, arguments

from tracea_jax.options import device_for
from tracea_jax.variants.attention_backward_sm80 import ATTENTION_BACKWARD_SM80
from tracea_jax.variants.attention_sm80 import device_refuses

pytestmark = pytest.mark.gpu

run_and_check = functools.partial(checks.run_and_check, ATTENTION_BACKWARD_SM80)


@pytest.fixture(autouse=True)
def device():
    device = device_for("cuda")
    if reason := device_refuses(device):
        pytest.skip(reason)
    return device


class TestLikeEveryKernel(BackwardCases):
    variant = ATTENTION_BACKWARD_SM80
    forward = "attention_sm80"
    entry = "attention_backward_keys_sm80"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{"is_causal": True}, EVERYTHING], ids=str)
def test_every_tile_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BACKWARD, head_dim=head_dim, **fields)
    found = checks.sweep(
        ATTENTION_BACKWARD_SM80, problem, "tile_kv", "block_q", "warps"
    )
    assert found > 2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "fields",
    [
        {"segments": True},
        {"segments": True, **EVERYTHING},
        {"sinks": True, "segments": True, "is_causal": True},
        {"soft_cap": 5.0},
        {"soft_cap": 20.0, **EVERYTHING},
        {"mask": (1, *SCORES)},
        {"mask": (2, 1, 1, 457), "is_causal": True},
        {"mask": (1, 4, 331, 1)},
        {"mask": (1, 4, 3, 4), "mask_block": (128, 128), "is_causal": True},
        {"mask": (1, 4, 4, 10), "mask_block": (100, 50)},
        {"is_causal": True, "aligned_at_end": True, "kv_lengths": True},
    ],
    ids=str,
)
def test_options(head_dim, fields):
    run_and_check(dataclasses.replace(BACKWARD, head_dim=head_dim, **fields))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_query_whose_keys_are_all_masked_gives_to_all_values(head_dim):
    args = arguments(700, 300, head_dim)
    queries, keys = (jnp.arange(n)[None].repeat(2, 0) for n in (700, 300))
    ids = (queries // 50).astype("int32"), (keys // 40).astype("int32")
    segments = {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}
    checks.assert_gradients_as_xla("attention_sm80", args, **segments)
    seen = (jnp.arange(700)[:, None] + jnp.arange(300)[None]) % 7 < 3
    seen = seen & (jnp.arange(700)[:, None] % 100 > 10)
    checks.assert_gradients_as_xla("attention_sm80", args, mask=seen[None, None])

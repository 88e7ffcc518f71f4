"""attention_sm80 on a GPU since Ampere: a config of every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses

import attention_checks as checks
import pytest
from attention_cases import ForwardCases
from attention_checks import ALL, BASE

from tracea_jax.options import device_for
from tracea_jax.variants.attention_sm80 import ATTENTION_SM80, device_refuses

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device():
    device = device_for("cuda")
    if reason := device_refuses(device):
        pytest.skip(reason)
    return device


class TestLikeEveryKernel(ForwardCases):
    variant = ATTENTION_SM80


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fields", [{"is_causal": True}, ALL], ids=len)
def test_every_config_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    found = checks.sweep(
        ATTENTION_SM80, problem, "tile_q", "tile_kv", "warps", "stages"
    )
    assert found > 4

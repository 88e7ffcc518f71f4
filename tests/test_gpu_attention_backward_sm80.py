"""attention_backward_sm80 on a GPU since Ampere: configs and awkward shapes."""

from __future__ import annotations

import dataclasses
import functools

import attention_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import arguments
from attentions import lengths

from tracea_jax.ops import attention
from tracea_jax.options import device_for
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_sm80 import ATTENTION_BACKWARD_SM80
from tracea_jax.variants.attention_sm80 import device_refuses

pytestmark = pytest.mark.gpu

run_and_check = functools.partial(checks.run_and_check, ATTENTION_BACKWARD_SM80)
BASE = AttentionProblem(
    direction="backward",
    batch=2,
    q_len=331,
    kv_len=457,
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
LENGTHS = {"q_lengths": True, "kv_lengths": True}
EVERYTHING = {"window": (200, 90), "is_causal": True, **LENGTHS}
SCORES = (BASE.heads, BASE.q_len, BASE.kv_len)


@pytest.fixture(autouse=True)
def device():
    device = device_for("cuda")
    if reason := device_refuses(device):
        pytest.skip(reason)
    return device


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fields", [{"is_causal": True}, EVERYTHING], ids=str)
def test_every_tile_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    found = checks.sweep(
        ATTENTION_BACKWARD_SM80, problem, "tile_kv", "block_q", "warps"
    )
    assert found > 2


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 112])
def test_heads_that_fill_no_slab(head_dim):
    for fields in ({}, {"dtype": "float16", **EVERYTHING}):
        run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize("kv_len", [1, 65, 127, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_around_those_of_tiles(kv_len, is_causal):
    for q_len in (1, 64, 129, 1000):
        sizes = {"q_len": q_len, "kv_len": kv_len, "is_causal": is_causal}
        run_and_check(dataclasses.replace(BASE, **sizes))


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (128, 128), (3, 1000)], ids=str)
def test_windows(window):
    for is_causal in (False, True):
        problem = dataclasses.replace(
            BASE, q_len=777, kv_len=777, window=window, is_causal=is_causal
        )
        run_and_check(problem)
        run_and_check(dataclasses.replace(problem, head_dim=128, **LENGTHS))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_that_share_keys(group):
    run_and_check(dataclasses.replace(BASE, heads=3 * group, kv_heads=3))
    run_and_check(dataclasses.replace(BASE, heads=group, kv_heads=1, is_causal=True))


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
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


# --- against XLA, every element -------------------------------------------------------


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        assert np.nanmax(np.abs(x - y)) <= 3e-2 * max(np.nanmax(np.abs(y)), 1e-3)


def assert_as_xla(args, **settings) -> None:
    """Gradients through our forward attention and our backward pass."""

    def gradients(args, **how):
        def loss(*args):
            o = attention(*args, **settings, **how).astype("float32")
            return (o * jnp.cos(jnp.arange(o.shape[-1]) + o.shape[1])).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)

    wide = [x.astype("float32") for x in args]
    found = gradients(args, implementation="attention_sm80")
    assert_close(found, gradients(wide, implementation="xla", precision="highest"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_query_that_sees_no_key_gives_to_all_values(head_dim):
    args = arguments(700, 300, head_dim)
    assert_as_xla(args, local_window_size=(40, 0))
    assert_as_xla(args, key_value_seq_lengths=lengths(0, 300))
    some = {"key_value_seq_lengths": lengths(0, 17), "is_causal": True}
    assert_as_xla(args, query_seq_lengths=lengths(130, 700), **some)
    queries, keys = (jnp.arange(n)[None].repeat(2, 0) for n in (700, 300))
    ids = (queries // 50).astype("int32"), (keys // 40).astype("int32")
    segments = {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}
    assert_as_xla(args, **segments)
    seen = (jnp.arange(700)[:, None] + jnp.arange(300)[None]) % 7 < 3
    seen = seen & (jnp.arange(700)[:, None] % 100 > 10)
    assert_as_xla(args, mask=seen[None, None])


def test_large_scores():
    q, k, v = arguments(300, 400)
    for factor in (5.0, 30.0):
        assert_as_xla([q * factor, k, v], is_causal=True)


# --- in programs ----------------------------------------------------------------------


def test_loops_and_maps_around_it():
    q, k, v = arguments(300, 400)

    def loss(q, k, v):
        return (attention(q, k, v, implementation="attention_sm80") ** 2).sum()

    both = jax.grad(loss, argnums=(0, 1))
    text = jax.jit(both).lower(q, k, v).as_text()
    assert "attention_backward_keys_sm80" in text
    expected = both(q, k, v)
    stacked = jnp.stack([q, q + q])
    mapped = jax.vmap(both, in_axes=(0, None, None))(stacked, k, v)
    for x, y in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(x[0], y)

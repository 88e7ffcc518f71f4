"""attention_sm80 on a GPU since Ampere: a config of every kind, at awkward shapes."""

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
from tracea_jax.variants.attention_sm80 import ATTENTION_SM80, device_refuses

pytestmark = pytest.mark.gpu

ours = functools.partial(attention, implementation="attention_sm80")
run_and_check = functools.partial(checks.run_and_check, ATTENTION_SM80)
BASE = AttentionProblem(
    batch=2,
    q_len=331,
    kv_len=457,
    heads=4,
    kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
EVERYTHING = {
    "window": (200, 90),
    "is_causal": True,
    "q_lengths": True,
    "kv_lengths": True,
    "saves_lse": True,
}
SCORES = (BASE.heads, BASE.q_len, BASE.kv_len)
BIAS = {"bias": (1, *SCORES), "bias_dtype": "bfloat16"}
ALL = {
    **EVERYTHING,
    **BIAS,
    "window": (300, 90),
    "segments": True,
    "mask": (1, *SCORES),
    "soft_cap": 5.0,
    "sinks": True,
}


@pytest.fixture(autouse=True)
def device():
    device = device_for("cuda")
    if reason := device_refuses(device):
        pytest.skip(reason)
    return device


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fields", [{"is_causal": True}, ALL], ids=len)
def test_every_config_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    found = checks.sweep(
        ATTENTION_SM80, problem, "tile_q", "tile_kv", "warps", "stages"
    )
    assert found > 4


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 112, 160, 192, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_that_fill_no_slab(head_dim, dtype):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, dtype=dtype))
    run_and_check(
        dataclasses.replace(BASE, head_dim=head_dim, dtype=dtype, **EVERYTHING)
    )


@pytest.mark.parametrize("kv_len", [1, 7, 31, 32, 63, 64, 65, 127, 129, 1000])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_around_those_of_tiles(kv_len, is_causal):
    for q_len in (1, 63, 128, 200, 1000):
        run_and_check(
            dataclasses.replace(BASE, q_len=q_len, kv_len=kv_len, is_causal=is_causal)
        )


@pytest.mark.parametrize(
    "window", [(0, 0), (5, 0), (0, 9), (128, 128), (1000, 3), (3, 1000)], ids=str
)
def test_windows(window):
    for is_causal in (False, True):
        problem = dataclasses.replace(
            BASE, q_len=777, kv_len=777, window=window, is_causal=is_causal
        )
        run_and_check(problem)
        run_and_check(dataclasses.replace(problem, kv_lengths=True, saves_lse=True))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_that_share_keys(group):
    run_and_check(dataclasses.replace(BASE, heads=3 * group, kv_heads=3))
    run_and_check(dataclasses.replace(BASE, heads=group, kv_heads=1, is_causal=True))


def test_more_heads_than_a_section():
    long = dataclasses.replace(BASE, q_len=300, kv_len=20_000, heads=10, kv_heads=5)
    run_and_check(dataclasses.replace(long, head_dim=128, is_causal=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "fields",
    [
        {"segments": True, "is_causal": True},
        {"soft_cap": 5.0, "is_causal": True},
        {"soft_cap": 1e6, "sinks": True, "saves_lse": True},
        {"soft_cap": 1e-3},
        {"is_causal": True, "aligned_at_end": True, "kv_lengths": True},
        BIAS,
        {"mask": (1, *SCORES)},
        {"mask": (1, 4, 3, 4), "mask_block": (128, 128), "is_causal": True},
        {"mask": (1, 4, 4, 10), "mask_block": (100, 50)},
    ],
    ids=len,
)
def test_options(head_dim, fields):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kv_len", [1, 456, 457])
def test_biases_that_are_shared(dtype, kv_len):
    for shape in ((2, 4, 331, kv_len), (2, 1, 1, kv_len), (1, 4, 331, 1), (1, 4, 1, 1)):
        run_and_check(
            dataclasses.replace(BASE, kv_len=kv_len, bias=shape, bias_dtype=dtype)
        )


@pytest.mark.parametrize("sizes", [(1, 1), (7, 129), (129, 127), (300, 9000)], ids=str)
def test_segments_and_masks_around_the_sizes_of_tiles(sizes):
    q_len, kv_len = sizes
    problem = dataclasses.replace(BASE, q_len=q_len, kv_len=kv_len, saves_lse=True)
    run_and_check(dataclasses.replace(problem, segments=True))
    run_and_check(dataclasses.replace(problem, mask=(1, 4, q_len, kv_len)))


@pytest.mark.parametrize("dims", [(192, 128), (64, 256), (96, 64), (40, 72)], ids=str)
def test_values_of_another_size(dims):
    head_dim, value_dim = dims
    for fields in ({}, EVERYTHING, {"segments": True}):
        run_and_check(
            dataclasses.replace(BASE, head_dim=head_dim, value_dim=value_dim, **fields)
        )


# --- against XLA, every row -----------------------------------------------------------


def assert_as_xla(args, **settings) -> None:
    xla = functools.partial(
        attention, implementation="xla", precision="highest", **settings
    )
    wide = [x.astype("float32") for x in args]
    found = np.asarray(jax.jit(functools.partial(ours, **settings))(*args), np.float64)
    expected = np.asarray(jax.jit(xla)(*wide), np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_query_that_sees_no_key_takes_the_mean_of_all(head_dim):
    args = arguments(700, 300, head_dim)
    assert_as_xla(args, local_window_size=(40, 0))
    assert_as_xla(args, is_causal=True, local_window_size=(40, 3))
    assert_as_xla(args, key_value_seq_lengths=lengths(0, 300))
    assert_as_xla(args, key_value_seq_lengths=lengths(0, 17), is_causal=True)
    queries = np.arange(700)[None].repeat(2, 0) // 50
    keys = np.arange(300)[None].repeat(2, 0) // 40
    keys[keys == 3] = 2
    queries[1, :40] = -7
    ids = [jnp.asarray(x, jnp.int32) for x in (queries, keys)]
    for is_causal in (False, True):
        assert_as_xla(
            args,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
            is_causal=is_causal,
        )


def test_queries_past_their_number_are_zeros():
    args = arguments(500, 300)
    for first, second in ((0, 500), (1, 130), (499, 256)):
        counts = lengths(first, second)
        assert_as_xla(args, query_seq_lengths=counts)
        found = ours(*args, query_seq_lengths=counts)
        for example, count in enumerate((first, second)):
            assert not np.asarray(found[example, count:]).any()


def test_large_scores():
    q, k, v = arguments(300, 400)
    for factor in (30.0, 1e3):
        for settings in ({}, {"is_causal": True}):
            assert_as_xla([q * factor, k, v], **settings)
    assert_as_xla([q, k, v], scale=30.0)
    assert_as_xla([q, k, v], scale=1e-12, is_causal=True)


def test_what_is_not_seen_may_be_nan():
    q, k, v = arguments(300, 400)
    clean = ours(q, k, v, key_value_seq_lengths=lengths(129, 250))
    broken = k.at[0, 129:].set(jnp.nan).at[1, 250:].set(jnp.inf)
    found = ours(q, broken, v, key_value_seq_lengths=lengths(129, 250))
    np.testing.assert_array_equal(found, clean)
    # Values of blocks that no query of a tile sees are not read.
    far = v.at[:, 256:].set(jnp.nan)
    causal = functools.partial(ours, is_causal=True)
    found, clean = causal(q, k, far), causal(q, k, v)
    np.testing.assert_array_equal(found[:, :128], clean[:, :128])


def test_nan_and_infinities_stay_in_their_rows():
    q, k, v = arguments(300, 400)
    odd = q.at[0, 17, 1, 3].set(jnp.nan).at[1, 200, 2, 5].set(jnp.inf)
    assert_as_xla([odd, k, v])
    found, clean = np.array(ours(odd, k, v)), np.array(ours(q, k, v))
    assert np.isnan(found[0, 17, 1]).all() and np.isnan(found[1, 200, 2]).all()
    for x in (found, clean):
        x[0, 17, 1] = x[1, 200, 2] = 0
    np.testing.assert_array_equal(found, clean)
    infinite = v.at[0, 5, 0, 7].set(jnp.inf)
    assert_as_xla([q, k, infinite])


# --- in programs ----------------------------------------------------------------------


def test_loops_and_maps_around_it():
    q, k, v = arguments(300, 400)
    expected = ours(q, k, v)

    def body(carry, _):
        return ours(carry, k, v), None

    twice, _ = jax.lax.scan(body, q, None, length=2)
    np.testing.assert_array_equal(twice, ours(expected, k, v))
    stacked = jnp.stack([q, q + q])
    mapped = jax.vmap(ours, in_axes=(0, None, None))(stacked, k, v)
    np.testing.assert_array_equal(mapped[0], expected)
    np.testing.assert_array_equal(mapped[1], ours(q + q, k, v))

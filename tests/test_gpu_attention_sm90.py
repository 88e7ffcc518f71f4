"""attention_sm90 on an H100 or H200: a config of every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses
import functools
import re

import attention_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import EVERYTHING, ForwardCases
from attention_checks import BASE, arguments
from attentions import lengths
from numerics import normal

from tracea_jax import masks
from tracea_jax.ops import attention
from tracea_jax.options import device_for
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

run_and_check = functools.partial(checks.run_and_check, ATTENTION_SM90)
sweep = functools.partial(checks.sweep, ATTENTION_SM90)
assert_as_xla = functools.partial(checks.assert_as_xla, "attention_sm90")


class TestLikeEveryKernel(ForwardCases):
    variant = ATTENTION_SM90


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}, EVERYTHING], ids=str)
def test_every_tile_at_one_awkward_shape(head_dim, fields):
    problem = dataclasses.replace(BASE, head_dim=head_dim, **fields)
    assert sweep(problem, "tile_q", "tile_kv") > 4


@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=str)
def test_every_schedule_and_way_to_overlap(fields):
    """More tiles than blocks, so that blocks compute several, and the rings wrap."""
    problem = dataclasses.replace(BASE, batch=9, heads=8, **fields)
    problem = dataclasses.replace(problem, q_len=1100, kv_len=1150)
    assert sweep(problem, "ping_pong", "overlap", "schedule") == 12


WINDOW = {"window": (150, 0), "is_causal": True, "saves_lse": True}
WHOLE = {"mask_block": (128, 128), "kv_len": 512}


@pytest.mark.parametrize(
    ("head_dim", "fields", "config"),
    [
        (128, {"segments": True, "is_causal": True}, {}),
        (128, {"segments": True}, {"tile_kv": 64, "schedule": "static"}),
        (64, {"mask": (1, 1, 3, 4), "mask_block": (128, 128)}, {}),
        (64, {**WHOLE, "mask": (6, 1, 3, 4), "sinks": True}, {"overlap": True}),
        (128, {**WHOLE, "mask": (1, 48, 3, 4), "saves_lse": True}, {}),
        (128, {**WHOLE, "mask": (1, 1, 3, 4)}, {"schedule": "static"}),
        (128, {**WHOLE, "mask": (1, 1, 3, 4)}, {"ping_pong": False, "tile_kv": 64}),
        (128, WINDOW, {}),
        (64, WINDOW, {"tile_q": 192, "tile_kv": 96}),
        (64, WINDOW, {"tile_q": 192, "tile_kv": 48, "stages": 4}),
        (64, WINDOW, {"tile_q": 192, "tile_kv": 64, "ping_pong": False}),
        (128, {**WINDOW, "q_lengths": True}, {"tile_kv": 64, "overlap": True}),
        (64, {"q_lengths": True, "kv_lengths": True}, {"tile_q": 192, "tile_kv": 64}),
        (256, {"is_causal": True}, {"tile_kv": 64}),
        (192, {"value_dim": 128, "segments": True}, {}),
    ],
    ids=str,
)
def test_blocks_that_compute_several_tiles(head_dim, fields, config):
    """A tile begins while the one before ends, or consumers pass over blocks of it."""
    problem = dataclasses.replace(BASE, batch=6, heads=48, kv_heads=24)
    problem = dataclasses.replace(problem, head_dim=head_dim, **fields)
    usual = ATTENTION_SM90.heuristic(problem, device_for("cuda"))
    run_and_check(problem, dataclasses.replace(usual, **config))


@pytest.mark.parametrize("group", [2, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_are_packed(group, head_dim):
    """Awkward numbers of queries, alone and many tiles of them."""
    base = dataclasses.replace(BASE, heads=3 * group, kv_heads=3, head_dim=head_dim)
    for q_len, fields in (
        *((1, {}), (33, {"sinks": True, "saves_lse": True}), (331, EVERYTHING)),
        (200, {"is_causal": True, "aligned_at_end": True, "kv_lengths": True}),
        (457, {"window": (90, 0), "is_causal": True, "batch": 40, "soft_cap": 5.0}),
    ):
        problem = dataclasses.replace(base, q_len=q_len, **fields)
        usual = ATTENTION_SM90.heuristic(problem, device_for("cuda"))
        run_and_check(problem, dataclasses.replace(usual, packed=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_whose_queries_see_no_key(head_dim):
    """Between tiles that see some, and more of both than blocks."""
    args = arguments(6000, 300, head_dim)
    assert_as_xla(args, local_window_size=(40, 0))
    assert_as_xla(args, local_window_size=(40, -50), is_causal=True)
    assert_as_xla(args, query_seq_lengths=lengths(0, 5000), is_causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_see_whole_blocks_between_tiles_that_see_none(head_dim):
    blocks = np.random.default_rng(0).random((47, 8)) < 0.3
    blocks[::3] = False
    mask = masks.block_sparse(jnp.asarray(blocks), (128, 128))
    assert_as_xla(arguments(6000, 1024, head_dim), mask=mask)


# --- what changes or masks scores -----------------------------------------------------

ALL = {**checks.ALL, "alibi": "distance"}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "fields",
    [
        {"soft_cap": 50.0, "is_causal": True},
        {"alibi": "linear", "is_causal": True},
        {"alibi": "distance", "saves_lse": True},
        {"alibi": "linear", "aligned_at_end": True, "kv_lengths": True},
        ALL,
    ],
    ids=len,
)
def test_more_options(head_dim, fields):
    run_and_check(dataclasses.replace(BASE, head_dim=head_dim, **fields))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_biases_that_are_copied_in_tiles(head_dim, dtype):
    problem = dataclasses.replace(BASE, kv_len=456, head_dim=head_dim, dtype=dtype)
    bias = {"bias": (1, 4, 331, 456), "bias_dtype": dtype}
    per_example = {"bias": (2, 1, 331, 456), "bias_dtype": "bfloat16"}
    masked = {**ALL, **bias, "mask": (1, 4, 331, 456)}
    for fields in (bias, per_example, {**bias, "is_causal": True}, masked):
        run_and_check(dataclasses.replace(problem, **fields))


def test_every_tile_takes_a_bias():
    problem = dataclasses.replace(BASE, kv_len=456, bias=(2, 4, 331, 456))
    problem = dataclasses.replace(problem, bias_dtype="bfloat16", is_causal=True)
    assert sweep(problem, "tile_q", "tile_kv") > 4
    assert sweep(problem, "stages", "overlap") > 2


@pytest.mark.parametrize("kv_len", [400, 401])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}], ids=str)
def test_a_bias_that_masks(kv_len, settings):
    """By infinities and by the least numbers, alone and through whole blocks.

    A causal query all of whose keys are masked by the bias is not compared: there the
    keys behind it, masked by a finite number, would weigh more.
    """
    args = arguments(300, kv_len)
    least = float(jnp.finfo("bfloat16").min)
    bias = normal(1, 4, 300, kv_len, seed=5).astype("bfloat16")
    bias = bias.at[:, 0, :, 64:256].set(-jnp.inf).at[:, 1, :, 100:300].set(least)
    bias = bias.at[:, 2, 70:200].set(least).at[:, 3, 40:90].set(-jnp.inf)
    bias = bias.at[:, 3, 100:200, :300].set(least).at[:, 3, 250:, 1:].set(-jnp.inf)
    sees = np.array(bias[0] > least)
    if settings:
        sees &= np.tri(300, kv_len, dtype=bool)
    rows = sees.any(-1).T if settings else np.ones((300, 4), bool)
    assert rows.mean() > 0.5
    assert_as_xla(args, rows, bias=bias, **settings)
    assert_as_xla(args, rows, bias=bias, logits_soft_cap=5.0, **settings)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_window_behind_all_keys_takes_the_mean_of_all(head_dim):
    assert_as_xla(arguments(700, 300, head_dim), local_window_size=(40, -50))


def test_an_infinite_value_reaches_the_queries_of_its_head_alone():
    q, k, v = arguments(300, 400)
    found = attention(
        q, k, v.at[0, 5, 0, 7].set(jnp.inf), implementation="attention_sm90"
    )
    assert np.isposinf(np.asarray(found)[0, :, :2, 7]).all()


# --- in programs ----------------------------------------------------------------------


def test_gradients_take_what_the_kernel_saves():
    """The backward pass is another kernel's, from our output and log-sum-exp."""

    def loss(*args, **how):
        return (attention(*args, is_causal=True, **how).astype("float32") ** 2).sum()

    args = arguments(1024, 1024)
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
    text = str(jax.jit(jax.grad(loss, argnums=(1, 2))).lower(*args).compile().as_text())
    assert "attention_sm90" in text
    assert re.search("attention_backward_(keys|both)_sm90", text)
    wide = [x.astype("float32") for x in args]
    xla = functools.partial(loss, implementation="xla", precision="highest")
    expected = jax.grad(xla, argnums=(0, 1, 2))(*wide)
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= 3e-2 * np.abs(y).max()

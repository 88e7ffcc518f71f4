"""attention_decode_sm90 and its pages on Hopper: every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from attentions import lengths
from numerics import normal
from spaces import one_of_each

from tracea_jax.ops import attention, paged_attention
from tracea_jax.ops.attention import workload
from tracea_jax.ops.paged_attention import workload as of_pages
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, PagedAttentionProblem, Problem
from tracea_jax.variants.attention_decode_sm90 import (
    ATTENTION_DECODE_SM90,
    AttentionDecodeSm90Config,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

WHOLE = AttentionDecodeSm90Config(tile_kv=64)
PARTS = dataclasses.replace(WHOLE, splits=4)
ours = functools.partial(attention, implementation="attention_decode_sm90")
BASE = AttentionProblem(
    batch=3,
    q_len=1,
    kv_len=700,
    heads=8,
    kv_heads=2,
    head_dim=128,
    dtype="bfloat16",
    scale=0.1,
    kv_lengths=True,
)
FROM_END = {"is_causal": True, "aligned_at_end": True, "saves_lse": True}


def run_and_check(problem: Problem, choice: Choice, bench: Any = workload) -> None:
    """Runs the kernel in buffers full of NaN, twice, and compares with float64."""
    device = device_for("cuda")
    inputs = bench.operands(problem, 3)
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    found = call(poison, *inputs)
    for first, second in zip(found, call(again, *inputs), strict=True):
        np.testing.assert_array_equal(first, second, strict=True)
    error = (
        workload.error(problem, device, inputs, found, 3)
        if isinstance(problem, AttentionProblem)
        else bench.judge(problem, device, inputs, 3)(found)
    )
    assert error <= 1, f"{error:.3g} of the allowed error: {problem} {choice}"


def check(problem: AttentionProblem, *configs: AttentionDecodeSm90Config) -> None:
    choices = [Choice(variant="attention_decode_sm90", config=c) for c in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for choice in choices:
            run_and_check(problem, choice)


@pytest.mark.parametrize("fields", [{}, {"q_len": 5, **FROM_END}], ids=str)
def test_every_tile_and_number_of_parts(fields):
    problem = dataclasses.replace(BASE, **fields)
    space = ATTENTION_DECODE_SM90.space(problem, device_for("cuda"))
    configs = one_of_each(space, "tile_kv", "blocks_per_sm", "persistent")
    assert len(configs) > 10
    check(problem, *[dataclasses.replace(c, splits=n) for c in configs for n in (1, 3)])


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 192, 200, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_of_every_size(head_dim, dtype):
    problem = dataclasses.replace(BASE, head_dim=head_dim, dtype=dtype, q_len=3)
    one = dataclasses.replace(WHOLE, blocks_per_sm=1)
    for fields in ({}, FROM_END):
        asked = dataclasses.replace(problem, **fields)
        check(asked, one, dataclasses.replace(one, splits=3))


@pytest.mark.parametrize("kv_len", [1, 7, 63, 64, 65, 129, 193, 1000])
def test_lengths_around_those_of_blocks(kv_len):
    for q_len in (1, 16):
        problem = dataclasses.replace(
            BASE, kv_len=kv_len, q_len=q_len, kv_lengths=False
        )
        check(problem, WHOLE, PARTS)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (6, 2), (64, 1), (14, 2)])
def test_heads_that_share_keys(heads, kv_heads):
    for q_len in (1, 2, 33):
        problem = dataclasses.replace(
            BASE, heads=heads, kv_heads=kv_heads, q_len=q_len, head_dim=64
        )
        check(problem, WHOLE, PARTS)


@pytest.mark.parametrize("window", [(0, 0), (100, 0), (5, 3)], ids=str)
def test_windows_from_the_end(window):
    for q_len in (1, 7):
        problem = dataclasses.replace(BASE, q_len=q_len, window=window, **FROM_END)
        check(problem, WHOLE, PARTS)


PAGED = PagedAttentionProblem(
    batch=5,
    heads=8,
    kv_heads=2,
    head_dim=128,
    pages=500,
    page_size=16,
    pages_per_sequence=44,
    dtype="bfloat16",
    scale=0.1,
)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_pages(page_size):
    problem = dataclasses.replace(
        PAGED, page_size=page_size, pages_per_sequence=-(-700 // page_size)
    )
    for config in (WHOLE, PARTS, dataclasses.replace(PARTS, tile_kv=128)):
        choice = Choice(variant="paged_attention_sm90", config=config)
        run_and_check(problem, choice, of_pages)


# --- against XLA, every row -----------------------------------------------------------


def arguments(q_len: int = 1, kv_len: int = 300) -> list[jax.Array]:
    k = (2, kv_len, 2, 64)
    shapes = ((2, q_len, 8, 64), k, k)
    return [normal(*s, seed=i).astype("bfloat16") for i, s in enumerate(shapes)]


@pytest.mark.parametrize("config", [WHOLE, PARTS], ids=str)
def test_what_lies_behind_a_length_may_be_anything(config):
    q, k, v = arguments(q_len=2)
    for counts in ((1, 17), (64, 129), (299, 300)):
        clean = ours(q, k, v, key_value_seq_lengths=lengths(*counts), config=config)
        for example, count in enumerate(counts):
            k = k.at[example, count:].set(jnp.nan)
            v = v.at[example, count:].set(jnp.inf)
        found = ours(q, k, v, key_value_seq_lengths=lengths(*counts), config=config)
        np.testing.assert_array_equal(found, clean)
        q, k, v = arguments(q_len=2)


@pytest.mark.parametrize("config", [WHOLE, PARTS], ids=str)
def test_special_rows_are_xlas(config):
    """Sequences without keys, NaN, infinities and large scores."""
    q, k, v = arguments(q_len=3)
    none = {"key_value_seq_lengths": lengths(0, 300)}
    cases: list[tuple[list[jax.Array], dict[str, Any]]] = [
        ([q, k, v], none),
        ([q, k, v], {"local_window_size": (40, -50)}),
        ([q.at[0, 1, 1, 3].set(jnp.nan), k, v], {}),
        ([q, k.at[0, 200, 1, 3].set(jnp.nan), v], {}),
        ([q, k, v.at[0, 5, 0, 7].set(jnp.inf)], {}),
        ([q * 100, k, v], {}),
        ([q, k, v], {"scale": 1e-12}),
    ]
    xla = functools.partial(attention, implementation="xla", precision="highest")
    for args, settings in cases:
        wide = [x.astype("float32") for x in args]
        found = np.asarray(ours(*args, config=config, **settings), np.float64)
        expected = np.asarray(xla(*wide, **settings), np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_lengths_change_without_compiling_again():
    """In loops, under vmap, and as operands of one executable."""
    q, k, v = arguments()
    traces: list[int] = []

    @jax.jit
    def call(n):
        traces.append(1)
        return ours(q, k, v, key_value_seq_lengths=n, config=PARTS)

    steps = [lengths(n, 300 - n) for n in (1, 100, 299)]
    each = [call(n) for n in steps]
    assert len(traces) == 1
    _, scanned = jax.lax.scan(lambda c, n: (c, call(n)), None, jnp.stack(steps))
    np.testing.assert_array_equal(scanned, jnp.stack(each))
    np.testing.assert_array_equal(jax.vmap(call)(jnp.stack(steps)), jnp.stack(each))


def test_pages_of_nobody_are_not_looked_at():
    q, k, v = (x.astype("bfloat16") for x in (normal(3, 8, 64), *_pages()))
    counts = jnp.asarray([0, 13, 48], jnp.int32)
    pages = jnp.asarray([[9, 9, 9], [4, 9, 9], [1, 7, 3]], jnp.int32)
    how = {"implementation": "paged_attention_sm90", "config": WHOLE}
    clean = paged_attention(q, k, v, counts, pages, **how)
    assert not np.asarray(clean[0]).any()
    k, v = (x.at[:, 9].set(jnp.nan).at[:, 4, 13:].set(jnp.nan) for x in (k, v))
    lost = pages.at[0].set(1 << 30).at[1, 1:].set(-1)
    found = paged_attention(q, k, v, counts, lost, **how)
    np.testing.assert_array_equal(found, clean)
    xla = paged_attention(q, k, v, counts, pages, implementation="xla")
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(xla, np.float32), atol=2e-2
    )


def _pages() -> tuple[jax.Array, jax.Array]:
    return normal(2, 11, 16, 64, seed=1), normal(2, 11, 16, 64, seed=2)

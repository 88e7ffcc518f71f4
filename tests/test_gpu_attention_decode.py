"""attention_decode_sm90 and its pages on Hopper: every kind, at awkward shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import lengths
from numerics import normal

from tracea_jax.ops import attention, paged_attention
from tracea_jax.ops.attention import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, Problem
from tracea_jax.variants.attention_decode_sm90 import (
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

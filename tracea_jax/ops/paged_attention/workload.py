"""Workload of paged attention for the tuner."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.attention import exact
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    operand_roundoff,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.common.typed import asarray
from tracea_jax.ops.paged_attention.primitive import paged_attention_p
from tracea_jax.policy import Choice
from tracea_jax.problem import PagedAttentionProblem


def check(problem: PagedAttentionProblem) -> None:
    """Raises ValueError on what cannot be run."""
    check_dtype(problem.dtype)


def execute(
    *inputs: jax.Array, problem: PagedAttentionProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    return paged_attention_p.bind(*inputs, scale=problem.scale, **forced(choice))


def operands(problem: PagedAttentionProblem, seed: int) -> list[jax.Array]:
    """Random operands; sequences are at least half as long as they may be.

    Pages are dealt out at random, and shared only if there are too few.
    """
    p = problem
    pages = (p.kv_heads, p.pages, p.page_size, p.head_dim)
    queries = (p.batch, p.heads, p.head_dim)
    arrays = random_normal([(s, p.dtype) for s in (queries, pages, pages)], seed)
    rng = np.random.default_rng(seed)
    longest = p.pages_per_sequence * p.page_size
    lengths = rng.integers(max(1, longest // 2), longest + 1, p.batch)
    count = p.batch * p.pages_per_sequence
    dealt = rng.permutation(max(count, p.pages))[:count] % p.pages
    indices = dealt.reshape(p.batch, p.pages_per_sequence)
    return [*arrays, asarray(lengths, jnp.int32), asarray(indices, jnp.int32)]


def ragged(problem: PagedAttentionProblem) -> PagedAttentionProblem:
    """A small problem of the same kind, of sequences of a few pages."""
    kv_heads = min(problem.kv_heads, 2)
    return dataclasses.replace(
        problem,
        batch=min(problem.batch, 3),
        kv_heads=kv_heads,
        heads=problem.heads // problem.kv_heads * kv_heads,
        pages=23,
        pages_per_sequence=7,
    )


def judge(
    problem: PagedAttentionProblem,
    device: Device,
    inputs: list[jax.Array],
    seed: int,
) -> Judge:
    """See ``Workload``: as attention is judged, of the gathered pages."""
    q, k_pages, v_pages, lengths, indices = (np.asarray(x) for x in inputs)
    units = exact.Units(
        storage=unit_roundoff(problem.dtype),
        products=operand_roundoff((problem.dtype,), "default", device),
    )

    def gathered(pages: np.ndarray) -> np.ndarray:
        of_sequences = np.moveaxis(pages[:, indices], 0, 3)
        return of_sequences.reshape(len(q), -1, *of_sequences.shape[3:])

    arrays = {
        "q": q[:, None],
        "k": gathered(k_pages),
        "v": gathered(v_pages),
        "kv_lengths": lengths,
    }

    def error(results: list[jax.Array]) -> float:
        found = np.asarray(results[0])[:, None]
        if not np.isfinite(found.astype(np.float32)).all():
            return float("inf")
        return exact.forward_error(problem.gathered, arrays, found, units, seed)

    return error


PAGED_ATTENTION = Workload(
    check=check, operands=operands, execute=execute, ragged=ragged, judge=judge
)

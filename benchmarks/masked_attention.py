"""Cases of ``attention_suite`` with documents, windows, biases, caps, sinks, blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from attention_sides import (
    OURS,
    Case,
    Passes,
    Side,
    normal,
    operands,
    ours,
    peer,
    plain,
    problem_of,
    same,
    seen,
)

from tracea_jax import masks
from tracea_jax.problem import AttentionProblem

BLOCK = 128
USUAL = problem_of(4096, 128, is_causal=True)
GRADIENTS: tuple[tuple[Passes, str], ...] = (("forward", ""), ("both", ", gradients"))


def of_masks() -> Iterator[Case]:
    for passes, also in GRADIENTS:
        yield _documents(f"documents of 512{also}", passes, [512] * 8)
    for passes, _ in GRADIENTS:
        lengths = np.diff([0, *np.sort(_random().integers(1, 4096, 7)), 4096])
        yield _documents("documents of random lengths", passes, lengths.tolist())
    for passes, also in GRADIENTS:
        for head_dim in (64, 128):
            for length in (4096, 16384):
                for before in (511, 1023):
                    if also and (length == 4096) != (before == 511):
                        continue
                    problem = problem_of(
                        length, head_dim, is_causal=True, window=(before, 0)
                    )
                    yield plain(f"window{also}", passes, problem)
    for passes, also in GRADIENTS:
        yield _bias(f"bias per head{also}", passes)
    for passes, also in GRADIENTS:
        yield _scores(f"soft cap{also}", passes, "cap 50", logits_soft_cap=50.0)
    for passes, _ in GRADIENTS:
        yield _scores("sinks", passes, "sinks")
    for density in (0.05, 0.1, 0.25, 0.5):
        yield _blocks(density)


def _random() -> np.random.Generator:
    return np.random.default_rng(1)


def _documents(group: str, passes: Passes, lengths: list[int]) -> Case:
    p = USUAL
    row = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    share = sum(n * (n + 1) / 2 for n in lengths) / p.q_len**2
    is_equal = len(set(lengths)) == 1

    def sides() -> dict[str, Side]:
        x = operands(p)
        ids = jnp.broadcast_to(jnp.asarray(row), (p.batch, p.q_len))
        alike = ids[:, None, :, None] == ids[:, None, None, :]
        whole = alike & jnp.tri(p.q_len, dtype=bool)
        name = "query_segment_ids"
        found = same(((*x, ids),), (), name, is_causal=True) | {
            "cudnn": Side(run=peer("cudnn", "mask"), sets=((*x, whole),)),
            "causal": Side(
                run=peer("cudnn", "mask", is_causal=True), sets=((*x, alike),)
            ),
        }
        if is_equal:
            apart = tuple(a.reshape(-1, lengths[0], *a.shape[2:]) for a in x)
            found["separate"] = Side(run=ours(OURS, is_causal=True), sets=(apart,))
        return found

    kind = f"{len(lengths)} of {lengths[0]}" if is_equal else f"{len(lengths)} random"
    return Case(
        group=group,
        text=f"{_brief(p)} causal, documents: {kind}",
        passes=passes,
        problem=p,
        seen=share,
        sides=sides,
        rivals=("ours", "cudnn", "causal"),
    )


def _bias(group: str, passes: Passes) -> Case:
    p = USUAL
    shape = (1, p.heads, p.q_len, p.kv_len)

    def sides() -> dict[str, Side]:
        x = operands(p)
        (bias,) = normal((shape,), jnp.uint32(2))
        return same(((*x, bias),), ("cudnn",), "bias", is_causal=True)

    return Case(
        group=group,
        text=f"{_brief(p)} causal, bias per head",
        passes=passes,
        problem=p,
        seen=seen(p),
        sides=sides,
        differentiated=4,
    )


def _scores(group: str, passes: Passes, text: str, **how: Any) -> Case:
    """A case of causal attention with a score modifier or sinks, which cuDNN lacks."""
    p = USUAL
    names = () if how else ("sinks",)

    def sides() -> dict[str, Side]:
        x = operands(p)
        sinks = jnp.asarray(_random().normal(size=p.heads), jnp.float32)
        sets = (x if how else (*x, sinks),)
        xla = ours("xla", *names, is_causal=True, **how)
        return same(sets, (), *names, is_causal=True, **how) | {
            "plain": Side(run=ours(OURS, is_causal=True), sets=(x,)),
            "xla": Side(run=xla, sets=sets),
        }

    return Case(
        group=group,
        text=f"{_brief(p)} causal, {text}",
        passes=passes,
        problem=p,
        seen=seen(p),
        sides=sides,
        rivals=("ours", "xla"),
    )


def _blocks(density: float) -> Case:
    """Random blocks, the same of all heads; each query sees some."""
    p = problem_of(8192, 128)
    count = p.q_len // BLOCK
    chosen = _random().random((count, count)) < density
    chosen[np.arange(count), np.arange(count)] = True
    share = float(chosen.mean())

    def sides() -> dict[str, Side]:
        x = operands(p)
        mask = masks.block_sparse(jnp.asarray(chosen), (BLOCK, BLOCK))
        dense = Side(run=ours(OURS), sets=(x,))
        return same((x,), (), mask=mask) | {"dense": dense}

    return Case(
        group="blocks",
        text=f"{_brief(p)}, blocks of {BLOCK}, {share:.3f} of them",
        passes="forward",
        problem=p,
        seen=share,
        sides=sides,
        rivals=("ours",),
    )


def _brief(p: AttentionProblem) -> str:
    return f"{p.batch}x{p.q_len}x{p.kv_len} heads {p.heads} dim {p.head_dim}"

"""The cases of ``bench_attention``: who races on which attention, and the bars.

A suite is some groups of cases; each group has bars, as in ``matmul_suite``. The figure
"<peer>_min" of a group is the lowest ratio of the peer's time by ours.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from attention_sides import Arrays, Case, Side, operands, plain, problem_of, same, seen
from masked_attention import of_masks
from matmul_suite import Bar

from tracea_jax.problem import AttentionProblem

PER_BLOCK_OF_SCORES = 1.15  # what block-sparse may cost, by its share of dense time
BESIDES_US = 5.0  # and besides
XLA_LONGEST = 4096  # its scores of longer sequences do not fit, or take seconds
MOSAIC = "jax.experimental.pallas.ops.gpu.attention_mgpu"


def _bars(**limits: float) -> tuple[Bar, ...]:
    return tuple(Bar(figure=name, limit=limit) for name, limit in limits.items())


BARS: dict[str, tuple[Bar, ...]] = {
    "forward": _bars(cudnn_geomean=1.05, cudnn_min=0.97, default_min=0.99),
    "forward, short": _bars(default_min=0.99),
    "forward, shared keys": _bars(default_min=0.99),
    "forward + backward, causal": _bars(
        cudnn_geomean=1.03, cudnn_min=0.95, default_min=0.95
    ),
    "forward + backward, full": _bars(default_min=0.95),
    "backward": _bars(default_min=0.95),
    "documents of 512": _bars(cudnn_min=16.0, separate_min=1 / 1.25),
    "documents of 512, gradients": _bars(cudnn_min=14.0, separate_min=1 / 1.25),
    "documents of random lengths": _bars(default_min=0.95),
    "window": _bars(cudnn_min=1.2, default_min=0.95),
    "window, gradients": _bars(default_min=0.95),
    "bias per head": _bars(cudnn_min=1.8, default_min=0.95),
    "bias per head, gradients": _bars(default_min=0.95),
    "soft cap": _bars(plain_min=1 / 1.25),
    "soft cap, gradients": _bars(default_min=0.95),
    "sinks": _bars(plain_min=1 / 1.25),
    "blocks": _bars(allowed_min=1.0),
    "Pallas Mosaic": _bars(mosaic_min=1.0),
    "decode": _bars(cudnn_min=0.97, default_min=1 / 1.05),
    "decode, large": _bars(cudnn_min=0.97, default_min=1 / 1.05, copy_min=0.9),
}


def suite(name: str) -> list[Case]:
    """The cases of a suite, those of one group being consecutive."""
    return list(SUITES[name]())


# --- forward, backward ----------------------------------------------------------------


def forward() -> Iterator[Case]:
    lengths = {"forward": (2048, 4096, 8192, 16384), "forward, short": (512, 1024)}
    for group, of_group in lengths.items():
        for head_dim in (64, 128, 256):
            for length in of_group:
                for is_causal in (False, True):
                    problem = problem_of(length, head_dim, is_causal=is_causal)
                    yield plain(group, "forward", problem)
    for head_dim in (64, 128, 256):
        problem = problem_of(4096, head_dim, is_causal=True)
        shared = dataclasses.replace(problem, kv_heads=problem.heads // 4)
        yield plain("forward, shared keys", "forward", shared)


def backward() -> Iterator[Case]:
    for is_causal in (True, False):
        group = f"forward + backward, {'causal' if is_causal else 'full'}"
        for head_dim in (64, 128):
            for length in (2048, 4096, 8192, 16384):
                problem = problem_of(length, head_dim, is_causal=is_causal)
                yield plain(group, "both", problem, with_xla=length <= XLA_LONGEST)
    for head_dim in (64, 128):
        for is_causal in (True, False):
            problem = problem_of(4096, head_dim, is_causal=is_causal)
            yield plain("backward", "backward", problem)


# --- another library ------------------------------------------------------------------


def of_mosaic() -> Iterator[Case]:
    """The attention of jax's examples for Mosaic GPU: float16, of unscaled scores."""
    for head_dim in (64, 128, 256):
        for is_causal in (False, True):
            how: dict[str, Any] = {"is_causal": is_causal, "dtype": "float16"}
            yield _beside_mosaic(problem_of(4096, head_dim, **how))


def _beside_mosaic(problem: AttentionProblem) -> Case:
    def sides() -> dict[str, Side]:
        x = tuple(a.astype(problem.dtype) for a in operands(problem))
        how: dict[str, Any] = {"is_causal": problem.is_causal}
        mosaic = Side(run=_mosaic(problem.is_causal, x), sets=(x,))
        return {**same((x,), ("cudnn",), **how), "mosaic": mosaic}

    return Case(
        group="Pallas Mosaic",
        text=str(problem).removeprefix("attention "),
        passes="forward",
        problem=problem,
        seen=seen(problem),
        sides=sides,
        rivals=("ours", "cudnn", "mosaic"),
    )


def _mosaic(is_causal: bool, x: Arrays) -> Callable[..., Any]:
    """Blocks of 64 queries and of most keys that fit, as its own benchmark takes."""
    library = importlib.import_module(MOSAIC)
    for keys in (256, 128, 64):
        config = library.TuningConfig(
            block_q=64, block_kv=keys, max_concurrent_steps=2, causal=is_causal
        )
        run = functools.partial(library.attention, config=config)
        try:
            jax.jit(run).lower(*x)
        except ValueError as e:
            if "shared memory" not in str(e):
                raise
        else:
            return run
    raise ValueError(f"no blocks of {MOSAIC} fit")


# --- decode ---------------------------------------------------------------------------

DECODED = ((64, 4096, 2049), (8, 1 << 15, None), (1, 1 << 17, None), (16, 1024, None))
CACHE_BYTES = 1 << 28  # more than any cache holds: calls take turns at so much


def decode() -> Iterator[Case]:
    for batch, kv_len, length in DECODED:
        problem = AttentionProblem(
            batch=batch,
            q_len=1,
            kv_len=kv_len,
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            scale=128**-0.5,
            kv_lengths=True,
        )
        of = kv_len if length is None else length
        yield Case(
            group="decode, large" if batch * of > 1 << 16 else "decode",
            text=f"{batch} x {of} of {kv_len} keys, heads 32/8 dim 128",
            passes="forward",
            problem=problem,
            seen=of / kv_len,
            sides=functools.partial(_decoding, problem, of),
        )


def _decoding(problem: AttentionProblem, length: int) -> dict[str, Side]:
    count = max(1, CACHE_BYTES // problem.bytes)
    lengths = jnp.full(problem.batch, length, jnp.int32)
    sets = tuple((*operands(problem, seed), lengths) for seed in range(count))
    name = "key_value_seq_lengths"
    return same(sets, ("cudnn",), name, by="attention_decode_sm90")


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "forward": forward,
    "backward": backward,
    "masks": of_masks,
    "decode": decode,
    "peers": of_mosaic,
}

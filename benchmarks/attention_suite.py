"""The cases of ``bench_attention``: who races on which attention, and the bars.

A suite is some groups of cases; each group has bars, as in ``matmul_suite``. The figure
"<peer>_min" of a group is the lowest ratio of the peer's time by ours.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from matmul_suite import Bar

from tracea_jax import masks
from tracea_jax.ops import attention
from tracea_jax.problem import AttentionProblem

TOKENS, COLUMNS, BLOCK = 16384, 2048, 128
PER_BLOCK_OF_SCORES = 1.15  # what block-sparse may cost, by its share of dense time
BESIDES_US = 5.0  # and besides
XLA_LONGEST = 4096  # its scores of longer sequences do not fit, or take seconds
OURS = "attention_sm90"
MOSAIC = "jax.experimental.pallas.ops.gpu.attention_mgpu"

Passes = Literal["forward", "backward", "both"]
Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Who races: a function of q, k, v and further arrays.

    Attributes:
      sets: operands of several calls in turn, so that no cache holds them.
    """

    run: Callable[..., jax.Array]
    sets: tuple[Arrays, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of a suite.

    Attributes:
      group: which bars it is judged by.
      text: the problem, as people read it.
      passes: what is timed: the forward pass; the backward one, given what the forward
        one leaves; or both, in one call.
      problem: what ours computes, without what the mask says.
      seen: the share of scores that some query sees.
      sides: made when the case is run; "ours", "default", which is what runs
        unmeasured, and peers.
      rivals: sides that compute the same; the default ought to be as fast as they are.
      differentiated: how many operands gradients are taken of.
    """

    group: str
    text: str
    passes: Passes
    problem: AttentionProblem
    seen: float
    sides: Callable[[], dict[str, Side]]
    rivals: tuple[str, ...] = ("ours", "cudnn")
    differentiated: int = 3


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


def problem_of(length: int, head_dim: int, **fields: Any) -> AttentionProblem:
    """16384 tokens of 2048 columns."""
    heads = fields.pop("heads", COLUMNS // head_dim)
    usual: dict[str, Any] = {
        "batch": max(1, TOKENS // length),
        "q_len": length,
        "kv_len": length,
        "kv_heads": heads,
        "dtype": "bfloat16",
        "scale": head_dim**-0.5,
    }
    return AttentionProblem(head_dim=head_dim, heads=heads, **(usual | fields))


def forward() -> Iterator[Case]:
    lengths = {"forward": (2048, 4096, 8192, 16384), "forward, short": (512, 1024)}
    for group, of_group in lengths.items():
        for head_dim in (64, 128, 256):
            for length in of_group:
                for is_causal in (False, True):
                    problem = problem_of(length, head_dim, is_causal=is_causal)
                    yield _plain(group, "forward", problem)
    for head_dim in (64, 128, 256):
        problem = problem_of(4096, head_dim, is_causal=True)
        shared = dataclasses.replace(problem, kv_heads=problem.heads // 4)
        yield _plain("forward, shared keys", "forward", shared)


def backward() -> Iterator[Case]:
    for is_causal in (True, False):
        group = f"forward + backward, {'causal' if is_causal else 'full'}"
        for head_dim in (64, 128):
            for length in (2048, 4096, 8192, 16384):
                problem = problem_of(length, head_dim, is_causal=is_causal)
                yield _plain(group, "both", problem, with_xla=length <= XLA_LONGEST)
    for head_dim in (64, 128):
        for is_causal in (True, False):
            problem = problem_of(4096, head_dim, is_causal=is_causal)
            yield _plain("backward", "backward", problem)


def _plain(
    group: str, passes: Passes, problem: AttentionProblem, with_xla: bool = False
) -> Case:
    """Attention whose problem says everything, against what jax.nn calls."""
    how = {"is_causal": problem.is_causal, "local_window_size": problem.window}
    peers = ("cudnn", *("xla",) * with_xla)
    return Case(
        group=group,
        text=str(problem).removeprefix("attention "),
        passes=passes,
        problem=problem,
        seen=_seen(problem),
        sides=lambda: _same(operands(problem), peers, how),
    )


def _same(x: Arrays, peers: tuple[str, ...], how: Mapping[str, Any]) -> dict[str, Side]:
    """Ours, the default and peers on the same operands with the same arguments."""
    return {
        "ours": Side(run=ours(OURS, **how), sets=(x,)),
        "default": Side(run=ours(None, **how), sets=(x,)),
        **{name: Side(run=_peer(name, **how), sets=(x,)) for name in peers},
    }


def ours(implementation: str | None, *names: str, **how: Any) -> Callable[..., Any]:
    """Further operands are the arguments of these names."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        more = {**how, **dict(zip(names, rest, strict=True))}
        by: Any = implementation
        return attention(q, k, v, **more, implementation=by)

    return run


def _peer(implementation: str, *names: str, **how: Any) -> Callable[..., Any]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        more = {**how, **dict(zip(names, rest, strict=True))}
        peer: Any = implementation
        return jax.nn.dot_product_attention(q, k, v, **more, implementation=peer)

    return run


@functools.partial(jax.jit, static_argnums=0)
def _normal(shapes: tuple[tuple[int, ...], ...], seed: jax.Array) -> Arrays:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, s, jnp.bfloat16) for key, s in pairs)


def operands(problem: AttentionProblem, seed: int = 1) -> Arrays:
    """q, k and v: random normal numbers."""
    p = problem
    keys = (p.batch, p.kv_len, p.kv_heads, p.head_dim)
    shapes = ((p.batch, p.q_len, p.heads, p.head_dim), keys, keys)
    return _normal(shapes, jnp.uint32(seed))


def _seen(problem: AttentionProblem) -> float:
    """The share of scores that the rules on positions leave, of as many queries."""
    p = problem
    at = np.arange(p.q_len)
    left, right = p.window or (p.kv_len, p.kv_len)
    end = np.minimum(at + (0 if p.is_causal else right) + 1, p.kv_len)
    return float((end - np.maximum(at - left, 0)).sum() / (p.q_len * p.kv_len))


# --- masks ----------------------------------------------------------------------------

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
                    yield _plain(f"window{also}", passes, problem)
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
    seen = sum(n * (n + 1) / 2 for n in lengths) / p.q_len**2
    is_equal = len(set(lengths)) == 1

    def sides() -> dict[str, Side]:
        x = operands(p)
        ids = jnp.broadcast_to(jnp.asarray(row), (p.batch, p.q_len))
        alike = ids[:, None, :, None] == ids[:, None, None, :]
        whole = alike & jnp.tri(p.q_len, dtype=bool)
        name = "query_segment_ids"
        found = {
            "ours": Side(run=ours(OURS, name, is_causal=True), sets=((*x, ids),)),
            "default": Side(run=ours(None, name, is_causal=True), sets=((*x, ids),)),
            "cudnn": Side(run=_peer("cudnn", "mask"), sets=((*x, whole),)),
            "causal": Side(
                run=_peer("cudnn", "mask", is_causal=True), sets=((*x, alike),)
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
        seen=seen,
        sides=sides,
        rivals=("ours", "cudnn", "causal"),
    )


def _bias(group: str, passes: Passes) -> Case:
    p = USUAL
    shape = (1, p.heads, p.q_len, p.kv_len)

    def sides() -> dict[str, Side]:
        x = operands(p)
        (bias,) = _normal((shape,), jnp.uint32(2))
        how = {"is_causal": True}
        return {
            "ours": Side(run=ours(OURS, "bias", **how), sets=((*x, bias),)),
            "default": Side(run=ours(None, "bias", **how), sets=((*x, bias),)),
            "cudnn": Side(run=_peer("cudnn", "bias", **how), sets=((*x, bias),)),
        }

    return Case(
        group=group,
        text=f"{_brief(p)} causal, bias per head",
        passes=passes,
        problem=p,
        seen=_seen(p),
        sides=sides,
        differentiated=4,
    )


def _scores(group: str, passes: Passes, text: str, **how: Any) -> Case:
    """What cuDNN has not: beside the same attention without it."""
    p = USUAL
    names = () if how else ("sinks",)

    def sides() -> dict[str, Side]:
        x = operands(p)
        sinks = jnp.asarray(_random().normal(size=p.heads), jnp.float32)
        more = () if how else (sinks,)
        run = functools.partial(ours, is_causal=True, **how)
        return {
            "ours": Side(run=run(OURS, *names), sets=((*x, *more),)),
            "default": Side(run=run(None, *names), sets=((*x, *more),)),
            "plain": Side(run=ours(OURS, is_causal=True), sets=(x,)),
            **({"xla": Side(run=run("xla", *names), sets=((*x, *more),))}),
        }

    return Case(
        group=group,
        text=f"{_brief(p)} causal, {text}",
        passes=passes,
        problem=p,
        seen=_seen(p),
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
        return {
            "ours": Side(run=ours(OURS, mask=mask), sets=(x,)),
            "default": Side(run=ours(None, mask=mask), sets=(x,)),
            "dense": Side(run=ours(OURS), sets=(x,)),
        }

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
        how = {"is_causal": problem.is_causal}
        mosaic = Side(run=_mosaic(problem.is_causal, x), sets=(x,))
        return {**_same(x, ("cudnn",), how), "mosaic": mosaic}

    return Case(
        group="Pallas Mosaic",
        text=str(problem).removeprefix("attention "),
        passes="forward",
        problem=problem,
        seen=_seen(problem),
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
    return {
        "ours": Side(run=ours("attention_decode_sm90", name), sets=sets),
        "default": Side(run=ours(None, name), sets=sets),
        "cudnn": Side(run=_peer("cudnn", name), sets=sets),
    }


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "forward": forward,
    "backward": backward,
    "masks": of_masks,
    "decode": decode,
    "peers": of_mosaic,
}

"""Workload of attention for the tuner: operands, execution and error bounds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.attention import exact
from tracea_jax.ops.attention.primitives import attention_backward_p, attention_p
from tracea_jax.ops.attention.reference import OF_HEADS, OPTIONAL, Spec, reference
from tracea_jax.ops.common.bench import (
    Judge,
    Workload,
    check_dtype,
    forced,
    operand_roundoff,
    random_normal,
    unit_roundoff,
)
from tracea_jax.ops.common.typed import Params, arange, asarray, jit, lax
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem

_FEW_QUERIES = 64


def check(problem: AttentionProblem) -> None:
    """Raises ValueError on what cannot be run, or leaves a query without any key."""
    check_dtype(problem.dtype)
    if problem.bias:
        check_dtype(problem.bias_dtype or problem.dtype)
    p = problem
    if p.aligned_at_end and p.q_len > p.kv_len and (p.is_causal or p.window):
        raise ValueError(f"{problem}: the first queries are left without any key")
    if p.window and p.q_len > p.kv_len + p.window[0]:
        raise ValueError(f"{problem}: the last queries are left without any key")


def spec_of(problem: AttentionProblem) -> Spec:
    """The primitives' parameter that describes the problem."""
    given = (
        problem.bias,
        problem.mask,
        problem.q_lengths,
        problem.kv_lengths,
        problem.segments,
        problem.segments,
        problem.sinks,
        problem.alibi,
    )
    return Spec(
        scale=problem.scale,
        is_causal=problem.is_causal,
        window=problem.window,
        aligned_at_end=problem.aligned_at_end,
        mask_block=problem.mask_block,
        soft_cap=problem.soft_cap,
        alibi=problem.alibi,
        optional=tuple(n for n, there in zip(OPTIONAL, given, strict=True) if there),
    )


def execute(
    *inputs: jax.Array, problem: AttentionProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    params: Params = {"spec": spec_of(problem), **forced(choice)}
    if problem.direction == "forward":
        lse = jnp.dtype("float32") if problem.saves_lse else None
        return attention_p.bind(*inputs, lse=lse, **params)
    return attention_backward_p.bind(
        *inputs,
        bias_gradient=problem.bias_gradient,
        sinks_gradient=problem.sinks,
        **params,
    )


def operands(problem: AttentionProblem, seed: int) -> list[jax.Array]:
    """Random operands of a problem, in the primitive's order.

    Every query is allowed some key. For the backward pass the output and the
    log-sum-exp are the reference's.
    """
    p = problem
    q = (p.batch, p.q_len, p.heads, p.head_dim)
    k = (p.batch, p.kv_len, p.kv_heads, p.head_dim)
    v, o = (*k[:3], p.columns), (*q[:3], p.columns)
    shapes: list[tuple[tuple[int, ...], str]] = [(s, p.dtype) for s in (q, k, v, o)]
    shapes.append((p.bias or (1,), p.bias_dtype or p.dtype))
    shapes.append(((p.heads,), "float32"))
    *qkv, do, bias, sinks = random_normal(shapes, seed)
    rng = np.random.default_rng(seed)
    kv_segments = _segments(p, rng)
    given: dict[str, Any] = {
        "bias": bias,
        "mask": _mask(p, rng) if p.mask else None,
        "q_lengths": _lengths(p.q_len, p, rng),
        "kv_lengths": _lengths(p.kv_len, p, rng),
        "q_segments": asarray(kv_segments[:, _diagonal(p)]),
        "kv_segments": asarray(kv_segments),
        "sinks": sinks,
        "alibi_slopes": 2.0 ** (-8 / p.heads * arange(1, p.heads + 1)),
    }
    spec = spec_of(p)
    inputs = [*qkv, *(given[name] for name in spec.optional)]
    if p.direction == "forward":
        return inputs
    return [*inputs, *_forward(inputs, spec), do]


def _diagonal(p: AttentionProblem) -> np.ndarray:
    """For each query the key at its position, or the next that there is."""
    start = p.kv_len - p.q_len if p.aligned_at_end else 0
    return np.clip(np.arange(p.q_len) + start, 0, p.kv_len - 1)


def _mask(p: AttentionProblem, rng: np.random.Generator) -> jax.Array:
    """One key in eight is forbidden, but never all keys of a query."""
    assert p.mask
    *_, rows, keys = p.mask
    mask = rng.random(p.mask) < 0.875
    if p.window is None:
        mask[..., 0] = True
    if keys == 1 or rows == 1 and (p.window or p.segments):
        mask[:] = True
    of_q, of_k = p.mask_block or (1, 1)
    seen = np.arange(p.q_len) // of_q % rows, _diagonal(p) // of_k % keys
    mask[..., *seen] = True
    return asarray(mask)


def _segments(p: AttentionProblem, rng: np.random.Generator) -> np.ndarray:
    """Segment ids of keys: about eight documents of random lengths in an example."""
    starts = rng.random((p.batch, p.kv_len)) < 8 / p.kv_len
    return np.cumsum(starts, axis=1, dtype=np.int32)


def _lengths(longest: int, p: AttentionProblem, rng: np.random.Generator) -> jax.Array:
    """At least half of the longest; all of it where a query could lose its keys."""
    loses_keys = p.window or p.segments or p.aligned_at_end
    shortest = longest if loses_keys else max(1, longest // 2)
    return asarray(rng.integers(shortest, longest + 1, p.batch), jnp.int32)


@functools.partial(jit, static_argnames="spec")
def _forward(inputs: list[jax.Array], spec: Spec) -> list[jax.Array]:
    """Output and log-sum-exp by the reference, one example after the other."""
    batch = inputs[0].shape[0]

    def one(index: jax.Array) -> list[jax.Array]:
        parts = [
            x
            if name in OF_HEADS
            else jax.lax.dynamic_slice_in_dim(x, index * (x.shape[0] > 1), 1)
            for name, x in zip(spec.names, inputs, strict=True)
        ]
        return [y[0] for y in reference(*parts, spec=spec, lse=jnp.float32)]

    return lax.map(one, arange(batch))


def ragged(problem: AttentionProblem) -> AttentionProblem:
    """A small problem of the same kind whose lengths divide no tile but stay even.

    Few queries stay as few: kernels that are made for them take no more.
    """
    p = problem
    groups = p.heads // p.kv_heads
    kv_heads = min(p.kv_heads, 2)
    batch, heads = min(p.batch, 2), groups * kv_heads
    q_len, kv_len = 266, 266 if p.q_len == p.kv_len else 330
    if p.q_len <= _FEW_QUERIES:
        q_len = p.q_len

    def scores(
        shape: tuple[int, int, int, int] | None, block: tuple[int, int] = (1, 1)
    ) -> tuple[int, ...] | None:
        of_q, of_k = block
        whole = (batch, heads, -(-q_len // of_q), -(-kv_len // of_k))
        return shape and tuple(
            1 if own == 1 else n for own, n in zip(shape, whole, strict=True)
        )

    return dataclasses.replace(
        p,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        bias=scores(p.bias),
        mask=scores(p.mask, p.mask_block or (1, 1)),
    )


def error(
    problem: AttentionProblem,
    device: Device,
    inputs: list[jax.Array],
    results: list[jax.Array],
    seed: int,
) -> float:
    """The largest error against float64, in units of what rounding allows.

    Some heads of the first and the last example are compared, in a row of every band of
    64; see ``attention_exact``. Not-a-number anywhere counts as infinite.
    """
    if not all(bool(jnp.isfinite(x).all()) for x in results):
        return float("inf")
    units = exact.Units(
        storage=unit_roundoff(problem.dtype),
        products=operand_roundoff((problem.dtype,), "default", device),
    )
    names = [*spec_of(problem).names, "o", "lse", "do"]
    arrays = {n: np.asarray(x) for n, x in zip(names, inputs, strict=False)}
    found = [np.asarray(x) for x in results]
    if problem.direction == "forward":
        worst = exact.forward_error(problem, arrays, found[0], units, seed)
        if problem.saves_lse:
            error = exact.lse_error(problem, arrays, found[1], units.products, seed)
            worst = max(worst, error)
        return worst
    return exact.backward_error(problem, arrays, found, units, seed)


def judge(
    problem: AttentionProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """See ``Workload``."""
    return lambda results: error(problem, device, inputs, results, seed)


ATTENTION = Workload(
    check=check,
    operands=operands,
    execute=execute,
    ragged=ragged,
    judge=judge,
)

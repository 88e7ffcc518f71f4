"""Parts of the cases of ``attention_suite``: who races, on which operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.ops import attention
from tracea_jax.problem import AttentionProblem

TOKENS, COLUMNS = 16384, 2048
OURS = "attention_sm90"

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


def plain(
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
        seen=seen(problem),
        sides=lambda: same((operands(problem),), peers, **how),
    )


def same(
    sets: tuple[Arrays, ...],
    peers: tuple[str, ...],
    *names: str,
    by: str = OURS,
    **how: Any,
) -> dict[str, Side]:
    """Ours, the default and peers on the same operands with the same arguments.

    Args:
      sets: operands of several calls.
      peers: implementations of ``jax.nn``.
      names: arguments that operands behind q, k and v are.
      by: our kernel.
      how: further arguments.
    """
    runs = {"ours": ours(by, *names, **how), "default": ours(None, *names, **how)}
    runs |= {name: peer(name, *names, **how) for name in peers}
    return {name: Side(run=run, sets=sets) for name, run in runs.items()}


def ours(implementation: str | None, *names: str, **how: Any) -> Callable[..., Any]:
    """Further operands are the arguments of these names."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        more = {**how, **dict(zip(names, rest, strict=True))}
        by: Any = implementation
        return attention(q, k, v, **more, implementation=by)

    return run


def peer(implementation: str, *names: str, **how: Any) -> Callable[..., Any]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        more = {**how, **dict(zip(names, rest, strict=True))}
        peer: Any = implementation
        return jax.nn.dot_product_attention(q, k, v, **more, implementation=peer)

    return run


@functools.partial(jax.jit, static_argnums=0)
def normal(shapes: tuple[tuple[int, ...], ...], seed: jax.Array) -> Arrays:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return tuple(jax.random.normal(key, s, jnp.bfloat16) for key, s in pairs)


def operands(problem: AttentionProblem, seed: int = 1) -> Arrays:
    """q, k and v: random normal numbers."""
    p = problem
    keys = (p.batch, p.kv_len, p.kv_heads, p.head_dim)
    shapes = ((p.batch, p.q_len, p.heads, p.head_dim), keys, keys)
    return normal(shapes, jnp.uint32(seed))


def seen(problem: AttentionProblem) -> float:
    """The share of scores that the rules on positions leave, of as many queries."""
    p = problem
    at = np.arange(p.q_len)
    left, right = p.window or (p.kv_len, p.kv_len)
    end = np.minimum(at + (0 if p.is_causal else right) + 1, p.kv_len)
    return float((end - np.maximum(at - left, 0)).sum() / (p.q_len * p.kv_len))

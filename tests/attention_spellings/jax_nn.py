"""``jax.nn.dot_product_attention`` with each of its arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from numerics import normal

from attention_spellings.base import (
    CAUSAL,
    LEFT,
    LENGTHS,
    MASK,
    B,
    Case,
    H,
    K,
    N,
    T,
    btnh,
    case,
)


def jax_nn(args: Any, arrays: Any = (), rest: Any = (), **expected: Any) -> Case:
    """A case with these arguments; arrays are the program's, too."""
    known = dict(rest)

    def fn(q: Any, k: Any, v: Any, arrays: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, **arrays, **known)

    return case(
        fn, *args, {k: jnp.asarray(v) for k, v in dict(arrays).items()}, **expected
    )


KEYS, QUERIES = {"key_value_seq_lengths": LENGTHS}, {"query_seq_lengths": LENGTHS}


def all_of_jax_nn(args: Any, **shapes: Any) -> dict[str, Case]:
    of = functools.partial(jax_nn, args, **shapes)
    bias, mask = {"bias": normal(1, N, T, T)}, {"mask": MASK}
    return {
        "plain": of(),
        "scale": of((), {"scale": 0.3}, scale=0.3),
        "causal": of((), CAUSAL, **CAUSAL),
        "left": of((), {"local_window_size": (2, 0)}, **LEFT),
        "both": of((), {"local_window_size": 2}, window=(2, 2)),
        "right": of((), {"local_window_size": (T, 1)}, window=(T, 1)),
        "wide": of((), {"local_window_size": T}),
        "causal window": of((), {**CAUSAL, "local_window_size": 2}, **LEFT),
        "mask": of(mask, mask=(B, 1, T, T)),
        "mask and causal": of(mask, CAUSAL, mask=(B, 1, T, T), **CAUSAL),
        "bias": of(bias, bias=(1, N, T, T)),
        "bias and mask": of(
            {"bias": normal(B, 1, 1, T), "mask": MASK},
            bias=(B, 1, 1, T),
            mask=(B, 1, T, T),
        ),
        "keys": of(KEYS, kv_lengths=(B,)),
        "queries": of(QUERIES, q_lengths=(B,)),
        "lengths": of(
            {**KEYS, **QUERIES}, CAUSAL, q_lengths=(B,), kv_lengths=(B,), **CAUSAL
        ),
    }


def without_batch() -> Case:
    args = [x[0] for x in btnh(s=T + 3)]
    shapes = {"q": (1, T, N, H), "k": (1, T + 3, N, H)}
    return jax_nn(args, (), CAUSAL, **shapes, **CAUSAL)


JAX_NN = {
    **all_of_jax_nn(btnh()),
    "one head of keys": jax_nn(btnh(1), (), CAUSAL, k=(B, T, 1, H), **CAUSAL),
    "no batch": without_batch(),
}
JAX_NN_IN_BF16 = all_of_jax_nn(btnh(K, dtype="bfloat16"), k=(B, T, K, H))

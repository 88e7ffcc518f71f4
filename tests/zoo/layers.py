"""Equinox modules under vmap, a mixture of experts, and recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

from zoo.model import Model, Program, floats, linen_program, normal, random_like

TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 16, 16, 24, 4, 8


def equinox_mlp() -> Program:
    def module(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(12, 5, 24, 2, activation=jax.nn.gelu, key=key)

    return _equinox(module, lambda module, x: jax.vmap(module)(x), normal(7, 12))


def equinox_attention() -> Program:
    def module(key: jax.Array) -> eqx.nn.MultiheadAttention:
        return eqx.nn.MultiheadAttention(2, 16, use_output_bias=True, key=key)

    def apply(module: Any, x: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jax.vmap(lambda y: module(y, y, y, mask=causal))(x)

    return _equinox(module, apply, normal(3, 9, 16))


def _equinox(module: Callable[..., Any], apply: Any, x: jax.Array) -> Program:
    shapes = eqx.filter_eval_shape(module, jax.random.key(0))
    arrays, static = eqx.partition(
        shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def fn(params: Any, x: jax.Array) -> jax.Array:
        return apply(eqx.combine(params, static), x)

    return fn, (random_like(arrays), x)


def experts() -> Program:
    params = random_like(
        floats(
            router=(WIDTH, EXPERTS),
            w_gate=(EXPERTS, WIDTH, HIDDEN),
            w_up=(EXPERTS, WIDTH, HIDDEN),
            w_down=(EXPERTS, HIDDEN, WIDTH),
        )
    )
    return _experts, (params, normal(TOKENS, WIDTH))


def _experts(p: Any, x: jax.Array) -> jax.Array:
    """Every token goes to the best two experts that have room for it."""
    scores = jax.nn.softmax(x @ p["router"], axis=-1)
    weights, chosen = jax.lax.top_k(scores, 2)
    choice = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    flat = choice.reshape(-1, EXPERTS)
    place = (jnp.cumsum(flat, axis=0) * flat - 1).reshape(choice.shape)
    dispatch = jax.nn.one_hot(place, CAPACITY, dtype=x.dtype)  # token, 2, expert, place
    combine = jnp.sum(dispatch * weights[:, :, None, None].astype(x.dtype), axis=1)
    gathered = jnp.einsum("tec,td->ecd", dispatch.sum(axis=1), x)
    gate = jax.nn.silu(jnp.einsum("ecd,edf->ecf", gathered, p["w_gate"]))
    hidden = gate * jnp.einsum("ecd,edf->ecf", gathered, p["w_up"])
    y = jnp.einsum("ecf,efd->ecd", hidden, p["w_down"])
    return jnp.einsum("tec,ecd->td", combine, y)


class Recurrent(nn.Module):
    cell: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.RNN(self.cell(WIDTH))(x))


def recurrent(cell: Callable[..., Any]) -> Program:
    return linen_program(Recurrent(cell), normal(3, 7, 12))


MODELS = (
    # Two hidden layers and the last.
    Model(name="equinox_mlp", build=equinox_mlp, sites={"matmul": 3}),
    # The four projections.
    Model(
        name="equinox_attention",
        build=equinox_attention,
        sites={"matmul": 4, "attention": 1},
    ),
    # Router, to the experts, the last of the experts, and back; gate and up together.
    Model(name="experts", build=experts, sites={"matmul": 4, "gated_matmul": 1}),
    # Each of the four gates has a product with the input and one with the state; the
    # last layer.
    Model(
        name="lstm",
        build=lambda: recurrent(nn.LSTMCell),
        sites={"matmul": 4 * 2 + 1},
    ),
    # The gates' products are one with the input and one with the state.
    Model(
        name="lstm_optimized",
        build=lambda: recurrent(nn.OptimizedLSTMCell),
        sites={"matmul": 2 + 1},
    ),
    # Three gates.
    Model(name="gru", build=lambda: recurrent(nn.GRUCell), sites={"matmul": 3 * 2 + 1}),
)

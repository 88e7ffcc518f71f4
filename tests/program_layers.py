"""Steps of random programs that are layers: products, and what is made of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from jax import lax
from program_steps import ACTIVATIONS, SIZES, Step, is_matrix, pick, weight


def product(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """Any dimensions of two values contracted, others batched, the result permuted."""
    a = pick(draw, kinds, is_matrix)
    b = pick(draw, kinds, is_matrix)
    if a is None or b is None:
        return None
    pairs = [
        (i, j)
        for i, m in enumerate(kinds[a].shape)
        for j, n in enumerate(kinds[b].shape)
        if m == n
    ]
    if not pairs:
        return None
    i, j = draw(st.sampled_from(pairs))
    batches = [p for p in pairs if p[0] != i and p[1] != j]
    batch = [draw(st.sampled_from(batches))] if batches and draw(st.booleans()) else []
    dims = ((i,), (j,)), (tuple(p[0] for p in batch), tuple(p[1] for p in batch))
    rank = kinds[a].ndim + kinds[b].ndim - 2 - len(batch)
    order = draw(st.permutations(range(rank)))
    scale = 1 / math.sqrt(kinds[a].shape[i])

    def f(cast, x, y):
        out = jnp.result_type(x, y)
        z = lax.dot_general(x * scale, y, dims, preferred_element_type=out)
        return z.transpose(order)

    return Step("product", f, (a, b))


def dense(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A product with captured weights, and what may follow it, in any order."""
    x = pick(draw, kinds, is_matrix)
    if x is None:
        return None
    k, n = kinds[x].shape[-1], draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from([kinds[x].dtype.name, "float32"]))
    turned, seed = draw(st.booleans()), draw(st.integers(0, 3))
    tails = draw(
        st.lists(st.sampled_from([*TAILS, *LIKELY * 2]), min_size=1, max_size=4)
    )

    def f(cast, x):
        w = weight(cast, *((n, k) if turned else (k, n)), dtype=dtype, seed=seed)
        y = x @ w.T if turned else x @ w
        for i, name in enumerate(tails):
            y = TAILS[name](functools.partial(weight, cast, dtype=dtype, seed=i), y)
        return y

    return Step("dense:" + "+".join(tails), f, (x,))


# What may follow a product: (captured array of a shape, product so far).
TAILS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "bias": lambda array, y: y + array(y.shape[-1]),
    "left bias": lambda array, y: array(y.shape[-1]) + y,
    "column": lambda array, y: y + array(y.shape[-2], 1),
    "batched": lambda array, y: (
        y + array(y.shape[0], *(1,) * (y.ndim - 2), y.shape[-1])
    ),
    "residual": lambda array, y: y + array(*y.shape),
    "left residual": lambda array, y: array(*y.shape) + y,
    "relu": lambda array, y: jax.nn.relu(y),
    "gelu": lambda array, y: jax.nn.gelu(y),
    "silu": lambda array, y: y * jax.nn.sigmoid(y),
    "turn": lambda array, y: jnp.swapaxes(y, -1, -2),
    "flat": lambda array, y: y.reshape(-1, y.shape[-1]),
    "columns first": lambda array, y: y.reshape(-1, y.shape[0], order="F"),
    "again": lambda array, y: jnp.sin(y) + y,
    "narrow": lambda array, y: y.astype(jnp.result_type(array(1))),
}

LIKELY = ("bias", "residual", "left residual", "relu", "gelu", "silu")


def gated(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = pick(draw, kinds, is_matrix)
    if x is None:
        return None
    k, n = kinds[x].shape[-1], draw(st.sampled_from(SIZES))
    name, activation = draw(st.sampled_from(list(ACTIVATIONS.items())[:6]))

    def f(cast, x):
        a, b = (weight(cast, k, n, seed=s).astype(x.dtype) for s in range(2))
        return activation(x @ a) * (x @ b)

    return Step(f"gated:{name}", f, (x,))


def attention(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A softmax between two products; the same value thrice, or nearly."""
    x = pick(draw, kinds, is_matrix)
    if x is None:
        return None
    causal = draw(st.booleans())

    def f(cast, x):
        scores = x @ jnp.swapaxes(x, -1, -2) * 0.5
        if causal:
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(mask, scores, -1e9)
        return jax.nn.softmax(scores, axis=-1) @ (x + 1)

    return Step("attention", f, (x,))


def weak(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """An array as weakly typed as the number it repeats, and its products."""
    n = draw(st.sampled_from(SIZES))
    squared = draw(st.booleans())

    def f(cast):
        x = jnp.full((n, n), 0.5)
        return x @ x if squared else x

    return Step("weak", f, ())


def integers(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = pick(draw, kinds, lambda x: x.dtype == jnp.int32 and x.ndim >= 2)
    if x is None:
        return None
    return Step("integers", lambda cast, x: (x @ jnp.swapaxes(x, -1, -2)) % 7, (x,))


@jax.custom_jvp
def _own(x):
    return jnp.maximum(x, 0)


_own.defjvp(lambda x, dx: (_own(*x), 2 * dx[0]))


@jax.custom_vjp
def _opaque(x):
    return x @ jnp.swapaxes(x, -1, -2)


_opaque.defvjp(lambda x: (_opaque(x), x), lambda x, ct: (3 * ct @ x,))


def nested(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A layer in some control flow or function transformation."""
    x = pick(draw, kinds, is_matrix)
    if x is None:
        return None
    k = kinds[x].shape[-1]
    name, activation = draw(st.sampled_from(list(ACTIVATIONS.items())[:6]))
    rows = kinds[x].shape[0]

    def layer(cast, x):
        w = weight(cast, k, k).astype(x.dtype)
        return activation(x @ w + w[0])

    def scan(cast, x):
        w = jnp.stack([weight(cast, k, k, seed=s).astype(x.dtype) for s in range(2)])
        return lax.scan(lambda c, w: (activation(c @ w), c.sum()), x, w)[0]

    forms = {
        "jit": lambda cast, x: jax.jit(functools.partial(layer, cast))(x),
        "scan": scan,
        "cond": lambda cast, x: lax.cond(
            rows > 1, functools.partial(layer, cast), lambda x: x * 2, x
        ),
        "switch": lambda cast, x: lax.switch(
            jnp.int32(rows % 3),
            [functools.partial(layer, cast), jnp.tanh, lambda x: x + 1],
            x,
        ),
        "checkpoint": lambda cast, x: jax.checkpoint(
            functools.partial(layer, cast),
            policy=jax.checkpoint_policies.dots_saveable,
        )(x),
        "loop": lambda cast, x: lax.fori_loop(0, 2, lambda _, x: layer(cast, x), x),
        "vmap": lambda cast, x: jax.vmap(functools.partial(layer, cast))(x[:, None]),
        "map": lambda cast, x: lax.map(functools.partial(layer, cast), x[:, None]),
        "custom_jvp": lambda cast, x: _own(layer(cast, x)),
        "custom_vjp": lambda cast, x: _opaque(x) * 0.2,
    }
    kind = draw(st.sampled_from(list(forms)))
    return Step(f"{kind}:{name}", forms[kind], (x,))


def repeated(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A layer in a loop that has no reverse derivative."""
    x = pick(draw, kinds, is_matrix)
    if x is None:
        return None
    k = kinds[x].shape[-1]

    def f(cast, x):
        w = weight(cast, k, k).astype(x.dtype)

        def body(carry):
            i, x = carry
            return i + 1, jax.nn.gelu(x @ w) + x

        return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

    return Step("while", f, (x,))

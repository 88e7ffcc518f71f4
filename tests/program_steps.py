"""Steps of random programs: functions of elements, shapes, reductions, and effects.

Each function here, and in ``program_layers``, takes ``draw`` and the kinds of the
values so far, and returns a step, or None if no value fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Some equal, so that operands fit by chance.
SIZES = (1, 2, 3, 3, 4)


@dataclasses.dataclass(frozen=True)
class Step:
    """One value of a program: ``function(cast, *operands)``.

    Attributes:
      name: what it is.
      function: takes ``cast``, which maps dtypes to those computed in, then operands.
      operands: indices of earlier values.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[int, ...]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "where": lambda x: jnp.where(x > 0, x, 0),
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": lambda x: x * jax.nn.sigmoid(x),
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "tanh": jnp.tanh,
    "leaky": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "half": lambda x: x * 0.5,
    "shift": lambda x: 1.0 - x,
    "neg": jnp.negative,
    "barrier": lax.optimization_barrier,
    "stop": lax.stop_gradient,
}


def weight(cast: Any, *shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    """A captured array; small enough that chains of products stay of one size."""
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    x = x / math.sqrt(max(shape[0], 1)) if len(shape) > 1 else x
    # The same numbers in every dtype that is computed in.
    return x.astype(jnp.dtype(dtype)).astype(jnp.dtype(cast(dtype)))


def pick(draw: Any, kinds: Sequence[Any], fits: Callable[[Any], bool]) -> int | None:
    found = [i for i, x in enumerate(kinds) if fits(x)]
    # Late values more often: programs are rather deep than wide.
    return draw(st.sampled_from(found + found[-2:])) if found else None


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_matrix(x: Any) -> bool:
    return is_float(x) and x.ndim >= 2


def bias(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A captured array that varies along some dimensions only."""
    x = pick(draw, kinds, lambda x: is_float(x) and x.ndim >= 1)
    if x is None:
        return None
    keep = [draw(st.booleans()) for _ in kinds[x].shape]
    shape = [n if k else 1 for n, k in zip(kinds[x].shape, keep, strict=True)]
    leading = draw(st.booleans())
    dtype = draw(st.sampled_from([kinds[x].dtype.name] * 3 + ["float32"]))

    def f(cast, x):
        b = weight(cast, math.prod(shape), dtype=dtype).reshape(shape)
        return b + x if leading else x + b

    return Step("bias", f, (x,))


def together(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """Two values of one shape, maybe of different dtypes."""
    a = pick(draw, kinds, is_float)
    if a is None:
        return None
    shape = kinds[a].shape
    b = pick(draw, kinds, lambda x: is_float(x) and x.shape == shape)
    assert b is not None  # a itself is one
    operation = draw(
        st.sampled_from([jnp.add, jnp.add, jnp.add, jnp.subtract, jnp.multiply])
    )
    return Step(operation.__name__, lambda cast, x, y: operation(x, y), (a, b))


def elementwise(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = pick(draw, kinds, is_float)
    if x is None:
        return None
    name, f = draw(st.sampled_from(list(ACTIVATIONS.items())))
    return Step(name, lambda cast, x: f(x), (x,))


def shape(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """Another order, shape or part of a value."""
    x = pick(draw, kinds, lambda x: x.ndim >= 1)
    if x is None:
        return None
    dims = kinds[x].shape
    axis = draw(st.integers(0, len(dims) - 1))
    order = draw(st.permutations(range(len(dims))))
    forms = {
        "transpose": lambda x: x.transpose(order),
        "flat": lambda x: x.reshape(-1, dims[-1]),
        "ravel": lambda x: x.ravel(order="F"),
        "split": lambda x: x.reshape(*dims[:-1], dims[-1], 1),
        "merge": lambda x: x.reshape(dims[0], -1),
        "new axis": lambda x: x[None],
        "first": lambda x: x[:1],
        "slice": lambda x: lax.slice_in_dim(x, 0, max(1, dims[axis] - 1), axis=axis),
        "twice": lambda x: jnp.concatenate([x, x], axis=axis),
        "flip": lambda x: jnp.flip(x, axis),
    }
    name = draw(st.sampled_from(list(forms)))
    return Step(name, lambda cast, x: forms[name](x), (x,))


def reduction(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = pick(draw, kinds, lambda x: is_float(x) and x.ndim >= 1)
    if x is None:
        return None
    axis = draw(st.integers(0, kinds[x].ndim - 1))
    keep = draw(st.booleans())
    forms = {
        "mean": lambda x: x.mean(axis, keepdims=keep),
        "max": lambda x: x.max(axis, keepdims=keep),
        "softmax": lambda x: jax.nn.softmax(x, axis=axis),
        "normalised": lambda x: x / (1 + jnp.abs(x).max(axis, keepdims=True)),
    }
    name = draw(st.sampled_from(list(forms)))
    return Step(name, lambda cast, x: forms[name](x), (x,))


def conversion(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = draw(st.integers(0, len(kinds) - 1))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return Step(dtype, lambda cast, x: x.astype(cast(dtype)), (x,))


def selection(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A choice by a captured mask."""
    x = pick(draw, kinds, lambda x: is_float(x) and x.ndim >= 1)
    if x is None:
        return None
    mask = np.arange(kinds[x].shape[-1]) % 2 == 0
    other = draw(st.sampled_from([0, 1.0, -2]))
    return Step("select", lambda cast, x: jnp.where(mask, x, other), (x,))


def effect(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = pick(draw, kinds, is_float)
    if x is None:
        return None

    def f(cast, x):
        jax.debug.callback(_nothing, x.sum())
        return x

    return Step("effect", f, (x,))


def _nothing(_: Any) -> None:
    pass

"""Random small programs of products and the steps that surround them in models.

A program is a list of steps; each applies a function to values of earlier steps. The
program runs as written, and with other dtypes to judge results.
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
from numerics import normal

MAX_SIZE = 400
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


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """Steps after the arguments, and the values that are returned."""

    arguments: tuple[Any, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, *arguments: Any) -> list[Any]:
        return self.run(lambda dtype: dtype, *arguments)

    def run(self, cast: Callable[[str], str], *arguments: Any) -> list[Any]:
        values = list(arguments)
        for step in self.steps:
            values.append(step.function(cast, *(values[i] for i in step.operands)))
        return [values[i] for i in self.results]

    def __repr__(self) -> str:
        kinds = [f"{x.dtype}{list(x.shape)}" for x in self.arguments]
        steps = [f"{s.name}{list(s.operands)}" for s in self.steps]
        return f"Program({kinds}, {steps}, {list(self.results)})"


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


# --- steps ----------------------------------------------------------------------------
#
# Each takes ``draw`` and the kinds of the values so far, and returns a step, or None if
# no value fits.


def _pick(draw: Any, kinds: Sequence[Any], fits: Callable[[Any], bool]) -> int | None:
    found = [i for i, x in enumerate(kinds) if fits(x)]
    # Late values more often: programs are rather deep than wide.
    return draw(st.sampled_from(found + found[-2:])) if found else None


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_matrix(x: Any) -> bool:
    return _is_float(x) and x.ndim >= 2


def product(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """Any dimensions of two values contracted, others batched, the result permuted."""
    a = _pick(draw, kinds, _is_matrix)
    b = _pick(draw, kinds, _is_matrix)
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
    x = _pick(draw, kinds, _is_matrix)
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
    x = _pick(draw, kinds, _is_matrix)
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
    x = _pick(draw, kinds, _is_matrix)
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


def bias(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """A captured array that varies along some dimensions only."""
    x = _pick(draw, kinds, lambda x: _is_float(x) and x.ndim >= 1)
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
    a = _pick(draw, kinds, _is_float)
    if a is None:
        return None
    shape = kinds[a].shape
    b = _pick(draw, kinds, lambda x: _is_float(x) and x.shape == shape)
    assert b is not None  # a itself is one
    operation = draw(
        st.sampled_from([jnp.add, jnp.add, jnp.add, jnp.subtract, jnp.multiply])
    )
    return Step(operation.__name__, lambda cast, x, y: operation(x, y), (a, b))


def elementwise(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = _pick(draw, kinds, _is_float)
    if x is None:
        return None
    name, f = draw(st.sampled_from(list(ACTIVATIONS.items())))
    return Step(name, lambda cast, x: f(x), (x,))


def shape(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """Another order, shape or part of a value."""
    x = _pick(draw, kinds, lambda x: x.ndim >= 1)
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
    x = _pick(draw, kinds, lambda x: _is_float(x) and x.ndim >= 1)
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
    x = _pick(draw, kinds, lambda x: _is_float(x) and x.ndim >= 1)
    if x is None:
        return None
    mask = np.arange(kinds[x].shape[-1]) % 2 == 0
    other = draw(st.sampled_from([0, 1.0, -2]))
    return Step("select", lambda cast, x: jnp.where(mask, x, other), (x,))


def weak(draw: Any, kinds: Sequence[Any]) -> Step | None:
    """An array as weakly typed as the number it repeats, and its products."""
    n = draw(st.sampled_from(SIZES))
    squared = draw(st.booleans())

    def f(cast):
        x = jnp.full((n, n), 0.5)
        return x @ x if squared else x

    return Step("weak", f, ())


def integers(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = _pick(draw, kinds, lambda x: x.dtype == jnp.int32 and x.ndim >= 2)
    if x is None:
        return None
    return Step("integers", lambda cast, x: (x @ jnp.swapaxes(x, -1, -2)) % 7, (x,))


def effect(draw: Any, kinds: Sequence[Any]) -> Step | None:
    x = _pick(draw, kinds, _is_float)
    if x is None:
        return None

    def f(cast, x):
        jax.debug.callback(_nothing, x.sum())
        return x

    return Step("effect", f, (x,))


def _nothing(_: Any) -> None:
    pass


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
    x = _pick(draw, kinds, _is_matrix)
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
    x = _pick(draw, kinds, _is_matrix)
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


# Products and what may be fused with them are most of it.
STEPS = (
    *(product, dense, dense, dense, dense, gated, attention, nested, nested),
    *(weak, integers),
    repeated,
    *(bias, bias, together, together, elementwise, elementwise, shape, shape),
    *(reduction, conversion, selection, effect),
)


# Differentiable but for kinks that rounding rarely meets.
SMOOTH = (
    *(product, dense, dense, dense, gated, attention, nested, nested),
    *(bias, together, together, elementwise, shape, shape, selection, effect),
)


@st.composite
def programs(
    draw: Any,
    steps: Sequence[Any] = STEPS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    length: int = 14,
) -> Program:
    """A program, its arguments, and which of its values it returns.

    Args:
      draw: hypothesis's.
      steps: what it is made of.
      dtypes: of its floating arguments.
      length: how many steps it has at most.
    """
    sizes = st.sampled_from(SIZES)
    shapes = [
        tuple(draw(sizes) for _ in range(draw(st.sampled_from([1, 2, 2, 3]))))
        for _ in range(3)
    ]
    arguments = [
        normal(*s, dtype=draw(st.sampled_from(dtypes)), seed=i)
        for i, s in enumerate(shapes)
    ]
    arguments.append(jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    kinds = [jax.typeof(x) for x in arguments]
    made: list[Step] = []
    for _ in range(draw(st.integers(length // 2, length))):
        step = draw(st.sampled_from(steps))(draw, kinds)
        if step is None:
            continue
        kind = jax.eval_shape(
            functools.partial(step.function, lambda dtype: dtype),
            *(
                jax.ShapeDtypeStruct(kinds[i].shape, kinds[i].dtype)
                for i in step.operands
            ),
        )
        if math.prod(kind.shape) > MAX_SIZE or kind.ndim > 4:
            continue
        made.append(step)
        kinds.append(kind)
    last = len(kinds) - 1
    results = [last, *draw(st.lists(st.integers(0, last), max_size=2))]
    return Program(tuple(arguments), tuple(made), tuple(results))

"""Programs of every kind that a rule looks for, with dimensions of zero, one and more.

A seed gives a layer, the sizes of its dimensions, and what is done to it: it is mapped,
or differentiated forward, in reverse, or twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numerics import array

Layer = Callable[..., Any]
Made = tuple[Layer, list[tuple[int, ...]]]  # a function, and shapes of its arguments


def product(n: Any) -> Made:
    m, k, o = n(3)

    def f(x: Any, w: Any, b: Any, r: Any) -> Any:
        return jax.nn.relu(x @ w + b) + r

    return f, [(m, k), (k, o), (o,), (m, o)]


def batched_product(n: Any) -> Made:
    a, b, m, k, o = n(5)
    rows = n.pick([(a, b, m, k), (a, m, b, k)])
    spec = "abmk,abko->abmo" if rows == (a, b, m, k) else "ambk,abko->ambo"
    return lambda x, w: jax.nn.silu(jnp.einsum(spec, x, w)), [rows, (a, b, k, o)]


def vector_product(n: Any) -> Made:
    m, k = n(2)
    return lambda x, w, b: jnp.tanh(x @ w) + b, [(m, k), (k,), (m,)]


def gated(n: Any) -> Made:
    a, m, k, o = n(4)

    def f(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(x @ gate) * (x @ up)

    return f, [(a, m, k), (k, o), (k, o)]


def layers(n: Any) -> Made:
    a, m, k, h, o = n(5)

    def f(x: Any, w: Any, b: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v

    return f, [(a, m, k), (k, h), (h,), (h, o)]


def convolution(n: Any) -> Made:
    b, h, w, c, o = n(5)
    kh, kw = (n.pick([1, 1, 2]) for _ in range(2))
    first, lines = n.pick([False, False, True]), n.pick([False, False, True])
    layout = ("NCHW" if first else "NHWC", n.pick(["HWIO", "OIHW"]))
    numbers = (*layout, layout[0])
    sizes = {"N": b, "H": h, "W": w, "C": c, "I": c, "O": o}
    taps = {**sizes, "H": kh, "W": kw}
    if lines:
        numbers = tuple(spec.replace("H", "") for spec in numbers)
    rank = len(numbers[0]) - 2
    how: dict[str, Any] = {
        "window_strides": (n.pick([1, 1, 2]),) * rank,
        "padding": n.pick(["SAME", "VALID"]),
        "dimension_numbers": numbers,
    }
    if n.pick([False, False, True]):
        how["lhs_dilation"], how["window_strides"] = (2,) * rank, (1,) * rank
        how["padding"] = [(0, 1)] * rank
    elif c and o % c == 0 and n.pick([False, True]):
        how["feature_group_count"] = c
        taps["I"] = 1
    channels = (o,) + (1,) * rank if first else (o,)

    def f(x: Any, w: Any, mean: Any, variance: Any, scale: Any) -> Any:
        y = lax.conv_general_dilated(x, w, **how)
        y = (y - mean.reshape(channels)) * lax.rsqrt(
            jnp.square(variance).reshape(channels) + 1e-3
        )
        return jax.nn.relu(y * scale.reshape(channels) + mean.reshape(channels))

    x = tuple(sizes[i] for i in numbers[0])
    return f, [x, tuple(taps[i] for i in numbers[1]), (o,), (o,), (o,)]


def attention(n: Any) -> Made:
    b, t, s, h, d = n(5)
    kv = n.pick([1, h]) if h else h
    causal = n.pick([False, True])

    def f(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    return f, [(b, t, h, d), (b, s, kv, d), (b, s, kv, d)]


def attention_by_hand(n: Any) -> Made:
    b, t, s, h, d, e = n(6)
    masked, capped = n.pick([False, True]), n.pick([False, False, True])

    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * 0.5
        scores = 5 * jnp.tanh(scores / 5) if capped else scores + bias
        if masked:
            seen = jnp.arange(t)[:, None] >= jnp.arange(s)
            scores = jnp.where(seen, scores, -1e30)
        return jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(scores, -1), v)

    return f, [(b, h, t, d), (b, h, s, d), (b, h, s, e), (h, t, s)]


def norm(n: Any) -> Made:
    *lead, c = n(n.pick([2, 3, 4]))
    rank = len(lead) + 1
    kinds = [(rank - 1,), tuple(range(1, rank)), tuple(range(1, rank - 1))]
    axes = n.pick([*kinds, tuple(range(rank - 1)), tuple(range(rank)), (0,)])
    fast, keeps, where = n.pick([False, True]), n.pick([False, True]), n.pick([0, 1, 2])

    def f(x: Any, scale: Any, bias: Any) -> Any:
        mean = x.mean(axes, keepdims=True)
        variance = jnp.square(x - mean).mean(axes, keepdims=keeps)
        if fast:
            variance = (x * x).mean(axes, keepdims=keeps) - jnp.square(
                mean if keeps else mean.reshape(variance.shape)
            )
        inverse = lax.rsqrt(variance + 1e-3)
        inverse = inverse if keeps else jnp.expand_dims(inverse, axes)
        if where == 0:
            return jax.nn.silu((x - mean) * (inverse * scale) + bias)
        if where == 1:
            return (x - mean) * (inverse * 2.0) * scale
        return (x - mean) * inverse * (scale * bias)

    return f, [(*lead, c), (c,), (c,)]


def group_norm(n: Any) -> Made:
    b, h, w, g, c = n(5)
    g = max(g, 1)
    module = nn.GroupNorm(num_groups=g, use_fast_variance=n.pick([False, True]))

    def f(x: Any, scale: Any, bias: Any) -> Any:
        y: Any = module.apply({"params": {"scale": scale, "bias": bias}}, x)
        return nn.swish(y)

    return f, [(b, h, w, g * c), (g * c,), (g * c,)]


def batch_norm(n: Any) -> Made:
    b, h, w, c = n(4)
    wide = n.pick([4, 1])  # rows of few entries are left

    def f(x: Any, scale: Any, bias: Any, residual: Any) -> Any:
        mean = x.mean((0, 1, 2))
        variance = (x * x).mean((0, 1, 2)) - mean * mean
        y = (x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias
        return jax.nn.relu(y + residual)

    shape = (b, wide * h, wide * w, c)
    return f, [shape, (c,), (c,), shape]


def max_pool(n: Any) -> Made:
    b, h, w, c = n(4)
    window = tuple(n.pick([1, 2, 2]) for _ in range(2))
    strides, padding = n.pick([(1, 1), (2, 2), window]), n.pick(["SAME", "VALID"])

    def f(x: Any) -> Any:
        return nn.max_pool(jnp.sin(x), window, strides=strides, padding=padding)

    return f, [(b, h, w, c)]


def cross_entropy(n: Any) -> Made:
    b, t, d, v = n(4)
    v = max(8 * v, 1)
    labels = np.arange(b * t).reshape(b, t) % v
    kind, reduced = n.pick(["take", "one-hot", "optax"]), n.pick([False, True])

    def f(x: Any, w: Any) -> Any:
        z = (x @ w).astype(jnp.float32)
        if kind == "take":
            y = -jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1)
        elif kind == "one-hot":
            y = -(jax.nn.one_hot(labels, v) * jax.nn.log_softmax(z)).sum(-1)
        else:
            y = optax.softmax_cross_entropy_with_integer_labels(z, jnp.asarray(labels))
        return y.mean() if reduced else y

    return f, [(b, t, d), (d, v)]


LAYERS: dict[str, Callable[[Any], Made]] = {
    f.__name__: f
    for f in (
        *(product, batched_product, vector_product, gated, layers, convolution),
        *(attention, attention_by_hand, norm, group_norm, batch_norm, max_pool),
        cross_entropy,
    )
}


# --- what is done to a layer ----------------------------------------------------------
#
# Each takes the layer, plain or transformed, and gives a function of its arguments.


def _loss(f: Layer) -> Layer:
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def _forward(f: Layer) -> Layer:
    return lambda *args: jax.jvp(f, args, tuple(jnp.cos(x) for x in args))


def _reverse(f: Layer) -> Layer:
    return lambda *args: jax.grad(_loss(f), tuple(range(len(args))))(*args)


def _twice(f: Layer) -> Layer:
    """The Hessian times a vector."""

    def product(*args: Any) -> Any:
        tangents = tuple(jnp.cos(x) for x in args)
        return jax.jvp(lambda *args: _reverse(f)(*args), args, tangents)

    return product


def _hessian(f: Layer) -> Layer:
    """The Hessian in the last argument, which is the smallest one of most layers."""

    def hessian(*args: Any) -> Any:
        return jax.hessian(lambda x: _loss(f)(*args[:-1], x))(args[-1])

    return hessian


def _mapped(size: int) -> Callable[[Layer], Layer]:
    def mapped(f: Layer) -> Layer:
        def call(*args: Any) -> Any:
            many = tuple(jnp.stack([x] * size) if size else x[None][:0] for x in args)
            return jax.vmap(f)(*many)

        return call

    return mapped


def _reverse_mapped(f: Layer) -> Layer:
    return _mapped(2)(_reverse(f))


WAYS: dict[str, Callable[[Layer], Layer]] = {
    "as it is": lambda f: f,
    "jvp": _forward,
    "grad": _reverse,
    "grad of grad": _twice,
    "hessian": _hessian,
    "vmap of 0": _mapped(0),
    "vmap of 1": _mapped(1),
    "vmap of 2": _mapped(2),
    "vmap of grad": _reverse_mapped,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EdgeProgram:
    """A layer, and a way to use it.

    Attributes:
      seed: of both.
      kind, way: their names.
      layer: the function.
      arguments: of it.
    """

    seed: int
    kind: str
    way: str
    layer: Layer
    arguments: tuple[Any, ...]

    @property
    def use(self) -> Callable[[Layer], Layer]:
        return WAYS[self.way]

    def __repr__(self) -> str:
        shapes = [list(a.shape) for a in self.arguments]
        dtype = self.arguments[0].dtype
        return f"EdgeProgram({self.seed}, {self.kind}, {self.way}, {dtype} {shapes})"


def edge_program(seed: int) -> EdgeProgram:
    """The program of a seed; kinds and ways come in turn."""
    sizes = _Sizes(seed)
    kind = list(LAYERS)[seed % len(LAYERS)]
    way = list(WAYS)[seed // len(LAYERS) % len(WAYS)]
    layer, shapes = LAYERS[kind](sizes)
    dtype = sizes.pick(["float32", "float32", "bfloat16"])
    arrays = [array(sizes.rng.standard_normal(s).astype("float32")) for s in shapes]
    arguments = tuple(array(np.asarray(a).astype(jnp.dtype(dtype))) for a in arrays)
    return EdgeProgram(seed, kind, way, layer, arguments)


class _Sizes:
    """Random sizes: n(3) are three of them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sizes = self.pick([(1, 1, 2, 3), (1, 2, 4), (1, 1, 1, 5), (0, 1, 2, 3)])

    def __call__(self, count: int) -> list[int]:
        return [self.pick(self.sizes) for _ in range(count)]

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

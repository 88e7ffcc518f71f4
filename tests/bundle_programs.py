"""Programs that bundles are made of: a ResNet block, a transformer's MLP, attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

import tracea_jax as tracea
from tracea_jax.typing import Implementation

conv = functools.partial(
    jax.lax.conv_general_dilated,
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)


Program = tuple[Callable[..., Any], jax.Array]  # a function and its input


class Arrays:
    """Random arrays of one dtype."""

    def __init__(self, dtype: Any, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self._random.normal(size=shape) * scale, self._dtype)


def resnet_block(dtype: Any, channels: int = 64, size: int = 16) -> Program:
    """A block that halves the image and doubles the channels, and its input."""
    array, wide = Arrays(dtype), 2 * channels
    p = {
        "w1": array(3, 3, channels, wide, scale=0.05),
        "b1": array(wide),
        "w2": array(3, 3, wide, wide, scale=0.05),
        "b2": array(wide),
        "w3": array(1, 1, channels, wide, scale=0.1),
        "b3": array(wide),
    }

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h = jax.nn.relu(conv(x, p["w1"], (2, 2)) + p["b1"])
        shortcut = conv(x, p["w3"], (2, 2)) + p["b3"]
        return jax.nn.relu(conv(h, p["w2"], (1, 1)) + p["b2"] + shortcut)

    return functools.partial(block, p), array(2, size, size, channels)


def mlp(dtype: Any, width: int = 256, tokens: int = 96) -> Program:
    """A transformer's MLP with its residual, and its input."""
    array = Arrays(dtype, 1)
    p = {
        "w1": array(width, 4 * width, scale=0.05),
        "b1": array(4 * width),
        "w2": array(4 * width, width, scale=0.05),
        "b2": array(width),
    }

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ p["w1"] + p["b1"])
        return x + (h @ p["w2"] + p["b2"])

    return functools.partial(block, p), array(2, tokens, width)


def attention_block(
    dtype: Any, implementation: Implementation, heads: int = 4, head_dim: int = 64
) -> Program:
    """Causal self-attention with its projections and residual, and its input."""
    array, width = Arrays(dtype, 2), heads * head_dim
    p = {name: array(width, heads, head_dim, scale=0.05) for name in "qkv"}
    p["o"] = array(heads, head_dim, width, scale=0.05)

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, p[name]) for name in "qkv")
        y = tracea.ops.attention(q, k, v, is_causal=True, implementation=implementation)
        return x + jnp.einsum("bshe,hed->bsd", y, p["o"])

    return functools.partial(block, p), array(2, 128, width)


def normalised_block(dtype: Any, width: int = 64, tokens: int = 24) -> Program:
    """An MLP behind a layer norm, a head with a softmax, and its input."""
    array = Arrays(dtype, 3)
    p = {
        "scale": array(width),
        "shift": array(width),
        "w1": array(width, 4 * width, scale=0.1),
        "w2": array(4 * width, width, scale=0.1),
        "head": array(width, 10, scale=0.1),
    }

    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        h = centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]
        y = x + jax.nn.gelu(h @ p["w1"]) @ p["w2"]
        return jax.nn.softmax(jax.nn.relu(y.mean(1)) @ p["head"])

    return functools.partial(block, p), array(4, tokens, width)


# Functions of each element, in jax.numpy or in numpy; of x, and of x and y.
UNARY: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda m, x: -x,
    "abs": lambda m, x: abs(x),
    "sign": lambda m, x: m.sign(x),
    "floor": lambda m, x: m.floor(x),
    "ceil": lambda m, x: m.ceil(x),
    "square": lambda m, x: m.square(x),
    "power": lambda m, x: x**5,
    "inverse": lambda m, x: 1 / x**3,
    "sqrt": lambda m, x: m.sqrt(x),
    "exp": lambda m, x: m.exp(x),
    "exp2": lambda m, x: m.exp2(x),
    "expm1": lambda m, x: m.expm1(x),
    "log": lambda m, x: m.log(x),
    "log1p": lambda m, x: m.log1p(x),
    "tanh": lambda m, x: m.tanh(x),
    **{
        name: lambda m, x, name=name: getattr(m, name)(x)
        for name in (
            "round isfinite cbrt sin cos tan arcsin arccos arctan sinh cosh arcsinh "
            "arccosh arctanh"
        ).split()
    },
    "erfc": lambda m, x: (scipy if m is np else jax.scipy).special.erfc(x),
}
BINARY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda m, x, y: x + y,
    "sub": lambda m, x, y: x - y,
    "mul": lambda m, x, y: x * y,
    "div": lambda m, x, y: x / y,
    "pow": lambda m, x, y: m.power(abs(x), y),
    "rem": lambda m, x, y: m.fmod(x, y),
    "atan2": lambda m, x, y: m.arctan2(x, y),
    "max": lambda m, x, y: m.maximum(x, y),
    "min": lambda m, x, y: m.minimum(x, y),
    "gt": lambda m, x, y: x > y,
    "ge": lambda m, x, y: x >= y,
    "lt": lambda m, x, y: x < y,
    "le": lambda m, x, y: x <= y,
    "eq": lambda m, x, y: x == y,
    "ne": lambda m, x, y: x != y,
    "not": lambda m, x, y: ~(x > y),
    "and": lambda m, x, y: (x > 0) & (y > 0),
    "xor": lambda m, x, y: (x > 0) ^ (y > 0),
    "all": lambda m, x, y: (x < 2).all(0),
    "any": lambda m, x, y: (x > 2).any(1),
    "where": lambda m, x, y: m.where(x > y, x, y * y),
    "clip": lambda m, x, y: m.clip(x, -0.5, 0.5) + y,
    "rows": lambda m, x, y: x - y[:, :1],
    "columns": lambda m, x, y: x * y[0],
    "sum": lambda m, x, y: (x + y).sum(1),
    "sums": lambda m, x, y: (x + y).sum(0) + (x * y).max() - x.min(),
}


# Those whose results are no matter of rounding, with the zeros and NaNs of XLA.
EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "sign": lambda x, y: lax.sign(x),
    "floor": lambda x, y: lax.floor(x),
    "ceil": lambda x, y: lax.ceil(x),
    "even": lambda x, y: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "away": lambda x, y: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "is_finite": lambda x, y: lax.is_finite(x),
    "not": lambda x, y: lax.bitwise_not(x > y),
    "xor": lambda x, y: lax.bitwise_xor(x > 0, y > 0),
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "clamp": lambda x, y: lax.clamp(-y, x, y),
    "select": lambda x, y: lax.select(x > y, x, y),
    "selected": lambda x, y: lax.select(x > y, x > 0, y < 1),
    "any": lambda x, y: (x > y).any(1),
    "all": lambda x, y: (x != y).all(0),
}


def exact_functions(x: Any, y: Any) -> dict[str, Any]:
    """All of them, by name."""
    return {name: f(x, y) for name, f in EXACT.items()}


def every_function(module: Any, x: Any, y: Any) -> dict[str, Any]:
    """All of them, by name."""
    unary = {name: f(module, x) for name, f in UNARY.items()}
    return unary | {name: f(module, x, y) for name, f in BINARY.items()}


def special(shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two random arrays, in which zeros, infinities and NaN meet."""
    rng = np.random.default_rng(9)
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, -0.5, 2.5]
    arrays = []
    for turn in (1, len(odd)):
        x = rng.normal(size=shape) * 2
        flat = x.reshape(-1)
        count = len(odd) ** 2
        flat[:count] = [odd[i // turn % len(odd)] for i in range(count)]
        arrays.append(x.astype(dtype))
    return arrays[0], arrays[1]


def assert_all_close(
    got: dict[str, np.ndarray], wanted: dict[str, Any], rtol: float
) -> None:
    """Compares by name; what is not finite must be the same."""
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        want = np.asarray(want)
        np.testing.assert_allclose(
            got[name].astype(np.float64),
            want.astype(np.float64),
            rtol=rtol,
            atol=rtol,
            err_msg=name,
        )


def in_jax(fn: Callable[..., Any], *args: Any, implementation: str) -> np.ndarray:
    """Results of the same kernels in a JAX program."""
    with tracea.options(implementation=implementation):
        return np.asarray(jax.jit(tracea.transform(fn))(*args))


# Name -> function, input, and the implementation that the JAX program runs.
PROGRAMS = {
    "resnet": (*resnet_block(jnp.float32, 16), "conv2d_cpu"),
    "mlp": (*mlp(jnp.float32, 64), "gemm_cpu"),
    "mlp bf16": (*mlp(jnp.bfloat16, 64), "gemm_cpu"),
    "attention": (
        *attention_block(jnp.float32, "attention_cpu", 2, 32),
        "gemm_cpu",
    ),
}

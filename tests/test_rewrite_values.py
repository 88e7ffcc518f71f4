"""Masks and probabilities of integers, bits and narrow dtypes keep their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import normal
from transformed import jit

import tracea_jax as tracea

T, H = 6, 4
ROW, COLUMN = np.arange(T)[:, None], np.arange(T)[None, :]
DISTANCE = (ROW - COLUMN).astype(np.int32)
TRIL = ROW >= COLUMN


def attention(change: Callable[[Any], Any], p_change: Any = lambda p: p, t: int = T):
    """Attention with changes of its scores and probabilities, and its operands."""

    def f(q, k, v):
        return p_change(jax.nn.softmax(change(q @ k.T), axis=-1)) @ v

    return f, tuple(normal(t, H, seed=i) for i in range(3))


def assert_kept(f, args, tolerance=3e-6):
    fast = tracea.transform(f)
    found, expected = jit(lambda *args: (fast(*args), f(*args)))(*args)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def masked(mask: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda s: jnp.where(mask(), s, -1e9)


def quantised(dtype: Any, scale: float = 1.0) -> Callable[[Any], Any]:
    return lambda x: (x * scale).astype(dtype).astype(x.dtype) / scale


def between(factor: float = 1) -> Any:
    """A captured array."""
    return jnp.asarray(DISTANCE * factor)


def either(mask: Any) -> Any:
    """A mask that is not a conjunction, so that it is read as a table."""
    return mask | (between() == 0)


IOTA = functools.partial(lax.broadcasted_iota, "int8")
LONG = 200  # positions that int8 does not have
MASKS: dict[str, tuple[Callable[[], Any], int]] = {
    "even": (lambda: either((between() & 1) == 0), T),
    "bits or": (lambda: either((between() | 2) == 2), T),
    "bits inverted": (lambda: either(~between() < 0), T),
    "bits xor": (lambda: either((between() ^ 1) <= 0), T),
    "cast to integers": (lambda: either(between(0.5).astype("int32") >= 0), T),
    "cast to int8": (lambda: either(between(100).astype("int8") >= 0), T),
    "cast to bfloat16": (
        lambda: either((between() + 256.0).astype("bfloat16") >= 256),
        T,
    ),
    "truncated choice": (
        lambda: jnp.where(jnp.asarray(TRIL), 1.7, 0.5).astype("int32") > 0,
        T,
    ),
    "narrowed choice": (
        lambda: jnp.where(jnp.asarray(TRIL), 257, 256).astype("int8") > 0,
        T,
    ),
    "unsigned choice": (
        lambda: jnp.where(jnp.asarray(TRIL), 1, 0).astype("uint8") - jnp.uint8(1) < 9,
        T,
    ),
    "int8 positions": (
        lambda: IOTA((LONG, LONG), 0) >= IOTA((LONG, LONG), 1),
        LONG,
    ),
    "positions cast to int8": (
        lambda: jnp.arange(LONG).astype("int8")[:, None] >= jnp.arange(LONG)[None],
        LONG,
    ),
    "products of int8": (
        lambda: IOTA((T, T), 0) * jnp.int8(50) >= IOTA((T, T), 1) * jnp.int8(50),
        T,
    ),
    "float16 positions": (
        lambda: (
            (jnp.arange(T) + 4096).astype("float16")[:, None]
            >= (jnp.arange(T) + 4096).astype("float16")[None]
        ),
        T,
    ),
    "not a number": (lambda: jnp.where(jnp.asarray(TRIL), 1.0, jnp.nan) != 0, T),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_integers_and_casts(name):
    mask, length = MASKS[name]
    assert_kept(*attention(masked(mask), t=length))


CHANGES = {
    "scores to int32": (quantised("int32", 4.0), lambda p: p),
    "scores to float8": (quantised("float8_e4m3fn"), lambda p: p),
    "probabilities to int32": (lambda s: s, quantised("int32", 8.0)),
    "probabilities to int8": (lambda s: s, quantised("int8", 127.0)),
    "probabilities to float8": (lambda s: s, quantised("float8_e5m2")),
    "unscaled int32": (lambda s: s.astype("int32").astype("float32"), lambda p: p),
    "unscaled float8": (
        lambda s: s,
        lambda p: p.astype("float8_e4m3fn").astype("float32"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_quantised_scores_and_probabilities(name):
    assert_kept(*attention(*CHANGES[name]))


HEADS = {
    "a zero": np.array([1, 0], np.int32),
    "zeros": np.zeros(2, bool),
    "twos": np.full(2, 2, np.int8),
    "nearly ones": np.array([1.0, 1 + 2.0**-20], np.float32),
}


@pytest.mark.parametrize("name", HEADS)
def test_masks_of_heads_that_are_no_ones(name):
    mask = jnp.asarray(HEADS[name])

    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k), axis=-1)
        return jnp.einsum("hqk,h->hqk", p, mask) @ v

    q, k, v = (normal(2, T, H, seed=i) for i in range(3))
    assert_kept(f, (q, k, v))


def test_scores_that_overflow_in_float16():
    f, (q, k, v) = attention(lambda s: s.astype("float16").astype("float32"))
    fast = tracea.transform(f)
    found, expected = jit(lambda *args: (fast(*args), f(*args)))(q * 300, k * 300, v)
    assert np.isnan(expected).any()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


def test_a_quantised_exponential_function():
    def f(q, k, v):
        e = jnp.exp(q @ k.T).astype("int32").astype("float32") + 1
        e = e.astype("int8").astype("float32")
        return e / e.sum(-1, keepdims=True) @ v

    assert_kept(f, attention(lambda s: s)[1])


def test_masks_filled_with_nan_are_no_masks():
    f, args = attention(lambda s: jnp.where(TRIL, s, jnp.nan))
    assert_kept(f, args)


# --- random masks ---------------------------------------------------------------------

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32"]
DTYPES += ["float32", "bfloat16", "float16", "float8_e4m3fn"]
NUMBERS = [0, 1, 2, -1, 3, 127, 200, 256, 0.5, -1.5, 1e-9, float("nan"), float("inf")]
BINARY = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum]
BITS = [jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor]
COMPARISONS = [jnp.equal, jnp.not_equal, jnp.less, jnp.less_equal, jnp.greater]


@st.composite
def masks(draw: Any, depth: int = 3) -> Callable[[], Any]:
    """A function of nothing but captured arrays, to a boolean matrix."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        kind = draw(st.sampled_from(["tril", "band", "random"]))
        seed = draw(st.integers(0, 3))
        value = {
            "tril": TRIL,
            "band": np.abs(DISTANCE) <= seed,
            "random": np.random.default_rng(seed).random((T, T)) < 0.6,
        }[kind]
        return lambda: jnp.asarray(value)
    name = draw(st.sampled_from(["compare", "compare", "and", "or", "not", "where"]))
    if name == "compare":
        f = draw(st.sampled_from(COMPARISONS))
        x, y = draw(numbers(depth - 1)), draw(numbers(depth - 1))
        kind = draw(st.sampled_from(["int32", "int8", "float32", "bfloat16"]))
        return lambda: f(cast(x(), kind), cast(y(), kind))
    x, y, z = (draw(masks(depth=depth - 1)) for _ in range(3))
    return {
        "and": lambda: x() & y(),
        "or": lambda: x() | y(),
        "not": lambda: ~x(),
        "where": lambda: jnp.where(x(), y(), z()),
    }[name]


@st.composite
def numbers(draw: Any, depth: int) -> Callable[[], Any]:
    """A function of nothing but captured arrays, to numbers of some dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    name = draw(st.sampled_from(["leaf", "cast", "choice", "binary", "bits", "number"]))
    if name == "number":
        value = draw(st.sampled_from(NUMBERS))
        return lambda: cast(jnp.float32(value), dtype)
    if depth == 0 or name == "leaf":
        which = draw(st.sampled_from(["row", "column", "distance", "iota"]))
        factor = draw(st.sampled_from([1, 1, 1, -1, 2, 50]))
        value = {"row": ROW, "column": COLUMN, "distance": DISTANCE}.get(which)
        if value is None:
            axis = draw(st.integers(0, 1))
            kind = dtype if dtype in ("int8", "int32", "float32") else "int32"
            return lambda: (
                lax.broadcasted_iota(kind, (T, T), axis) * jnp.asarray(factor, kind)
            )
        return lambda: jnp.asarray(value * factor)
    if name == "cast":
        x = draw(numbers(depth - 1))
        return lambda: cast(x(), dtype)
    if name == "choice":
        mask = draw(masks(depth=depth - 1))
        a, b = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(NUMBERS))
        return lambda: cast(jnp.where(mask(), a, b), dtype)
    x, y = draw(numbers(depth - 1)), draw(numbers(depth - 1))
    f = draw(st.sampled_from(BITS if name == "bits" else BINARY))
    kind = dtype if name == "binary" and dtype != "bool" else "int32"
    kind = "float32" if kind.startswith("float8") else kind
    return lambda: f(cast(x(), kind), cast(y(), kind))


def cast(x: Any, dtype: str) -> Any:
    return lax.convert_element_type(x, dtype)


FILLS = [-1e9, -1e4, -np.inf, float(np.finfo(np.float32).min)]


@st.composite
def maskings(draw: Any) -> Callable[[Any], Any]:
    """A function of scores that masks them somehow."""
    mask = draw(masks())
    fill = draw(st.sampled_from(FILLS[:2]))
    # A query sees itself, so that no sum is empty.
    own = lambda: mask() | jnp.asarray(np.eye(T, dtype=bool))  # noqa: E731
    return draw(
        st.sampled_from(
            [
                lambda s: jnp.where(own(), s, fill),
                lambda s: s + jnp.where(own(), 0.0, fill),
                lambda s: s + (1.0 - own().astype(s.dtype)) * fill,
                lambda s: jnp.where(own().astype("int32") == 0, fill, s),
            ]
        )
    )


def check_masks(count: int, seed: int | None = None) -> None:
    """Random maskings, compared with the plain program."""
    batch = 10  # compiled at once

    @np.errstate(all="ignore")  # JAX converts numbers with NumPy
    @hypothesis.settings(
        max_examples=count // batch,
        derandomize=seed is None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(st.lists(maskings(), min_size=batch, max_size=batch))
    def check(changes):
        pairs = [attention(change) for change in changes]
        args = pairs[0][1]

        def both(*args):
            return [[g(*args) for g in (tracea.transform(f), f)] for f, _ in pairs]

        for found, expected in jit(both)(*args):
            np.testing.assert_allclose(found, expected, rtol=3e-6, atol=3e-6)

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    check()


def test_random_masks():
    check_masks(40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_random_masks(seed):
    check_masks(1000, seed)

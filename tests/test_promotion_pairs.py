"""Every op with operands of every two dtypes: dtype, value and error as in jnp."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracea_jax import ops
from tracea_jax.ops.common.promotion import promoted

pytestmark = pytest.mark.once

NAMES = (
    *("bool", "int4", "int32", "float8_e4m3fn", "float8_e5m2"),
    *("bfloat16", "float32", "complex64"),
)
OTHERS = (
    *("int2", "uint2", "uint4", "int8", "uint8", "int16", "uint16", "uint32", "int64"),
    "float16",
    *("uint64", "float64", "complex128", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)
PAIRS = tuple(itertools.product(NAMES, NAMES))
TRIED = ("bool", "int32", "float8_e4m3fn", "bfloat16", "float32")  # their values
MORE_TRIED = (*NAMES, "int8", "uint8", "float16", "float4_e2m1fn", "float8_e8m0fnu")

Plain = Callable[..., Any]


def dtype_of(name: str) -> Any:
    return np.dtype(bool) if name == "bool" else jnp.dtype(getattr(jnp, name))


def convolution(x: Any, w: Any, preferred: Any = None) -> jax.Array:
    """``lax.conv_general_dilated`` of operands in their common dtype."""
    wide = jnp.promote_types(x.dtype, w.dtype) if preferred is None else None
    wide = wide or promoted(x.dtype, w.dtype)
    return jax.lax.conv_general_dilated(
        x.astype(wide),
        w.astype(wide),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=preferred,
    )


def gate(x: Any, w: Any, preferred: Any = None) -> jax.Array:
    product = jnp.matmul(x, w, preferred_element_type=preferred)
    return product * product


def loss(x: Any, w: Any) -> jax.Array:
    logits = jnp.matmul(x, w.T)
    logits = logits.astype(promoted(logits.dtype, jnp.float32))
    return jax.scipy.special.logsumexp(logits, -1) - logits[:, 1]


def ours_of_loss(x: Any, w: Any) -> jax.Array:
    return ops.linear_cross_entropy(x, w, jnp.ones(x.shape[0], jnp.int32))


def gated(x: Any, w: Any, **how: Any) -> jax.Array:
    return ops.gated_matmul(x, w, w, activation="none", **how)


# name -> ours, plain, shapes of both operands
OPS: dict[str, tuple[Plain, Plain, tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (ops.matmul, jnp.matmul, (3, 4), (4, 5)),
    "gated_matmul": (gated, gate, (3, 4), (4, 5)),
    "conv2d": (ops.conv2d, convolution, (1, 3, 3, 4), (1, 2, 4, 3)),
    **{
        name: (getattr(ops.elementwise, name), getattr(jnp, name), (3, 5), (3, 5))
        for name in ("add", "subtract", "multiply", "divide")
    },
}


def outcome(f: Plain, *avals: Any) -> Any:
    """The dtype of a result; "error" where a dtype is refused."""
    try:
        return jax.eval_shape(f, *avals).dtype
    except (TypeError, ValueError):
        return "error"


def differing(op: str, pairs: Any, **how: Any) -> list[Any]:
    ours, plain, *shapes = OPS[op]
    found = []
    for pair in pairs:
        avals = [
            jax.ShapeDtypeStruct(shape, dtype_of(name))
            for shape, name in zip(shapes, pair, strict=True)
        ]
        both = [outcome(functools.partial(f, **how), *avals) for f in (ours, plain)]
        if both[0] != both[1]:
            found.append((*pair, *both))
    return found


@pytest.mark.parametrize("op", ["matmul", "gated_matmul", "conv2d", "add", "divide"])
def test_dtypes(op):
    assert not differing(op, PAIRS)


@pytest.mark.parametrize("op", ["matmul", "gated_matmul", "conv2d", "divide"])
def test_dtypes_where_promotion_is_forbidden(op):
    pairs = [(a, b) for a, b in PAIRS if a == b or "float32" in (a, b)]
    with jax.numpy_dtype_promotion("strict"):
        assert not differing(op, pairs)


def test_quotients_of_integers():
    with jax.enable_x64(True):
        names = ("bool", "int8", "int32", "int64", "uint64", "float32")
        assert not differing("divide", itertools.product(names, names))


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("mode", ["standard", "strict"])
@pytest.mark.parametrize("op", OPS)
def test_dtypes_of_all(op, mode, x64):
    all_ = [
        n for n in (*NAMES, *OTHERS) if x64 or dtype_of(n).itemsize < 8 or "64" not in n
    ]
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(mode):
        assert not differing(op, itertools.product(all_, all_))


def is_floating(name: str) -> bool:
    return jnp.issubdtype(dtype_of(name), jnp.floating)


PREFERRED = ("int8", "bfloat16", "float32", "float8_e5m2", "complex64")


@pytest.mark.parametrize("op", ["matmul", "conv2d"])
def test_preferred_dtypes(op):
    """jnp and lax refuse integers that are too narrow, so do ours.

    Sums of floats are rounded to any float, also where lax refuses a narrower one.
    """
    ours, plain, *shapes = OPS[op]
    key = "preferred_element_type"
    for name in PREFERRED:
        wanted = dtype_of(name)
        for pair in itertools.product(("int32", "bfloat16"), NAMES):
            avals = [
                jax.ShapeDtypeStruct(shape, dtype_of(n))
                for shape, n in zip(shapes, pair, strict=True)
            ]
            found = outcome(functools.partial(ours, **{key: wanted}), *avals)
            how = {key: wanted} if op == "matmul" else {"preferred": wanted}
            if "complex64" in pair and name != "complex64":
                expected = "error"  # jnp takes the real parts
            elif op == "conv2d" and all(map(is_floating, (name, *pair))):
                expected = wanted
            else:
                expected = outcome(functools.partial(plain, **how), *avals)
            assert found == expected, (name, pair)


# --- values ---------------------------------------------------------------------------


def values(name: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if dtype == np.bool_:
        return jnp.asarray(rng.random(shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 4, shape), jnp.int32).astype(dtype)
    numbers = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(numbers + 1j * rng.standard_normal(shape), dtype)
    return jnp.asarray(abs(numbers), jnp.float32).astype(dtype)


def check_values(ours: Plain, plain: Plain, cases: dict[Any, tuple[Any, ...]]) -> None:
    """Compares what one program computes of all cases, where dtypes are allowed."""
    legal = {k: xs for k, xs in cases.items() if outcome(ours, *xs) != "error"}
    assert legal

    def both(legal: Any) -> Any:
        return {k: (ours(*xs), plain(*xs)) for k, xs in legal.items()}

    for k, (found, expected) in jax.jit(both)(legal).items():
        assert found.dtype == expected.dtype, k
        wide = np.complex128
        x, y = np.asarray(found).astype(wide), np.asarray(expected).astype(wide)
        unit = 0.0
        if jnp.issubdtype(found.dtype, jnp.inexact):
            unit = float(jnp.finfo(found.dtype).eps)
        scale = abs(y).max(where=np.isfinite(y), initial=0.0)
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | (abs(x - y) <= 2 * unit * scale)
        assert same.all(), (k, found, expected)


@pytest.mark.parametrize("op", ["matmul", "gated_matmul", "conv2d"])
def test_values(op):
    check_op(op, TRIED)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_values_of_all(op):
    check_op(op, MORE_TRIED)


def check_op(op: str, names: tuple[str, ...]) -> None:
    """Sums of four terms: those of one program, whose rounding is the same."""
    ours, plain, a, b = OPS[op]
    cases = {}
    for i, (m, n) in enumerate(itertools.product(names, names)):
        if outcome(plain, values(m, a, 0), values(n, b, 0)) != "error":
            cases[m, n] = values(m, a, i), values(n, b, i + 1)
    check_values(ours, plain, cases)


@pytest.mark.parametrize("out", ["float32", "int32"])
def test_values_in_a_preferred_dtype(out):
    """Mixed operands are multiplied in what holds them all, and rounded once."""
    key = {"preferred_element_type": dtype_of(out)}

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = promoted(a.dtype, b.dtype, dtype_of(out))
        return jnp.matmul(a.astype(wide), b.astype(wide)).astype(out)

    mixed = [(m, n) for m, n in itertools.product(TRIED, TRIED) if m != n]
    check_values(
        functools.partial(ops.matmul, **key),
        plain,
        {(m, n): (values(m, (3, 4), 1), values(n, (4, 5), 2)) for m, n in mixed},
    )


def test_a_product_of_integers_and_short_floats():
    """Neither is cut to the other's kind."""
    a = jnp.array([[1, 2, 3], [0, 1, 1]], jnp.int32)
    b = jnp.array([[0.5, -0.25], [1.5, 0.125], [0.75, -2]], jnp.float8_e4m3fn)
    expected = [[6.0, -6.0], [2.25, -1.875]]
    assert ops.matmul(a, b).tolist() == expected
    mask = (a > 0).T
    assert ops.matmul(b.T, mask).tolist() == jnp.matmul(b.T, mask).tolist()


# --- what is added --------------------------------------------------------------------


def kind(name: str) -> int:
    dtype = dtype_of(name)
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k))


@pytest.mark.parametrize("role", ["bias", "residual"])
@pytest.mark.parametrize(
    "op, of",
    [
        *(("matmul", name) for name in ("int32", "float8_e4m3fn", "bfloat16")),
        *(("conv2d", name) for name in ("int32", "bfloat16")),
    ],
)
def test_addends(op, of, role):
    """A bias or residual is added in full; one of a higher kind is refused."""
    ours, product, *shapes = OPS[op]
    a, b = (values(of, shape, 3 + i) for i, shape in enumerate(shapes))
    result = jax.eval_shape(product, a, b).shape
    shape = result[-1:] if role == "bias" else result
    cases = {}
    for i, name in enumerate((*TRIED, "float8_e8m0fnu", "complex64")):
        added = values(name, shape, i)
        if kind(name) <= kind(of):
            cases[name] = (added,)
            continue
        with pytest.raises(TypeError, match=f"{role} is .*preferred_element_type"):
            ours(a, b, **{role: added})

    def plain(added: jax.Array) -> jax.Array:
        wide = promoted(a.dtype, added.dtype, *[jnp.float32] * (kind(of) == 2))
        acc = product(a.astype(wide), b.astype(wide))
        return (acc + added.astype(wide)).astype(a.dtype)

    check_values(lambda added: ours(a, b, **{role: added}), plain, cases)


def test_addends_of_a_higher_kind_where_the_result_has_it():
    x, w = values("int32", (1, 3, 3, 4), 1), values("int32", (1, 1, 4, 2), 2)
    y = ops.conv2d(x, w, bias=jnp.full(2, 0.5), preferred_element_type=jnp.float32)
    assert ((y - convolution(x, w)) == 0.5).all()


# --- attention and losses -------------------------------------------------------------


def test_attention():
    """Operands share a floating dtype; a bias of any dtype is added as in jax.nn."""

    def ours(q: Any, bias: Any = None) -> jax.Array:
        return ops.attention(q, q, q, bias)

    def plain(q: Any, bias: Any = None) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q, bias)

    for name in (*NAMES, "float8_e8m0fnu"):
        q = jax.ShapeDtypeStruct((1, 4, 2, 8), dtype_of(name))
        expected = outcome(plain, q) if kind(name) == 2 else "error"
        assert outcome(ours, q) == expected, name
    shapes = ((1, 4, 2, 8), (1, 2, 4, 4))
    cases = {
        (of, name): (values(of, shapes[0], 1), values(name, shapes[1], 2))
        for of in ("float32", "bfloat16")
        for name in NAMES
    }
    for k, xs in cases.items():
        expected = "error" if k[1] == "complex64" else outcome(plain, *xs)
        assert outcome(ours, *xs) == expected, k
    check_values(ours, plain, cases)


def test_dtypes_of_losses():
    for pair in PAIRS:
        avals = [
            jax.ShapeDtypeStruct((3, 4), dtype_of(pair[0])),
            jax.ShapeDtypeStruct((5, 4), dtype_of(pair[1])),
        ]
        is_float = all(kind(name) == 2 for name in pair)
        expected = outcome(loss, *avals) if is_float else "error"
        assert outcome(ours_of_loss, *avals) == expected, pair


# --- the common dtype -----------------------------------------------------------------


def test_promoted_holds_the_values_of_all():
    """As jnp where jnp has one; else every number of each dtype is one of it."""
    for pair in itertools.product((*NAMES, *OTHERS), repeat=2):
        with jax.enable_x64(True):
            given = [dtype_of(name) for name in pair]
            wide = promoted(*given)
            try:
                assert wide == jnp.promote_types(*given), pair
            except ValueError:
                for dtype in given:
                    check_holds(wide, dtype)


def check_holds(wide: Any, dtype: Any) -> None:
    if dtype.itemsize > 1 or not jnp.issubdtype(dtype, jnp.floating):
        return  # of integers with floats jnp rounds, too
    codes = np.arange(1 << jnp.finfo(dtype).bits, dtype=np.uint8)
    numbers = codes.view(dtype).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    assert (numbers.astype(wide).astype(complex) == numbers).all(), (wide, dtype)

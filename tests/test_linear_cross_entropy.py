"""linear_cross_entropy: values, derivatives and memory of the op itself.

How it behaves under JAX's transformations: ``test_linear_cross_entropy_transforms``.
How programs are put on it: ``test_rewrite_cross_entropy``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropies import (
    assert_near,
    chunked,
    cotangent,
    exact_gradients,
    exact_loss,
    gradients,
    operands,
    plain,
    temporaries,
)
from numerics import array, normal
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.ops import linear_cross_entropy
from tracea_jax.ops.linear_cross_entropy import chunks

pytestmark = pytest.mark.once

ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
# rows, vocabulary, chunk: one row, primes, a chunk that divides, one that leaves one
# column, one column at a time, all columns.
SHAPES = [
    (1, 40, 8),
    (13, 101, 32),
    (16, 96, 32),
    (7, 65, 64),
    (5, 6, 1),
    (9, 37, 37),
    (9, 37, 99),
    (0, 37, 8),
]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "chunk", "dtype"),
    slow_unless(
        [(*SHAPES[i], "float32") for i in (0, 1, 3, 4, 7)] + [(*SHAPES[3], "bfloat16")],
        [
            *((*shape, "float32") for shape in SHAPES),
            *((*SHAPES[1], dtype) for dtype in ROUNDING if dtype != "float32"),
            (*SHAPES[3], "bfloat16"),
        ],
    ),
)
def test_loss_and_gradients_are_those_of_float64(rows, vocabulary, chunk, dtype):
    args = operands(rows, vocabulary, dtype=dtype)
    f = functools.partial(chunked, chunk=chunk)
    loss, found = jax.jit(lambda *args: (f(*args), gradients(f, *args)))(*args)
    assert loss.dtype == jnp.float32
    assert_near(loss, exact_loss(*args), 1e-5)
    assert [g.dtype for g in found] == [args[0].dtype] * 3
    assert_near(found, exact_gradients(*args, cotangent(loss)), ROUNDING[dtype])


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", slow_unless([16], [None, 16]))
def test_layouts_and_leading_dimensions(layout, has_bias, chunk):
    x, w, labels, bias = operands(12, 50)
    stored = w if layout == "nt" else w.T

    def f(x, w, bias):
        return linear_cross_entropy(
            x.reshape(3, 4, -1),
            w,
            labels.reshape(3, 4),
            bias=bias if has_bias else None,
            layout=layout,
            chunk=chunk,
        )

    ct = normal(3, 4)
    loss, found = jax.jit(lambda *of: _with_gradients(f, ct, *of))(x, stored, bias)
    used = bias if has_bias else 0 * np.asarray(bias)
    assert_near(loss, exact_loss(x, w, labels, used).reshape(3, 4), 1e-5)
    dx, dw, dbias = exact_gradients(x, w, labels, used, np.reshape(ct, -1))
    wanted = [dx, dw if layout == "nt" else dw.T, dbias if has_bias else 0 * dbias]
    assert_near(found, wanted, 1e-5)


def _with_gradients(f, ct, *args):
    loss, back = jax.vjp(f, *args)
    return loss, back(ct)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_label_dtypes(dtype):
    x, w, labels, _ = operands(20, 300)  # more columns than eight bits count
    labels = (labels % 128).astype(dtype)
    loss = linear_cross_entropy(x, w, labels, chunk=64)
    assert_near(loss, exact_loss(x, w, labels), 1e-5)


@pytest.mark.parametrize("chunk", [None, 16])
def test_labels_outside_of_the_vocabulary_give_nan(chunk):
    x, w, labels, _ = operands(5, 40)
    labels = labels.at[jnp.array([0, 2, 4])].set(jnp.array([-1, 40, 2**31 - 1]))
    loss = linear_cross_entropy(x, w, labels, chunk=chunk)
    np.testing.assert_array_equal(np.isnan(loss), [True, False] * 2 + [True])
    with jax.enable_x64(True):
        wide = labels.astype(jnp.int64).at[1].set(2**32)  # 0 in 32 bits
        loss = linear_cross_entropy(x, w, wide, chunk=chunk)
    assert np.isnan(loss[1])


def test_double_precision_stays():
    with jax.enable_x64(True):
        x, w, labels, bias = (a.astype("float64") for a in operands(6, 45))
        args = (x, w, labels.astype("int64"), bias)
        loss = chunked(*args)
        assert loss.dtype == jnp.float64
        assert_near(loss, exact_loss(*args), 1e-14)
        found = gradients(chunked, *args)
        assert_near(found, exact_gradients(*args, cotangent(loss)), 1e-14)


def test_mixed_dtypes_round_nothing():
    x, w, labels, bias = operands(6, 45, dtype="bfloat16")
    args = (x.astype("float32"), w, labels, bias.astype("float32"))
    loss = chunked(*args)
    assert_near(loss, exact_loss(*args), 1e-5)
    dx, dw, dbias = gradients(chunked, *args)
    wanted = exact_gradients(*args, cotangent(loss))
    assert (dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16)
    assert_near([dx, dbias], [wanted[0], wanted[2]], 1e-5)
    assert_near(dw, wanted[1], 5e-3)


def test_logits_may_be_rounded():
    args = operands(64, 45, dtype="bfloat16")
    rounded = chunked(*args, preferred_element_type="bfloat16")
    assert rounded.dtype == jnp.float32
    error = np.abs(rounded - exact_loss(*args)).max()
    largest = np.abs(args[0].astype("float32") @ args[1].T.astype("float32")).max()
    assert 2**-11 * largest < error < 2**-7 * largest


SPECIAL = {
    "nan": {3: np.nan},
    "a label of infinity": {0: np.inf},
    "infinity in the last chunk": {39: np.inf},
    "infinity, then finite": {1: np.inf, 30: 5.0},
    "minus infinity": {5: -np.inf},
    "a label of minus infinity": {0: -np.inf},
    "a chunk of minus infinity": dict.fromkeys(range(16), -np.inf),
    "the last chunk of minus infinity": dict.fromkeys(range(32, 40), -np.inf),
    "all minus infinity": dict.fromkeys(range(40), -np.inf),
    "huge": {2: 3e38, 20: -3e38},
    "both infinities": {2: np.inf, 20: -np.inf},
}


def test_special_logits_are_as_in_logsumexp():
    x, w, _, _ = operands(3, 40)
    labels = array(np.array([0, 7, 39], np.int32))

    def at_once(x, w, labels, bias):
        logits = x @ w.T + bias
        label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return jax.nn.logsumexp(logits, 1) - label

    both = jax.jit(
        lambda *args: [(f(*args), *gradients(f, *args)) for f in (chunked, at_once)]
    )
    for kind, values in SPECIAL.items():
        bias = np.zeros(40, np.float32)
        bias[[*values]] = [*values.values()]
        for a, b in zip(*both(x, w, labels, array(bias)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=kind)


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_never_in_memory(optimizations, dtype):
    shapes = ((512, 32), (8192, 32), (512,), (8192,))
    dtypes = (dtype, dtype, "int32", dtype)
    args = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
    f = functools.partial(chunked, chunk=512)
    once = 4 * 512 * 8192
    for g in (f, functools.partial(gradients, f)):
        assert temporaries(g, *args) < once / 4
    assert temporaries(functools.partial(gradients, plain), *args) >= 2 * once


def test_second_derivatives_keep_no_logits(optimizations):
    x, w, labels, bias = operands(256, 4096)
    f = functools.partial(chunked, chunk=256)
    loss = lambda x: (f(x, w, labels, bias) ** 2).sum()  # noqa: E731
    product = lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1]  # noqa: E731
    assert temporaries(product, x) < 256 * 4096 * 4 / 2


@pytest.mark.parametrize("rows", [1, 1024, 8192, 1 << 17])
@pytest.mark.parametrize("vocabulary", [2, 1000, 32000, 50257, 1 << 20])
def test_chunks_are_bounded_and_few(rows, vocabulary):
    chunk = chunks.chunk_of(rows, vocabulary)
    size = 4 * rows * vocabulary
    if chunk is None:
        assert size <= 1 << 28 or vocabulary <= 128
        return
    assert chunk % 128 == 0 and 0 < chunk < vocabulary
    assert 4 * rows * chunk <= max(1 << 28, size // 16, 4 * rows * 128)
    assert vocabulary // chunk <= 32


# --- what it says ---------------------------------------------------------------------


def test_explain_shows_the_op_and_its_products():
    args = operands(16, 96)
    found = tracea.explain(functools.partial(gradients, chunked))(*args)
    assert found.ops == {"linear_cross_entropy": 1, "matmul": 4}
    site = found.sites[0]
    assert (site.op, site.variant, site.problem) == (
        "linear_cross_entropy",
        "chunks",
        None,
    )
    assert "16 of 96 columns at a time" in site.reason
    assert "linear_cross_entropy" in str(found)
    assert [s.count for s in found.sites[1:]] == [6] * 4
    assert found.to_json()["sites"][0]["op"] == "linear_cross_entropy"


NO_VARIANT: Any = {"implementation": "fast"}
WRONG = {
    "features": (lambda x, w, y: linear_cross_entropy(x[:, 1:], w, y), "24 features"),
    "layout": (lambda x, w, y: linear_cross_entropy(x, w, y, layout="tn"), "nt, nn"),
    "labels": (lambda x, w, y: linear_cross_entropy(x, w, y[1:]), r"\(5,\)"),
    "rank": (lambda x, w, y: linear_cross_entropy(x, w[0], y), "w two"),
    "bias": (lambda x, w, y: linear_cross_entropy(x, w, y, bias=x[0]), r"\(40,\)"),
    "chunk": (lambda x, w, y: linear_cross_entropy(x, w, y, chunk=0), "at least 1"),
    "implementation": (
        lambda x, w, y: linear_cross_entropy(x, w, y, **NO_VARIANT),
        "fast",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_values_are_errors_that_name_what_is_allowed(kind):
    f, text = WRONG[kind]
    with pytest.raises(ValueError, match=text):
        f(*operands(5, 40)[:3])


def test_wrong_types_are_errors():
    x, w, labels, _ = operands(5, 40)
    with pytest.raises(TypeError, match="labels must be integers"):
        linear_cross_entropy(x, w, labels.astype(float))
    with pytest.raises(TypeError, match="x must be floating-point"):
        linear_cross_entropy(labels[:, None], w[:, :1], labels)
    with pytest.raises(TypeError, match="w is a list"):
        linear_cross_entropy(x, [w], labels)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="logits must be floating-point"):
        linear_cross_entropy(x, w, labels, preferred_element_type=jnp.int32)

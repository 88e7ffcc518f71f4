"""Programs that transform leaves unchanged: other products, and effects."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from numerics import normal
from transformed import (
    assert_alike,
    assert_left,
    assert_near,
    epilogues,
    jit,
    only_matmul,
    remaining,
)

import tracea_jax as tracea
from tracea_jax.rewrite import rules, splice

MATMULS = [rule for rule in rules() if rule.op == "matmul"]


def dense(x, w):
    return jax.nn.relu(x @ w)


# --- what stays -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool", "complex64"])
def test_other_dtypes_are_left(dtype):
    x, w = (3 * normal(4, 5)).astype(dtype), (3 * normal(5, 3)).astype(dtype)
    assert_left(jnp.matmul, x, w)
    assert_left(lambda x, w: lax.scan(lambda c, _: (c @ w, c), x, None, 2), x, w @ w.T)


def test_float64_is_left():
    with jax.enable_x64(True):
        x, w = normal(4, 5).astype("float64"), normal(5, 3).astype("float64")
        assert_left(dense, x, w)
        assert_left(jnp.matmul, x.astype("float32"), w)
        wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float64)
        assert_left(wide, x.astype("float32"), w.astype("float32"))


@pytest.mark.parametrize("precision", ["high", "tensorfloat32"])
def test_precision_is_left(precision):
    x, w = normal(4, 5), normal(5, 3)
    assert_left(functools.partial(jnp.matmul, precision=precision), x, w)
    with jax.default_matmul_precision(precision):
        assert_left(dense, x, w)
    mixed = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    assert_left(functools.partial(jnp.matmul, precision=mixed), x, w)


def test_default_precision_is_not():
    x, w = normal(4, 5), normal(5, 3)
    for precision in (None, "default", lax.Precision.DEFAULT, "fastest"):
        f = functools.partial(jnp.matmul, precision=precision)
        assert epilogues(f, x, w) == ["none"]
        assert_alike(f, x, w)


@pytest.mark.parametrize("precision", ["highest", "float32", lax.Precision.HIGHEST])
def test_the_highest_precision_is_kept(precision):
    x, w = normal(4, 5), normal(5, 3)
    f = functools.partial(jnp.matmul, precision=precision)
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert only_matmul(f, x, w)["precision"] == highest
    assert_alike(f, x, w)
    with jax.default_matmul_precision("highest"):
        assert only_matmul(dense, x, w)["precision"] == highest
        assert_alike(dense, x, w)


def test_what_has_no_product_is_left():
    def f(x, w):
        y = lax.scan(lambda c, v: (jax.nn.gelu(c) * v, c.sum()), x, w)
        z = lax.cond(x.sum() > 0, jnp.sin, jax.checkpoint(jax.nn.silu), x)
        z = jnp.where(z > 0, jnp.tril(z), jax.nn.relu(z))
        return y, lax.while_loop(lambda z: z.sum() < 9, lambda z: z + 1, z)

    assert_left(f, normal(4, 4), normal(3, 4, 4))


def test_kernels_of_pallas_are_left():
    def kernel(x, w, y):
        y[...] = jnp.dot(x[...], w[...])

    x, w = normal(8, 8), normal(8, 8, seed=1)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    f = pl.pallas_call(kernel, out_shape=shape, interpret=True)
    assert_left(f, x, w)


def test_barriers_are_not_crossed():
    def f(x, w):
        return jax.nn.relu(lax.optimization_barrier(x @ w))

    x, w = normal(4, 5), normal(5, 3)
    assert epilogues(f, x, w) == ["none"]
    assert remaining(f, x, w, name="optimization_barrier") == 1
    assert_alike(f, x, w)


def test_what_is_beside_a_product_stays():
    def f(x, w, i):
        return jax.nn.relu(x @ w), i @ i, jnp.matmul(x, w, precision="high")

    args = normal(4, 5), normal(5, 3), jnp.arange(9).reshape(3, 3)
    jaxpr, misses = jax.make_jaxpr(f)(*args), []
    after = splice(jaxpr, MATMULS, misses)
    assert after is not jaxpr
    assert after.in_avals == jaxpr.in_avals and after.out_avals == jaxpr.out_avals
    left = [e for e in after.eqns if e.primitive.name == "dot_general"]
    assert left == [e for e in jaxpr.eqns if e.primitive.name == "dot_general"][1:]
    assert [miss.op for miss in misses] == ["matmul"] * 2
    assert "int32" in str(misses[0]) and "precision" in str(misses[1])
    found, expected = tracea.transform(f)(*args), jax.jit(f)(*args)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[2], expected[2])


# --- effects --------------------------------------------------------------------------


def effects_of(record):
    """A function with products between ordered effects."""

    def log(name, x):
        def callback(x):
            record.append((name, round(float(x), 3)))
            return np.float32(len(record))

        shape = jax.ShapeDtypeStruct((), "float32")
        return io_callback(callback, shape, x, ordered=True)

    def f(x, w):
        y = x @ w
        log("product", 1.0)
        y = jax.nn.relu(y)
        n = log("relu", y.sum())
        jax.debug.callback(lambda _: record.append(("debug", 0.0)), y[0, 0])

        def body(c, w):
            log("loop", c[0, 0])
            return jax.nn.relu(c @ w) + n, None

        return lax.scan(body, y, jnp.stack([w, w]))[0]

    return f


def test_ordered_effects_happen_once_and_in_order():
    x, w = normal(4, 4), normal(4, 4, seed=1)
    records = {}
    for name, wrap in {
        "plain": jax.jit,
        "eager": tracea.transform,
        "jitted": lambda f: jax.jit(tracea.transform(f)),
    }.items():
        records[name] = []
        f = effects_of(records[name])
        wrap(f)(x, w).block_until_ready()
        jax.effects_barrier()
    assert remaining(f, x, w) == 0
    for record in records.values():
        assert record.count(("debug", 0.0)) == 1  # at any time
        record.remove(("debug", 0.0))
        assert [name for name, _ in record] == ["product", "relu", "loop", "loop"]
        values = [[v for _, v in r] for r in (record, records["plain"])]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=2e-3)


def test_effects_are_those_of_the_function():
    x, w = normal(4, 4), normal(4, 4, seed=1)
    f = effects_of([])
    jaxpr = jax.make_jaxpr(f)(x, w)
    assert splice(jaxpr, MATMULS, []).effects == jaxpr.effects
    fast = jax.make_jaxpr(tracea.transform(f))(x, w)
    assert {type(e) for e in fast.effects} == {type(e) for e in jaxpr.effects}


def test_printing(capfd):
    @tracea.transform
    def f(x, w):
        y = jax.nn.relu(x @ w)
        jax.debug.print(
            "{n} columns, sum {t}", n=y[0].size, t=y.sum() * 0, ordered=True
        )
        return y

    for _ in range(2):
        f(normal(4, 4), normal(4, 4))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["4 columns, sum 0.0"] * 2


def test_unused_effects_stay():
    record = []

    def f(x, w):
        io_callback(lambda y: record.append(float(y)), None, (x @ w).sum())
        return x

    jax.block_until_ready(tracea.transform(f)(normal(4, 4), normal(4, 4)))
    jax.effects_barrier()
    assert len(record) == 1


def test_references():
    x, w = normal(4, 4), normal(4, 4, seed=1)

    def add_to(total, x):
        before = total[...]
        y = jax.nn.relu(x @ w + before[0])
        total[...] = before + y
        return jax.nn.relu(y @ w) + total[...]

    def inside(x):
        total = jax.new_ref(jnp.zeros_like(x))
        for _ in range(2):
            x = add_to(total, x)
        return x, total[...]

    assert_near(tracea.transform(inside)(x), jax.jit(inside)(x), 5e-5)

    def as_argument(f):
        total = jax.new_ref(jnp.ones((4, 4)))
        return f(total, x), f(total, x), total[...]

    expected = as_argument(jax.jit(add_to))
    assert_near(as_argument(tracea.transform(add_to)), expected, 5e-5)
    assert_near(as_argument(jax.jit(tracea.transform(add_to))), expected, 5e-5)

    def captured(f_of):
        total = jax.new_ref(jnp.ones((4, 4)))
        f = f_of(lambda x: add_to(total, x))
        return f(x), f(x), total[...]

    assert_near(captured(tracea.transform), expected, 5e-5)


def test_random_numbers_are_the_same():
    def f(x, w, key):
        first, second = jax.random.split(key)
        mask = jax.random.bernoulli(first, 0.5, (4, 4))
        return jnp.where(mask, x @ w, 0), jax.random.normal(second, (2,)), second

    args = normal(4, 4), normal(4, 4, seed=1), jax.random.key(0)
    found, expected = tracea.transform(f)(*args), jax.jit(f)(*args)
    assert_near(found[0], expected[0], 2e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    assert (found[2] == expected[2]).all()


def test_products_of_other_ops_with_shared_operands():
    # An operand that was a transposed product must still be there for both.
    a, x, w, v = (normal(6, 6, seed=i) for i in range(4))

    def gated(a, x, w, v):
        h = (a @ x).T
        return jax.nn.silu(h @ w) * (h @ v)

    def weights(a, x, w, v):
        return jax.nn.gelu(x @ (a @ w).T) * (x @ (a @ v).T)

    def scaled(a, x, w, v):
        return jax.nn.relu(a @ x) * 2.0 + jax.nn.silu(a @ w) * v

    def attention(a, x, w, v):
        q, k = (a @ x).T, (a @ w).T
        return jax.nn.softmax(q @ k.T, axis=-1) @ (a @ v).T

    for f in (gated, weights, scaled, attention):
        assert_alike(f, a, x, w, v, fast=tracea.transform(f), tolerance=1e-4)


def test_deep_programs():
    def f(x, w):
        for _ in range(40):
            x = jnp.tanh(jax.nn.relu(x @ w) + x)
        return x

    x, w = normal(4, 4), normal(4, 4, seed=1)
    assert epilogues(f, x, w) == ["relu+residual"] * 40
    found, expected = jit(lambda *args: (tracea.transform(f)(*args), f(*args)))(x, w)
    assert_near(found, expected, 1e-3)

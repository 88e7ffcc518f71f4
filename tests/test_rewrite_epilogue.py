"""Epilogues of products that transform finds; values with other uses stay apart."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from numerics import f64, normal
from transformed import (
    assert_alike,
    assert_all_alike,
    assert_becomes,
    assert_one,
    epilogues,
    only_matmul,
    remaining,
)
from transforms import in_f64

import tracea_jax as tracea

# --- epilogues ------------------------------------------------------------------------


def operands():
    """x, w, one number a column, one an entry; no sum before relu is near its kink."""
    x, w, b, r = normal(6, 8), normal(8, 5, seed=1), normal(5), normal(6, 5)
    for z in (x @ w, x @ w + b, x @ w + r, x @ w + b + r):
        assert jnp.abs(z).min() > 1e-3
    return x, w, b, r


BIAS = {
    "added": lambda y, b: y + b,
    "left": lambda y, b: b + y,
    "new axis": lambda y, b: y + b[None],
    "reshaped": lambda y, b: y + b.reshape(1, 5),
    "broadcast": lambda y, b: y + jnp.broadcast_to(b, y.shape),
    "expanded": lambda y, b: lax.add(y, lax.broadcast_in_dim(b, (6, 5), (1,))),
    "split rows": lambda y, b: y.reshape(2, 3, 5) + b,
    "split columns": lambda y, b: y.reshape(6, 1, 5) + b[None, None],
    "flat rows": lambda y, b: (y.reshape(3, 2, 5) + b).reshape(6, 5),
}


def test_bias():
    x, w, b, _ = operands()

    def dense(add, x, w, b):
        return jax.nn.relu(add(x @ w, b))

    cases = {
        name: (functools.partial(dense, add), (x, w, b)) for name, add in BIAS.items()
    }
    for f, args in cases.values():
        assert_becomes(f, *args, epilogue="bias+relu")
    assert_all_alike(cases)


def test_bias_of_several_dimensions():
    x, w, b = normal(2, 6, 8), normal(8, 3, 4), normal(3, 4)

    def heads(x, w, b):
        return jax.nn.gelu(jnp.einsum("btd,dhk->bthk", x, w) + b)

    assert_one(heads, x, w, b, epilogue="bias+gelu")
    split = w.reshape(8, 12)
    cases = {
        "split columns": lambda x, w, b: (x @ w).reshape(2, 6, 3, 4) + b,
        "flat bias": lambda x, w, b: x @ w + b.reshape(12),
        "split result": lambda x, w, b: (x @ w + b.ravel()).reshape(2, 6, 3, 4),
    }
    for f in cases.values():
        assert_becomes(f, x, split, b, epilogue="bias")
    assert_all_alike({name: (f, (x, split, b)) for name, f in cases.items()})


def test_bias_of_each_batch():
    x, w, b = normal(4, 6, 8), normal(4, 8, 5), normal(4, 1, 5)

    def experts(x, w, b):
        return jax.nn.gelu(x @ w + b)

    params = assert_one(experts, x, w, b, epilogue="bias+gelu")
    assert params["epilogue"].bias == "batched_row"

    shared = only_matmul(experts, x, w, b[0])
    assert shared["epilogue"].bias == "row"
    assert_alike(experts, x, w, b[0])

    nested = normal(2, 4, 6, 8), normal(2, 4, 8, 5), normal(2, 4, 1, 5)
    params = assert_one(experts, *nested, epilogue="bias+gelu")
    assert params["epilogue"].bias == "batched_row"


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (1, 0, 0), (0, 1, 1)])
def test_vmapped_layers(axes):
    def dense(x, w, b):
        return jax.nn.silu(x @ w + b)

    shapes = [[6, 8], [8, 5], [5]]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, 4)
    args = [normal(*s) for s in shapes]
    f = jax.vmap(dense, axes)
    params = assert_one(f, *args, epilogue="bias+silu")
    expected = "row" if axes[1] is None else "batched_row"
    assert params["epilogue"].bias == expected


def test_an_ensemble_on_the_same_data():
    def dense(x, w, b):
        return jax.nn.silu(x @ w + b)

    f = jax.vmap(dense, (None, 0, 0))
    args = normal(6, 8), normal(4, 8, 5), normal(4, 5)
    only_matmul(f, *args)
    assert_alike(f, *args)


# What is added is no bias; the values are what counts.
NO_BIAS = {
    "scalar": (lambda y: jax.nn.relu(y + 1.0), (), "none"),
    "column": (lambda y, c: jax.nn.relu(y + c), (6, 1), "none"),
    "one number": (lambda y, c: jax.nn.relu(y + c), (1,), "none"),
    "filled": (lambda y: y + jnp.full(y.shape, 2.0), (), "residual"),
    "more rows": (lambda y, c: y + c, (3, 6, 5), "none"),
    "columns of the turned product": (lambda y, c: y.T + c, (6,), "bias"),
    "rows of the turned product": (lambda y, c: y.T + c, (5, 1), "none"),
}


def test_what_is_no_bias():
    x, w, *_ = operands()
    cases = {}
    for name, (after, shape, epilogue) in NO_BIAS.items():
        args = (x, w, normal(*shape)) if shape else (x, w)
        cases[name] = functools.partial(_then, after), args
        params = only_matmul(cases[name][0], *args)
        assert str(params["epilogue"]) == epilogue, name
    assert_all_alike(cases)


def _then(after, x, w, *rest):
    return after(x @ w, *rest)


def test_square_products_tell_rows_from_columns():
    def add(x, w, c):
        return x @ w + c

    def dense(x, w, c):
        return jax.nn.relu(x @ w + c)

    x, w, c = normal(6, 8), normal(8, 6), normal(6, 1)
    assert epilogues(add, x, w, c) == ["none"]
    assert epilogues(add, x, w, c[:, 0]) == ["bias"]
    cases = {"column": (add, (x, w, c)), "row": (add, (x, w, c[:, 0]))}
    x, w = normal(6, 6, 8), normal(6, 8, 6)  # batch, rows and columns of one size
    for shape in ((6, 1, 1), (1, 6, 1), (6, 6, 1), (1, 6, 6), (6, 1, 6), (1, 1, 6)):
        cases[str(shape)] = dense, (x, w, normal(*shape, seed=5))
    assert_all_alike(cases)


def test_vectors():
    x, v, w = normal(6, 8), normal(8), normal(8, 5)
    assert_one(
        lambda x, v, b: jax.nn.relu(x @ v + b),
        x,
        v,
        normal(6),
        layout="nt",
        epilogue="bias+relu",
    )
    assert_one(
        lambda v, w, b: jax.nn.relu(v @ w + b), v, w, normal(5), epilogue="bias+relu"
    )
    column = normal(8, 1)
    assert_one(
        lambda x, w, b: jax.nn.relu(x @ w + b),
        x,
        column,
        normal(1),
        epilogue="bias+relu",
    )
    assert_alike(lambda x, w: jax.nn.relu(x @ w + 1.0), x, column)


RESIDUAL = {
    "right": (lambda y, r: y + r, "residual"),
    "left": (lambda y, r: r + y, "residual"),
    "after relu": (lambda y, r: r + jax.nn.relu(y), "relu+residual"),
    "after gelu": (lambda y, r: jax.nn.gelu(y) + r, "gelu+residual"),
    "before relu": (lambda y, r: jax.nn.relu(y + r), "residual"),
    "before gelu": (lambda y, r: jax.nn.gelu(y + r) + r, "residual"),
    "of a reshape": (
        lambda y, r: y.reshape(2, 3, 5) + r.reshape(2, 3, 5),
        "residual",
    ),
    "flat": (lambda y, r: jax.nn.relu(y).ravel() + r.ravel(), "relu+residual"),
    "two": (lambda y, r: y + r + jnp.sin(r), "residual"),
}


def test_residual():
    x, w, _, r = operands()
    cases = {}
    for name, (after, epilogue) in RESIDUAL.items():
        cases[name] = functools.partial(_then, after), (x, w, r)
        assert_becomes(cases[name][0], x, w, r, epilogue=epilogue)
    assert_all_alike(cases)


def test_bias_and_residual_in_any_order():
    x, w, b, r = operands()
    cases = {
        "straight": (lambda x, w, b, r: x @ w + b + r, "bias+residual"),
        "turned": (lambda x, w, b, r: x @ w + r + b, "bias+residual"),
        "left": (lambda x, w, b, r: r + jax.nn.gelu(b + x @ w), "bias+gelu+residual"),
        "late": (lambda x, w, b, r: jax.nn.relu(x @ w) + b + r, "relu"),
        "relu": (lambda x, w, b, r: jax.nn.relu(x @ w + r + b), "bias+residual"),
        "twice": (lambda x, w, b, r: jax.nn.gelu(x @ w + b + b + r), "bias"),
    }
    for f, epilogue in cases.values():
        assert_becomes(f, x, w, b, r, epilogue=epilogue)
    assert_all_alike({name: (f, (x, w, b, r)) for name, (f, _) in cases.items()})


def test_the_order_in_memory_of_a_reshape():
    x, w, _, r = operands()
    cases = {
        "ravel": lambda x, w, r: jnp.ravel(x @ w, order="F") + r.ravel(),
        "jnp": lambda x, w, r: jnp.reshape(x @ w, (5, 6), order="F") + r.T,
        "lax": lambda x, w, r: lax.reshape(x @ w, (30,), (1, 0)) + r.ravel(),
    }
    assert_all_alike({name: (f, (x, w, r)) for name, f in cases.items()})


def test_reshapes_that_mix_rows_and_columns():
    x, w, _, r = operands()
    cases = {
        "columns": lambda x, w, r: (x @ w).reshape(5, 6) + r[:, 0],
        "all": lambda x, w, r: (x @ w).reshape(5, 6) + r.reshape(5, 6),
        "two rows": lambda x, w, r: (x @ w).reshape(3, 10) + r.ravel()[:10],
        "flat": lambda x, w, r: (x @ w).reshape(30) + r.ravel(),
        "less": lambda x, w, r: (x @ w).reshape(10, 3) + r[0, :3],
    }
    assert_all_alike({name: (f, (x, w, r)) for name, f in cases.items()})


def test_two_products_are_added():
    x, w, _, r = operands()
    u = normal(8, 5, seed=2)
    assert epilogues(lambda x, w, u: x @ w + x @ u, x, w, u) == ["none", "residual"]
    assert_alike(lambda x, w, u: x @ w + x @ u, x, w, u)

    def low_rank(x, w, u, r):
        return jax.nn.relu(x @ w + r) + x @ u

    assert remaining(low_rank, x, w, u, r) == 0
    assert_alike(low_rank, x, w, u, r)


def test_operands_that_are_made_after_the_product():
    x, w, *_ = operands()

    def f(x, w, u):
        y = x @ w
        scale = jnp.sin(u).sum(0)
        return jax.nn.relu(y + scale) + jnp.cos(x @ u)

    assert sorted(epilogues(f, x, w, w)) == ["bias+relu+residual", "none"]
    assert_alike(f, x, w, normal(8, 5, seed=3))


# --- the single-use rule --------------------------------------------------------------


def test_what_is_used_elsewhere_is_not_fused():
    x, w, b, r = operands()

    def keeps(stage):
        def f(x, w, b, r):
            stages = [x @ w]
            stages.append(stages[-1] + b)
            stages.append(jax.nn.relu(stages[-1]))
            stages.append(stages[-1] + r)
            return stages[-1], stages[stage]

        return f

    kept = ["none", "bias", "bias+relu", "bias+relu+residual"]
    for stage, epilogue in enumerate(kept):
        assert_becomes(keeps(stage), x, w, b, r, epilogue=epilogue)
    assert_all_alike({e: (keeps(stage), (x, w, b, r)) for stage, e in enumerate(kept)})


def test_a_use_in_an_inner_function_counts():
    x, w, b, r = operands()

    def f(x, w, b, r):
        z = x @ w + b

        def body(carry, _):
            return carry * 0.5 + z, None

        return jax.nn.relu(z), lax.scan(body, r, length=2)[0]

    assert_one(f, x, w, b, r, epilogue="bias")


def test_results_that_are_used_twice():
    x, w, b, r = operands()

    def f(x, w, b):
        y = jax.nn.relu(x @ w + b)
        return y * 2, jnp.sin(y), y

    assert_becomes(f, x, w, b, epilogue="bias+relu")
    cases = {
        "activated": f,
        "returned": lambda x, w, b: (x @ w + b,) * 2,
        "doubled": lambda x, w, b: (lambda y: y + y)(x @ w + b),
        "beside": lambda x, w, b: (lambda y: jax.nn.relu(y) + y)(x @ w + b),
    }
    for name in list(cases)[1:]:
        assert_becomes(cases[name], x, w, b, epilogue="bias")
    assert_all_alike({name: (f, (x, w, b)) for name, f in cases.items()})


def test_operands_that_are_used_elsewhere():
    x, w, b, r = operands()

    def f(x, w, b, r):
        return jax.nn.relu(x @ w + b) + r, b * 2, r + 1, w.T, x

    assert_one(f, x, w, b, r, epilogue="bias+relu+residual")


def test_dead_code_is_kept_apart():
    x, w, b, _ = operands()

    def f(x, w, b):
        dead = jax.nn.relu(x @ w + b)
        jnp.sin(dead)
        return x @ w

    assert_alike(f, x, w, b)


# --- steps in float32 after a narrow product ------------------------------------------


def widened(y):
    return y.astype(jnp.promote_types(y.dtype, jnp.float32))


AFTER_NARROW = {
    "bias": (lambda x, w, b: x @ w + b, "bias"),
    "activation": (lambda x, w, b: jax.nn.gelu(widened(x @ w) + b), "bias+gelu"),
    "residual": (lambda x, w, b: x @ w + (b + jnp.zeros((9, 1))), "residual"),
    "narrow": (lambda x, w, b: (x @ w + b).astype(x.dtype), "bias"),
}


@pytest.mark.parametrize("implementation", ["xla", "tracea"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", AFTER_NARROW)
def test_no_rounding_comes_before_what_is_added_in_float32(name, dtype, implementation):
    """XLA leaves out that of bfloat16; that of float16 stays, for it has infinities."""
    f, epilogue = AFTER_NARROW[name]
    args = normal(9, 17, dtype=dtype), normal(17, 12, dtype=dtype), normal(12)
    (site,) = equations(tracea.transform(f), *args, name="tracea_matmul")
    steps = str(site.params["epilogue"]).split(":")[0]
    assert steps == (epilogue if dtype == "bfloat16" else "none")
    with tracea.options(implementation=implementation):
        found = jax.jit(tracea.transform(f))(*args)
    plain, exact = jax.jit(f)(*args), in_f64(f, *args)
    error, usual = (np.abs(f64(y) - exact).mean() for y in (found, plain))
    assert error <= 1.1 * usual + 1e-6

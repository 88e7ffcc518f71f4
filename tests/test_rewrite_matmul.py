"""Products that transform finds: every layout, and the epilogues that follow them."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from numerics import normal
from transformed import (
    assert_alike,
    assert_all_alike,
    epilogues,
    filled,
    matmuls,
    only_matmul,
    remaining,
)


def assert_one(f, *args, layout="nn", epilogue="none", **how):
    """Asserts that f becomes one product like this, and keeps values and gradients."""
    params = assert_becomes(f, *args, layout=layout, epilogue=epilogue)
    assert_alike(f, *args, **how)
    return params


def assert_becomes(f, *args, layout="nn", epilogue="none"):
    params = only_matmul(f, *args)
    assert (params["layout"], str(params["epilogue"])) == (layout, epilogue)
    assert params["implementation"] is None and params["config"] is None
    return params


# --- layouts --------------------------------------------------------------------------


def einsum(subscripts):
    return functools.partial(jnp.einsum, subscripts)


def contract(contracted, batched=((), ())):
    return lambda a, b: lax.dot_general(a, b, (contracted, batched))


# name: (function, shapes of its operands, layout)
STRAIGHT = {
    "matmul": (jnp.matmul, (5, 7), (7, 3), "nn"),
    "dot": (jnp.dot, (5, 7), (7, 3), "nn"),
    "tensordot": (lambda a, b: jnp.tensordot(a, b, 1), (5, 7), (7, 3), "nn"),
    "inner": (jnp.inner, (5, 7), (3, 7), "nt"),
    "lax.dot": (lax.dot, (5, 7), (7, 3), "nn"),
    "ij,jk": (einsum("ij,jk->ik"), (5, 7), (7, 3), "nn"),
    "leading": (jnp.matmul, (2, 5, 7), (7, 3), "nn"),
    "two leading": (jnp.matmul, (2, 3, 5, 7), (7, 3), "nn"),
    "matvec": (jnp.matmul, (5, 7), (7,), "nt"),  # the vector is the only row
    "vecmat": (jnp.matmul, (7,), (7, 3), "nn"),
    "x W'": (lambda a, b: a @ b.T, (5, 7), (3, 7), "nt"),
    "x' y": (lambda a, b: a.T @ b, (7, 5), (7, 3), "tn"),
    "x' y'": (lambda a, b: a.T @ b.T, (7, 5), (3, 7), "tt"),
    "(y x)'": (lambda a, b: (b @ a).T, (7, 5), (3, 7), "tt"),
    "(y' x')'": (lambda a, b: (b.T @ a.T).T, (5, 7), (7, 3), "nn"),
    "twice turned": (lambda a, b: a.T.T @ b, (5, 7), (7, 3), "nn"),
    "tied": (einsum("btd,vd->btv"), (2, 5, 7), (3, 7), "nt"),
    "qkv": (einsum("btd,dhk->bthk"), (2, 5, 7), (7, 4, 3), "nn"),
    "out": (einsum("bthk,hkd->btd"), (2, 5, 4, 3), (4, 3, 7), "nn"),
    "out turned": (einsum("bthk,dhk->btd"), (2, 5, 4, 3), (7, 4, 3), "nt"),
    "ki": (einsum("ij,kj->ki"), (5, 7), (3, 7), "nt"),
    "tensordot 2": (
        lambda a, b: jnp.tensordot(a, b, ((1, 2), (0, 1))),
        (5, 4, 7),
        (4, 7, 3),
        "nn",
    ),
    "batched": (jnp.matmul, (4, 5, 7), (4, 7, 3), "nn"),
    "batched turned": (
        lambda a, b: a @ b.swapaxes(-1, -2),
        (2, 4, 5, 7),
        (2, 4, 3, 7),
        "nt",
    ),
    "bij,bkj": (einsum("bij,bkj->bik"), (2, 5, 7), (2, 3, 7), "nt"),
    "bji,bjk": (einsum("bji,bjk->bik"), (2, 7, 5), (2, 7, 3), "tn"),
    "size 1": (contract(((3,), (0,))), (1, 5, 1, 7), (7, 1, 3), "nn"),
    "no transposition": (contract(((1,), (1,))), (5, 7, 1), (1, 7, 3), "nn"),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_layouts_become_flags(name):
    f, lhs, rhs, layout = STRAIGHT[name]
    args = normal(*lhs), normal(*rhs, seed=1)
    assert_becomes(f, *args, layout=layout)
    assert remaining(f, *args, name="transpose") == 0


# Dimensions of one kind that do not lie together must be moved.
MOVED = {
    "shared rhs": (jnp.matmul, (2, 4, 5, 7), (4, 7, 3)),
    "qk": (einsum("bqhd,bkhd->bhqk"), (2, 5, 4, 7), (2, 3, 4, 7)),
    "pv": (einsum("bhqk,bkhd->bqhd"), (2, 4, 5, 3), (2, 3, 4, 7)),
    "tensordot": (
        lambda a, b: jnp.tensordot(a, b, ((0, 2), (2, 1))),
        (4, 5, 7),
        (3, 7, 4),
    ),
    "crossed": (contract(((0, 2), (0, 1)), ((1,), (2,))), (4, 3, 7), (4, 7, 3, 5)),
    "spread": (contract(((1,), (1,))), (5, 7, 2), (4, 7, 3)),
}


@pytest.mark.parametrize("name", MOVED)
def test_other_layouts_are_transposed(name):
    f, lhs, rhs = MOVED[name]
    args = normal(*lhs), normal(*rhs, seed=1)
    only_matmul(f, *args)
    assert remaining(f, *args, name="transpose") >= 1


def test_all_layouts_keep_values_and_gradients():
    cases = STRAIGHT | MOVED
    assert_all_alike(
        {
            name: (f, (normal(*lhs), normal(*rhs, seed=1)))
            for name, (f, lhs, rhs, *_) in cases.items()
        }
    )


def test_products_of_several_operands():
    a, b, c = normal(5, 7), normal(7, 3), normal(3, 4)
    assert len(matmuls(einsum("ij,jk,kl->il"), a, b, c)) == 2
    assert remaining(einsum("ij,jk,kl->il"), a, b, c) == 0
    assert_alike(einsum("ij,jk,kl->il"), a, b, c)
    assert_alike(lambda a, b, c: (a @ b) @ c + a @ (b @ c), a, b, c)


def test_a_product_of_a_transposed_product():
    # the transposition belongs to one of them, not to both
    a, b, c = normal(5, 7), normal(7, 3), normal(5, 4)
    cases = {
        "first": lambda a, b, c: (a @ b).T @ c,
        "second": lambda a, b, c: c.T @ (b.T @ a.T).T,
        "activated": lambda a, b, c: jax.nn.relu((a @ b).T) @ c,
        "einsum": lambda a, b, c: jnp.einsum("ij,il->jl", a @ b, c),
        "squared": lambda a, b, c: (a @ b).T @ (a @ b).T.T,
    }
    for f in cases.values():
        assert remaining(f, a, b, c) == 0
    assert_all_alike({name: (f, (a, b, c)) for name, f in cases.items()})


def test_a_transposition_that_is_used_elsewhere_stays():
    def f(x, w):
        turned = w.T
        return x @ turned, turned * 2

    x, w = normal(5, 7), normal(3, 7)
    assert only_matmul(f, x, w)["layout"] == "nt"
    assert remaining(f, x, w, name="transpose") == 1
    assert_alike(f, x, w)

    def both(x, w):
        y = x @ w
        return y, y.T

    assert only_matmul(both, x, normal(7, 3))["layout"] == "nn"
    assert_alike(both, x, normal(7, 3))


def test_a_matrix_times_itself():
    x = normal(5, 7)
    assert_one(lambda x: x @ x.T, x, layout="nt")
    assert_one(lambda x: x.T @ x, x, layout="tn")
    w = normal(6, 6)
    assert epilogues(lambda w: w @ w @ w + w, w) == ["none", "residual"]
    assert_alike(lambda w: w @ w @ w + w, w)


@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_empty_dimensions(empty):
    m, n, k = (0 if d == empty else 3 for d in "mnk")
    args = normal(m, k), normal(k, n), normal(n)
    assert_one(lambda x, w, b: jax.nn.relu(x @ w + b), *args, epilogue="bias+relu")


def test_products_without_a_contraction():
    f = contract(((), ()), ((0,), (0,)))
    assert_alike(f, normal(4, 3), normal(4, 5))
    assert_alike(contract(((), ())), normal(4), normal(5))
    assert_alike(einsum("bij,bkl->bil"), normal(2, 3, 4), normal(2, 5, 6))


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_products(dtype):
    x, w, b = (normal(*s, dtype=dtype) for s in ((5, 7), (7, 3), (3,)))

    def dense(x, w, b):
        return jax.nn.gelu(x @ w + b)

    params = assert_one(dense, x, w, b, epilogue="bias+gelu", tolerance=2e-2)
    assert params["out"] == dtype


def test_a_wide_sum_that_is_rounded_once():
    x, w = normal(5, 7, dtype="bfloat16"), normal(7, 3, dtype="bfloat16")
    b = normal(3)

    def dense(x, w, b):
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32) + b
        return jax.nn.silu(y).astype(jnp.bfloat16)

    params = assert_one(dense, x, w, b, epilogue="bias+silu", tolerance=1e-2)
    assert params["out"] == "bfloat16"

    def rounded_early(x, w, b):
        y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jax.nn.relu(y.astype(jnp.bfloat16) + b.astype(jnp.bfloat16))

    assert_one(rounded_early, x, w, b, epilogue="bias+relu", tolerance=2e-2)


def test_mixed_operands():
    x, w = normal(5, 7, dtype="bfloat16"), normal(7, 3)
    params = assert_one(lambda x, w: jax.nn.relu(x @ w), x, w, epilogue="relu")
    assert params["out"] == "float32"


def test_a_wider_result_is_not_part_of_a_site():
    x, w = normal(5, 7, dtype="bfloat16"), normal(7, 3, dtype="bfloat16")

    def f(x, w):
        y = x @ w
        return y.astype(jnp.float32) * 2

    assert only_matmul(f, x, w)["out"] == "bfloat16"
    assert_alike(f, x, w, tolerance=1e-2)


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


# --- layers of libraries --------------------------------------------------------------


def gradients_of_parameters(apply, params, x, epilogue, tolerance=2e-5, layout="nn"):
    leaves, tree = jax.tree.flatten(params)

    def f(x, *leaves):
        return apply(jax.tree.unflatten(tree, leaves), x)

    return assert_one(
        f, x, *leaves, epilogue=epilogue, tolerance=tolerance, layout=layout
    )


LINEN = {
    "Dense": (nn.Dense(5), "bias"),
    "without bias": (nn.Dense(5, use_bias=False), "none"),
    "Dense bf16": (nn.Dense(5, dtype=jnp.bfloat16), "bias"),
    "gelu": (nn.Sequential([nn.Dense(5), nn.gelu]), "bias+gelu"),
    "exact gelu": (
        nn.Sequential([nn.Dense(5), functools.partial(nn.gelu, approximate=False)]),
        "bias+gelu_exact",
    ),
    "silu bf16": (nn.Sequential([nn.Dense(5, dtype="bfloat16"), nn.silu]), "bias+silu"),
    "DenseGeneral": (nn.DenseGeneral((4, 3)), "bias"),
    "DenseGeneral 2": (nn.DenseGeneral(5, axis=(-2, -1)), "bias"),
    "Einsum": (nn.Einsum((8, 4, 3), "btd,dhk->bthk"), "bias"),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    module, epilogue = LINEN[name]
    x = normal(2, 6, 8)
    params = filled(jax.eval_shape(module.init, jax.random.key(0), x))
    tolerance = 3e-2 if "bf16" in name else 2e-5
    gradients_of_parameters(module.apply, params, x, epilogue, tolerance)


NNX = {
    "Linear": (lambda rngs: nnx.Linear(8, 5, rngs=rngs), "bias"),
    "bf16": (lambda rngs: nnx.Linear(8, 5, dtype=jnp.bfloat16, rngs=rngs), "bias"),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral(8, (4, 3), rngs=rngs), "bias"),
    "Einsum": (
        lambda rngs: nnx.Einsum("btd,dhk->bthk", (8, 4, 3), (4, 3), rngs=rngs),
        "bias",
    ),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    make, epilogue = NNX[name]
    definition, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    tolerance = 3e-2 if name == "bf16" else 2e-5

    def apply(state, x):
        return nnx.merge(definition, state)(x)

    gradients_of_parameters(apply, filled(state), normal(2, 6, 8), epilogue, tolerance)


def test_equinox():
    make = functools.partial(eqx.nn.MLP, 8, 5, 6, 2, activation=jax.nn.gelu)
    mlp = eqx.filter_eval_shape(make, key=jax.random.key(0))
    shapes, static = eqx.partition(mlp, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    leaves, tree = jax.tree.flatten(filled(shapes))

    def f(x, *leaves):
        module = eqx.combine(jax.tree.unflatten(tree, leaves), static)
        return jax.vmap(module)(x)

    x = normal(6, 8)
    found = matmuls(f, x, *leaves)
    assert [str(p["epilogue"]) for p in found] == ["bias+gelu", "bias+gelu", "bias"]
    assert [p["layout"] for p in found] == ["nt"] * 3
    assert remaining(f, x, *leaves) == remaining(f, x, *leaves, name="transpose") == 0
    assert_alike(f, x, *leaves)


def test_an_ensemble_of_equinox_layers():
    w, b, x = normal(4, 5, 8), normal(4, 5), normal(8)

    def layer(w, b, x):
        return jax.nn.relu(w @ x + b)

    cases = {
        "the same vector": (jax.vmap(layer, (0, 0, None)), (w, b, x)),
        "a vector each": (jax.vmap(layer), (w, b, normal(4, 8))),
        "one": (layer, (w[0], b[0], x)),
    }
    for f, args in cases.values():
        only_matmul(f, *args)
    assert_all_alike(cases)

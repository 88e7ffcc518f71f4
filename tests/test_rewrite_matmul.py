"""Products that transform finds: every layout, dtypes, and the layers of libraries."""

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
    assert_becomes,
    assert_one,
    epilogues,
    filled,
    matmuls,
    only_matmul,
    remaining,
)

pytestmark = pytest.mark.usefixtures("calls_only")

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

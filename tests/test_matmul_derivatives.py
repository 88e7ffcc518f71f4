"""Derivatives of matmul, forward and reverse, to second order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jaxprs import equations
from numerics import ACTIVATIONS, normal
from slow_cases import slow_unless
from transforms import (
    LAYOUTS,
    PLAIN,
    arguments,
    assert_close,
    assert_derivatives_alike,
    gemm_cpu,
    in_f64,
    ours,
    plain,
    products,
)

from tracea_jax.ops import matmul
from tracea_jax.ops.matmul.definition import reference
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.problem import Epilogue

pytestmark = pytest.mark.once


@pytest.mark.parametrize("activation", slow_unless(["none", "silu"], ACTIVATIONS))
def test_derivatives_to_second_order_agree_with_differences(activation):
    check_grads(
        jax.jit(functools.partial(ours, activation)),
        arguments(2, 3, 3),
        order=2,
        modes=["fwd", "rev"],
        atol=2e-2,
        rtol=2e-2,
        eps=1e-2,
    )


@pytest.mark.parametrize("activation", slow_unless(["none", "silu"], ACTIVATIONS))
def test_derivatives_are_those_of_the_plain_code(activation):
    args = arguments()
    pair = [functools.partial(f, activation) for f in (ours, plain)]
    assert_derivatives_alike(*pair, *args)

    def jacobians(f, *args):
        return jax.jacfwd(f)(*args), jax.jacrev(f)(*args)

    found, expected = (functools.partial(jacobians, f) for f in pair)
    assert_close(jax.jit(found)(*args), in_f64(jax.jit(expected), *args), 2e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_derivatives_of_some_operands(activation, wanted):
    args = arguments()

    def gradients(f, *args):
        return jax.grad(lambda *x: (f(activation, *x) ** 2).sum(), argnums=wanted)(
            *args
        )

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 2e-5)


@pytest.mark.parametrize("batched", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposes_of_every_layout(layout, batched):
    lhs = normal(*[3] * batched[0], *((4, 5) if layout[0] == "n" else (5, 4)))
    rhs = normal(*[3] * batched[1], *((5, 6) if layout[1] == "n" else (6, 5)))
    params = dict(layout=layout, out=jnp.dtype("float32"), precision=None)
    params |= dict(epilogue=Epilogue(), config=None)

    def gradients(f, lhs, rhs):
        return jax.grad(lambda x, y: jnp.sin(f(x, y)[0]).sum(), argnums=(0, 1))(
            lhs, rhs
        )

    bind = functools.partial(matmul_p.bind, **params, implementation="gemm_cpu")
    found = jax.jit(functools.partial(gradients, bind))(lhs, rhs)
    oracle = functools.partial(reference, **{**params, "out": jnp.float64})
    assert_close(found, in_f64(functools.partial(gradients, oracle), lhs, rhs))


@pytest.mark.parametrize("operand", range(3))
def test_linear_transpose(operand):
    a, b, residual = normal(4, 5), normal(5, 6), normal(4, 6)
    args = [a, b, residual]

    def linear(x):
        a, b, residual = [*args[:operand], x, *args[operand + 1 :]]
        return gemm_cpu(a, b, residual=residual if operand == 2 else None)

    cotangent = normal(4, 6, seed=1)
    if operand == 2:
        a = args[0] = jnp.zeros_like(a)  # affine in the residual is not linear in it
    (found,) = jax.linear_transpose(linear, args[operand])(cotangent)
    expected = (cotangent @ b.T, a.T @ cotangent, cotangent)[operand]
    assert_close(found, np.asarray(expected))


def test_an_activation_has_no_transpose():
    f = functools.partial(gemm_cpu, b=normal(3, 3), activation="relu")
    with pytest.raises(ValueError, match="activation='relu' is not linear"):
        jax.linear_transpose(f, normal(2, 3))(normal(2, 3))


def test_derivatives_have_the_dtypes_of_their_operands():
    args = [normal(4, 5), normal(5, 3), normal(3), normal(4, 3)]
    dtypes = ("bfloat16", "bfloat16", "float32", "float16")
    args = [x.astype(d) for x, d in zip(args, dtypes, strict=True)]

    def loss(*args):
        y = matmul(*args[:2], bias=args[2], activation="gelu", residual=args[3])
        assert y.dtype == "bfloat16"
        return (y.astype("float32") ** 2).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
    assert [g.dtype for g in found] == list(dtypes)
    expected = in_f64(
        jax.grad(lambda *x: (plain("gelu", *x) ** 2).sum(), argnums=(0, 1, 2, 3)), *args
    )
    assert_close(found, expected, 2e-2)


def test_wide_results_of_narrow_operands_have_derivatives():
    a, b = normal(4, 5, dtype="bfloat16"), normal(5, 3, dtype="bfloat16")

    def loss(a, b):
        return (matmul(a, b, preferred_element_type="float32") ** 2).sum()

    found = jax.grad(loss, argnums=(0, 1))(a, b)
    assert [g.dtype for g in found] == ["bfloat16"] * 2
    assert_close(
        found, in_f64(jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1)), a, b), 4e-3
    )


def test_one_product_serves_value_and_derivative():
    a, b, bias, residual = arguments()

    def loss(a, b):
        return ours("gelu", a, b, bias, residual).sum()

    assert products(loss, a, b) == 1
    assert products(jax.grad(loss, argnums=(0, 1)), a, b) == 3


# --- a residual that is multiplied with -----------------------------------------------


def bind_multiplied(activation, *operands, **changes):
    """activation(a @ b + bias) * residual by the primitive; bias may be left out."""
    epilogue = Epilogue(
        bias="row" if len(operands) == 4 else "none",
        activation=activation,
        residual=True,
        residual_op="multiply",
    )
    params = dict(layout="nn", out=jnp.dtype("float32"), precision=None, config=None)
    params |= dict(implementation="gemm_cpu", epilogue=epilogue)
    return matmul_p.bind(*operands, **(params | changes))[0]


def plain_multiplied(activation, a, b, bias, residual):
    return PLAIN[activation](a @ b + bias) * residual


@pytest.mark.parametrize("activation", slow_unless(["none", "silu"], ACTIVATIONS))
def test_derivatives_through_a_multiplied_residual(activation):
    pair = (bind_multiplied, plain_multiplied)
    ours, plain = (functools.partial(f, activation) for f in pair)
    assert_derivatives_alike(ours, plain, *arguments())


@pytest.mark.parametrize("wanted", range(4))
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_derivatives_of_one_factor(activation, wanted):
    args = arguments()

    def gradient(f, *args):
        return jax.grad(lambda *x: (f(activation, *x) ** 2).sum(), wanted)(*args)

    found = jax.jit(functools.partial(gradient, bind_multiplied))(*args)
    expected = in_f64(functools.partial(gradient, plain_multiplied), *args)
    assert_close(found, expected, 2e-5)


def test_z_is_saved_only_where_a_derivative_needs_it():
    def saved(activation, wanted):
        def loss(*args):
            return bind_multiplied(activation, *args).sum()

        gradient = jax.grad(loss, wanted)
        forward, *_ = equations(gradient, *arguments(), name="tracea_matmul")
        return len(forward.outvars) == 2

    assert not saved("none", 0) and saved("none", 3)
    assert saved("silu", 0) and saved("silu", 3)


@pytest.mark.parametrize("operand", range(3))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_linear_transpose_in_one_factor(batch, operand):
    args = [normal(*batch, 4, 5), normal(5, 6), normal(*batch, 4, 6)]

    def f(bind, x):
        return bind("none", *args[:operand], x, *args[operand + 1 :])

    def by_numpy(activation, a, b, residual):
        return a @ b * residual

    cotangent = normal(*batch, 4, 6, seed=1)
    found, expected = (
        jax.linear_transpose(functools.partial(f, bind), args[operand])(cotangent)
        for bind in (bind_multiplied, by_numpy)
    )
    assert_close(found, [np.asarray(x) for x in expected])


def test_two_factors_together_have_no_transpose():
    args = (normal(4, 5), normal(5, 6), normal(4, 6))

    def f(a, residual):
        return bind_multiplied("none", a, args[1], residual)

    with pytest.raises(ValueError, match="not linear in both"):
        jax.linear_transpose(f, args[0], args[2])(args[2])


def test_derivatives_of_narrow_products_and_residuals():
    a, b, bias, residual = arguments()
    args = [a.astype("bfloat16"), b.astype("bfloat16"), bias, residual.astype("f2")]

    def loss(f, *args):
        return (f("silu", *args).astype("float32") ** 2).sum()

    bind = functools.partial(bind_multiplied, out=jnp.dtype("bfloat16"))
    found = jax.grad(functools.partial(loss, bind), (0, 1, 2, 3))(*args)
    assert [g.dtype for g in found] == [x.dtype for x in args]
    plain_loss = functools.partial(loss, plain_multiplied)
    expected = in_f64(jax.grad(plain_loss, (0, 1, 2, 3)), *args)
    assert_close(found, expected, 3e-2)

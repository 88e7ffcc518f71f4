"""matmul under vmap: every operand, nested, and with grad."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from numerics import exact, exact_gemm, normal
from transforms import (
    LAYOUTS,
    assert_close,
    gemm_cpu,
    in_f64,
    ours,
    plain,
)

from tracea_jax.ops.matmul.definition import problem_of
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.problem import Epilogue

pytestmark = pytest.mark.once

SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]


@pytest.mark.parametrize("mapped", SUBSETS, ids=lambda s: "".join("-x"[i] for i in s))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_vmap_over_any_operands(batch, mapped):
    size, (m, n, k) = 2, (5, 3, 4)
    shapes = [(*batch, m, k), (k, n), (n,), (*batch, m, n)]
    # The mapped axis is first, last, or in the middle.
    axes = [
        i % (len(s) + 1) if x else None
        for i, (s, x) in enumerate(zip(shapes, mapped, strict=True))
    ]
    args = [
        normal(*s) if axis is None else normal(*s[:axis], size, *s[axis:])
        for s, axis in zip(shapes, axes, strict=True)
    ]
    out_axis = len(batch) + 1
    f = jax.vmap(functools.partial(ours, "gelu"), in_axes=axes, out_axes=out_axis)
    found = jnp.moveaxis(jax.jit(f)(*args), out_axis, 0)
    assert found.shape == (size, *batch, m, n)
    for i in range(size):
        a, b, bias, residual = (
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(args, axes, strict=True)
        )
        exact(a, b, bias, "gelu", residual).assert_near(found[i])


@st.composite
def primitive_calls(draw):
    """(shapes, mapped operands, parameters) of the primitive in any of its forms."""
    flag = st.booleans()
    layout, batched = draw(st.sampled_from(LAYOUTS)), (draw(flag), draw(flag))
    kinds = ["none", "row", "batched_row"] if any(batched) else ["none", "row"]
    epilogue = Epilogue(
        bias=draw(st.sampled_from(kinds)),
        activation=draw(st.sampled_from(["none", "silu"])),
        residual=draw(flag),
        residual_op=draw(st.sampled_from(["add", "multiply"])),
        save_preactivation=draw(flag),
    )
    m, n, k = (draw(st.sampled_from([0, 1, 3, 4])) for _ in "mnk")
    batch = [draw(st.sampled_from([1, 2]))] if any(batched) else []
    shapes = [
        (*(batch if batched[0] else []), *((m, k) if layout[0] == "n" else (k, m))),
        (*(batch if batched[1] else []), *((k, n) if layout[1] == "n" else (n, k))),
    ]
    if epilogue.bias != "none":
        shapes.append((*(batch if epilogue.bias == "batched_row" else []), n))
    if epilogue.residual:
        shapes.append((*batch, m, n))
    mapped = [draw(flag) for _ in shapes]
    hypothesis.assume(any(mapped))
    return shapes, mapped, dict(layout=layout, epilogue=epilogue)


@hypothesis.settings(max_examples=60)
@hypothesis.given(primitive_calls(), st.sampled_from([1, 3]))
def test_vmap_of_the_primitive_in_every_form(call, size):
    shapes, mapped, params = call
    args = [
        normal(*([size] if x else []), *s, seed=i)
        for i, (s, x) in enumerate(zip(shapes, mapped, strict=True))
    ]
    axes = [0 if x else None for x in mapped]
    how = dict(precision=None, implementation="gemm_cpu", config=None)
    bind = functools.partial(matmul_p.bind, **params, **how, out=jnp.dtype("float32"))
    found = [np.asarray(y) for y in jax.vmap(bind, in_axes=axes)(*args)]
    args = [np.asarray(x) for x in args]
    for i in range(size):
        one = [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)]
        expected = exact_gemm(params["layout"], params["epilogue"], *one)
        for y, x in zip(expected, found, strict=True):
            y.assert_near(x[i])


def test_nested_vmap():
    a, b, bias, residual = (
        normal(2, 3, 5, 4),
        normal(3, 4, 6),
        normal(2, 6),
        normal(5, 6),
    )
    inner = jax.vmap(functools.partial(ours, "relu"), in_axes=(0, 0, None, None))
    outer = jax.vmap(inner, in_axes=(0, None, 0, None))
    exact(a, b, bias[:, None, None], "relu", residual).assert_near(
        outer(a, b, bias, residual)
    )


def test_vmap_of_grad_gives_gradients_of_each_example():
    args = (normal(6, 5, 4), normal(4, 3), normal(3), normal(6, 5, 3))
    axes = (0, None, None, 0)

    def gradients(f, *args):
        grad = jax.grad(lambda *x: (f("gelu", *x) ** 2).sum(), argnums=(0, 1, 2, 3))
        return jax.vmap(grad, in_axes=axes)(*args)

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 1e-5)


def test_grad_of_vmap_sums_over_examples():
    args = (normal(6, 5, 4), normal(4, 3), normal(6, 3), normal(5, 3))

    def gradients(f, *args):
        mapped = jax.vmap(functools.partial(f, "silu"), in_axes=(0, None, 0, None))
        return jax.grad(lambda *x: (mapped(*x) ** 2).sum(), argnums=(0, 1, 2, 3))(*args)

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 1e-5)


def test_a_mapped_left_operand_becomes_rows_of_one_product():
    f = jax.vmap(gemm_cpu, in_axes=(0, None))
    (equation,) = equations(f, normal(6, 5, 4), normal(4, 3), name="tracea_matmul")
    problem = problem_of([x.aval for x in equation.invars], **equation.params)
    assert (problem.batch, problem.m, problem.n) == (1, 30, 3)

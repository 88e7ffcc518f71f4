"""Kernels of users where none can run: their references, derivatives and vmap."""

from __future__ import annotations

import functools
from typing import Any

import cuda_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_kernels import Struct, program_for_a_gpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import normal
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.ops.cuda_kernel.tangent import differentiable

pytestmark = pytest.mark.once

# --- where the kernel cannot run ------------------------------------------------------


def test_a_cpu_runs_the_reference_under_every_transformation():
    x, w = normal(3, 4, 5), normal(4, 5, seed=1)
    f, g = kernels.SOFTMAX_OP, jax.nn.softmax
    np.testing.assert_array_equal(jax.jit(f)(x), jax.jit(g)(x))

    def loss(f):
        return jax.vmap(jax.grad(lambda x: (f(x) * w).sum()))

    np.testing.assert_allclose(loss(f)(x), loss(g)(x), atol=1e-6)
    remat = jax.grad(lambda x: jax.checkpoint(f)(x)[0, 0, 0])(x)
    np.testing.assert_allclose(remat, jax.grad(lambda x: g(x)[0, 0, 0])(x), atol=1e-6)
    tangent = jax.jvp(lambda x: kernels.AXPY_OP(x, x, a=2.0), (w,), (w,))[1]
    np.testing.assert_allclose(tangent, 3 * w, rtol=1e-6)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    rows = P(None, "i")
    many = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_allclose(jax.jit(many)(x), g(x), rtol=1e-6)


def test_without_a_reference_the_error_says_why_nothing_runs():
    op = tracea.cuda_kernel(kernels.AXPY, scalars={"n": 1})
    with pytest.raises(
        tracea.Unsupported, match="cuda_kernel: it is a CUDA kernel; the "
    ):
        op(normal(2), normal(2), a=1.0)
    with pytest.raises(tracea.Unsupported, match="no reference="):
        op(normal(2), normal(2), a=1.0, implementation="xla")
    with pytest.raises(TypeError, match="'axpy' has no derivative: pass backward="):
        jax.grad(lambda x: op(x, x, a=1.0)[0])(normal(2))


def test_a_setting_for_all_ops_does_not_take_the_only_kernel_away():
    op = tracea.cuda_kernel(kernels.AXPY, scalars={"n": 1, "a": 1})
    x = normal(2)
    with tracea.options(implementation="xla"):
        (site,) = tracea.explain(op, device="H200")(x, x).sites
    assert site.variant == "cuda_kernel"
    with pytest.raises(tracea.Unsupported, match="'xla' cannot run .* no reference="):
        op(x, x, implementation="xla")


INDEXED = """
extern "C" __global__ void take(const float* x, const int* at, float* y, int n) {
  y[threadIdx.x] = x[at[threadIdx.x]];
}
"""


def test_operands_without_a_derivative_and_numbers_of_the_space():
    """Integers have none; the reference gets numbers that shapes decide."""

    def reference(x, at, *, n):
        assert n == x.size
        return x[at]

    take = tracea.cuda_kernel(
        INDEXED,
        out=Struct((3,), jnp.float32),
        reference=reference,
        scalars={"n": lambda x: x.size},
        backward=lambda x, at, y, dy: (jnp.zeros_like(x).at[at].add(dy), None),
    ).space(BLOCK=(32, 64))
    at = jnp.array([1, 1, 4])
    gradient = jax.grad(lambda x: take(x, at).sum())(normal(5))
    np.testing.assert_array_equal(gradient, [0, 2, 0, 0, 1])


@pytest.mark.parametrize("of_reference", slow_unless([False], [True, False]))
def test_backward_gives_forward_mode_too(of_reference):
    """Forward mode, of the reference or by transposing the user's backward function."""
    x, dx, w = (normal(3, 5, seed=i) for i in range(3))
    f, g = kernels.SOFTMAX_OP, jax.nn.softmax
    if not of_reference:
        f = differentiable(
            lambda x: (g(x),),
            "f",
            lambda x, y, dy: kernels.softmax_gradient(y, dy),
            None,
        )
        f = functools.partial(lambda f, x: f(x)[0], f)

    def close(ours, theirs, *args):
        found, wanted = jax.jit(ours)(*args), theirs(*args)
        same = functools.partial(np.testing.assert_allclose, atol=1e-6)
        jax.tree.map(same, found, wanted)

    def tangent(f):
        return lambda x, dx: jax.jvp(f, (x,), (dx,))

    def hessian(mode):
        return lambda f: mode(jax.grad(lambda x: (f(x) ** 2 * w[0]).sum()))

    close(jax.vmap(tangent(f)), jax.vmap(tangent(g)), x, dx)
    close(tangent(jax.vmap(f)), tangent(jax.vmap(g)), x, dx)
    close(hessian(jax.jacfwd)(f), hessian(jax.jacfwd)(g), x[0])
    if of_reference:
        return  # what follows is alike

    def shared(f):  # the mapped and the common operand of one call
        return jax.grad(lambda x: jax.vmap(lambda w: (f(x) * w).sum())(w).sum())

    close(hessian(jax.jacrev)(f), hessian(jax.jacrev)(g), x[0])
    close(shared(f), shared(g), x[0])


def test_a_backward_that_cannot_be_transposed_says_so():
    op = tracea.cuda_kernel(
        kernels.SOFTMAX,
        "softmax",
        scalars={"columns": 1},
        backward=lambda x, y, dy: jax.pure_callback(lambda a: a, dy, dy),
    )
    message = (
        "'softmax' has no derivative in forward mode: JAX cannot .* pass reference="
    )
    with pytest.raises(NotImplementedError, match=message):
        program_for_a_gpu(lambda x: jax.jvp(op, (x,), (x,)), normal(3))


def test_integers_among_results_have_no_derivative():
    source = """
    extern "C" __global__ void top(const float* x, const int* k, float* y, int* at) {}
    """
    op = tracea.cuda_kernel(
        source,
        out=(Struct((), jnp.float32), Struct((), jnp.int32)),
        reference=lambda x, k: (x.max() * k, x.argmax().astype(jnp.int32)),
        backward=lambda x, k, y, at, dy, dat: (
            jnp.zeros_like(x).at[at].set(dy * k),
            None,
        ),
    )
    x, k = jnp.array([1.0, 3.0, 2.0]), jnp.int32(2)
    value, gradient = jax.value_and_grad(lambda x: op(x, k)[0])(x)
    assert value == 6 and gradient.tolist() == [0, 2, 0]
    (y, at), (dy, _) = jax.jvp(lambda x: op(x, k), (x,), (jnp.array([5.0, 7.0, 9.0]),))
    assert (y, at, dy) == (6, 1, 14)


def test_a_cotangent_has_the_shape_of_its_operand():
    op = tracea.cuda_kernel(
        kernels.SOFTMAX,
        "softmax",
        scalars={"columns": 1},
        reference=lambda x: x,
        backward=lambda x, y, dy: dy.sum(),
    )
    with pytest.raises(ValueError, match=r"shape \(\) for an operand of shape \(3,\)"):
        jax.grad(lambda x: op(x).sum())(normal(3))


def test_a_reference_must_return_what_the_kernel_writes():
    op = tracea.cuda_kernel(
        kernels.AXPY, scalars={"n": 1, "a": 1}, reference=lambda x, y: x.sum()
    )
    with pytest.raises(TypeError, match=r"returns float32\[\]; .* writes float32\[3\]"):
        op(normal(3), normal(3))


def test_numbers_that_are_equal_are_still_different():
    divide = tracea.cuda_kernel(
        kernels.AXPY,
        scalars={"n": 1},
        reference=lambda x, y, *, a: x / a + y,
    )
    f = jax.jit(lambda x, a: divide(x, x, a=a), static_argnums=1)
    assert divide(jnp.ones(1), jnp.zeros(1), a=0.0) == jnp.inf
    assert divide(jnp.ones(1), jnp.zeros(1), a=-0.0) == -jnp.inf
    assert jnp.isnan(f(jnp.ones(1), float("nan")))


# --- vmap -----------------------------------------------------------------------------


def shapes_under_vmap(op: Any) -> list[tuple[int, ...]]:
    """The shapes of the operands of the primitive, wherever it is."""
    x = Struct((5, 4, 6), jnp.float32)
    found = equations(jax.vmap(op), x, name="tracea_cuda_kernel")
    return [eqn.invars[0].aval.shape for eqn in found]


def test_vmap_is_a_loop_one_launch_or_a_rule():
    rows: dict[str, Any] = {**kernels.ROWS, "reference": jax.nn.softmax}
    assert shapes_under_vmap(kernels.SOFTMAX_OP) == [(5, 4, 6)]
    loop = tracea.cuda_kernel(
        kernels.SOFTMAX, "softmax", **{**rows, "vmap": "sequential"}
    )
    assert shapes_under_vmap(loop) == [(4, 6)]

    def rule(size, is_mapped, x):
        assert (size, is_mapped) == (5, [True])
        return kernels.SOFTMAX_OP(x.reshape(20, 6)).reshape(x.shape), True

    own = tracea.cuda_kernel(kernels.SOFTMAX, "softmax", **{**rows, "vmap": rule})
    assert shapes_under_vmap(own) == [(20, 6)]
    x = normal(5, 4, 6)
    for op in (loop, own, kernels.SOFTMAX_OP):
        np.testing.assert_allclose(jax.vmap(op)(x), jax.nn.softmax(x), rtol=1e-6)

"""linear_cross_entropy under JAX's transformations, and on several devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
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
)
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import normal

import tracea_jax as tracea
from tracea_jax.ops import linear_cross_entropy

pytestmark = pytest.mark.once

# --- JAX's transformations ------------------------------------------------------------


def assert_alike(of, *args, forms=(chunked, plain), tolerance=1e-5):
    """Asserts that ``of(f, *args)`` is the same of both forms, in one program."""
    ours, theirs = jax.jit(lambda *args: [of(f, *args) for f in forms])(*args)
    assert_near(ours, theirs, tolerance)


def value_and_gradients(f, *args):
    return f(*args), gradients(f, *args)


def test_forward_mode_and_second_derivatives():
    x, w, labels, bias = operands(5, 40)
    moved = (normal(5, 24, seed=7), normal(40, 24, seed=8), normal(40, seed=9))

    def second(f, *of):
        """Derivatives of the gradient along a direction."""
        loss = lambda x, w, b: (f(x, w, labels, b) ** 2).sum()  # noqa: E731
        return jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), of, moved)

    def first(f, *of):
        return jax.jvp(lambda x, w, b: f(x, w, labels, b), of, moved)

    def reverse_over_reverse(f, *of):
        def size(*of):
            loss = lambda x, w, b: f(x, w, labels, b).sum()  # noqa: E731
            grads = jax.grad(loss, argnums=(0, 1, 2))(*of)
            return sum((g**2).sum() for g in grads)

        return jax.grad(size, argnums=(0, 1, 2))(*of)

    for derivative in (first, second, reverse_over_reverse):
        assert_alike(derivative, x, w, bias, tolerance=1e-4)


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_gradients_of_one_operand_alone(name):
    args = operands(5, 40)
    place = {"x": 0, "w": 1, "bias": 3}[name]

    def of_one(value):
        full = [*args]
        full[place] = value
        return chunked(*full)

    loss, back = jax.vjp(of_one, args[place])
    wanted = exact_gradients(*args, cotangent(loss))
    assert_near(back(cotangent(loss)), (wanted[min(place, 2)],), 1e-5)


def test_a_frozen_head_costs_no_gradient_of_it():
    x, w, labels, bias = operands(5, 48)
    grad = jax.grad(lambda x: chunked(x, w, labels, bias).sum())
    assert tracea.explain(grad)(x).ops["matmul"] == 3  # logits twice, and dx


@pytest.mark.parametrize(
    "mapped", [(0, None, 0, None), (0, None, None, None), (None, None, 0, None)]
)
def test_vmap_of_rows_makes_one_call(mapped):
    x, w, labels, bias = operands(12, 40)
    rows = (x.reshape(3, 4, -1), labels.reshape(3, 4))
    args = [
        rows[0] if mapped[0] == 0 else rows[0][1],
        w,
        rows[1] if mapped[2] == 0 else rows[1][1],
        bias,
    ]
    f, g = (jax.vmap(f, in_axes=mapped) for f in (chunked, plain))
    assert str(jax.make_jaxpr(f)(*args)).count("tracea_linear_cross_entropy[") == 1
    assert_alike(value_and_gradients, *args, forms=(f, g))


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0), (None, 0, None, None), (0, None, 0, 0)]
)
def test_vmap_of_heads(mapped):
    first = operands(4, 40)
    sets = (first, [a[::-1] for a in first])
    args = [
        jnp.stack(pair) if axis == 0 else pair[0]
        for pair, axis in zip(zip(*sets, strict=True), mapped, strict=True)
    ]
    forms = [jax.vmap(f, in_axes=mapped) for f in (chunked, plain)]
    assert_alike(value_and_gradients, *args, forms=forms)


def test_gradients_of_single_examples_and_jacobians():
    x, w, labels, bias = operands(4, 40)

    def single(f, x, w, labels, bias):
        grad = jax.grad(
            lambda *a: f(a[0][None], w, a[1][None], a[2])[0], argnums=(0, 2)
        )
        return jax.vmap(grad, in_axes=(0, 0, None))(x, labels, bias)

    def jacobians(f, x, w, labels, bias):
        of_bias = lambda b: f(x, w, labels, b)  # noqa: E731
        return jax.jacfwd(of_bias)(bias), jax.jacrev(of_bias)(bias)

    for derivative in (single, jacobians):
        assert_alike(derivative, x, w, labels, bias)


def test_scan_over_microbatches_and_checkpoint():
    x, w, labels, bias = operands(12, 40)

    def total(f, x, w, labels, bias):
        @jax.checkpoint
        def step(sum_, rows):
            return sum_ + f(jnp.sin(rows[0]), w, rows[1], bias).sum(), None

        batches = (x.reshape(3, 4, -1), labels.reshape(3, 4))
        return jax.lax.scan(step, 0.0, batches)[0]

    assert_alike(jax.grad(total, argnums=(1, 2, 4)), x, w, labels, bias)


def test_policies_keep_what_replaces_a_product():
    x, w, labels, bias = operands(5, 40)
    policy = tracea.ops.remat_policy(jax.checkpoint_policies.dots_saveable)
    f = jax.checkpoint(lambda x: chunked(x, w, labels, bias).sum(), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(f))(x))
    assert jaxpr.count("tracea_linear_cross_entropy[") == 1


def test_taylor_series():
    x, w, labels, bias = operands(5, 40)
    along = normal(5, 24, seed=3)

    def series(f, x):
        loss = lambda x: f(x, w, labels, bias).sum()  # noqa: E731
        return jet.jet(loss, (x,), ([along, 0 * along],))

    assert_alike(series, x, tolerance=1e-4)


# --- several devices ------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))


def test_shard_map_over_rows(mesh):
    args = operands(16, 40)
    specs = (P("rows"), P(), P("rows"), P())
    f = jax.shard_map(chunked, mesh=mesh, in_specs=specs, out_specs=P("rows"))
    assert_near(jax.jit(f)(*args), exact_loss(*args), 1e-5)
    found = jax.jit(functools.partial(gradients, f))(*args)
    assert_near(found, exact_gradients(*args, cotangent(args[0][:, 0])), 1e-5)


@pytest.mark.parametrize("spread", [P("rows"), P(None, "rows")])
def test_automatic_partitioning(mesh, spread):
    args = operands(16, 40)
    placed = [
        jax.device_put(args[0], NamedSharding(mesh, P("rows"))),
        jax.device_put(args[1], NamedSharding(mesh, spread)),
        *args[2:],
    ]
    found = jax.jit(functools.partial(gradients, chunked))(*placed)
    assert_near(found, exact_gradients(*args, cotangent(args[0][:, 0])), 1e-5)


def test_explicit_shardings_are_computed_at_once():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
    x, w, labels, bias = operands(16, 40)
    wanted = exact_loss(x, w, labels, bias).reshape(8, 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(x.reshape(8, 2, -1), P("rows"))
        labels = jax.device_put(labels.reshape(8, 2), P("rows"))
        loss = jax.jit(chunked)(x, w, labels, bias)
        assert jax.typeof(loss).sharding.spec == P("rows", None)
        assert_near(loss, wanted, 1e-5)


def test_symbolic_shapes_are_computed_at_once():
    (rows,) = jax.export.symbolic_shape("rows")
    x, w, labels, _ = operands(6, 40)
    exported = jax.export.export(jax.jit(linear_cross_entropy))(
        jax.ShapeDtypeStruct((rows, 24), x.dtype),
        w,
        jax.ShapeDtypeStruct((rows,), labels.dtype),
    )
    assert_near(exported.call(x, w, labels), exact_loss(x, w, labels), 1e-5)

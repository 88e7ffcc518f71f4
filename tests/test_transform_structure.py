"""transform enters nested structures of programs and keeps them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxprs import count
from numerics import normal
from transformed import (
    assert_alike,
    epilogues,
    remaining,
)

import tracea_jax as tracea
from tracea_jax.rewrite import channel_affine


def layer(x, w):
    return jax.nn.gelu(x @ w)


# --- functions inside -----------------------------------------------------------------


def jitted(x, w):
    return jax.jit(jax.jit(layer))(x, w[0])


def scanned(x, w):
    return lax.scan(lambda c, w: (layer(c, w), c.sum()), x, w)


def scanned_backwards(x, w):
    return lax.scan(lambda c, w: (layer(c, w), c), x, w, reverse=True, unroll=2)


def counted(x, w):
    return lax.fori_loop(0, 3, lambda i, c: layer(c, w[i]), x)


def whiled(x, w):
    def body(c):
        return c[0] + 1, layer(c[1], w[0])

    def go_on(c):
        return ((c[1] @ w[1]).sum() > 1e3) | (c[0] < 2)

    return lax.while_loop(go_on, body, (0, x))


def conditional(x, w):
    return lax.cond(x[0, 0] > 0, layer, lambda x, w: jax.nn.relu(w @ x), x, w[0])


def switched(x, w):
    branches = [layer, jnp.add, lambda x, w: x @ w + w[0], lambda x, w: x]
    return [lax.switch(i, branches, x, w[0]) for i in range(4)]


def mapped(x, w):
    return lax.map(lambda w: layer(x, w), w), lax.map(lambda w: x @ w, w, batch_size=2)


def associative(x, w):
    return lax.associative_scan(lambda a, b: jnp.matmul(a, b) + a, w)


def rematerialised(x, w):
    return jax.checkpoint(jax.checkpoint(layer))(jax.checkpoint(layer)(x, w[0]), w[1])


def on_platforms(x, w):
    return lax.platform_dependent(x, w[0], cpu=layer, default=lambda x, w: x @ w)


def nested(x, w):
    @jax.checkpoint
    def body(c, w):
        y = lax.cond(c.sum() > 0, jax.jit(layer), lambda c, w: c @ w + 1, c, w)
        return lax.fori_loop(0, 2, lambda _, y: layer(y, w), y), None

    return jax.jit(lambda x, w: lax.scan(body, x, w)[0])(x, w)


# name: how many products the function has, and whether it has a gradient
INSIDE = {
    jitted: (1, True),
    scanned: (1, True),
    scanned_backwards: (1, True),
    counted: (1, True),
    whiled: (2, False),
    conditional: (2, True),
    switched: (8, True),
    mapped: (3, True),
    associative: (4, True),
    rematerialised: (2, True),
    on_platforms: (2, True),
    nested: (3, True),
}


@pytest.mark.parametrize("f", INSIDE)
def test_functions_inside_are_entered(f):
    x, w = normal(4, 4), normal(3, 4, 4)
    expected, differentiable = INSIDE[f]
    fast = tracea.transform(f, ops=["matmul"])
    if f is not associative:
        assert count(fast, x, w) == expected
    assert remaining(f, x, w) == 0
    assert_alike(f, x, w, gradients=differentiable, tolerance=5e-5, fast=fast)


def test_forward_derivatives_of_loops():
    x, w = normal(4, 4), normal(3, 4, 4)

    def tangents(f):
        return lambda x, w: jax.jvp(f, (x, w), (w[0], jnp.sin(w)))

    fast = tangents(tracea.transform(whiled))
    assert_alike(tangents(whiled), x, w, fast=fast, gradients=False, tolerance=5e-5)


def test_solvers():
    a, b = normal(4, 4), normal(4)
    a = a @ a.T + 4 * jnp.eye(4)

    def direct(a, b):
        return jnp.linalg.solve(a, b) + jnp.linalg.inv(a) @ b

    def custom(a, b):
        def solve(matvec, b):
            return lax.fori_loop(0, 60, lambda _, x: x + 0.1 * (b - matvec(x)), b)

        return lax.custom_linear_solve(lambda x: a @ x, b, solve, symmetric=True)

    def conjugate_gradients(a, b):
        return jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=8)[0]

    for f in (direct, custom, conjugate_gradients):
        assert_alike(f, a, b, tolerance=1e-3 if f is custom else 2e-4)
    assert count(tracea.transform(custom), a, b) > 0
    assert remaining(custom, a, b) == 0


def test_roots():
    def f(a):
        def residual(x):
            return jnp.tanh(x) @ a + x - 1

        def solve(g, x):
            return lax.fori_loop(0, 40, lambda _, x: x - 0.5 * g(x), x)

        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacobian(g)(y), y)

        return lax.custom_root(residual, jnp.ones(3), solve, tangent_solve)

    assert_alike(f, 0.3 * normal(3, 3), tolerance=1e-3)


# --- derivatives that users wrote -----------------------------------------------------


def dense(x, w):
    return jax.nn.relu(x @ w)


def test_custom_jvp_keeps_its_derivative():
    @jax.custom_jvp
    def dense(x, w):
        return jax.nn.relu(x @ w)

    @dense.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return dense(x, w), 3 * (dx @ w) + 5 * (x @ dw)

    def f(x, w):
        return dense(x, w) * 2

    x, w = normal(4, 4), normal(4, 4, seed=1)
    assert epilogues(f, x, w) == ["relu"]
    assert remaining(f, x, w) == 0
    assert_alike(f, x, w)
    assert_alike(lambda x, w: lax.map(lambda w: f(x, w), w), x, normal(2, 4, 4))


def test_custom_vjp_is_left_as_it_is():
    @jax.custom_vjp
    def dense(x, w):
        return jax.nn.relu(x @ w)

    def backward(saved, ct):
        x, w = saved
        return 3 * (ct @ w.T), 5 * (x.T @ ct)

    dense.defvjp(lambda x, w: (dense(x, w), (x, w)), backward)
    x, w = normal(4, 4), normal(4, 4, seed=1)
    assert epilogues(dense, x, w) == [] and remaining(dense, x, w) == 1

    def f(x, w):
        return jax.nn.relu(dense(x, w) @ w)

    assert epilogues(f, x, w) == ["relu"] and remaining(f, x, w) == 1
    assert_alike(f, x, w)
    vmapped = jax.vmap(f, in_axes=(0, None))
    assert_alike(vmapped, normal(2, 4, 4), w)


def test_rounding_with_a_straight_through_gradient():
    @jax.custom_jvp
    def quantised(w):
        return jnp.round(w * 4) / 4

    quantised.defjvp(lambda w, dw: (quantised(*w), dw[0]))

    def f(x, w):
        return jax.nn.relu(x @ quantised(w))

    x, w = normal(4, 4), normal(4, 4, seed=1)
    assert epilogues(f, x, w) == ["relu"]
    assert_alike(f, x, w)


def test_custom_batching_keeps_its_rule():
    @jax.custom_batching.custom_vmap
    def dense(x, w):
        return x @ w

    @dense.def_vmap
    def _(size, batched, x, w):
        return 3 * jnp.matmul(x, w), True

    x, w = normal(2, 4, 4), normal(4, 4, seed=1)
    f = jax.vmap(dense, in_axes=(0, None))
    fast = jax.vmap(tracea.transform(dense), in_axes=(0, None))
    assert_alike(f, x, w, fast=fast, gradients=False)


# --- rematerialisation ----------------------------------------------------------------


def two_layers(x, w, b):
    h = checkpoint_name(jax.nn.gelu(x @ w + b), "hidden")
    return jnp.sin(jax.nn.silu(h @ w.T) @ w) + x


def attend(x, w, b):
    scores = jnp.einsum("ij,bkj->bik", x, jnp.stack([w, w + 1]))
    return jnp.sin(jnp.einsum("bik,bkj->ij", jnp.tanh(scores), jnp.stack([w, w]))) + b


POLICIES = {
    "none": None,
    "nothing_saveable": policies.nothing_saveable,
    "everything_saveable": policies.everything_saveable,
    "dots_saveable": policies.dots_saveable,
    "checkpoint_dots": policies.checkpoint_dots,
    "dots_with_no_batch_dims": policies.dots_with_no_batch_dims_saveable,
    "only_names": policies.save_only_these_names("hidden"),
    "other_names": policies.save_only_these_names("elsewhere"),
    "any_names_but": policies.save_any_names_but_these("elsewhere"),
    "both": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("hidden"),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("layers", [two_layers, attend])
def test_policies_keep_their_meaning(layers, name):
    f = jax.checkpoint(layers, policy=POLICIES[name])
    args = normal(4, 4), normal(4, 4, seed=1), normal(4)

    def gradients(f):
        return jax.grad(lambda *args: f(*args).sum(), argnums=(0, 1, 2))

    fast = gradients(tracea.transform(f, ops=["matmul"]))
    plain = count(gradients(f), *args, name="dot_general")
    assert count(fast, *args) == plain
    assert count(fast, *args, name="dot_general") == 0


def test_rematerialised_values_and_gradients():
    args = normal(4, 4), normal(4, 4, seed=1), normal(4)
    for layers in (two_layers, attend):
        every = [
            jax.checkpoint(layers, policy=POLICIES[p])
            for p in ("dots_saveable", "only_names", "dots_with_no_batch_dims")
        ]
        assert_alike(lambda *args, every=every: [f(*args) for f in every], *args)


def test_scans_of_rematerialised_layers():
    @functools.partial(jax.checkpoint, policy=policies.dots_saveable)
    def body(c, w):
        return jax.nn.relu(c @ w), None

    def f(x, w):
        return lax.scan(body, x, w)[0]

    args = normal(4, 4), normal(3, 4, 4)
    assert_alike(f, *args)

    # The derivative begins with an equation without operands and results.
    gradients = jax.grad(lambda *args: f(*args).sum(), argnums=(0, 1))
    fast = tracea.transform(gradients, after_grad=True)
    assert count(fast, *args, name="dot_general") == 0
    assert_alike(gradients, *args, fast=fast, gradients=False)


# --- small functions beside products --------------------------------------------------


def test_small_functions_of_all_shapes():
    two = jax.jit(lambda x: (jnp.exp(x), jnp.exp(x) * x))
    unused = jax.jit(lambda x: ((y := jnp.exp(x)), y * y + y))
    same = jax.jit(lambda x: (x, jnp.sin(x)))
    twice = jax.jit(lambda x: (jnp.cos(x),) * 2)
    constant = jax.jit(lambda x: (1.0, x + 1))
    table = np.arange(5.0, dtype="float32")
    captured = jax.jit(lambda x: x + table)
    nothing = jax.jit(lambda x: ())
    inner = jax.jit(lambda x: two(x)[0] + unused(x)[1])

    def f(x, w):
        y = x @ w
        _, used = unused(y)
        out = [*two(y), used, unused(y)[0], *same(y), *twice(y), constant(y)[1]]
        nothing(y)
        return *out, captured(y), inner(y), two(x)[1], inner(inner(w)), same(x)[0]

    x, w = normal(4, 5), normal(5, 5)
    assert_alike(f, 0.3 * x, 0.3 * w)
    with jax.enable_checks(True):
        jax.jit(jax.grad(lambda x: tracea.transform(f)(x, w)[2].sum())).lower(x)


def test_a_function_that_is_called_twice_is_two_functions():
    @jax.jit
    def activate(x):
        return jnp.where(x > 0, x, 0) * 2

    def f(x, w):
        y = activate(x @ w)
        return activate(y @ w) + y

    assert_alike(f, normal(4, 4), normal(4, 4, seed=1))


def test_donation_inside():
    @functools.partial(jax.jit, donate_argnums=0)
    def add(x, y):
        return x + y

    def f(x, w):
        return add(x @ w, w), add(jax.nn.relu(x @ w), x)

    assert_alike(f, normal(4, 4), normal(4, 4, seed=1), gradients=False)


# --- long programs --------------------------------------------------------------------


def many_sums(x, w):
    y = x
    for _ in range(600):
        y = y + x
    return (y * x) @ w


def many_sums_from_the_right(x, w):
    y = x
    for _ in range(600):
        y = x + y
    return (y * x) @ w


@pytest.mark.parametrize("f", [many_sums, many_sums_from_the_right])
def test_programs_longer_than_the_stack(f):
    x, w = normal(3, 3), normal(3, 3, seed=1)
    assert_alike(f, x, w)


def test_rows_of_steps_are_read_in_linear_time(monkeypatch):
    read = []
    step_at = channel_affine._step_at
    monkeypatch.setattr(
        channel_affine, "_step_at", lambda *args: read.append(1) or step_at(*args)
    )

    def steps(x, scale, shift):
        for _ in range(100):
            x = x * scale + shift
        for _ in range(100):
            x = x + shift
        return x

    vectors = jnp.ones(5), jnp.ones(5)
    jax.make_jaxpr(tracea.transform(steps))(normal(32, 5), *vectors)
    assert len(read) < 300 * 20

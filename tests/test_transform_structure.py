"""transform and the structure of programs: what it enters, and what it leaves alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import normal
from transformed import (
    assert_alike,
    assert_near,
    epilogues,
    jit,
    only_matmul,
    remaining,
)

import tracea_jax as tracea
from tracea_jax.rewrite import RULES, splice

MATMULS = [rule for rule in RULES if rule.op == "matmul"]


def count(f, *args, name="tracea_matmul"):
    return len(equations(f, *args, name=name))


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


# --- several devices ------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def data_parallel(x, w, b):
    return lax.pmean((jax.nn.gelu(x @ w + b) ** 2).sum(), "x")


def tensor_parallel(x, w, b):
    y = lax.psum(x @ w, "x") + b
    return (jax.nn.relu(y) ** 2).sum()


SHARDED = {
    data_parallel: (P("x"), P(), P()),
    tensor_parallel: (P(None, "x"), P("x"), P()),
}


@pytest.mark.parametrize("f", SHARDED)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(f, check_vma, mesh):
    shard = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=SHARDED[f],
        out_specs=P(),
        check_vma=check_vma,
    )
    args = normal(16, 16), normal(16, 5), normal(5)
    # Around the whole, and inside.
    for fast in (tracea.transform(shard(f)), shard(tracea.transform(f))):
        (site,) = equations(fast, *args, name="tracea_matmul")
        fused = "bias+gelu" if f is data_parallel else "none"
        assert str(site.params["epilogue"]) == fused
        assert count(fast, *args, name="dot_general") == 0
        assert_alike(shard(f), *args, fast=fast, tolerance=5e-5)


def test_gradients_inside_of_shard_map(mesh):
    def step(f, x, w, b):
        loss, grads = jax.value_and_grad(f, argnums=(1, 2))(x, w, b)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, (w, b), grads)

    fast, plain = (
        jax.shard_map(
            functools.partial(step, f),
            mesh=mesh,
            in_specs=SHARDED[data_parallel],
            out_specs=P(),
        )
        for f in (tracea.transform(data_parallel), data_parallel)
    )
    args = normal(16, 16), normal(16, 5), normal(5)
    assert_alike(plain, *args, fast=fast, gradients=False, tolerance=5e-5)
    whole = tracea.transform(plain, after_grad=True)
    assert count(whole, *args, name="dot_general") == 0
    assert_alike(plain, *args, fast=whole, gradients=False, tolerance=5e-5)


def test_arrays_that_the_compiler_partitions(mesh):
    x, w, b = normal(16, 16), normal(16, 5), normal(5)
    sharding = NamedSharding(mesh, P("x"))

    def f(x, w, b):
        y = lax.with_sharding_constraint(x @ w, sharding)
        return jax.nn.relu(y + b)

    args = jax.device_put(x, sharding), w, b
    result = jax.jit(tracea.transform(f))(*args)
    assert_near(result, f(x, w, b), 2e-5)
    assert result.sharding.is_equivalent_to(sharding, 2)
    # The constraint is on the product, not on what follows.
    assert epilogues(f, *args) == ["none"]


def test_explicit_shardings_are_left():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(normal(16, 16), NamedSharding(mesh, P("x")))
    w = jax.device_put(normal(16, 8), NamedSharding(mesh, P()))

    def rows(x, w):
        return jax.nn.relu(x @ w)

    def asked(w):
        sharding = NamedSharding(mesh, P(None, "x"))
        return jnp.einsum("ij,ik->jk", w, w, out_sharding=sharding)

    with jax.set_mesh(mesh):
        for f, args in ((rows, (x, w)), (asked, (w,))):
            assert_left(f, *args)
            result = jax.jit(tracea.transform(f))(*args)
            assert result.sharding == jax.jit(f)(*args).sharding
            assert jax.typeof(result) == jax.typeof(f(*args))
        replicated = tracea.transform(rows)
        assert count(replicated, w.T, w) == 1
        assert_near(replicated(w.T, w), rows(w.T, w), 2e-5)


# --- what stays -----------------------------------------------------------------------


def assert_left(f, *args):
    """Asserts that nothing of f is replaced: the very same jaxpr, and equal bits."""
    jaxpr = jax.make_jaxpr(f)(*args)
    assert splice(jaxpr, RULES, []) is jaxpr
    found, expected = tracea.transform(f)(*args), jax.jit(f)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def dense(x, w):
    return jax.nn.relu(x @ w)


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

"""transform of programs for several devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import count, equations
from numerics import normal
from transformed import (
    assert_alike,
    assert_near,
    epilogues,
    jit,
)

import tracea_jax as tracea

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


@pytest.mark.parametrize("f", SHARDED)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_a_shard_map_that_a_step_takes_itself(f, check_vma, mesh):
    parallel = jax.shard_map(
        f, mesh=mesh, in_specs=SHARDED[f], out_specs=P(), check_vma=check_vma
    )
    args = normal(16, 16), normal(16, 5), normal(5)
    step = jax.value_and_grad(parallel, argnums=(1, 2))
    fast = tracea.transform(step)
    assert_near(jit(fast)(*args), jit(step)(*args), 5e-5)
    assert count(fast, *args, name="dot_general") == 0


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


@pytest.mark.parametrize("implementation", [None, "tracea"])
def test_partly_manual_axes_are_refused_with_a_reason(implementation):
    two = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    partly = jax.shard_map(
        tensor_parallel,
        mesh=two,
        in_specs=SHARDED[tensor_parallel],
        out_specs=P(),
        axis_names={"x"},
    )
    args = [
        jax.device_put(a, NamedSharding(two, spec))
        for a, spec in zip(
            (normal(16, 16), normal(16, 6), normal(6)),
            (P("y", "x"), P("x"), P()),
            strict=True,
        )
    ]
    step = jax.jit(tracea.transform(jax.value_and_grad(partly, argnums=(1, 2))))
    with tracea.options(implementation=implementation):
        if implementation is None:
            plain = jax.jit(jax.value_and_grad(partly, argnums=(1, 2)))(*args)
            assert_near(step(*args), plain, 5e-5)
            (site,) = tracea.explain(partly)(*args).sites
            assert site.variant == "xla" and "some axes of the mesh" in site.reason
        else:
            with pytest.raises(tracea.Unsupported, match="some axes of the mesh"):
                step(*args)


def test_explicit_shardings():
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
            assert count(tracea.transform(f), *args) == 1
            result = jax.jit(tracea.transform(f))(*args)
            assert result.sharding == jax.jit(f)(*args).sharding
            assert jax.typeof(result) == jax.typeof(f(*args))
            assert_near(result, f(*args), 2e-5)
        replicated = tracea.transform(rows)
        assert count(replicated, w.T, w) == 1
        assert_near(replicated(w.T, w), rows(w.T, w), 2e-5)

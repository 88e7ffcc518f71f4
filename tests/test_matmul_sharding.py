"""matmul on several devices: shard_map and automatic partitioning."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import exact, normal
from transforms import (
    arguments,
    assert_close,
    gemm_cpu,
    in_f64,
    ours,
    plain,
)

from tracea_jax.ops import matmul


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def block(x, w, bias):
    return gemm_cpu(x, w, bias=bias, activation="gelu")


def plain_block(x, w, bias):
    return jax.nn.gelu(x @ w + bias)


def custom_calls(f, *args):
    return f.lower(*args).compile().as_text().count('"tracea_cpu_gemm_v1"')


def test_shard_map_over_the_batch(mesh):
    x, w, bias = normal(16, 5), normal(5, 6), normal(6)
    sharded = jax.shard_map(
        block, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x")
    )
    f = jax.jit(sharded)
    exact(x, w, bias, "gelu").assert_near(f(x, w, bias))
    assert custom_calls(f, x, w, bias) == 1

    def gradients(f, *args):
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*args)

    expected = in_f64(functools.partial(gradients, plain_block), x, w, bias)
    assert_close(
        jax.jit(functools.partial(gradients, sharded))(x, w, bias), expected, 1e-5
    )


@pytest.mark.parametrize("operand", range(4))
def test_gradients_of_replicated_operands_are_summed_over_the_mesh(mesh, operand):
    # grad inside of shard_map: what data-parallel training steps do
    args = arguments(8, 3, 4)
    specs = [P("x") if i in (0, 3) and i != operand else P() for i in range(4)]
    if operand == 3:
        args = (*args[:3], args[3][:1])

    def gradient(*local):
        return jax.grad(lambda *x: (ours("gelu", *x) ** 2).sum(), argnums=operand)(
            *local
        )

    if operand == 0:  # replicated rows, differing columns
        specs = [P(), P(None, "x"), P("x"), P(None, "x")]
        args = (normal(3, 4), normal(4, 8), normal(8), normal(3, 8))
    found = jax.jit(
        jax.shard_map(gradient, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    )(*args)
    expected = in_f64(
        jax.grad(lambda *x: (plain("gelu", *x) ** 2).sum(), argnums=operand), *args
    )
    assert_close(found, expected, 1e-5)


def test_shard_map_over_the_contraction(mesh):
    x, w = normal(5, 16), normal(16, 6)

    def partial_sums(x, w):
        return jax.lax.psum(gemm_cpu(x, w), "x")

    f = jax.jit(
        jax.shard_map(
            partial_sums, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P()
        )
    )
    exact(x, w).assert_near(f(x, w))
    found = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(x, w)
    expected = in_f64(jax.grad(lambda x, w: ((x @ w) ** 2).sum(), argnums=(0, 1)), x, w)
    assert_close(found, expected, 1e-5)


def test_shard_map_refuses_what_it_refuses_of_jnp(mesh):
    x, w = normal(16, 4), normal(4, 3)
    for mm in (gemm_cpu, jnp.matmul):
        f = jax.shard_map(mm, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
        with pytest.raises(ValueError, match="(?s)out_specs"):
            f(x, w)


def test_vmap_inside_of_shard_map(mesh):
    x, w, bias = normal(16, 5, 4), normal(4, 3), normal(16, 3)
    each = jax.vmap(block, in_axes=(0, None, 0))
    f = jax.shard_map(each, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    exact(x, w, bias[:, None], "gelu").assert_near(jax.jit(f)(x, w, bias))


def test_explicitly_sharded_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x, w, bias = normal(16, 5), normal(5, 6), normal(6)
    args = (jax.device_put(x, NamedSharding(mesh, P("x"))), w, bias)
    args = (args[0], *jax.device_put((w, bias), NamedSharding(mesh, P())))

    def f(*args, implementation=None):
        return matmul(
            *args[:2], bias=args[2], activation="gelu", implementation=implementation
        )

    jitted = jax.jit(f, static_argnames="implementation")
    result = jitted(*args)
    exact(x, w, bias, "gelu").assert_near(result)
    assert result.sharding.spec[0] == "x"
    text = jitted.lower(*args).compile().as_text()
    assert text is not None
    assert "all-gather" not in text and "all-reduce" not in text

    def gradients(f, *args):
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*args)

    expected = in_f64(functools.partial(gradients, plain_block), x, w, bias)
    found = jax.jit(functools.partial(gradients, f))(*args)
    assert_close(found, expected, 1e-5)
    assert [jax.typeof(g) for g in found] == [jax.typeof(x) for x in args]
    for demanded in ("tracea", "gemm_cpu"):
        own = jax.jit(functools.partial(f, implementation=demanded))
        assert custom_calls(own, *args) == 1
        exact(x, w, bias, "gelu").assert_near(own(*args))

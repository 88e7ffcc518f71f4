"""Batch norms whose gradients come of two sums, as programs have them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jaxprs import equations
from numerics import f64, normal
from transforms import assert_close

import tracea_jax as tracea

pytestmark = pytest.mark.once

C = 8


def exactly(f, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(f64(x)), args)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def weighed(y):
    """A sum of entries that are not alike."""
    return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()


def calls(f, *args):
    return equations(tracea.transform(f), *args, name="tracea_channel_affine")


def sites(f, *args):
    return [e.params["result"].steps for e in calls(f, *args)]


def large_sums(f, *args):
    """How many sums over arrays of the first argument's size a program has."""
    found = equations(f, *args, name="reduce_sum")
    planned = equations(f, *args, name="tracea_channel_sums")
    large = [e for e in found if e.invars[0].aval.size >= args[0].size]
    return len(large) + 2 * len(planned)


def moments(x, axes, keepdims=False):
    mean = x.mean(axes, keepdims=keepdims)
    return mean, (x * x).mean(axes, keepdims=keepdims) - mean * mean


def batch_norm(x, scale, bias):
    mean, variance = moments(x, (0, 1, 2))
    return jax.nn.relu((x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias)


def residual_block(x, scale, bias):
    """Its result is used twice."""
    y = jnp.sin(x)
    mean, variance = moments(y, (0, 1, 2))
    y = jax.nn.relu((y - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias + x / 32)
    return jnp.cos(y) * y


def channels_first(x, scale, bias):
    mean, variance = moments(x, (0, 2, 3), keepdims=True)
    scale, bias = scale[:, None, None], bias[:, None, None]
    return jax.nn.silu((x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias)


def divided(x, scale, bias):
    mean, variance = moments(x, (0, 1, 2))
    return bias - (mean - x) / jnp.sqrt(variance + 1e-3) * scale


def group_norm(x, scale, bias):
    groups = x.reshape(*x.shape[:3], 2, C // 2)
    mean, variance = moments(groups, (1, 2, 4), keepdims=True)
    mean, variance = (
        jnp.broadcast_to(m, (len(x), 1, 1, 2, C // 2)).reshape(-1, 1, 1, C)
        for m in (mean, variance)
    )
    return jax.nn.silu((x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias)


NORMS = {
    batch_norm: ("sub", "mul", "add"),
    residual_block: ("sub", "mul", "add"),
    channels_first: ("sub", "mul", "mul", "add"),
    divided: ("rsub", "div", "mul", "rsub"),
}


def arguments(norm):
    """x with a mean far from zero, scale and bias."""
    x = normal(3, 5, 7, C) + 10 * normal(C)
    x = x.transpose(0, 3, 1, 2) if norm is channels_first else x
    return x, normal(C, seed=1), normal(C, seed=2)


def value_and_gradients(f):
    return jax.value_and_grad(lambda *args: weighed(f(*args)), (0, 1, 2))


def test_norms_and_their_gradients():
    args = [arguments(norm) for norm in NORMS]
    for (norm, steps), own in zip(NORMS.items(), args, strict=True):
        assert sites(norm, *own) == [steps]
        step = value_and_gradients(norm)
        fewer = large_sums(tracea.transform(step), *own)
        assert fewer == large_sums(step, *own) - len(steps) + 2, norm

    def of_all(f):
        return lambda args: [f(norm)(*args[i]) for i, norm in enumerate(NORMS)]

    plain, step = of_all(lambda norm: norm), of_all(value_and_gradients)
    both = jax.jit(lambda args: (tracea.transform(plain)(args), plain(args)))
    jax.tree.map(np.testing.assert_array_equal, *both(args))
    assert_close(tracea.transform(step)(args), exactly(step, args), 3e-4)


@pytest.fixture
def a_gpu() -> Iterator[None]:
    """Programs are traced as for a GPU, so that a kernel's op has the sums."""
    with tracea.options(device="H200"):
        yield


@pytest.mark.usefixtures("a_gpu")
def test_what_jax_makes_of_it():
    """Forward mode, second derivatives, vmap, loops and checkpoints."""
    args = arguments(batch_norm)

    def made(f):
        def loss(*args):
            return weighed(f(*args))

        def many(x, scale, bias):
            layer = jax.checkpoint(lambda x, p: (f(x, *p) + x, None))
            return weighed(lax.scan(layer, x, (scale[None], bias[None]))[0])

        direction = jax.tree.map(jnp.sin, args)
        gradient = jax.grad(loss, (0, 1))
        return {
            "jvp": jax.jvp(f, args, direction)[1],
            "reverse over forward": jax.grad(
                lambda *a: weighed(jax.jvp(f, a, direction)[1]), (0, 1, 2)
            )(*args),
            "forward over reverse": jax.jvp(gradient, args, direction)[1],
            "reverse over reverse": jax.grad(
                lambda *a: weighed(gradient(*a)[0]), (0, 1, 2)
            )(*args),
            "map of gradients": jax.vmap(gradient, (None, 0, None))(
                args[0], jnp.stack([args[1]] * 2), args[2]
            ),
            "map": jax.vmap(f, (None, None, 0))(*args[:2], jnp.stack([args[2]] * 2)),
            "loop": jax.grad(many, (0, 1, 2))(*args),
        }

    norm = lambda x, s, b: jnp.tanh(  # noqa: E731
        residual_block(batch_norm(x, s, b), s, b)
    )
    assert [e.params["result"].copies for e in calls(norm, *args)] == [1, 2]
    found = jax.jit(lambda: made(tracea.transform(norm)))()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-3),
        found,
        jax.jit(lambda: made(norm))(),
    )


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        y = nn.relu(norm()(nn.Conv(C, (3, 3), use_bias=False)(x)))
        y = nn.swish(nn.GroupNorm(2)(nn.Conv(C, (3, 3))(y)))
        return norm(dtype=jnp.bfloat16)(y).astype(jnp.float32)


def test_the_modules_of_flax():
    x = normal(2, 6, 5, 3)
    variables = jax.jit(Net().init)(jax.random.key(0), x)

    def loss(variables, x):
        y, state = Net().apply(variables, x, mutable=["batch_stats"])
        return weighed(y), state

    assert len(sites(loss, variables, x)) == 2
    step = jax.value_and_grad(loss, has_aux=True)
    found, plain = tracea.transform(step)(variables, x), jax.jit(step)(variables, x)
    assert_close(found, plain, 1e-2)


def test_batch_norm_of_nnx_and_its_running_statistics():
    def made():
        norm: Any = nnx.BatchNorm(C, rngs=nnx.Rngs(0))
        norm.scale[...], norm.bias[...] = normal(C, seed=1), normal(C, seed=2)
        return norm

    def step(norm, x):
        return nnx.value_and_grad(lambda norm, x: weighed(jnp.sin(norm(x))))(norm, x)

    x = normal(4, 9, C) + 3
    one, other = made(), made()
    found, plain = tracea.transform(step)(one, x), step(other, x)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(plain), 1e-4)
    assert_close(one.mean[...], other.mean[...], 1e-5)
    assert_close(one.var[...], other.var[...], 1e-5)


def layer_norm(x, scale, bias):
    mean, variance = moments(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias


@pytest.mark.usefixtures("a_gpu")
def test_a_block_in_half_precision_rounds_as_it_is_written():
    """A residual, its gradient, and the sum of cotangents of both uses."""

    def two(x, scale, bias):
        y = batch_norm(x.astype(jnp.float32), scale, bias).astype(x.dtype)
        for _ in range(2):
            wide = jnp.sin(y).astype(jnp.float32)
            mean, variance = moments(wide, (0, 1, 2))
            z = (wide - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias
            y = jax.nn.relu(y + z.astype(y.dtype))
        return y

    x, *rest = arguments(batch_norm)
    args = x.astype(jnp.bfloat16), *rest
    results = [e.params["result"] for e in calls(two, *args)]
    assert [(r.residual, r.copies) for r in results] == [(False, 1), (1, 2), (1, 1)]
    assert [r.dtype for r in results] == [None, "bfloat16", "bfloat16"]
    step = jax.jit(value_and_gradients(two))
    assert_close(tracea.transform(step)(*args), step(*args), 2e-2)


def without_statistics(x, scale, bias):
    return jax.nn.relu((x - bias) * scale + bias + x / 2) * x


def test_a_result_is_forked_in_training_only():
    (call,) = calls(without_statistics, *arguments(batch_norm))
    assert call.params["result"].residual
    assert call.params["result"].copies == 1


LEFT = {
    "layer norm": layer_norm,
    "group norm": group_norm,
    "two steps": lambda x, s, b: x * s + b,
    "no scale": lambda x, s, b: x + s + b - s,
    "no shift but one": lambda x, s, b: x * s - 2.0,
    "a shift between": lambda x, s, b: (x * s + b) * b,
    "used before": lambda x, s, b: (y := (x - s) * s) + b + y,
    "integers": lambda x, s, b: ((x.astype(int) - 1) * 2 + jnp.arange(C)) * 1.0,
}


def test_what_is_no_row_of_scales_and_shifts_is_left():
    for name, f in LEFT.items():
        assert sites(f, *arguments(batch_norm)) == [], name


def test_symbolic_shapes_are_left():
    n, h = jax.export.symbolic_shape("n, h")
    x = jax.ShapeDtypeStruct((n, h, h, C), jnp.float32)
    vector = jax.ShapeDtypeStruct((C,), jnp.float32)
    assert calls(batch_norm, x, vector, vector) == []


def test_explicit_shardings():
    mesh = jax.make_mesh((8,), ("n",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, scale, bias = normal(8, 2, 2, C), normal(C), normal(C, seed=1)

    def loss(x, scale, bias):
        return weighed(batch_norm(x, scale, bias))

    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.P("n"))
        assert len(sites(loss, x, scale, bias)) == 1
        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        found, plain = (
            jax.jit(tracea.transform(step))(x, scale, bias),
            step(x, scale, bias),
        )
        assert_close(found, plain, 1e-5)
        assert list(map(jax.typeof, found)) == list(map(jax.typeof, plain))

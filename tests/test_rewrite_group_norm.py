"""Group norms in plain programs: the spellings that are found, and what is left."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jaxprs import equations
from numerics import normal

import tracea_jax as tracea
from tracea_jax.ops.group_norm.primitive import problem_of, reference
from tracea_jax.rewrite import group_norm

pytestmark = pytest.mark.usefixtures("calls_only")

N, H, W, C, G = 3, 4, 5, 12, 3
B = jnp.bfloat16


def arguments(dtype="float32", shape=(N, H, W, C)):
    return normal(*shape, dtype=dtype), normal(C, seed=1), normal(C, seed=2)


def sites(f, *args):
    """A description of each site of a program, in words and numbers."""
    found = equations(tracea.transform(f), *args, name="tracea_group_norm")
    return [
        (problem_shape(e), e.params["groups"], e.params["activation"]) for e in found
    ]


def problem_shape(equation):
    """(images, pixels, channels)."""
    p = problem_of([x.aval for x in equation.invars], **equation.params)
    return p.images, p.pixels, p.channels


def grouped(x):
    return x.reshape(len(x), -1, G, C // G)


def by_moments(x, scale, bias):
    """As flax computes them."""
    x32 = grouped(x).astype(jnp.float32)
    mean, square = x32.mean((1, 3)), (x32 * x32).mean((1, 3))
    variance = jnp.maximum(square - mean * mean, 0)
    mean, variance = (
        jnp.repeat(v, C // G, axis=1)[:, None, None] for v in (mean, variance)
    )
    y = (x - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias
    return jax.nn.silu(y.astype(x.dtype))


def by_var(x, scale, bias):
    x32 = grouped(x).astype(jnp.float32)
    y = x32 - x32.mean((1, 3), keepdims=True)
    y = y * lax.rsqrt(x32.var((1, 3), keepdims=True) + 1e-3)
    return jax.nn.silu((y.reshape(x.shape) * scale + bias).astype(x.dtype))


def by_distances(x, scale, bias):
    """One difference for both, and a division."""
    d = grouped(x) - grouped(x).mean((1, 3), keepdims=True)
    y = d / jnp.sqrt((d**2).mean((1, 3), keepdims=True) + 1e-3)
    return jax.nn.silu(y.reshape(x.shape) * scale + bias)


def with_channels_in_view(x, scale, bias):
    """Scale and bias have the groups' shape."""
    x32 = x.reshape(N, H, W, G, C // G)
    mean = x32.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(x32 - mean).mean((1, 2, 4), keepdims=True)
    scale, bias = scale.reshape(G, -1), bias.reshape(G, -1)
    y = (x32 - mean) * (lax.rsqrt(variance + 1e-3) * scale) + bias
    return jax.nn.silu(y.reshape(x.shape))


SPELLINGS = (by_moments, by_var, by_distances, with_channels_in_view)


@pytest.mark.parametrize("f", SPELLINGS)
def test_spellings_are_sites_and_compute_the_same(f):
    args = arguments()
    assert sites(f, *args) == [((N, H * W, C), G, "silu")]
    flat = (args[0].reshape(N, H * W, C), *args[1:])
    wanted = reference(*flat, groups=G, epsilon=1e-3, activation="silu")[0]
    found = jax.jit(tracea.transform(f))(*args).reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def linen(dtype, shape=(N, H, W, C), **how):
    how = {"num_groups": G, "dtype": dtype, **how}
    module = nn.GroupNorm(**how)
    x = normal(*shape, dtype="float32").astype(dtype)
    variables = module.init(jax.random.key(0), x)

    def normed(x: Any) -> Any:
        y: Any = module.apply(variables, x)
        return nn.swish(y)

    return normed, x


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_fast_variance": False},
        {"use_bias": False},
        {"use_scale": False},
        {"num_groups": 1},
        {"num_groups": C},
        {"shape": (N, 20, C)},
    ],
    ids=str,
)
def test_modules_of_flax_linen(how):
    for dtype in (jnp.float32, B):
        f, x = linen(dtype, **how)
        groups = how.get("num_groups", G)
        assert sites(f, x) == [((N, 20, C), groups, "silu")]
    if not how:
        found, wanted = (g(x).astype("float32") for g in (tracea.transform(f), f))
        np.testing.assert_allclose(found, wanted, rtol=0.06, atol=0.06)  # bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_of_flax_nnx(dtype):
    module = nnx.GroupNorm(C, num_groups=G, dtype=dtype, rngs=nnx.Rngs(0))
    x = normal(N, H, W, C, dtype=dtype)
    assert sites(lambda x: nnx.gelu(module(x)), x) == [((N, H * W, C), G, "gelu")]


def in_another_order(x, scale, bias):
    """Channels of a group are not neighbours."""
    x32 = x.reshape(N, -1, C // G, G)
    mean, variance = x32.mean((1, 2), keepdims=True), x32.var((1, 2), keepdims=True)
    return ((x32 - mean) * lax.rsqrt(variance + 1e-3)).reshape(x.shape) * scale + bias


def with_means_of_others(x, scale, bias):
    """Means lie at entries of other groups."""
    mean, variance = grouped(x).mean((1, 3)), grouped(x).var((1, 3))
    mean, variance = (jnp.tile(v, (1, C // G))[:, None, None] for v in (mean, variance))
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias


def with_variance_of_another(x, scale, bias):
    x32 = grouped(x)
    variance = grouped(x[::-1]).var((1, 3), keepdims=True)
    y = (x32 - x32.mean((1, 3), keepdims=True)) * lax.rsqrt(variance + 1e-3)
    return y.reshape(x.shape) * scale + bias


def unbiased(x, scale, bias):
    """A variance with n - 1."""
    x32 = grouped(x)
    variance = x32.var((1, 3), keepdims=True, ddof=1)
    y = (x32 - x32.mean((1, 3), keepdims=True)) * lax.rsqrt(variance + 1e-3)
    return y.reshape(x.shape) * scale + bias


def batch_norm(x, scale, bias):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias


def whose_mean_is_used(x, scale, bias):
    mean = grouped(x).mean((1, 3), keepdims=True)
    variance = grouped(x).var((1, 3), keepdims=True)
    y = (grouped(x) - mean) * lax.rsqrt(variance + 1e-3)
    return y.reshape(x.shape) * scale + bias, mean


def with_scales_of_pixels(x, scale, bias):
    y = by_var(x, jnp.ones(C), jnp.zeros(C))
    return y * x[:, :, :, :1] + bias


def layer_norm(x, scale, bias):
    """A site only where a kernel serves it."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + bias


LEFT = (
    in_another_order,
    with_means_of_others,
    with_variance_of_another,
    unbiased,
    batch_norm,
    whose_mean_is_used,
    layer_norm,
)


@pytest.mark.parametrize("f", LEFT)
def test_what_only_looks_like_a_norm_is_left(f):
    assert sites(f, *arguments()) == []


# --- factors --------------------------------------------------------------------------


def with_factor(factor):
    """A norm times a factor, after it."""

    def normed(x, g, h):
        x32 = grouped(x)
        mean, variance = (m((1, 3), keepdims=True) for m in (x32.mean, x32.var))
        y = (x32 - mean) * lax.rsqrt(variance + 1e-3)
        return y.reshape(x.shape) * factor(x, g, h)

    return normed


def inside(factor):
    """The inverse deviation times a factor."""

    def normed(x, g, h):
        x32 = grouped(x)
        mean, variance = (m((1, 3), keepdims=True) for m in (x32.mean, x32.var))
        of_channels = factor(x, g, h).reshape(G, C // G)
        return (x32 - mean) * (lax.rsqrt(variance + 1e-3) * of_channels)

    return normed


FACTORS = {
    "g * 2": lambda x, g, h: g * 2,
    "g * h": lambda x, g, h: g * h,
    "g * x[0]": lambda x, g, h: g * x[0, 0, 0, 0],
    "g * h * 2": lambda x, g, h: g * h * 2,
    "g * (h * g)": lambda x, g, h: g * (h * g),
    "g / h": lambda x, g, h: g / h,
    "rsqrt(g)": lambda x, g, h: lax.rsqrt(g * g + 1),
    "1 + g": lambda x, g, h: 1 + g,
}


@pytest.mark.parametrize("place", [with_factor, inside])
@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_factors_are_applied_once(place, factor):
    args = normal(N, H, W, C), 1 + jnp.arange(C) / 8, 2 + jnp.arange(C) / 4
    f = place(factor)
    assert len(sites(f, *args)) == 1
    found, wanted = (g(*args) for g in (tracea.transform(f), f))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_result_of_the_norm_is_no_scale_of_it(monkeypatch):
    """In a row of one image, the difference has the size of a scale."""
    monkeypatch.setattr(group_norm, "is_served", lambda *_: True)

    def squared(x):
        d = x - x.mean(-1, keepdims=True)
        return d * lax.rsqrt(jnp.square(d).mean(-1, keepdims=True) + 1e-3) * d

    x = normal(1, C)
    np.testing.assert_allclose(tracea.transform(squared)(x), squared(x), rtol=2e-5)


def test_what_follows_and_is_of_pixels_stays():
    args = arguments()
    assert sites(with_scales_of_pixels, *args) == [((N, H * W, C), G, "silu")]
    found, wanted = (
        g(*args)
        for g in (tracea.transform(with_scales_of_pixels), with_scales_of_pixels)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_gradients_through_a_site():
    args = arguments()

    def gradients(f):
        def loss(*a):
            return jnp.sum(jnp.sin(f(*a)) * jnp.cos(jnp.arange(C)))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    found = gradients(tracea.transform(by_moments))(*args)
    for a, b in zip(found, gradients(by_moments)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    inside = tracea.transform(gradients(by_moments))
    assert equations(inside, *args, name="tracea_group_norm_gradients")


def test_a_program_keeps_its_norm_where_the_kernel_demanded_cannot_run():
    args = arguments()
    with tracea.options(implementation="tracea"):  # on a CPU, which has none for it
        fast = jax.jit(tracea.transform(by_moments))
        np.testing.assert_array_equal(fast(*args), jax.jit(by_moments)(*args))


def test_dimensions_of_images_and_pixels_stay_apart():
    args = arguments()
    (norm,) = equations(tracea.transform(by_moments), *args, name="tracea_group_norm")
    assert norm.invars[0].aval.shape == args[0].shape and norm.params["ranks"] == 1
    mapped = equations(
        jax.vmap(tracea.transform(by_moments), (0, None, None)),
        jnp.stack([args[0]] * 2),
        *args[1:],
        name="tracea_group_norm",
    )
    assert [e.params["ranks"] for e in mapped] == [2]

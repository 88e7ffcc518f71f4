"""Images with channels first, lines and transposed convolutions become sites too."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxprs import equations
from numerics import f64, normal
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax.rewrite.channels_last import with_channels_last
from tracea_jax.rewrite.inline import inlined

C = 4
NCHW = ("NCHW", "OIHW", "NCHW")


def conv(x, w, strides=(1, 1), padding: Any = "SAME", numbers=NCHW, **how):
    how = dict(dimension_numbers=numbers, **how)
    return lax.conv_general_dilated(x, w, strides, padding, **how)


def integers(*shape, seed=0):
    """Small integers: sums of their products are exact in any order."""
    values = np.random.default_rng(seed).integers(-3, 4, shape)
    return jnp.asarray(values, jnp.float32)


def exactly(f, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(f64(x)), args)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def with_gradients(f):
    """f, and the gradients of a sum of its entries that are not alike."""

    def both(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return both


def images_turned(f, *args):
    """Equations that transpose images in what f becomes with kernels of ours."""
    with tracea.options(implementation="tracea"):
        found = equations(tracea.transform(f), *args, name="transpose")
    return [e for e in found if e.invars[0].aval.shape[0] == args[0].shape[0]]


# --- what is between convolutions -----------------------------------------------------


def indexed(c):
    return c[:, None, None]


def max_pool(y, low=0):
    pads = ((0, 0), (0, 0), (low, 0), (0, low))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 1), pads)


def mean_pool(y):
    window = (1, 1, 2, 2)
    return lax.reduce_window(y, 0.0, lax.add, window, window, "VALID") / 4


# (y, c, r) -> of an image, an array of one entry a channel and another image.
BETWEEN = {
    "relu": lambda y, c, r: jax.nn.relu(y),
    "other activations": lambda y, c, r: jnp.clip(jnp.abs(y) - 1, 0, 6) * jnp.sign(y),
    "bias": lambda y, c, r: y * indexed(c) + c.reshape(1, -1, 1, 1) - 0.5,
    "whole bias": lambda y, c, r: y + jnp.broadcast_to(indexed(c), y.shape),
    "one bias each": lambda y, c, r: y + jnp.stack([c, -c])[:, :, None, None],
    "rows": lambda y, c, r: y + jnp.arange(6.0)[:, None] * jnp.arange(5.0),
    "residual": lambda y, c, r: y + r,
    "choice": lambda y, c, r: jnp.where(r > 0, y, -1.0),
    "dtypes": lambda y, c, r: y.astype(jnp.int32).astype(jnp.float32),
    "max pool": lambda y, c, r: max_pool(y),
    "padded pool": lambda y, c, r: max_pool(y, 1),
    "mean pool": lambda y, c, r: mean_pool(y),
    "pad": lambda y, c, r: jnp.pad(y, ((0, 0), (0, 0), (2, 1), (0, 3))),
    "slice": lambda y, c, r: y[:, :, 1::2, :-1],
    "rev": lambda y, c, r: y[:, :, :, ::-1],
    "concatenate": lambda y, c, r: jnp.concatenate([y, r], 1)[:, 2 : 2 + C],
    "split": lambda y, c, r: jnp.add(*jnp.split(y, 2, 2)),
    "mean of channels": lambda y, c, r: y - indexed(y.sum((0, 2, 3))),
    "mean of images": lambda y, c, r: y - y.sum((2, 3), keepdims=True),
    "mean of pixels": lambda y, c, r: y - y.max(1, keepdims=True),
    "gate": lambda y, c, r: y * (y.sum((2, 3)) @ r[0, :, 0, :C])[..., None, None],
    "turned twice": lambda y, c, r: (y.transpose(0, 2, 3, 1) + c).transpose(0, 3, 1, 2),
    "map": lambda y, c, r: jax.vmap(lambda z: z[None][0] * 2 + indexed(c))(y),
}  # fmt: skip


def turned_and_plain(between):
    """(function with channels last, equations of it, function as it is written)."""
    x, v, w = integers(2, 3, 6, 5), integers(C, 3, 3, 3), integers(C, C, 3, 3, seed=1)
    c, r = integers(C, seed=2), integers(2, C, 6, 5, seed=3)

    def f(x, v, w, c, r):
        return conv(between(conv(x, v), c, r), w)

    args = x, v, w, c, r
    closed = jax.make_jaxpr(f)(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    eqns = with_channels_last(inlined(jaxpr.eqns).eqns, jaxpr.outvars)
    last = jaxpr.replace(eqns=eqns)
    last = jaxpr_as_fun(last if jaxpr is closed else closed.replace(jaxpr=last))
    return (lambda: last(*args)[0]), eqns, lambda: f(*args)


def test_what_lies_between_convolutions_follows_them():
    """One transposition before, one after, and the same bits."""
    made = {name: turned_and_plain(between) for name, between in BETWEEN.items()}
    for name, (_, eqns, _) in made.items():
        turned = [e.invars[0].aval for e in eqns if e.primitive.name == "transpose"]
        images = [a for a in turned if a.size > 2 * C]
        other = name in ("residual", "choice", "concatenate")  # than the first one
        assert len(images) == 2 + other, (name, images)
    both = jax.jit(lambda: {name: (f(), g()) for name, (f, _, g) in made.items()})()
    for name, (found, expected) in both.items():
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_what_needs_channels_first_has_them():
    x, w = integers(2, C, 6, 5), integers(C, C, 3, 3)

    def f(x, w):
        y = conv(x, w)
        z = conv(jnp.cumsum(y, 1), w)
        return y, z.reshape(2, -1), jnp.argmax(z, 1), z

    with tracea.options(implementation="tracea"):
        found = tracea.transform(f)(x, w)
    jax.tree.map(np.testing.assert_array_equal, found, f(x, w))


def test_a_program_that_no_kernel_serves_stays_as_it_is():
    x, w = normal(2, C, 6, 5), normal(C, C, 3, 3)
    f = lambda x, w: conv(jax.nn.relu(conv(x, w)), w)  # noqa: E731
    with tracea.options(implementation="xla"):
        text = jax.jit(tracea.transform(f)).lower(x, w).as_text()
        np.testing.assert_array_equal(tracea.transform(f)(x, w), jax.jit(f)(x, w))
    assert "transpose" not in text and "tracea" not in text


# --- whole programs -------------------------------------------------------------------


def batch_norm(y, scale, shift):
    mean = y.mean((0, 2, 3))
    variance = (y * y).mean((0, 2, 3)) - mean * mean
    return (y - indexed(mean)) * indexed(lax.rsqrt(variance + 1e-3) * scale) + indexed(
        shift
    )


def resnet(x, stem, blocks, scale, shift):
    """In training: a stem, a pool, two blocks, the mean over all pixels."""
    y = max_pool(jax.nn.relu(batch_norm(conv(x, stem, (2, 2)), scale, shift)))
    for first, second in blocks:
        z = jax.nn.relu(batch_norm(conv(y, first), scale, shift))
        y = jax.nn.relu(y + batch_norm(conv(z, second), scale, shift))
    return y.mean((2, 3))


def weights(*shape, seed):
    return normal(*shape, seed=seed) / np.sqrt(np.prod(shape[1:]))


def test_a_resnet_with_channels_first():
    stem = weights(C, 3, 7, 7, seed=1)
    blocks = [
        tuple(weights(C, C, 3, 3, seed=2 + 2 * i + j) for j in range(2))
        for i in range(2)
    ]
    args = normal(2, 3, 20, 18), stem, blocks, jnp.abs(normal(C)) + 1, normal(C)
    assert len(images_turned(resnet, *args)) == 1
    f = with_gradients(resnet)
    with tracea.options(implementation="tracea"):
        found = tracea.transform(f)(*args)
    assert_close(found, exactly(f, *args), 2e-4)


def whisper(x, v, w, b, c, numbers):
    """Its stem: spectra over time, a second convolution with every other window."""
    y = jax.nn.gelu(conv(x, v, (1,), [(1, 1)], numbers) + b)
    return jax.nn.gelu(conv(y, w, (2,), [(1, 1)], numbers) + c)


@pytest.mark.parametrize("last", [True, False], ids=["NWC", "NCW"])
def test_convolutions_over_lines(last):
    """Audio, as convolutions over images of height 1."""
    numbers = ("NWC", "WIO", "NWC") if last else ("NCW", "OIW", "NCW")
    x, v, w = normal(2, 21, 10), weights(3, 10, 8, seed=1), weights(3, 8, 8, seed=2)
    b, c = normal(8), normal(8, seed=1)
    if not last:
        x, v, w = x.transpose(0, 2, 1), v.transpose(2, 1, 0), w.transpose(2, 1, 0)
        b, c = b[:, None], c[:, None]
    f = functools.partial(whisper, numbers=numbers)
    with tracea.options(implementation="tracea"):
        g = tracea.transform(f)
        calls = equations(g, x, v, w, b, c, name="tracea_conv2d")
        epilogues = {str(e.params["epilogue"]) for e in calls}
        found = tracea.transform(with_gradients(f))(x, v, w, b, c)
    assert epilogues == {"bias+gelu"} and len(calls) == 2
    assert_close(found, exactly(with_gradients(f), x, v, w, b, c), 1e-5)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = functools.partial(nn.ConvTranspose, C, strides=(2, 2))
        a = nn.relu(nn.Conv(C, (3, 3))(x))
        b = nn.relu(nn.Conv(2 * C, (3, 3), strides=(2, 2))(a))
        c = nn.relu(up((2, 2))(b))
        d = nn.relu(up((4, 4), padding="SAME")(b))
        e = nn.relu(up((3, 3), padding="VALID")(b)[:, :-1, :-1])
        return nn.Conv(1, (1, 1))(jnp.concatenate([a, c, d, e], -1))


def test_a_unet_with_transposed_convolutions():
    x = normal(2, 8, 6, 3)
    shapes = jax.eval_shape(UNet().init, jax.random.key(0), x)
    leaves, tree = jax.tree.flatten(shapes)
    made = [weights(*a.shape, seed=i) for i, a in enumerate(leaves)]
    variables = jax.tree.unflatten(tree, made)
    f = UNet().apply
    with tracea.options(implementation="tracea"):
        calls = equations(tracea.transform(f), variables, x, name="tracea_conv2d")
        directions = sorted(e.params["direction"] for e in calls)
        found = tracea.transform(with_gradients(f))(variables, x)
    assert directions == ["forward"] * 3 + ["input_grad"] * 3
    assert_close(found, exactly(with_gradients(f), variables, x), 1e-5)


# How entries are spread: distances, taps' distances and padding of the spread image.
SPREADS = {
    "more than the kernel": dict(strides=(3, 4), padding=((2, 2), (2, 2))),
    "dilated": dict(strides=(2, 1), rhs_dilation=(2, 3), padding=((4, 3), (6, 2))),
    "cropped": dict(strides=(2, 2), padding=((0, 1), (1, 0))),
    "behind the last window": dict(strides=(3, 3), padding=((2, 4), (0, 3))),
    "channels first": dict(strides=(2, 2), numbers=NCHW),
    "to channels first": dict(strides=(2, 2), numbers=("NHWC", "HWIO", "NCHW")),
    "other weights": dict(strides=(2, 2), numbers=("NHWC", "OIHW", "NHWC")),
}


def spread(name):
    """A transposed convolution, and its arguments."""
    how = {"numbers": ("NHWC", "HWIO", "NHWC"), "padding": ((1, 2), (2, 1))}
    how |= SPREADS[name]
    lhs, rhs, _ = numbers = how.pop("numbers")
    x = integers(2, 5, 4, 3).transpose(["NHWC".index(d) for d in lhs])
    w = integers(3, 3, 3, 5).transpose(["HWIO".index(d) for d in rhs])

    steps = dict(lhs_dilation=how["strides"], rhs_dilation=how.get("rhs_dilation"))
    return functools.partial(
        conv, strides=(1, 1), padding=how["padding"], numbers=numbers, **steps
    ), (x, w)


def test_transposed_convolutions():
    made = {name: spread(name) for name in SPREADS}

    def f(args):
        return {name: made[name][0](*args[name]) for name in made}

    args = {name: args for name, (_, args) in made.items()}
    with tracea.options(implementation="tracea"):
        calls = equations(tracea.transform(f), args, name="tracea_conv2d")
        found = tracea.transform(f)(args)
    assert [e.params["direction"] for e in calls] == ["input_grad"] * len(SPREADS)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(f)(args))

"""Convolutions of plain programs become one op each, with the steps after them."""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jaxprs import equations
from numerics import f64, normal
from transforms import PLAIN, assert_close

import tracea_jax as tracea
from tracea_jax.rewrite import splice
from tracea_jax.transform import rules_of, transform

pytestmark = pytest.mark.usefixtures("calls_only")

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
C = 8  # channels of most results


def conv(x, w, strides=(1, 1), *, numbers=NHWC, **how):
    how = {"padding": "SAME", **how}
    return lax.conv_general_dilated(x, w, strides, dimension_numbers=numbers, **how)


def images(*shape, numbers=NHWC):
    """Random x and w for results of C channels; small weights."""
    n, h, w, i = shape
    x, weights = normal(n, h, w, i), normal(3, 3, i, C) / math.sqrt(9 * i)
    if numbers == NCHW:
        return x.transpose(0, 3, 1, 2), weights.transpose(3, 2, 0, 1)
    return x, weights


def sites(f, *args):
    """The epilogue of each site that f becomes."""
    found = equations(transform(f), *args, name="tracea_conv2d")
    return [str(e.params["epilogue"]) for e in found]


def rewritten(f, *args):
    """(jaxpr of f, the same with its sites, what was left)."""
    jaxpr, misses = jax.make_jaxpr(f)(*args), []
    return jaxpr, splice(jaxpr, rules_of(("conv2d",)), misses), misses


def reasons(f, *args):
    """Why convolutions of f are left."""
    return [miss.reason for miss in rewritten(f, *args)[2]]


def exactly(f, *args):
    """f in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(f64(x)), args)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def check(f, *args, epilogue):
    """f is one site with this epilogue, nothing else is as large, values are right.

    But for reshapes, and for transpositions of images with channels first.
    """
    check_all({"it": f}, *args, epilogue=epilogue)


def check_all(programs, *args, epilogue):
    """``check`` for several programs, which are compiled together."""
    for name, f in programs.items():
        eqns = rewritten(f, *args)[1].eqns
        size = eqns[-1].outvars[0].aval.size
        large = [e for e in eqns if e.outvars[0].aval.size == size]
        passed = ("reshape", "squeeze", "transpose")
        found = [e for e in large if e.primitive.name not in passed]
        assert [e.primitive.name for e in found] == ["tracea_conv2d"], name
        assert str(found[0].params["epilogue"]) == epilogue, name
    f = together(programs)
    assert_close(jax.jit(transform(f))(*args), exactly(f, *args))


def together(programs):
    """One program of several."""
    return lambda *args: {name: f(*args) for name, f in programs.items()}


# --- windows and layouts --------------------------------------------------------------

WINDOWS = {
    "same": {},
    "not all read": dict(padding="VALID", strides=(4, 3)),
    "strided": dict(strides=(2, 3)),
    "padded": dict(padding=((2, 0), (1, 3))),
    "dilated": dict(rhs_dilation=(2, 1)),
    "groups": dict(feature_group_count=2),
    "depthwise": dict(feature_group_count=4, strides=(2, 2)),
}


layouts = pytest.mark.parametrize("numbers", [NHWC, NCHW], ids=["nhwc", "nchw"])


def windows(numbers):
    """conv with each of the windows, on x and the weights of one group."""

    def program(how):
        def f(x, w):
            i = 4 // how.get("feature_group_count", 1)
            w = w[:, :i] if numbers == NCHW else w[:, :, :i]
            return conv(x, w, numbers=numbers, **how)

        return f

    return {name: program(how) for name, how in WINDOWS.items()}


def forward_params(how):
    return {
        "strides": how.get("strides", (1, 1)),
        "dilation": how.get("rhs_dilation", (1, 1)),
        "groups": how.get("feature_group_count", 1),
    }


@layouts
def test_a_convolution_is_the_same_in_our_op(numbers):
    x, w = images(2, 9, 7, 4, numbers=numbers)
    for name, f in windows(numbers).items():
        (e,) = equations(transform(f), x, w, name="tracea_conv2d")
        # Windows that do not overlap make a product, which reads either layout.
        layout = numbers[0].lower() if name == "not all read" else "nhwc"
        expected = forward_params(WINDOWS[name]) | {"layout": layout}
        assert expected.items() <= e.params.items(), name
    f = together(windows(numbers))
    with tracea.options(implementation="xla"):
        same = transform(f)(x, w)
    jax.tree.map(np.testing.assert_array_equal, same, jax.jit(f)(x, w))


@pytest.mark.parametrize(
    "numbers", [("NHWC", "OIHW", "NHWC"), ("NHWC", "HWOI", "NHWC")], ids="-".join
)
def test_only_the_weights_of_another_layout_are_transposed(numbers):
    x, w = images(2, 6, 5, 3)
    x = x.transpose(["NHWC".index(d) for d in numbers[0]])
    w = w.transpose(["HWIO".index(d) for d in numbers[1]])
    f = functools.partial(conv, numbers=numbers)
    (transposed,) = equations(transform(f), x, w, name="transpose")
    assert transposed.invars[0].aval.shape == w.shape
    assert_close(transform(f)(x, w), exactly(f, x, w))


def test_dtype_of_the_result_stays():
    x, w = (a.astype(jnp.bfloat16) for a in images(2, 6, 5, 3))
    f = functools.partial(conv, preferred_element_type=jnp.float32)
    assert sites(f, x, w) == ["none"]
    assert transform(f)(x, w).dtype == jnp.float32


# --- bias, activation, residual -------------------------------------------------------

BIASES = {
    NHWC: {
        "broadcast": lambda y, b: y + b,
        "first": lambda y, b: b + y,
        "reshaped": lambda y, b: y + b.reshape(1, 1, 1, -1),
        "whole": lambda y, b: y + jnp.broadcast_to(b, y.shape),
        "subtracted": lambda y, b: y - b,
        "twice": lambda y, b: y + b + 2 * b,
        "number": lambda y, b: y + 0.5,
        "one": lambda y, b: y + b[3],
    },
    NCHW: {
        "indexed": lambda y, b: y + b[:, None, None],
        "reshaped": lambda y, b: y + b.reshape(1, -1, 1, 1),
        "expanded": lambda y, b: y + jnp.expand_dims(b, (0, 2, 3)),
        "whole": lambda y, b: y + jnp.broadcast_to(b[:, None, None], y.shape),
    },
}


def after_conv(follow, numbers=NHWC):
    return lambda x, w, *rest: follow(conv(x, w, numbers=numbers), *rest)


@layouts
def test_bias_in_every_spelling(numbers):
    def activated(add):
        return after_conv(lambda y, b: jax.nn.relu(add(y, b)), numbers)

    programs = {name: activated(add) for name, add in BIASES[numbers].items()}
    args = *images(2, 7, 5, 3, numbers=numbers), normal(C)
    check_all(programs, *args, epilogue="bias+relu")


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "silu"])
def test_activations(activation):
    f = after_conv(lambda y, b: PLAIN[activation](y + b))
    check(f, *images(2, 7, 5, 3), normal(C), epilogue=f"bias+{activation}")


def test_the_modules_of_flax():
    x = normal(2, 7, 5, 3)
    module = nn.Sequential([nn.Conv(C, (3, 3)), nn.relu])
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda a: normal(*a.shape) / 5, variables)
    check(module.apply, variables, x, epilogue="bias+relu")


def test_residual_on_either_side():
    programs = {
        "right": after_conv(lambda y, b, r: jax.nn.relu(y + b + r)),
        "left": after_conv(lambda y, b, r: jax.nn.relu(r + (y + b))),
    }
    args = *images(2, 7, 5, 3), normal(C), normal(2, 7, 5, C)
    check_all(programs, *args, epilogue="bias+relu+residual")


def test_bias_after_the_residual():
    f = after_conv(lambda y, b, r: y + r + b)
    args = *images(2, 7, 5, 3), normal(C), normal(2, 7, 5, C)
    check(f, *args, epilogue="bias+residual")


STOPS = {
    "residual after the activation": (lambda y, r, b: jax.nn.relu(y) + r, "relu"),
    "second residual": (lambda y, r, b: y + r + 2 * r, "residual"),
    "scale of the residual": (lambda y, r, b: (y + r) * b, "residual"),
    "one entry an image": (lambda y, r, b: y + r[:, :1, :1], "none"),
    "one entry a row": (lambda y, r, b: y + r[:1, :, :1, :1], "none"),
    "broadcast residual": (
        lambda y, r, b: y + jnp.broadcast_to(r[:, :1, :1], y.shape),
        "none",
    ),
    "several uses": (lambda y, r, b: (z := y + b) * jnp.tanh(z), "bias"),
    "result of its own": (lambda y, r, b: (y, jax.nn.relu(y + b)), "none"),
    "other activation": (lambda y, r, b: jax.nn.elu(y + b), "bias"),
    "product with an array": (lambda y, r, b: y * r, "none"),
    "number by it": (lambda y, r, b: 1 / y, "none"),
    "division by zero": (lambda y, r, b: y / 0.0, "none"),
}


def test_what_follows_and_is_no_epilogue_is_left():
    args = *images(2, 7, 5, 3), normal(2, 7, 5, C), normal(C)
    programs = {name: after_conv(follow) for name, (follow, _) in STOPS.items()}
    for name, f in programs.items():
        assert sites(f, *args) == [STOPS[name][1]], name
    f = together(programs)
    found, expected = transform(f)(*args), jax.jit(f)(*args)
    # Divided by numbers near zero, what is within rounding differs by much.
    for both in (found, expected):
        both["number by it"] = 1 / both["number by it"]
    equal = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(equal, found, expected)


def test_an_op_for_each_image_of_a_map():
    """vmap and modules for one image put dimensions of size 1 around the image."""
    make = functools.partial(eqx.nn.Conv2d, 3, C, 3, padding=1)
    module = eqx.filter_eval_shape(make, key=jax.random.key(0))
    x, w = images(2, 7, 5, 3, numbers=NCHW)

    def f(w, b, x):
        where = lambda m: (m.weight, m.bias)  # noqa: E731
        return jax.nn.relu(jax.vmap(eqx.tree_at(where, module, (w, b)))(x))

    check(f, w, normal(C, 1, 1), x, epilogue="bias+relu")


def test_patches_in_a_row():
    def f(x, w, b, r):
        patches = conv(x, w, (3, 3), padding="VALID").reshape(2, -1, C)
        return jax.nn.relu(patches + b + r)

    args = *images(2, 9, 6, 3), normal(C), normal(2, 6, C)
    check(f, *args, epilogue="bias+relu+residual")


# --- batch norm -----------------------------------------------------------------------


def moments(shape=(C,)):
    """mean, variance, scale and bias of a batch norm."""
    mean, variance, scale, bias = (normal(*shape, seed=i) for i in range(4))
    return mean, jnp.abs(variance) + 0.5, scale, bias


NORMS = {
    "scale last": lambda y, m, v, s, b: (y - m) * lax.rsqrt(v + 1e-5) * s + b,
    "one scale": lambda y, m, v, s, b: (y - m) * (s * lax.rsqrt(v + 1e-5)) + b,
    "division": lambda y, m, v, s, b: s * ((y - m) / jnp.sqrt(v + 1e-5)) + b,
    "power": lambda y, m, v, s, b: (y - m) * (v + 1e-5) ** -0.5 * s + b,
    "reciprocal": lambda y, m, v, s, b: (y - m) * (s / jnp.sqrt(1e-5 + v)) + b,
}

# Scales that may be anything, so their values must be known.
AFFINE = {
    "affine": lambda y, m, v, s, b: y * s + b,
    "turned": lambda y, m, v, s, b: b - s * (m - y),
    "negated": lambda y, m, v, s, b: -(y * s) + b,
    "divided": lambda y, m, v, s, b: (y - m) / v + b,
    "numbers": lambda y, m, v, s, b: (y * 0.5 - 1.5) / 3 * 1.25 + b,
}


def residual_and_moments(numbers):
    r = normal(2, 7, 5, C).transpose(["NHWC".index(d) for d in numbers[2]])
    return r, moments((C,) if numbers == NHWC else (C, 1, 1))


def normed(norm, *known):
    """relu(norm(y, *moments) + r) of y and r and the moments that are not known."""
    return lambda y, r, *m: jax.nn.relu(norm(y, *known, *m) + r)


@layouts
def test_batch_norm_by_hand(numbers):
    x, w = images(2, 7, 5, 3, numbers=numbers)
    r, norm = residual_and_moments(numbers)
    programs = {name: after_conv(normed(f), numbers) for name, f in NORMS.items()}
    check_all(programs, x, w, r, *norm, epilogue="bias+relu+residual")


@layouts
def test_known_scales(numbers):
    x, w = images(2, 7, 5, 3, numbers=numbers)
    r, norm = residual_and_moments(numbers)
    programs = {n: after_conv(normed(f, *norm), numbers) for n, f in AFFINE.items()}
    check_all(programs, x, w, r, epilogue="bias+relu+residual")


def test_a_scale_alone_needs_no_bias():
    s = normal(C)
    check(lambda x, w: conv(x, w) * s, *images(2, 7, 5, 3), epilogue="none")


def test_a_scale_made_outside_of_a_nested_function():
    @jax.checkpoint
    def layer(x, w, scale, shift):
        return jnp.sin(conv(x, w) * scale + shift)

    def f(x, w, v, s, b):
        return layer(x, w, s * lax.rsqrt(v + 1e-5), b)

    args = *images(2, 7, 5, 3), *moments()[1:]
    assert sites(f, *args) == ["bias"]
    assert_close(transform(f)(*args), exactly(f, *args))


def assert_alike_by_channel(found, expected, name, sizes=None):
    """Asserts equal special values, and others that differ by rounding.

    ``sizes``: of what was rounded on the way, for each channel, if that was larger.
    """
    found, expected = f64(found).T, f64(expected).T
    sizes = np.zeros(len(found)) if sizes is None else sizes
    for x, y, size in zip(found, expected, sizes, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite], name)
        bound = 1e-5 * np.abs(y[finite]).max(initial=1e-36) + 2.0**-22 * size
        assert (np.abs(x[finite] - y[finite]) <= bound).all(), name


SPECIAL = [1.0, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-40, 1e-38, -1e-30, 3e38]
SCALES = {
    "divided": lambda y, s: y / s,
    "multiplied": lambda y, s: y * s,
    "affine": lambda y, s: jax.nn.relu((y - 1) * s + 1),
    "no epsilon": lambda y, s: y * lax.rsqrt(s),
    "tiny epsilon": lambda y, s: y / jnp.sqrt(s + 1e-38),
    "no variance": lambda y, s: y / (s + 1e-5),
    "subtracted epsilon": lambda y, s: y * lax.rsqrt(s - 1e-5),
    "epsilon inside": lambda y, s: y * lax.rsqrt((s + 1e-5) * s),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("name", SCALES)
def test_special_scales_keep_their_meaning(name, is_known):
    """Zeros, infinities and NaN are where they were, and so are large and tiny values.

    Scaled weights would make sums of infinities, and overflow or vanish themselves.
    """
    x, w = images(2, 5, 4, 3)
    scale = jnp.asarray(SPECIAL, jnp.float32)
    w = jnp.concatenate([w * 1e-3, w[..., :2] * 1e3], -1)
    programs = {"as they are": (x, w), "large and tiny": (x * 1e20, w * 1e-19)}
    for which, args in programs.items():
        for value in [scale] if not is_known else [scale, scale[:1], scale[-1:]]:
            s = jnp.broadcast_to(value, scale.shape)

            def f(x, w, s=s):
                return SCALES[name](conv(x, w), s)

            args = (*args[:2],) if is_known else (*args[:2], s)
            # What is added and taken away again was rounded as the number it was.
            sizes = 1 + np.abs(f64(s)) if name == "affine" else np.zeros(len(s))
            assert_alike_by_channel(
                transform(f)(*args), jax.jit(f)(*args), which, sizes
            )


@pytest.mark.parametrize("name", ["times", "minus"])
def test_zeros_of_both_signs_are_two_numbers(name):
    x, w = images(1, 9, 9, 3)
    follow = {"times": lambda y, c: y * c, "minus": lambda y, c: c - jax.nn.relu(y)}
    for zero in (0.0, -0.0):
        f = lambda x, w, c=zero: jnp.sign(1 / follow[name](conv(x, w), c))  # noqa: E731
        found, expected = jax.jit(lambda *a, f=f: (transform(f)(*a), f(*a)))(x, w)
        np.testing.assert_array_equal(found, expected)


def test_batch_norm_keeps_special_moments():
    """No variance, no weight, and what is lost already."""
    x, w = images(2, 5, 4, 3)
    mean = jnp.asarray([0, 1, jnp.inf, jnp.nan, 0, 0, 1, 0], jnp.float32)
    variance = jnp.asarray([0, 1e-40, 1, 1, jnp.inf, jnp.nan, 1e30, 1], jnp.float32)
    scale = jnp.asarray([1, -1, 1, 1, 1, 1, 0, jnp.nan], jnp.float32)
    for name, norm in NORMS.items():
        args = x, w, mean, variance, scale, normal(C)
        f = after_conv(norm)
        assert sites(f, *args) == ["bias"], name
        assert_alike_by_channel(transform(f)(*args), jax.jit(f)(*args), name)


def test_known_factors_of_a_norm_are_judged_by_their_values():
    x, w = images(2, 5, 4, 3)
    _, v, s, b = moments()
    v, s = v.at[0].set(0.1), s.at[0].set(3e38)

    def f(x, w):
        return conv(x, w) * lax.rsqrt(v + 1e-5) * s + b

    assert_alike_by_channel(transform(f)(x, w), jax.jit(f)(x, w), "infinite product")


class Block(nn.Module):
    """Convolution, batch norm, relu; conv_dtype is what both round to."""

    conv_dtype: Any = None
    is_training: bool = False
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        dtype, is_fixed = self.conv_dtype, not self.is_training
        x = nn.Conv(C, (3, 3), use_bias=self.use_bias, dtype=dtype)(x)
        return nn.relu(nn.BatchNorm(use_running_average=is_fixed, dtype=dtype)(x))


def block_variables(x, **fields):
    """Random variables of a block; the variances are positive."""
    shapes = jax.eval_shape(Block(**fields).init, jax.random.key(0), x)

    def leaf(path, like):
        value = normal(*like.shape, seed=len(str(path)))
        return jnp.abs(value) + 0.5 if "var" in str(path) else value / 4

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@pytest.mark.parametrize("use_bias", [False, True])
def test_batch_norm_of_linen(use_bias):
    block, x = Block(use_bias=use_bias), normal(2, 7, 5, 3)
    variables = block_variables(x, use_bias=use_bias)
    check(block.apply, variables, x, epilogue="bias+relu")


def test_batch_norm_of_nnx():
    class Module(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, C, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(C, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.conv(x)))

    module = nnx.eval_shape(lambda: Module(nnx.Rngs(0)))
    module.eval()
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda a: jnp.abs(normal(*a.shape)) / 4 + 0.1, state)
    f = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    check(f, state, normal(2, 7, 5, 3), epilogue="bias+relu")


def test_batch_norm_around_bfloat16():
    x = normal(4, 9, 8, 16)
    narrow: Any = Block(conv_dtype="bfloat16", use_bias=True).apply
    wide = Block(use_bias=True).apply
    variables = block_variables(x, use_bias=True)
    assert sites(narrow, variables, x) == ["bias+relu"]
    assert not equations(transform(narrow), variables, x, name="sub")  # no image is
    expected = exactly(wide, variables, x)
    plain = np.abs(f64(jax.jit(narrow)(variables, x)) - expected)
    found = transform(narrow)(variables, x)
    assert found.dtype == jnp.bfloat16
    assert np.abs(f64(found) - expected).mean() <= 2 * plain.mean()
    assert np.abs(f64(found) - expected).max() <= 2 * plain.max()


def wide(y, b, r):
    return jax.nn.relu(y.astype("float32") + b + r.astype("float32"))


def test_steps_in_float32_belong_to_a_narrow_convolution_if_its_result_is_narrow():
    x, w = (a.astype(jnp.bfloat16) for a in images(2, 7, 5, 3))
    r = normal(2, 7, 5, C, dtype="bfloat16")

    def narrow(y, b, r):
        return wide(y, b, r).astype("bfloat16")

    args = x, w, normal(C), r
    (e,) = equations(transform(after_conv(narrow)), *args, name="tracea_conv2d")
    assert str(e.params["epilogue"]) == "bias+relu+residual"
    bias, residual = e.invars[2:]
    assert (bias.aval.dtype, residual.aval.dtype) == (jnp.float32, jnp.bfloat16)
    expected = exactly(lambda *a: jax.nn.relu(conv(*a[:2]) + a[2] + a[3]), *args)
    error = np.abs(f64(transform(after_conv(narrow))(*args)) - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 1e-6).all()


AFTER_NARROW = {
    "bias": (lambda y, b: y.astype("float32") + b, "bias"),
    "promoted": (lambda y, b: y + b, "bias"),
    "activation": (lambda y, b: jax.nn.relu(y.astype("float32") - b), "bias+relu"),
    "scale": (lambda y, b: y.astype("float32") * b, "none"),
    "norm": (lambda y, b: (y - b) * lax.rsqrt(b * b + 1e-5) + b, "bias"),
    "residual": (lambda y, b: y + (b + jnp.zeros(y.shape)), "residual"),
}


@pytest.mark.parametrize("implementation", ["xla", "tracea"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_rounding_comes_before_steps_in_float32(dtype, implementation):
    """XLA leaves out that of bfloat16; that of float16 stays, for it has infinities."""
    x, w = (a.astype(dtype) for a in images(2, 7, 5, 3))
    b = normal(C)
    for name, (follow, epilogue) in AFTER_NARROW.items():
        f = after_conv(follow)
        if dtype == "bfloat16":
            assert sites(f, x, w, b) == [epilogue], name
        else:
            assert sites(f, x, w, b) == ["none"], name
        expected = exactly(f, x, w, b)
        with tracea.options(implementation=implementation):
            found = jax.jit(transform(f))(x, w, b)
        plain = jax.jit(f)(x, w, b)
        assert found.dtype == plain.dtype == jnp.float32
        error, usual = (np.abs(f64(y) - expected).mean() for y in (found, plain))
        assert error <= 1.1 * usual + 1e-7, name


@pytest.mark.parametrize("implementation", ["xla", "tracea"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_in_float32_are_rounded_once(dtype, implementation):
    """Before the result is narrow, whatever the operands of the convolution are."""
    x, w = images(2, 7, 5, 3)
    args = x.astype(dtype), w.astype(dtype), normal(C)

    def of_narrow(x, w, b):
        y = conv(x, w, preferred_element_type=jnp.float32)
        return jax.nn.gelu(y + b).astype(dtype)

    def of_wide(x, w, b):
        y = conv(x.astype("float32"), w.astype("float32"))
        return jax.nn.gelu(y + b).astype(dtype)

    expected = exactly(lambda x, w, b: jax.nn.gelu(conv(x, w) + b), *args)
    for f in (of_narrow, of_wide):
        assert sites(f, *args) == ["bias+gelu"]
        with tracea.options(implementation=implementation):
            found = jax.jit(transform(f))(*args)
        error, usual = (
            np.abs(f64(y) - expected).mean() for y in (found, jax.jit(f)(*args))
        )
        assert error <= 1.1 * usual


def test_batch_norm_in_training_is_not_folded():
    block, x = Block(is_training=True, use_bias=True), normal(2, 7, 5, 3)
    variables = block_variables(x, use_bias=True)
    f = functools.partial(block.apply, mutable=["batch_stats"])
    assert sites(f, variables, x) == ["bias"]
    assert_close(transform(f)(variables, x), exactly(f, variables, x), 1e-5)


def test_gradients_reach_all_of_a_folded_batch_norm():
    block, x = Block(), normal(2, 7, 5, 3)
    variables = block_variables(x)
    weights = normal(2, 7, 5, C)

    def gradients(apply, variables, x, weights):
        def loss(variables, x):
            return (apply(variables, x) * weights).sum()

        return jax.grad(loss, argnums=(0, 1))(variables, x)

    found = jax.jit(functools.partial(gradients, transform(block.apply)))
    expected = exactly(functools.partial(gradients, block.apply), variables, x, weights)
    assert_close(found(variables, x, weights), expected, 1e-5)


def products(f, *args):
    """Shapes of the elementwise products that are left."""
    return [e.outvars[0].aval.shape for e in equations(transform(f), *args, name="mul")]


def test_float16_is_not_scaled():
    """Its weights might overflow or vanish."""
    x, w = (a.astype(jnp.float16) for a in images(2, 7, 5, 3))
    b = normal(C, dtype="float16")
    f = after_conv(lambda y, b: y * b)
    assert products(f, x, w, b) == [(2, 7, 5, C)]
    assert sites(after_conv(lambda y, b: y + b), x, w, b) == ["bias"]


def test_narrow_weights_are_not_scaled_for_a_wide_result():
    x, w = (a.astype(jnp.bfloat16) for a in images(2, 7, 5, 3))
    s = normal(C)

    def f(x, w, s):
        return jax.nn.relu(conv(x, w, preferred_element_type=jnp.float32) * s)

    found, expected = transform(f)(x, w, s), jax.jit(f)(x, w, s)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_many_weights_are_not_scaled_for_a_small_result():
    mean, variance, *_ = moments()
    f = after_conv(lambda y, m, v: (y - m) * lax.rsqrt(v + 1e-5))
    few, many = images(1, 9, 9, 3), images(1, 3, 3, 64)
    assert (1, 9, 9, C) not in products(f, *few, mean, variance)
    assert products(f, *many, mean, variance) == [(1, 3, 3, C)]
    assert sites(f, *many, mean, variance) == ["bias"]


# --- inside other things --------------------------------------------------------------


def test_inside_of_loops_and_checkpoints():
    x, w, b = normal(2, 6, 5, C), normal(3, 3, 3, C, C) / 9, normal(3, C)

    def loss(x, w, b):
        @jax.checkpoint
        @jax.jit
        def layer(x, p):
            return x + jax.nn.silu(conv(x, p[0]) + p[1]), None

        return (lax.scan(layer, x, (w, b))[0] ** 2).sum()

    assert sites(loss, x, w, b) == ["bias+silu"]
    gradients = jax.grad(transform(loss), argnums=(0, 1, 2))
    expected = exactly(jax.grad(loss, argnums=(0, 1, 2)), x, w, b)
    assert_close(gradients(x, w, b), expected, 1e-5)


def test_two_branches_that_meet():
    """The first one takes the sum; the other is its residual."""

    def f(x, w, v, b):
        return jax.nn.relu((conv(x, w) + b) + conv(x, v))

    x, w = images(2, 6, 5, 3)
    args = x, w, normal(1, 1, 3, C), normal(C)
    assert sorted(sites(f, *args)) == ["bias+relu+residual", "none"]
    assert_close(transform(f)(*args), exactly(f, *args))


# --- gradients in the program itself --------------------------------------------------


def step_of(f):
    """A function that differentiates inside: f and both of its gradients."""

    def step(x, w):
        y, pull = jax.vjp(f, x, w)
        return y, pull(jnp.sin(y))

    return step


@layouts
def test_gradients_of_a_training_step(numbers):
    x, w = images(2, 9, 7, 4, numbers=numbers)
    steps = {name: step_of(f) for name, f in windows(numbers).items()}
    for name, step in steps.items():
        found = equations(transform(step, after_grad=True), x, w, name="tracea_conv2d")
        directions = [e.params["direction"] for e in found]
        how = forward_params(WINDOWS[name])
        # lax reorders the weights of groups: the gradient looks like a forward one.
        third = {"groups": ["forward"], "depthwise": []}.get(name, ["input_grad"])
        expected = sorted(["forward", "weight_grad", *third])
        assert sorted(directions) == expected, name
        assert len(reasons(step, x, w)) == 3 - len(found)
        assert all(how.items() <= e.params.items() for e in found), name
    f = together(steps)
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    found = transform(f, after_grad=True)(x, w)
    jax.tree.map(equal, found, jax.jit(f)(x, w))


# --- what is left ---------------------------------------------------------------------


def upsampled(x, w):
    how = dict(lhs_dilation=(2, 2), padding=((4, 0), (1, 1)))
    return conv(x, w, **how)


def cropped(x, w):
    return conv(x, w, padding=((-1, 1), (0, 0)))


def of_image_groups(x, w):
    return conv(x, w, batch_group_count=2)


def precise(x, w):
    return conv(x, w, precision=lax.Precision.HIGHEST)


def of_images_last(x, w):
    return conv(x, w, numbers=("NHWC", "HWIO", "HWNC"))


LEFT = {
    upsampled: "it is transposed: its lhs_dilation is (2, 2)",
    cropped: "it crops: its padding is ((-1, 1), (0, 0))",
    of_image_groups: "it has groups of images: its batch_group_count is not 1",
    precise: "it asks for a precision other than the default",
    of_images_last: "it reads NHWC and gives HWNC; each must be NHWC or NCHW",
}


@pytest.mark.parametrize("f", LEFT, ids=lambda f: f.__name__)
def test_what_is_left_is_left_with_a_reason(f):
    x, w = images(2, 6, 5, 3)
    before, after, misses = rewritten(f, x, w)
    assert [miss.reason for miss in misses] == [LEFT[f]]
    assert after is before


def test_volumes_are_left():
    x, w = normal(2, 3, 5, 5, 5), normal(4, 3, 2, 2, 2)
    f = functools.partial(lax.conv, window_strides=(1, 1, 1), padding="SAME")
    assert reasons(f, x, w) == ["it is 3-dimensional, not 1- or 2-dimensional"]


def test_integers_are_left():
    x, w = jnp.ones((2, 6, 5, 3), jnp.int32), jnp.ones((3, 3, 3, C), jnp.int32)
    assert reasons(conv, x, w) == ["int32 is left to XLA"]


def test_empty_and_weakly_typed_arrays_are_left():
    x, w = images(2, 6, 5, 3)
    assert reasons(conv, x[:0], w) == ["its arrays are empty"]
    weak = jax.jit(lambda: jnp.broadcast_to(jnp.asarray(1.5), x.shape))()
    assert weak.weak_type
    f = lambda x: conv(x, x[:1, :3, :3, :].transpose(1, 2, 3, 0))  # noqa: E731
    assert reasons(f, weak) == ["its dtype is weak"]
    assert transform(f)(weak).weak_type

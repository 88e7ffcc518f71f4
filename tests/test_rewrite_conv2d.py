"""Convolutions of plain programs become one op each, with the steps after them."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolved import (
    NCHW,
    NHWC,
    C,
    after_conv,
    check,
    check_all,
    conv,
    exactly,
    images,
    layouts,
    reasons,
    rewritten,
    sites,
    together,
)
from jax import lax
from jaxprs import equations
from numerics import normal
from transforms import PLAIN, assert_close

import tracea_jax as tracea
from tracea_jax.transform import transform

pytestmark = pytest.mark.usefixtures("calls_only")


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

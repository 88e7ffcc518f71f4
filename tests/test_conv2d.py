"""conv2d's values against lax's convolution: the epilogue, its roundings, errors."""

from __future__ import annotations

import functools
from typing import Any

import convolutions
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from convolutions import arguments, exact, lax_conv
from jaxprs import equations
from numerics import normal
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.ops import conv2d
from tracea_jax.ops.conv2d.primitive import reference

pytestmark = pytest.mark.once

OURS = ("float32", "bfloat16", "float16")


@hypothesis.settings(max_examples=40)
@hypothesis.given(convolutions.calls(), st.sampled_from(OURS))
def test_any_shapes_and_floats_give_what_lax_gives(call, dtype):
    x, w, how = call
    x, w = normal(*x, dtype=dtype), normal(*w, dtype=dtype, seed=1)
    result = conv2d(x, w, **how)
    assert result.dtype == dtype
    exact(x, w, **how).assert_near(result)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    convolutions.calls(), st.sampled_from([*OURS, "int32", "int8", "complex64"])
)
def test_xla_without_an_epilogue_is_bit_equal(call, dtype):
    x, w, how = call
    hypothesis.assume(how["padding"] != convolutions.CROPPING)  # see the next test
    x, w = ((3 * normal(*s)).astype(dtype) for s in (x, w))
    np.testing.assert_array_equal(
        conv2d(x, w, implementation="xla", **how), lax_conv(x, w, **how), strict=True
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("padding", [(-1, 1), (-3, 3), (-6, 4), (-9, 9)])
def test_nothing_outside_of_x_is_read(padding, dtype):
    # which XLA on CPUs does in places, if a padding is negative in front only
    x, w = normal(2, 6, 5, 3, dtype=dtype), normal(3, 3, 3, 4, dtype=dtype)
    for strides in ((1, 1), (2, 3)):
        how: Any = dict(strides=strides, padding=(padding, (0, 1)))
        exact(x, w, **how).assert_near(conv2d(x, w, **how))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"strides": 2}, {"strides": (2, 2)}),
        ({"strides": [2, 1]}, {"strides": (2, 1)}),
        ({"strides": np.int32(3)}, {"strides": (3, 3)}),
        ({"dilation": 2}, {"dilation": (2, 2)}),
        ({"padding": 1}, {"padding": ((1, 1), (1, 1))}),
        ({"padding": [[0, 1], [2, 3]]}, {"padding": ((0, 1), (2, 3))}),
        ({"padding": np.ones((2, 2), int)}, {"padding": ((1, 1), (1, 1))}),
        ({"padding": "same"}, {"padding": "SAME"}),
    ],
    ids=str,
)
def test_one_number_stands_for_both_axes(short, long):
    x, w = normal(1, 7, 6, 2), normal(3, 2, 2, 3)
    np.testing.assert_array_equal(conv2d(x, w, **short), lax_conv(x, w, **long))


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x, w, bias, residual = (a.astype("float64") / 3 for a in arguments())
        result = conv2d(x, w, bias=bias, residual=residual, activation="gelu_exact")
        assert result.dtype == "float64"
        expected = exact(x, w, bias, residual, activation="gelu_exact")
        expected.assert_near(result, unit=2.0**-53)


def test_numpy_arrays_are_operands_too():
    x, w = np.ones((1, 4, 4, 2)), np.ones((3, 3, 2, 1), np.float32)
    result = conv2d(x, w)
    assert isinstance(result, jax.Array) and result.dtype == "float32"
    assert result[0, :2, :2, 0].tolist() == [[8, 12], [12, 18]]


@pytest.mark.parametrize(
    ("lhs", "rhs"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("int8", "f4")]
)
def test_operands_are_promoted_to_their_common_dtype(lhs, rhs):
    x, w = ((3 * a).astype(d) for a, d in zip(arguments(), (lhs, rhs), strict=False))
    result = conv2d(x, w)
    assert result.dtype == "float32"
    exact(x, w).assert_near(result)


# --- the epilogue ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", slow_unless(["float32"], OURS))
@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_epilogue(activation, dtype):
    layout = "NHWC" if dtype == "float32" else "NCHW"
    args: Any = [a.astype(dtype) for a in arguments(layout, groups=2, stride=2)]
    how = dict(activation=activation, strides=(2, 2), groups=2, layout=layout)
    for implementation in (None, "xla"):
        result = convolutions.ours(*args, **how, implementation=implementation)
        assert result.dtype == dtype
        if dtype == "float32":
            exact(*args, **how).assert_near(result)
    # XLA serves it as people write it: every step rounds.
    written = jax.jit(functools.partial(convolutions.plain, **how))
    np.testing.assert_array_equal(result, written(*args), strict=True)


@pytest.mark.parametrize("given", ["bias", "residual"])
def test_bias_and_residual_are_optional(given):
    x, w, bias, residual = arguments()
    added: Any = {"bias": bias} if given == "bias" else {"residual": residual}
    result = conv2d(x, w, **added, activation="silu")
    exact(x, w, **added, activation="silu").assert_near(result)


def test_the_activation_comes_after_the_residual():
    x, w = jnp.ones((1, 1, 1, 1)), jnp.full((1, 1, 1, 1), 2.0)
    y = conv2d(x, w, residual=jnp.full((1, 1, 1, 1), -3.0), activation="relu")
    assert y.item() == 0
    y = conv2d(x, -w, residual=jnp.full((1, 1, 1, 1), 3.0), activation="relu")
    assert y.item() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_reference_rounds_once(dtype):
    args = [a.astype(dtype) for a in arguments(size=(9, 8))]
    (equation,) = equations(
        functools.partial(convolutions.ours, activation="relu"),
        *args,
        name="tracea_conv2d",
    )

    def run(out):
        return reference(*args, **{**equation.params, "out": jnp.dtype(out)})[0]

    wide = run("float32").astype(dtype)
    np.testing.assert_array_equal(run(dtype), wide, strict=True)
    # Rounding the convolution first is visible in this very example.
    x, w, bias, residual = args
    z = conv2d(x, w).astype("float32") + bias.astype("float32")
    twice = jax.nn.relu(z + residual.astype("float32")).astype(dtype)
    assert (run(dtype) != twice).any()


def test_bias_and_residual_may_have_other_dtypes():
    x, w, bias, residual = arguments()
    x, w = x.astype("bfloat16"), w.astype("bfloat16")
    args: Any = (x, w, bias, residual.astype("float16"))
    result = convolutions.ours(*args)
    assert result.dtype == "bfloat16"
    exact(*args).assert_near(result)


def test_integers_take_bias_relu_and_residual():
    x, w = jnp.array([1, -2]).reshape(1, 1, 1, 2), jnp.array([3, 4]).reshape(1, 1, 2, 1)
    y = conv2d(x, w, bias=jnp.array([1]), activation="relu", residual=x[..., :1] * 9)
    assert y.dtype == "int32" and y.item() == 5
    with pytest.raises(ValueError, match="activation='gelu' needs a floating-point"):
        conv2d(x, w, activation="gelu")


# --- precision and output dtype -------------------------------------------------------


def traced_precision(f, *args, name="tracea_conv2d"):
    (equation,) = equations(f, *args, name=name)
    return equation.params["precision"]


@pytest.mark.parametrize(
    "precision", [None, "float32", jax.lax.Precision.HIGH, ("high", "highest")], ids=str
)
def test_precision_means_what_it_means_in_lax(precision):
    x, w, *_ = arguments()
    f = functools.partial(conv2d, precision=precision)
    g = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )
    expected = traced_precision(g, x, w, name="conv_general_dilated")
    assert traced_precision(f, x, w) == expected
    with jax.default_matmul_precision("highest"):
        inside = traced_precision(conv2d, x, w)
    assert inside == (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize("out", ["float32", jnp.bfloat16, np.dtype("float16"), float])
@pytest.mark.parametrize("dtype", OURS)
def test_the_result_has_the_preferred_dtype(dtype, out):
    x, w, *_ = (a.astype(dtype) for a in arguments())
    result = conv2d(x, w, preferred_element_type=out)
    assert result.dtype == jnp.zeros((), out).dtype
    exact(x, w).assert_near(result)


def test_small_integers_may_be_summed_in_wide_ones():
    x, w = jnp.full((1, 2, 2, 5), 100, jnp.int8), jnp.full((2, 2, 5, 1), 100, jnp.int8)
    result = conv2d(x, w, padding="VALID", preferred_element_type=jnp.int32)
    assert result.dtype == "int32" and result.item() == 200_000


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": normal(4, 5, 2)}, r"x must have 4 dimensions, NHWC.*\(4, 5, 2\)"),
        ({"w": normal(3, 2)}, r"w must have 4 dimensions, HWIO.*\(3, 2\)"),
        (
            {"w": normal(3, 2, 3, 3)},
            r"HWIO \(3, 2, 3, 3\), must take 2 channels.*it takes 3",
        ),
        ({"layout": "NCHW"}, r"OIHW \(3, 2, 2, 3\), must take 4 channels.*it takes 2"),
        ({"groups": 2}, "groups=2 must divide the channels.*2 and 3"),
        ({"groups": 0}, "groups=0 must be a positive integer"),
        ({"groups": 1.0}, "groups=1.0 must be a positive integer"),
        ({"w": normal(0, 2, 2, 3)}, r"at least one tap.*\(0, 2, 2, 3\)"),
        ({"bias": normal(4)}, r"bias must have shape \(3,\).*\(4,\)"),
        ({"bias": normal(1, 3)}, r"bias must have shape \(3,\).*\(1, 3\)"),
        (
            {"residual": normal(1, 1, 1, 3)},
            r"residual must have the result's shape, \(2, 4, 5, 3\).*\(1, 1, 1, 3\)",
        ),
        ({"residual": normal(3)}, r"residual must have.*\(2, 4, 5, 3\).*\(3,\)"),
        ({"strides": (1, 2, 3)}, r"strides=\(1, 2, 3\) must be one.*or a pair"),
        ({"strides": 0}, "strides=0 must be a positive integer"),
        ({"dilation": (1, -1)}, "dilation=-1 must be a positive integer"),
        ({"dilation": "2"}, "dilation='2' must be one positive integer"),
        ({"padding": "FULL"}, "'FULL' must be one of SAME, VALID, SAME_LOWER"),
        ({"padding": (1, 1)}, r"padding=\(1, 1\) must be one of.*\(\(top, bottom\)"),
        ({"padding": ((0, 0.5), (1, 1))}, "must be one of SAME"),
        ({"padding": None}, "padding=None must be one of SAME"),
        ({"padding": ((-9, 0), (0, 0))}, "Negative padding is larger"),
        ({"layout": "nhwc"}, "layout='nhwc'.*NHWC, NCHW"),
        ({"activation": "swish"}, "'swish'.*none, relu, gelu, gelu_exact, silu"),
        (
            {"implementation": "cudnn"},
            "'cudnn'.*None.*tracea, conv2d_product, .*conv2d_sm90, .*xla",
        ),
        ({"config": {"tile": 1}}, "xla has no config field tile"),
        ({"precision": "bogus"}, "[Pp]recision"),
    ],
    ids=str,
)
def test_mistakes_are_value_errors(changes, message):
    x, w, *_ = arguments()
    call = {"x": x, "w": w, **changes}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        conv2d(call.pop("x"), call.pop("w"), **call)


@pytest.mark.parametrize("name", ["x", "w", "bias", "residual"])
def test_lists_are_type_errors(name):
    x, w, bias, residual = arguments()
    call = {"x": x, "w": w, "bias": bias, "residual": residual, name: [1.0, 2.0]}
    with pytest.raises(TypeError, match=f"conv2d takes arrays; {name} is a list"):
        conv2d(call.pop("x"), call.pop("w"), **call)


def test_ours_are_refused_with_a_reason():
    x, w, *_ = arguments("NCHW")
    message = "'tracea' cannot run conv2d 2x4x5x2.*conv2d_cpu: layout nchw"
    with pytest.raises(tracea.Unsupported, match=message):
        conv2d(x, w, layout="NCHW", implementation="tracea")

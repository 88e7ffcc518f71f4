"""conv2d under vmap: every operand and direction, nested, and with grad."""

from __future__ import annotations

import functools
import itertools

import convolutions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import GELU, PLAIN_GELU, arguments, gradients
from jaxprs import equations
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close, in_f64

from tracea_jax.ops import conv2d
from tracea_jax.ops.conv2d.primitive import conv2d_p, reference
from tracea_jax.problem import Epilogue

pytestmark = pytest.mark.once

SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]


@pytest.mark.parametrize(
    "mapped",
    [
        pytest.param(s, marks=[pytest.mark.slow] * bool(i % 3))
        for i, s in enumerate(SUBSETS)
    ],
    ids=lambda s: "".join("-x"[i] for i in s),
)
@pytest.mark.parametrize(("groups", "layout"), [(1, "NHWC"), (2, "NCHW")])
def test_vmap_over_any_operands(mapped, groups, layout):
    size = 3
    args = arguments(layout, groups)
    # The mapped axis is first, last, or in the middle.
    axes = [
        i % (x.ndim + 1) if m else None
        for i, (x, m) in enumerate(zip(args, mapped, strict=True))
    ]
    args = [
        x if axis is None else normal(*x.shape[:axis], size, *x.shape[axis:], seed=i)
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]
    f = functools.partial(GELU, groups=groups, layout=layout)
    found = jax.jit(jax.vmap(f, in_axes=axes, out_axes=2))(*args)
    for i in range(size):
        one = (
            x if a is None else np.take(np.asarray(x), i, a)
            for x, a in zip(args, axes, strict=True)
        )
        expected = convolutions.exact(
            *one, activation="gelu", groups=groups, layout=layout
        )
        expected.assert_near(found[:, :, i])


FORMS = list(
    itertools.product(
        ("forward", "input_grad", "weight_grad"),
        [("nhwc", 1), ("nhwc", 2), ("nchw", 3)],
        [(0, 0), (0, None), (None, 0)],
    )
)


@pytest.mark.parametrize(("direction", "form", "axes"), slow_unless(FORMS[::4], FORMS))
def test_vmap_of_every_direction(direction, form, axes):
    layout, groups = form
    x, w, _, y = arguments(layout.upper(), groups, size=(5, 4), stride=2)
    operands, size = {
        "forward": ((x, w), None),
        "input_grad": ((y, w), (5, 4)),
        "weight_grad": ((x, y), (3, 2)),
    }[direction]
    operands = [
        a if axis is None else normal(2, *a.shape, seed=i)
        for i, (a, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    params = dict(direction=direction, layout=layout, groups=groups, size=size)
    params |= dict(strides=(2, 2), padding=((0, 1), (0, 0)), dilation=(1, 1))
    params |= dict(precision=None, epilogue=Epilogue(), config=None)
    bind = functools.partial(conv2d_p.bind, implementation=None, **params)
    mapped = jax.vmap(functools.partial(bind, out=jnp.dtype("float32")), in_axes=axes)
    (found,) = jax.jit(mapped)(*operands)
    (equation,) = equations(mapped, *operands, name="tracea_conv2d")
    assert equation.params["groups"] == groups * (2 if None not in axes else 1)
    oracle = functools.partial(reference, out=jnp.float64, **params)

    def each(*operands):
        for i in range(2):
            pairs = zip(operands, axes, strict=True)
            yield oracle(*(a if axis is None else a[i] for a, axis in pairs))[0]

    expected = in_f64(jax.jit(lambda *a: jnp.stack(list(each(*a)))), *operands)
    assert_close(found, expected)


def test_a_mapped_x_becomes_more_examples():
    x, w, *_ = arguments()
    f = jax.vmap(conv2d, in_axes=(0, None))
    (equation,) = equations(f, jnp.stack([x] * 5), w, name="tracea_conv2d")
    assert equation.outvars[0].aval.shape == (10, 4, 5, 3)
    assert equation.params["groups"] == 1


def test_nothing_may_be_mapped_over():
    x, w, *_ = arguments()
    for axes in ((0, 0), (0, None), (None, 0)):
        operands = [
            a if axis is None else jnp.zeros((0, *a.shape))
            for a, axis in zip((x, w), axes, strict=True)
        ]
        assert jax.vmap(conv2d, in_axes=axes)(*operands).shape == (0, 2, 4, 5, 3)


def test_nested_vmap():
    x, w, bias, residual = arguments()
    xs, ws, biases = normal(2, 3, *x.shape), normal(3, *w.shape), normal(2, 3)
    inner = jax.vmap(GELU, in_axes=(0, 0, None, None))
    found = jax.vmap(inner, in_axes=(0, None, 0, None))(xs, ws, biases, residual)
    for i, j in itertools.product(range(2), range(3)):
        args = (xs[i, j], ws[j], biases[i], residual)
        convolutions.exact(*args, activation="gelu").assert_near(found[i, j])


def test_vmap_and_grad_in_either_order():
    x, w, bias, residual = arguments()
    args = (normal(3, *x.shape), w, normal(3, 3), residual)
    axes = (0, None, 0, None)

    def of_each(f, *args):
        return jax.vmap(functools.partial(gradients, f), in_axes=axes)(*args)

    def of_all(f, *args):
        return gradients(jax.vmap(f, in_axes=axes), *args)

    for both in (of_each, of_all):
        expected = in_f64(jax.jit(functools.partial(both, PLAIN_GELU)), *args)
        found = jax.jit(functools.partial(both, GELU))(*args)
        assert_close(found, expected, 1e-5)

"""Plain convolutions and what they become, for the tests of their rewrite."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from numerics import array, f64, normal
from transforms import assert_close

from tracea_jax.rewrite import splice
from tracea_jax.transform import rules_of, transform

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
        wide = jax.tree.map(lambda x: array(f64(x)), args)
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


layouts = pytest.mark.parametrize("numbers", [NHWC, NCHW], ids=["nhwc", "nchw"])


def after_conv(follow, numbers=NHWC):
    return lambda x, w, *rest: follow(conv(x, w, numbers=numbers), *rest)

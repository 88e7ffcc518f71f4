"""matmul and the plain code beside it, for the tests of its transformations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import equations
from numerics import array, normal

from tracea_jax.ops import matmul

gemm_cpu = functools.partial(matmul, implementation="gemm_cpu")
LAYOUTS = ("nn", "nt", "tn", "tt")
PLAIN = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def ours(activation, a, b, bias, residual):
    return gemm_cpu(a, b, bias=bias, activation=activation, residual=residual)


def plain(activation, a, b, bias, residual):
    return PLAIN[activation](a @ b + bias) + residual


def arguments(m=5, n=3, k=4):
    """a, b, bias, residual; no sum before the activation is near relu's kink."""
    a, b, bias, residual = normal(m, k), normal(k, n), normal(n), normal(m, n)
    assert jnp.abs(a @ b + bias).min() > 0.02
    return a, b, bias, residual


def in_f64(f, *args):
    """f of the same numbers in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: array(np.asarray(x, np.float64)), args)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


_known: dict[Any, Any] = {}


def in_f64_once(case, f, *args):
    """``in_f64``, kept for other tests of the same case."""
    if case not in _known:
        _known[case] = in_f64(f, *args)
    return _known[case]


def each_in_f64(f, axes, *args):
    """``in_f64`` of ``jax.vmap(f, axes)``, by examples: compiled once for all axes."""
    sizes = {x.shape[d] for x, d in zip(args, axes, strict=True) if d is not None}
    (size,) = sizes
    examples = [
        [
            x if d is None else np.take(np.asarray(x), i, d)
            for x, d in zip(args, axes, strict=True)
        ]
        for i in range(size)
    ]
    results = [in_f64(f, *example) for example in examples]
    return jax.tree.map(lambda *each: np.stack(each), *results)


def assert_close(found, expected, tolerance=2e-6):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - y).max(initial=0)
        assert error <= tolerance * max(1, np.abs(y).max(initial=0))


def products(f, *args, name="tracea_matmul"):
    """How many products f traces to."""
    return len(equations(f, *args, name=name))


def derivatives(f, args, tangents, weights):
    """f, and the derivatives of f and of sum(weights f^2) in every mode."""
    every = tuple(range(len(args)))
    gradient = jax.grad(lambda *a: (weights * f(*a) ** 2).sum(), argnums=every)

    def along_tangents(*args):
        pairs = zip(gradient(*args), tangents, strict=True)
        return sum((g * t).sum() for g, t in pairs)

    return {
        "value": f(*args),
        "jvp": jax.jvp(f, args, tangents)[1],
        "linearize": jax.linearize(f, *args)[1](*tangents),
        "vjp": jax.vjp(f, *args)[1](weights),
        "grad": gradient(*args),
        "hvp": jax.jvp(gradient, args, tangents)[1],
        "reverse over reverse": jax.grad(along_tangents, argnums=every)(*args),
    }


def assert_derivatives_alike(f, plain, *args):
    """Asserts that f has the derivatives that plain code has in float64."""
    tangents = tuple(normal(*x.shape, seed=1) for x in args)
    weights = normal(*jax.eval_shape(plain, *args).shape, seed=2)
    given = args, tangents, weights
    found = jax.jit(functools.partial(derivatives, f))(*given)
    expected = in_f64(jax.jit(functools.partial(derivatives, plain)), *given)
    for name in found:
        assert_close(found[name], expected[name], 2e-5)

"""Modules of flax nnx as functions, and inside scans, checkpoints and ``jit``."""

from __future__ import annotations

import functools

import flax.errors
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from mutables import (
    Net,
    X,
    Y,
    assert_alike,
    assert_near,
    forward,
    momentum,
    plain,
    step,
)

import tracea_jax as tracea

# ---- a module as the function --------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [
        lambda module: module,
        lambda module: module.hidden,
        lambda module: functools.partial(forward, module),
        lambda module: functools.partial(module.hidden),
    ],
    ids=["module", "method", "partial", "partial of a method"],
)
def test_a_module_and_its_methods_are_functions(of):
    def run(wrap, module):
        fast = wrap(of(module))
        first = fast(X)
        module.up.kernel[...] *= 2  # no constant of the trace
        module.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(5))
        second = fast(X)
        module.eval()
        return first, second, fast(x=X)

    assert_alike(run)


def test_decorated_methods():
    class Decorated(Net):
        @tracea.transform(ops="matmul")
        def hidden(self, x: jax.Array) -> jax.Array:
            return super().hidden(x)

    ends = []
    for kind in (Net, Decorated):
        module = kind(nnx.Rngs(0))
        ends.append((plain([module(X) for _ in range(2)]), plain(module)))
    assert_near(ends[1], ends[0])


# ---- around it -----------------------------------------------------------------------


def test_stacked_modules_and_scans():
    def run(wrap, module):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stacked(rngs):
            return Net(rngs)

        modules = stacked(nnx.Rngs(1))
        outside = nnx.vmap(wrap(forward), in_axes=(0, None))
        inside = wrap(lambda ms, x: nnx.vmap(forward, in_axes=(0, None))(ms, x))
        results = [f(modules, X) for f in (outside, inside, outside)]

        def body(module, x):
            return module, module(x)

        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        results.append(
            wrap(lambda m, xs: scan(m, xs)[1])(module, jnp.stack([X, 2 * X]))
        )
        return results, plain(modules)

    assert_alike(run)


def test_rematerialised_modules():
    def run(wrap, module):
        outside, inside = nnx.remat(wrap(forward)), wrap(nnx.remat(forward))
        grads = nnx.grad(lambda m: (inside(m, X) ** 2).sum())(module)
        return outside(module, X), inside(module, X), plain(grads["down"])

    assert_alike(run)


def test_donated_modules():
    deleted = []

    def run(wrap, module):
        optimizer, old = momentum(module), module.up.kernel[...]
        train = nnx.jit(wrap(step), donate_argnames=("module", "optimizer"))
        values = [train(module, optimizer, X, Y) for _ in range(2)]
        deleted.append(old.is_deleted())
        return values, plain(optimizer)

    assert_alike(run)
    assert deleted == [True, True]


def test_a_captured_module_may_be_read_but_not_changed():
    def run(wrap, module):
        module.eval()
        model, fast = wrap(module.hidden), wrap(lambda m, x: m.hidden(x))
        grads = jax.grad(lambda x: (model(x) ** 2).sum())(X)
        of_module = nnx.grad(lambda m: (wrap(m.hidden)(X) ** 2).sum())(module)
        return [
            *(jax.jit(f)(X) for f in (model, lambda x: fast(module, x))),
            jax.vmap(model)(X[None]),
            jax.lax.scan(lambda c, x: (c, model(x)), 0, X[None])[1],
            wrap(lambda x: module.hidden(x))(X),
            grads,
            plain(of_module),
        ]

    assert_alike(run)
    module, fast = Net(nnx.Rngs(0)), tracea.transform(forward)
    for function in (forward, fast):
        with pytest.raises(flax.errors.TraceContextError):
            jax.jit(lambda x, f=function: f(module, x))(X)


@pytest.mark.filterwarnings("ignore:a transformed function changes objects")
def test_jit_forgets_the_state_as_ever():
    def run(wrap, module):
        return [jax.jit(wrap(forward))(module, X), wrap(jax.jit(forward))(module, X)]

    assert_alike(run)


def test_a_state_is_an_argument_too():
    def run(wrap, module):
        graph, state = nnx.split(module)

        def fn(state, x):
            merged = nnx.merge(graph, state)
            return merged(x), nnx.to_pure_dict(nnx.state(merged, nnx.BatchStat))

        return [wrap(fn)(state, X) for _ in range(2)], nnx.to_pure_dict(state)["norm"]

    assert_alike(run)

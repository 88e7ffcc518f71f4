"""Objects of flax nnx as arguments: what a function changes in them is changed."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import count
from mutables import (
    Net,
    X,
    Y,
    assert_alike,
    assert_near,
    forward,
    loss,
    made,
    momentum,
    plain,
    step,
)

import tracea_jax as tracea


def test_changes_that_jax_jit_loses_are_a_warning():
    lost = r"objects of flax nnx \(Net, Optimizer\) .* lost. Use nnx.jit"
    net, optimizer = made()
    before = plain(net)
    fast = tracea.transform(step)
    with pytest.warns(UserWarning, match=lost) as warned:
        jax.jit(fast)(net, optimizer, X, Y)
    assert len(warned) == 1
    assert_near(plain(net), before)
    # The trace is known by now.
    with pytest.warns(UserWarning, match=lost):
        jax.jit(fast)(*made(), X, Y)


def test_changes_that_are_kept_are_no_warning():
    fast = tracea.transform(step)
    net, optimizer = made()
    before = plain(net)[0]["up"]["kernel"]
    fast(net, optimizer, X, Y)
    nnx.jit(fast)(net, optimizer, X, Y)

    def called(net: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return fast(net, optimizer, x, y)

    nnx.jit(called)(net, optimizer, X, Y)
    assert np.abs(plain(net)[0]["up"]["kernel"] - before).max() > 1e-3

    @jax.jit
    def merged(structure: Any, state: Any) -> Any:
        net, optimizer = nnx.merge(structure, state)
        fast(net, optimizer, X, Y)
        return nnx.state((net, optimizer))

    def returned(net: Any, optimizer: Any) -> Any:
        return step(net, optimizer, X, Y), net, optimizer

    def state_of(net: Any, optimizer: Any) -> Any:
        return step(net, optimizer, X, Y), nnx.state((net, optimizer))

    merged(*nnx.split((net, optimizer)))
    jax.jit(tracea.transform(returned))(*made())
    jax.jit(tracea.transform(state_of))(*made())
    jax.jit(tracea.transform(forward))(net.up, X)


# ---- what changes --------------------------------------------------------------------


def test_a_module_changes_as_if_it_had_been_called():
    def run(wrap, module):
        fast = wrap(forward)
        return [fast(module, X) for _ in range(3)]

    assert_alike(run)
    # The function does change something, and on our ops.
    module, fast = Net(nnx.Rngs(0)), tracea.transform(forward)
    first, second = fast(module, X), fast(module, X)
    assert not np.allclose(first, second) and module.count[...] == 2
    assert count(lambda m, x: fast(m, x), module, X) == 2


@pytest.mark.parametrize(
    "wrap",
    [
        tracea.transform,
        lambda f: nnx.jit(tracea.transform(f)),
        lambda f: tracea.transform(nnx.jit(f)),
        pytest.param(
            lambda f: tracea.transform(tracea.transform(f)), marks=pytest.mark.slow
        ),
        lambda f: tracea.transform(f, after_grad=True),
    ],
    ids=["alone", "under nnx.jit", "around nnx.jit", "twice", "after_grad"],
)
def test_a_training_step(wrap):
    def run(wrap, module):
        optimizer = momentum(module)
        train = wrap(step)
        values = [train(module, optimizer, X, Y) for _ in range(3)]
        assert values[2] < values[0]
        return values, plain(optimizer)

    assert_alike(run, wrap=wrap)


def test_a_transformed_loss_changes_the_module_too():
    def run(wrap, module):
        optimizer, of_model = momentum(module), wrap(loss)

        @nnx.jit
        def train(module, optimizer):
            value, grads = nnx.value_and_grad(of_model)(module, X, Y)
            optimizer.update(module, grads)
            return value

        return [train(module, optimizer) for _ in range(3)]

    assert_alike(run)


def test_keywords_and_random_numbers():
    def run(wrap, module):
        rngs = nnx.Rngs(3)
        noisy = wrap(lambda module, *, x, rngs: module(x) + rngs.normal((4,)))
        results = [noisy(module, x=X, rngs=rngs) for _ in range(2)]
        return results, rngs.default.count[...]

    assert_alike(run)


class Growing(nnx.Module):
    """Gets new variables and another attribute in every call."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.calls = nnx.Linear(8, 8, rngs=rngs), 0

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.last, self.calls = nnx.Variable(y.sum()), self.calls + 1
        return y


def test_new_variables_and_other_attributes():
    def run(wrap, module):
        results = [wrap(forward)(module, X) for _ in range(2)]
        assert module.calls == 2
        return results, module.last[...]

    assert_alike(run, Growing)


def test_a_module_that_occurs_twice_stays_one():
    def run(wrap, module):
        both = wrap(lambda a, b, x: (a, a(x) + b(x), nnx.Linear(2, 2, rngs=b.rngs)))
        again, y, new = both(module, module, X)
        assert again is module and module.count[...] == 2
        return y, new.kernel[...]

    class WithRngs(Net):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.rngs = rngs

    assert_alike(run, WithRngs)


def test_caches_of_decoding():
    def make(rngs):
        attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs)
        attention.init_cache((3, 4, 8))
        return attention

    def run(wrap, attention):
        fast = wrap(forward)
        return [fast(attention, X[3 * i : 3 * i + 3, None]) for i in range(3)]

    assert_alike(run, make)


def test_a_module_that_is_no_pytree_and_a_single_variable():
    class Opaque(nnx.Module, pytree=False):
        def __init__(self, rngs: nnx.Rngs):
            self.net = Net(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.net(x)

    def run(wrap, module):
        fast, variable = wrap(forward), nnx.Param(jnp.eye(8))

        @wrap
        def doubled(variable, x):
            variable[...] = 2 * variable[...]
            return x @ variable[...]

        return [fast(module, X) for _ in range(2)], doubled(variable, X), variable[...]

    assert_alike(run, Opaque)


# ---- traces and errors ---------------------------------------------------------------


def test_modules_alike_are_traced_once():
    traces = []

    def traced(module, x):
        traces.append(1)
        return module(x)

    fast, module = tracea.transform(traced), Net(nnx.Rngs(0))
    for _ in range(2):
        fast(module, X)
        fast(Net(nnx.Rngs(7)), X)
    assert len(traces) == 1
    module.eval()
    fast(module, X)
    assert len(traces) == 2
    module.train()
    fast(module, X)
    assert len(traces) == 2


def test_an_error_leaves_the_module_as_it_was():
    module = Net(nnx.Rngs(0))
    before = plain(module)

    def failing(module, x):
        module(x)
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        tracea.transform(failing)(module, X)
    assert_near(plain(module), before)
    # And nothing of the failed call is left for the next one.
    other = Net(nnx.Rngs(0))
    assert_near(tracea.transform(forward)(module, X), forward(other, X))


def test_explain_finds_the_same_and_changes_nothing():
    module = Net(nnx.Rngs(0))
    optimizer, before = momentum(module), plain(module)
    for fn, args in (
        (forward, (module, X)),
        (module, (X,)),
        (module.hidden, (X,)),
        (step, (module, optimizer, X, Y)),
    ):
        found = tracea.explain(fn)(*args)
        assert found.ops == {"matmul": 2 if fn is not step else 5}
    assert_near(plain(module), before)
    assert tracea.explain(module)(X).function == "Net"
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    assert tracea.explain(forward)(abstract, X).ops == {"matmul": 2}


def test_threads():
    fast, found = tracea.transform(forward), []

    def run(seed):
        ours, other = Net(nnx.Rngs(seed)), Net(nnx.Rngs(seed))
        got = [fast(ours, X) for _ in range(2)], plain(ours)
        assert_near(got, ([other(X) for _ in range(2)], plain(other)))
        found.append(seed)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]

"""Objects of flax nnx as arguments: what a function changes in them is changed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import count

import tracea_jax as tracea

X = jax.random.normal(jax.random.key(1), (12, 8))
Y = jax.random.normal(jax.random.key(2), (12, 4))


class Net(nnx.Module):
    """Running statistics, random numbers and a counter change in every call."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] = self.count[...] + 1
        return self.hidden(x)

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def forward(module: Any, x: jax.Array) -> jax.Array:
    return module(x)


def loss(module: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.square(module(x) - y).mean()


def step(module: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(module, x, y)
    optimizer.update(module, grads)
    return value


def momentum(module: Any) -> nnx.Optimizer:
    return nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def plain(*trees: Any) -> Any:
    """Arrays in place of objects, keys of random numbers as numbers."""

    def leaf(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    pure = [
        nnx.to_pure_dict(nnx.state(t)) if isinstance(t, nnx.Pytree) else t
        for t in trees
    ]
    return jax.tree.map(leaf, pure)


def made() -> tuple[Any, Any]:
    net = Net(nnx.Rngs(0))
    return net, momentum(net)


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


def assert_near(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def assert_alike(
    run: Callable[[Any, Any], Any],
    make: Callable[[nnx.Rngs], Any] = Net,
    wrap: Any = tracea.transform,
) -> None:
    """run(wrap, module) gives the same and leaves the same state, wrapped or not."""
    ends = []
    for wrapped in (lambda f: f, wrap):
        module = make(nnx.Rngs(0))
        ends.append((plain(run(wrapped, module)), plain(module)))
    assert_near(ends[1], ends[0])


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

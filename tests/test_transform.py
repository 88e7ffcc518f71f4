"""transform as a function of functions: signatures, arguments, which ops."""

from __future__ import annotations

import collections
import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import arguments, block
from flax import nnx
from jax import lax
from jaxprs import count, equations
from numerics import normal
from transformed import assert_alike, assert_near, filled, jit, kind

import tracea_jax as tracea

# --- the signature --------------------------------------------------------------------


def test_it_looks_like_the_function():
    def layer(x, w, /, b=None, *, activation="relu"):
        """A layer."""
        return getattr(jax.nn, activation)(x @ w if b is None else x @ w + b)

    fast = tracea.transform(layer)
    assert (fast.__name__, fast.__doc__) == ("layer", "A layer.")
    assert inspect.signature(fast) == inspect.signature(layer)
    x, w, b = arguments()
    for args, kwargs in (
        ((x, w), {}),
        ((x, w, b), {}),
        ((x, w), {"b": b, "activation": "silu"}),
    ):
        assert_near(fast(*args, **kwargs), layer(*args, **kwargs), 2e-5)
    with pytest.raises(TypeError, match="layer.*unexpected keyword argument 'c'"):
        fast(x, w, c=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="layer.*missing 1 required positional"):
        fast(x)  # pyright: ignore[reportCallIssue]


def test_it_decorates_with_and_without_options():
    x, w, b = arguments()

    @tracea.transform(ops=["matmul"])
    def first(x, w, b):
        return block(x, w, b)

    @functools.partial(tracea.transform, ops="matmul", after_grad=True)
    def second(x, w, b):
        return block(x, w, b)

    @tracea.transform()
    def third(x, w, b):
        return block(x, w, b)

    class Layer:
        @staticmethod
        @tracea.transform(ops=())
        def none(x, w, b):
            return block(x, w, b)

        @tracea.transform(ops="matmul")
        def one(self, x, w, b):
            return block(x, w, b)

    functions = [first, second, third, Layer().one, Layer().none]
    for fast, sites in zip(functions, (1, 1, 1, 1, 0), strict=True):
        assert count(fast, x, w, b) == sites
        assert_near(fast(x, w, b), block(x, w, b), 2e-5)
    assert (first.__name__, second.__name__) == ("first", "second")


def test_what_is_no_function_is_an_error():
    with pytest.raises(ValueError, match="softmax"):
        tracea.transform(ops="softmax")
    with pytest.raises(TypeError, match="ops='matmul'"):
        tracea.transform("matmul")  # pyright: ignore[reportArgumentType]
    for other in (3, classmethod(block)):
        with pytest.raises(TypeError, match="transform takes a function, not"):
            tracea.transform(other)  # pyright: ignore[reportArgumentType]


def test_any_number_of_arguments():
    @tracea.transform
    def total(*args, **kwargs):
        return sum(args) @ kwargs["w"]

    x, w, _ = arguments()
    assert_near(total(x, x, w=w), 2 * x @ w, 2e-5)
    assert count(lambda x, w: total(x, x, x, w=w), x, w) == 1


def test_callables_of_all_kinds():
    x, w, b = arguments()

    class Layer:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return jax.nn.relu(x @ self.w)

        @tracea.transform
        def twice(self, x):
            return jax.nn.relu(x @ self.w) * 2

    layer = Layer(w)
    expected = jax.nn.relu(x @ w)
    for f in (
        layer,
        functools.partial(block, b=b, w=w),
        layer.__call__,
        jax.jit(layer),
    ):
        assert count(tracea.transform(f), x) == 1
    assert_near(tracea.transform(layer)(x), expected, 2e-5)
    assert_near(layer.twice(x), 2 * expected, 2e-5)


def test_errors_of_the_function_reach_the_caller():
    def f(x):
        if x.ndim != 2:
            raise RuntimeError("two dimensions, please")
        return x @ x.T

    fast = tracea.transform(f)
    with pytest.raises(RuntimeError, match="two dimensions, please"):
        fast(normal(3))
    assert fast(normal(3, 2)).shape == (3, 3)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        tracea.transform(lambda x: x @ x.T if x.sum() > 0 else x)(normal(3, 3))
    with pytest.raises(TypeError, match="valid JAX type"):
        tracea.transform(lambda x: "text")(normal(3))


# --- arguments that are no arrays -----------------------------------------------------


def test_static_arguments():
    def f(x, w, activation, depth, width, bias, scale=None):
        for _ in range(depth):
            x = activation(x @ w)
        if bias:
            x = x + 1
        if scale == "half":
            x = x / 2
        return jnp.zeros((width, width)).at[0].add(x[0, :width])

    fast = tracea.transform(f)
    x, w = normal(6, 8), normal(8, 8)
    for static in (
        (jax.nn.relu, 1, 3, True),
        (jax.nn.gelu, 3, 8, False, "half"),
        (jnp.tanh, 0, 2, True, None),
    ):
        assert_near(fast(x, w, *static), f(x, w, *static), 5e-5)
    assert jax.jit(fast, static_argnums=(2, 3, 4, 5))(x, w, jnp.sin, 1, 4, True).shape
    named = jax.jit(fast, static_argnames=("activation", "depth", "width", "bias"))
    assert named(x, w, activation=jnp.sin, depth=1, width=4, bias=True).shape


def test_equal_numbers_of_other_types_are_other_constants():
    # 1 == 1.0 == True, and each gives another dtype
    fast = tracea.transform(lambda x, s: (x * s, isinstance(s, bool)))
    x = jnp.arange(3)
    for s in (1, 1.0, True, 2, 2.0, 0, False, 0.0):
        y, is_bool = fast(x, s)
        assert y.dtype == (x * s).dtype
        assert bool(is_bool) == isinstance(s, bool)


def test_a_static_argument_that_cannot_be_hashed():
    fast = tracea.transform(lambda x, names: x * len(names))
    assert fast(jnp.ones(2), frozenset("ab"))[0] == 2
    with pytest.raises(TypeError, match="(?s)set.*hash"):
        fast(jnp.ones(2), {"a", "b"})


def test_numbers_and_weak_types():
    cases = {
        "number": (lambda x: x * 2.0 + 1, (jnp.float32(3),)),
        "weak": (lambda x: x * 2, (jnp.asarray(2.0) * 1,)),
        "literal": (lambda x: (x, 3, 2.0, True, 1j), (jnp.int32(1),)),
        "numpy": (lambda x, y: x * y, (np.float32(2), np.int8(3))),
        "weak product": (lambda x: x @ x, (jnp.full((3, 3), 2.0),)),
        "weak layer": (
            lambda x, w: jax.nn.relu(x @ w + w[0]) + x,
            (jnp.full((3, 3), 2.0), jnp.full((3, 3), 1.0)),
        ),
        "weak and strong": (
            lambda x, w: (x @ w, w @ x, w @ w),
            (jnp.full((3, 3), 2.0), jnp.ones((3, 3))),
        ),
        "weak bias": (lambda x: x @ x + jnp.full((3,), 1.0), (normal(3, 3),)),
    }
    for name, (f, args) in cases.items():
        expected = jax.tree.map(kind, jax.jit(f)(*args))
        fast = tracea.transform(f)
        assert jax.tree.map(kind, fast(*args)) == expected, name
        assert jax.tree.map(kind, jax.jit(fast)(*args)) == expected, name
    with jax.numpy_dtype_promotion("strict"):
        weak = tracea.transform(lambda x: x @ x)(jnp.full((3, 3), 2.0))
        assert (weak * jnp.ones((3, 3), jnp.bfloat16)).dtype == jnp.bfloat16


# --- pytrees --------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["w", "b"])


def test_pytrees():
    def f(params, x, rest):
        y = block(x, *params["first"])
        return {"y": Pair(y, None), "rest": [rest, (), x]}, None

    x, w, b = arguments()
    args = {"first": Pair(w, b)}, x, {"none": None, "empty": ()}
    found, expected = tracea.transform(f)(*args), f(*args)
    assert_near(found, expected, 2e-5)
    assert isinstance(found[0]["y"], Pair) and found[0]["y"].b is None
    assert count(tracea.transform(f), *args) == 1


def test_numpy_and_keys():
    @tracea.transform
    def f(x, w, key, old):
        noise = jax.random.normal(key, (5,)) + jax.random.uniform(old)
        return jax.nn.relu(x @ w + noise), jax.random.split(key)

    x, w, _ = arguments()
    keys = jax.random.key(3), jax.random.PRNGKey(4)
    y, split = f(np.asarray(x), np.asarray(w), *keys)
    wanted = f.__wrapped__(x, w, *keys)  # pyright: ignore[reportFunctionMemberAccess]
    assert_near(y, wanted[0], 2e-5)
    assert split.dtype == keys[0].dtype and (split == wanted[1]).all()


def test_modules_as_arguments():
    x = normal(6, 8)
    make = functools.partial(eqx.nn.MLP, 8, 5, 6, 2, activation=jax.nn.gelu)
    mlp = eqx.filter_eval_shape(make, key=jax.random.key(0))
    mlp = eqx.combine(filled(eqx.filter(mlp, _is_shape)), mlp, is_leaf=_is_shape)

    def apply(mlp, x):
        return jax.vmap(mlp)(x)

    assert_near(tracea.transform(apply)(mlp, x), apply(mlp, x), 5e-5)
    grads = eqx.filter_grad(lambda m: (tracea.transform(apply)(m, x) ** 2).sum())(mlp)
    wanted = eqx.filter_grad(lambda m: (apply(m, x) ** 2).sum())(mlp)
    assert_near(eqx.filter(grads, eqx.is_array), eqx.filter(wanted, eqx.is_array), 1e-4)

    layer = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
    fast = tracea.transform(lambda layer, x: jax.nn.relu(layer(x)))
    assert_near(fast(layer, x), jax.nn.relu(layer(x)), 2e-5)
    layer.kernel.set_value(layer.kernel.get_value() * 2)
    assert_near(fast(layer, x), jax.nn.relu(layer(x)), 2e-5)
    found = nnx.grad(lambda m: (fast(m, x) ** 2).sum())(layer)
    wanted = nnx.grad(lambda m: (jax.nn.relu(m(x)) ** 2).sum())(layer)
    assert_near(jax.tree.leaves(found), jax.tree.leaves(wanted), 1e-4)


def _is_shape(x):
    return isinstance(x, jax.ShapeDtypeStruct)


# --- which ops ------------------------------------------------------------------------


def test_ops_restricts():
    x, w, b = arguments()
    for ops in ([], (), set(), iter([])):
        assert count(tracea.transform(block, ops=ops), x, w, b) == 0
    for ops in (["matmul"], ("matmul",), {"matmul"}, iter(["matmul"]), None):
        assert count(tracea.transform(block, ops=ops), x, w, b) == 1
    plain = tracea.transform(block, ops=[])
    np.testing.assert_array_equal(plain(x, w, b), jax.jit(block)(x, w, b))


def test_unknown_ops():
    with pytest.raises(ValueError, match="'matmull'.*must be.*matmul"):
        tracea.transform(block, ops=["matmul", "matmull"])
    with pytest.raises(ValueError, match="must be"):
        tracea.transform(block, ops="gemm")


def loss(params, x, y):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b, y).mean()


def training(optimizer, loss):
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.mark.parametrize("after_grad", [False, True])
def test_a_training_step(after_grad):
    params = filled([(jnp.ones(s), jnp.ones(s[1])) for s in ((8, 7), (7, 6), (6, 3))])
    x, y = normal(6, 8), jnp.arange(6) % 3
    optimizer = optax.adamw(1e-2)
    args = params, optimizer.init(params), x, y
    plain = training(optimizer, loss)
    if after_grad:
        fast = tracea.transform(plain, after_grad=True)
        # three forward, and two for each but the first, whose input has no gradient
        assert count(fast, *args) == 8
    else:
        fast = training(optimizer, tracea.transform(loss))
    assert len(equations(fast, *args, name="dot_general")) == 0
    found, expected = jit(lambda *args: (_steps(fast, *args), _steps(plain, *args)))(
        *args
    )
    assert_near(found[2], expected[2], 1e-5)
    assert_near(found[0], expected[0], 1e-3)  # adam divides by small gradients


def _steps(step, params, state, x, y):
    losses = []
    for _ in range(3):
        params, state, value = step(params, state, x, y)
        losses.append(value)
    return params, state, jnp.stack(losses)


def test_after_grad_keeps_to_single_products():
    x, w, b = arguments()

    def gradients(x, w, b):
        return jax.grad(lambda *args: (block(*args) ** 2).sum(), argnums=(0, 1, 2))(
            x, w, b
        )

    fast = tracea.transform(gradients, after_grad=True)
    assert count(fast, x, w, b) == 3
    only_conv = tracea.transform(gradients, after_grad=True, ops=[])
    assert count(only_conv, x, w, b) == 0
    assert_alike(gradients, x, w, b, fast=fast, gradients=False)


# --- what functions close over --------------------------------------------------------


def test_captured_arrays():
    x, w, b = arguments()
    weights = np.asarray(w)

    @jax.jit
    def inner(x):
        return x @ weights

    def f(x):
        y = lax.scan(lambda c, _: (jax.nn.relu(c @ w) @ w.T, None), x, None, 2)[0]
        z = jax.checkpoint(lambda x: jax.nn.gelu(x @ w + b))(y)
        return z + inner(x), lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: z)

    assert count(tracea.transform(f), x) == 5
    assert_alike(f, x, fast=tracea.transform(f))


def test_captured_tracers():
    x, w, b = arguments()

    def outer(f_of, w, b):
        inner = f_of(lambda x: jax.nn.gelu(x @ w + b))

        def step(carry, _):
            return carry + inner(x), None

        y, _ = lax.scan(step, inner(x), length=2)
        each = jax.vmap(
            lambda row: f_of(lambda r: r @ w)(row) + f_of(lambda: row @ w)()
        )
        return (y**2).sum() + each(x).sum()

    fast, plain = (
        functools.partial(outer, f_of) for f_of in (tracea.transform, lambda f: f)
    )
    assert_alike(plain, w, b, fast=fast, tolerance=5e-5)
    np.testing.assert_allclose(
        jax.grad(fast)(w, b), jax.grad(plain)(w, b), rtol=1e-4, atol=1e-4
    )


def test_functions_without_arguments_or_results():
    x, w, b = arguments()
    assert_near(tracea.transform(lambda: block(x, w, b))(), block(x, w, b), 2e-5)
    assert tracea.transform(lambda x: None)(x) is None
    assert tracea.transform(lambda: ())() == ()
    assert tracea.transform(lambda x: (x, x))(x)[1] is not None

"""transform as a function of functions: calls, traces, and what it composes with."""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax
from jaxprs import equations
from numerics import normal
from transformed import assert_alike, assert_near, filled, jit, kind

import tracea_jax as tracea
from tracea_jax.ops import export_checks
from tracea_jax.options import publish_epoch


def block(x, w, b):
    return jax.nn.gelu(x @ w + b)


def arguments():
    return normal(6, 8), normal(8, 5, seed=1), normal(5)


def counted(f):
    """f, and a list that grows by one entry whenever it is traced."""
    traces = []

    @functools.wraps(f)
    def g(*args, **kwargs):
        traces.append(None)
        return f(*args, **kwargs)

    return g, traces


def sites(f, *args):
    return len(equations(f, *args, name="tracea_matmul"))


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


def test_any_number_of_arguments():
    @tracea.transform
    def total(*args, **kwargs):
        return sum(args) @ kwargs["w"]

    x, w, _ = arguments()
    assert_near(total(x, x, w=w), 2 * x @ w, 2e-5)
    assert sites(lambda x, w: total(x, x, x, w=w), x, w) == 1


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
        assert sites(tracea.transform(f), x) == 1
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
    assert sites(tracea.transform(f), *args) == 1


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


# --- tracing --------------------------------------------------------------------------


def test_a_signature_is_traced_once():
    f, traces = counted(block)
    fast = tracea.transform(f)
    x, w, b = arguments()
    for _ in range(3):
        fast(x, w, b)
        fast(np.asarray(x), w, b)
    assert len(traces) == 1
    fast(x[:3], w, b)
    assert len(traces) == 2
    fast(x.astype(jnp.bfloat16), w, b)
    assert len(traces) == 3
    fast(x, w, b=b)
    assert len(traces) == 4
    for _ in range(2):
        fast(x, w, b)
        fast(x[:3], w, b)
    assert len(traces) == 4


def test_derivatives_and_jitted_calls_are_traced_once():
    f, traces = counted(lambda *args: block(*args).sum())
    gradient = jax.grad(tracea.transform(f))
    for _ in range(3):
        gradient(*arguments())
    assert len(traces) == 1
    f, traces = counted(block)
    jitted = jax.jit(tracea.transform(f))
    for _ in range(3):
        jitted(*arguments())
    assert len(traces) == 1


def test_layers_that_are_alike_are_rewritten_once(monkeypatch):
    module = importlib.import_module("tracea_jax.transform")
    rewritten = []

    def counting(*args):
        rewritten.append(args)
        return splice(*args)

    splice = module.spliced
    monkeypatch.setattr(module, "spliced", counting)
    f, traces = counted(block)
    layer = tracea.transform(f)
    x, w, b = arguments()

    @jax.jit
    def model(x):
        return [layer(x, w, b), layer(2 * x, w, b), layer(x[:3], w, b)]

    first, second, third = model(x)
    assert (len(traces), len(rewritten)) == (2, 2)
    assert_near(first, block(x, w, b), 2e-5)
    assert_near(second, block(2 * x, w, b), 2e-5)
    assert_near(third, block(x[:3], w, b), 2e-5)


def test_static_arguments_are_traced_again():
    f, traces = counted(lambda x, n: x * n)
    fast = tracea.transform(f)
    for n in (2, 3, 2, 3):
        assert fast(jnp.ones(2), n)[0] == n
    assert len(traces) == 2


def test_options_and_results_of_tuning_are_seen():
    f, traces = counted(block)
    fast = jax.jit(tracea.transform(f))
    args = arguments()
    fast(*args)
    before = fast.lower(*args).as_text()
    with tracea.options(implementation="xla"):
        fast(*args)
        assert len(traces) == 2
        assert "tracea_cpu_gemm" not in fast.lower(*args).as_text()
    with tracea.options(implementation="gemm_cpu"):
        assert "tracea_cpu_gemm" in fast.lower(*args).as_text()
    assert fast.lower(*args).as_text() == before
    count = len(traces)
    publish_epoch()
    fast(*args)
    assert len(traces) == count + 1
    eager = tracea.transform(f)
    eager(*args)
    with tracea.options(implementation="xla"):
        eager(*args)
    eager(*args)
    assert len(traces) == count + 3


def test_an_option_that_cannot_be_met_is_an_error():
    x, w, b = arguments()
    with (
        tracea.options(implementation="gemm_sm90"),
        pytest.raises(tracea.Unsupported, match="gemm_sm90"),
    ):
        tracea.transform(block)(x, w, b)


# --- which ops ------------------------------------------------------------------------


def test_ops_restricts():
    x, w, b = arguments()
    for ops in ([], (), set(), iter([])):
        assert sites(tracea.transform(block, ops=ops), x, w, b) == 0
    for ops in (["matmul"], ("matmul",), {"matmul"}, iter(["matmul"]), None):
        assert sites(tracea.transform(block, ops=ops), x, w, b) == 1
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
        assert sites(fast, *args) == 8
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
    assert sites(fast, x, w, b) == 3
    only_conv = tracea.transform(gradients, after_grad=True, ops=[])
    assert sites(only_conv, x, w, b) == 0
    assert_alike(gradients, x, w, b, fast=fast, gradients=False)


# --- under jit ------------------------------------------------------------------------


def test_donation():
    x, w, b = arguments()
    square = normal(6, 6)
    f = tracea.transform(lambda x, y: jax.nn.relu(x @ y) + x)
    expected = f(x @ x.T, square)
    donated = x @ x.T
    jitted = jax.jit(f, donate_argnums=0)
    assert_near(jitted(donated, square), expected, 2e-5)
    assert donated.is_deleted() and not square.is_deleted()


def test_names_of_scopes_reach_the_compiler():
    def f(x, w, b):
        with jax.named_scope("blk"), jax.named_scope("dense"):
            y = jax.nn.gelu(x @ w + b)
        with jax.named_scope("late"):
            return jnp.sin(y)

    args = arguments()
    text = jax.jit(tracea.transform(f)).lower(*args).as_text(debug_info=True)
    assert re.search(r'"[^"]*\bblk/dense/[^"]*tracea_matmul[^"]*"', text)
    assert re.search(r'"[^"]*\blate/sin[^"]*"', text)


def test_names_of_scopes_around_jitted_functions():
    @jax.jit
    def layer(x, w, b):
        with jax.named_scope("inner"):
            return block(x, w, b)

    def f(x, w, b):
        with jax.named_scope("outer"):
            return jax.nn.relu(layer(x, w, b) @ w.T)

    args = arguments()
    text = jax.jit(tracea.transform(f)).lower(*args).as_text(debug_info=True)
    names = re.findall(r'"([^"]*tracea_matmul)[^"]*"', text)
    assert any("inner" in name for name in names)
    assert any("outer" in name and "inner" not in name for name in names)


def test_lines_of_the_program_reach_the_compiler():
    def f(x, w, b):
        return block(x, w, b)

    text = jax.jit(tracea.transform(f)).lower(*arguments()).as_text(debug_info=True)
    assert "test_transform.py" in text


def test_shapes_without_arrays():
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments()]
    fast = tracea.transform(block)
    found = jax.eval_shape(fast, *args)
    assert found == jax.eval_shape(block, *args)
    assert jax.jit(fast).lower(*args).out_info == found


def test_with_checks():
    x, w, b = arguments()
    with jax.enable_checks(True):
        f = tracea.transform(lambda *args: (block(*args) ** 2).sum())
        found = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, w, b)
        scanned = tracea.transform(
            lambda x, w: lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, w)[0]
        )
        jax.jit(scanned)(normal(3, 4), normal(2, 4, 4))
        jax.jit(tracea.transform(lambda x: x @ x + x))(jnp.full((3, 3), 2.0))
    expected = jax.value_and_grad(
        lambda *args: (block(*args) ** 2).sum(), argnums=(0, 1)
    )(x, w, b)
    assert_near(found, expected, 1e-4)


def test_without_jit():
    x, w, b = arguments()
    with jax.disable_jit():
        found = tracea.transform(block)(x, w, b)
    assert_near(found, block(x, w, b), 2e-5)


def test_export():
    args = arguments()
    f = tracea.transform(block)
    with tracea.options(implementation="gemm_cpu"):
        checks = export_checks()
        exported = export.export(jax.jit(f), disabled_checks=checks)(*args)
    assert "tracea_cpu_gemm" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    assert_near(again.call(*args), block(*args), 2e-5)

    (n,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, 8), "float32"), *args[1:]
    exported = export.export(jax.jit(f), disabled_checks=checks)(*shapes)
    assert "tracea_cpu_gemm" not in exported.mlir_module()
    assert_near(exported.call(*args), block(*args), 2e-5)


# --- what it composes with ------------------------------------------------------------


def both(f):
    return tracea.transform(f), f


def total(*args):
    return (block(*args) ** 2).sum()


def test_derivatives():
    args = arguments()
    tangents = tuple(jnp.cos(x) for x in args)

    def everything(f, *args):
        def hvp(*args):
            return jax.jvp(jax.grad(f, argnums=(0, 1, 2)), args, tangents)

        y, pullback = jax.vjp(f, *args)
        _, linear = jax.linearize(f, *args)
        return {
            "value_and_grad": jax.value_and_grad(f, argnums=(0, 1, 2))(*args),
            "jvp": jax.jvp(f, args, tangents),
            "hvp": hvp(*args),
            "reverse over reverse": jax.grad(
                lambda w: (jax.grad(f, argnums=1)(args[0], w, args[2]) ** 2).sum()
            )(args[1]),
            "vjp": pullback(y),
            "linearize": linear(*tangents),
        }

    fast, plain = (jit(functools.partial(everything, f))(*args) for f in both(total))
    for name in plain:
        assert_near(fast[name], plain[name], 5e-5, name)


def test_jacobians_and_linear_functions():
    x, w, b = arguments()
    fast = tracea.transform(lambda b: block(x, w, b)[0])
    plain = lambda b: block(x, w, b)[0]  # noqa: E731
    for jacobian in (jax.jacfwd, jax.jacrev, jax.hessian):
        assert_near(jit(jacobian(fast))(b), jit(jacobian(plain))(b), 5e-5)
    linear = tracea.transform(lambda x: x @ w)
    (ct,) = jax.linear_transpose(linear, x)(normal(6, 5))
    assert_near(ct, normal(6, 5) @ w.T, 2e-5)


@pytest.mark.parametrize(
    ("axes", "out"),
    [
        ((0, None, None), 0),
        ((1, None, None), 1),
        ((None, 0, 0), 0),
        ((0, -1, 0), -1),
        ((None, None, 0), 2),
    ],
)
def test_vmap(axes, out):
    shapes = [list(x.shape) for x in arguments()]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis if axis >= 0 else len(shape), 3)
    args = [normal(*shape) for shape in shapes]
    mapped = [jax.vmap(f, in_axes=axes, out_axes=out) for f in both(block)]
    assert_alike(mapped[1], *args, fast=mapped[0])
    jaxpr = jax.make_jaxpr(mapped[0])(*args)
    assert "dot_general" not in str(jaxpr)


def test_vmap_with_a_named_axis():
    def f(x, w):
        y = jax.nn.relu(x @ w)
        return y - lax.pmean(y, "batch"), lax.axis_index("batch")

    args = normal(3, 6, 8), normal(8, 5)
    fast, plain = (jax.vmap(g, in_axes=(0, None), axis_name="batch") for g in both(f))
    assert_near(fast(*args), plain(*args), 2e-5)
    assert sites(fast, *args) == 1


@pytest.mark.parametrize("policy", [None, "dots_saveable", "nothing_saveable"])
def test_under_checkpoint(policy):
    policy = policy and getattr(jax.checkpoint_policies, policy)
    fast, plain = (jax.checkpoint(f, policy=policy) for f in both(total))
    assert_alike(plain, *arguments(), fast=fast, tolerance=5e-5)


def test_in_control_flow():
    x, w = normal(6, 8), normal(3, 8, 8)

    def layer(x, w):
        return jax.nn.gelu(x @ w)

    def run(layer, x, w):
        x, ys = lax.scan(lambda c, w: (layer(c, w), layer(c, w).sum()), x, w)
        x = lax.fori_loop(0, 2, lambda i, x: layer(x, w[i]), x)
        x = lax.cond(x.sum() > 0, layer, lambda x, w: x @ w, x, w[0])
        return lax.while_loop(lambda x: (x < 5).all(), lambda x: layer(x, w[1]) + 9, x)

    fast, plain = (functools.partial(run, f) for f in both(layer))
    assert_alike(plain, x, w, fast=fast, gradients=False)


def test_of_itself_and_of_jitted_functions():
    args = arguments()
    for f in (
        tracea.transform(tracea.transform(block)),
        tracea.transform(jax.jit(block)),
        tracea.transform(jax.jit(tracea.transform(block))),
        jax.jit(tracea.transform(jax.jit(jax.jit(block)))),
        tracea.transform(lambda x, w, b: tracea.transform(block)(x, w, b)),
    ):
        assert sites(f, *args) == 1
        assert len(equations(f, *args, name="dot_general")) == 0
        assert_near(f(*args), block(*args), 2e-5)


def test_inner_functions_with_static_arguments():
    @functools.partial(jax.jit, static_argnames=("n",), static_argnums=(0,))
    def inner(activation, x, w, *, n):
        return activation(x @ w)[:n]

    x, w, b = arguments()

    def f(x, w):
        return inner(jax.nn.relu, x, w, n=2), inner(jax.nn.silu, x, w, n=3)

    assert sites(tracea.transform(f), x, w) == 2
    assert_alike(f, x, w, fast=tracea.transform(f))


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

    assert sites(tracea.transform(f), x) == 5
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

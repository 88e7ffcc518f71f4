"""Sites that XLA serves are what the user wrote, and the others are calls of ours."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import compiled
from jax import lax
from jax.experimental import jet
from jax.sharding import PartitionSpec as P
from jaxprs import count, equations
from numerics import normal
from value_programs import program

import tracea_jax as tracea
from tracea_jax.ops.common import choice

OURS = ("tracea_matmul", "tracea_conv2d", "tracea_attention", "tracea_gated_matmul")


def mlp(p, x):
    for w, b in p:
        x = jax.nn.gelu(x @ w + b)
    return x


def gated(p, x):
    a, b = p
    return jax.nn.silu(x @ a) * (x @ b)


def attend(p, x):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, w) for w in p)
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights * jnp.ones((1, 2, 1, 1), x.dtype), v)


def conv(w, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5)
    z = lax.conv_general_dilated(
        jax.nn.relu(y), w, (1, 1), "SAME", dimension_numbers=numbers
    )
    return jax.nn.relu(z * 2.0 + 1.0 + x)


def layers(p, x):
    return lax.scan(lambda x, p: (jax.nn.gelu(x @ p[0] + p[1]), x.sum()), x, p)[0]


PROGRAMS = {
    "mlp": (
        mlp,
        [(normal(16, 16, seed=i) / 4, normal(16, seed=i)) for i in range(3)],
        normal(8, 16, seed=9),
    ),
    "gated": (gated, (normal(16, 12), normal(16, 12, seed=1)), normal(5, 16, seed=2)),
    "attention": (
        attend,
        [normal(16, 2, 8, seed=i) / 4 for i in range(3)],
        normal(2, 12, 16, seed=3),
    ),
    "convolution": (conv, normal(3, 3, 8, 8) / 8, normal(2, 8, 8, 8, seed=1)),
    "scan": (layers, (normal(3, 8, 8) / 3, normal(3, 8)), normal(4, 8, seed=1)),
}
DTYPES = ("float32", "bfloat16")


def case(name, dtype):
    f, p, x = PROGRAMS[name]
    return f, jax.tree.map(lambda a: a.astype(dtype), (p, x))


def step(f):
    """Its gradients, as of a loss."""

    def loss(*args):
        return (f(*args).astype("float32") ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))


def over_examples(f):
    return lambda p, x: jax.vmap(f, in_axes=(None, 1), out_axes=1)(
        p, jnp.stack([x] * 3, 1)
    )


FORMS = {
    "forward": lambda f: f,
    "step": step,
    "rematerialised": lambda f: step(jax.checkpoint(f)),
    "mapped": over_examples,
    "mapped step": lambda f: step(over_examples(f)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
}


def is_floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def assert_same_bits(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_graphs_differ_where_programs_do(optimizations):
    x = normal(8, 8)
    f = compiled(lambda x: jnp.tanh(x @ x + 1), x)
    assert f == compiled(lambda y: jnp.tanh(1 + y @ y), x)
    assert f != compiled(lambda x: jnp.tanh(x @ x + 2), x)
    assert f != compiled(lambda x: jnp.tanh(x @ x.T + 1), x)


# --- what XLA serves ------------------------------------------------------------------


# Each form of a program or two; the other combinations are slow tests. Random
# programs and their gradients are below.
BY_DEFAULT = {
    ("mlp", "rematerialised", "float32"),
    ("gated", "forward", "bfloat16"),
    ("gated", "mapped", "float32"),
    ("attention", "mapped step", "bfloat16"),
    ("convolution", "jvp", "float32"),
    ("scan", "forward", "float32"),
    ("scan", "step", "bfloat16"),
}
SERVED = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in BY_DEFAULT))
    for case in itertools.product(PROGRAMS, FORMS, DTYPES)
]


@pytest.mark.once
@pytest.mark.parametrize(("name", "form", "dtype"), SERVED)
def test_what_xla_serves_compiles_to_what_was_written(name, form, dtype, optimizations):
    f, args = case(name, dtype)
    plain = FORMS[form](f)
    with tracea.options(implementation="xla"):
        fast = tracea.transform(plain)
        assert_same_bits(jax.jit(fast)(*args), jax.jit(plain)(*args))
        assert compiled(fast, *args) == compiled(plain, *args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_a_transformed_function_are_those_of_what_was_written(name):
    f, args = case(name, "float32")
    with tracea.options(implementation="xla"):
        fast = step(tracea.transform(f))
        assert not any(count(fast, *args, name=op) for op in OURS)
        found, expected = jax.jit(fast)(*args), jax.jit(step(f))(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # sums in another order


def test_calls_that_no_rule_looks_into_are_calls():
    """XLA orders what it knows to be constant, which it is not in the call."""
    w, x = normal(6, 5), normal(4, 6, seed=1)

    def f(w, x):
        y = jax.nn.silu(x @ w) * 0.2 + 1e-7
        return 1 / jnp.clip(jnp.where(y > 0, y, 3.0), 0.5, jnp.inf)

    with tracea.options(implementation="xla"):
        assert compiled(tracea.transform(f), w, x) == compiled(f, w, x)
    names = [e.params["name"] for e in equations(tracea.transform(f), w, x, name="jit")]
    assert {"_where", "clip"} <= set(names)
    (site,) = equations(tracea.transform(f), w, x, name="tracea_choice")
    written = [e.primitive.name for e in site.params["written"].closed.eqns]
    assert written == [
        "tracea_choice",
        "jit",
    ]  # the product, if several devices plan it


@pytest.mark.once
@hypothesis.given(st.integers(0, 2**31))
@hypothesis.example(
    1227749367
)  # the number that ``jnp.clip`` is called with is constant
@hypothesis.settings(max_examples=15)
def test_random_programs_keep_their_bits(seed):
    made = program(seed)
    with tracea.options(implementation="xla"):
        found = jax.jit(tracea.transform(made))(*made.arguments)
        assert_same_bits(found, jax.jit(made)(*made.arguments))


@pytest.mark.once
@hypothesis.given(st.integers(0, 2**31))
@hypothesis.example(92948285)  # multiplies float16 by a number that it has not
@hypothesis.settings(max_examples=10)
def test_gradients_of_random_programs_keep_their_bits(seed):
    made = program(seed)
    chosen = [
        i for i, x in enumerate(made.arguments) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    hypothesis.assume(chosen)

    def loss(*args):
        leaves = filter(is_floating, jax.tree.leaves(made(*args)))
        return sum((y.astype("float32").sum() for y in leaves), jnp.float32(0))

    gradients = jax.grad(loss, argnums=chosen)
    with tracea.options(implementation="xla"):
        found = jax.jit(tracea.transform(gradients))(*made.arguments)
        assert_same_bits(found, jax.jit(gradients)(*made.arguments))


def test_a_batch_norm_is_folded_only_for_a_kernel():
    w, x = normal(3, 3, 4, 6), normal(2, 9, 9, 4, seed=1)
    scale, mean, var = normal(6, seed=2), normal(6, seed=3), normal(6, seed=4) ** 2

    def block(w, x):
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * scale)

    fast = tracea.transform(block)
    (site,) = equations(fast, w, x, name="tracea_choice")
    of_weights = [
        e for e in site.params["ours"].eqns if e.outvars[0].aval.shape == w.shape
    ]
    assert of_weights  # scaled by the norm
    with tracea.options(implementation="xla"):
        assert compiled(fast, w, x) == compiled(block, w, x)
    text = jax.jit(fast).lower(w, x).as_text()
    assert "tracea" in text


# --- what kernels serve ---------------------------------------------------------------


def test_a_kernel_serves_the_call():
    f, args = case("mlp", "float32")
    assert "tracea" in jax.jit(tracea.transform(f)).lower(*args).as_text()
    with tracea.options(implementation="xla"):
        assert "tracea" not in jax.jit(tracea.transform(f)).lower(*args).as_text()


def test_a_kernel_of_a_gradient_makes_the_derivative_ours(monkeypatch):
    """Also where XLA serves the forward pass."""
    f, args = case("gated", "float32")
    fast = step(tracea.transform(f))
    assert count(fast, *args, name="tracea_matmul") >= 2
    with tracea.options(implementation="xla"):
        assert not any(count(fast, *args, name=op) for op in OURS)


def test_what_is_demanded_and_cannot_run_is_an_error():
    def f(x, w):
        return x @ w

    args = normal(4, 8).astype("float16"), normal(8, 4).astype("float16")
    with tracea.options(implementation="gemm_sm90"):
        with pytest.raises(ValueError, match="gemm_sm90"):
            jax.jit(tracea.transform(f)).lower(*args)
        with pytest.raises(ValueError, match="gemm_sm90"):
            jax.jit(step(tracea.transform(f))).lower(*args)


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_linear_transposition(implementation):
    w = normal(8, 5)
    with tracea.options(implementation=implementation):
        fast = tracea.transform(lambda x: x @ w)
        (found,) = jax.linear_transpose(fast, normal(3, 8))(normal(3, 5))
    np.testing.assert_allclose(found, normal(3, 5) @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 1), (0, 1)])
def test_maps_of_either_operand(axes, implementation):
    x, w, b = normal(4, 4, 4), normal(4, 4, 4, seed=1), normal(4, seed=2)

    def f(x, w):
        return jax.nn.silu(x @ w + b) if axes[1] is None else jnp.tanh(x @ w + b)

    x = x if axes[0] is not None else x[0]
    w = w if axes[1] is not None else w[0]
    with tracea.options(implementation=implementation):
        for out in (0, 1, 2):
            found, expected = jax.jit(
                lambda x, w, out=out: [
                    jax.vmap(g, axes, out)(x, w) for g in (tracea.transform(f), f)
                ]
            )(x, w)
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_maps_of_gradients_of_maps(implementation):
    f, (p, x) = case("attention", "float32")

    def of(f):
        gradient = jax.grad(lambda x: (over_examples(f)(p, x) ** 2).sum())
        return jax.jit(jax.vmap(gradient))

    with tracea.options(implementation=implementation):
        found = of(tracea.transform(f))(jnp.stack([x, 2 * x]))
    expected = of(f)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_taylor_series_are_those_of_what_was_written():
    x, w = normal(3, 4), normal(4, 4, seed=1)

    def f(x):
        return jnp.sin(x @ w) @ w

    series = [normal(3, 4, seed=2), normal(3, 4, seed=3)]
    found = jet.jet(tracea.transform(f), (x,), (series,))
    expected = jet.jet(f, (x,), (series,))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_second_derivatives():
    f, (p, x) = case("mlp", "float32")

    def of(f):
        return jax.jit(jax.hessian(lambda x: f(p[:1], x).sum()))(x[:1])

    expected = of(f)
    for implementation in (None, "xla"):
        with tracea.options(implementation=implementation):
            found = of(tracea.transform(f))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_export_for_several_platforms():
    f, args = case("mlp", "float32")
    with tracea.options(implementation="xla"):
        exported = jax.export.export(
            jax.jit(tracea.transform(f)), platforms=["cpu", "cuda"]
        )(*args)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(*args), f(*args), rtol=1e-5, atol=1e-5)


def test_symbolic_shapes_are_left_as_written():
    f, (p, _) = case("mlp", "float32")
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 16), "float32")
    fast, plain = (
        jax.export.export(jax.jit(g))(p, x) for g in (tracea.transform(f), f)
    )
    assert "tracea" not in fast.mlir_module()
    value = normal(7, 16)
    assert_same_bits(fast.call(p, value), plain.call(p, value))


def test_arrays_with_explicit_shardings():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(4, 8), P("x"))
        w = jax.device_put(normal(8, 8), P())

        def f(x, w):
            return jnp.tanh(x @ w)

        fast = tracea.transform(f)
        assert count(fast, x, w, name="tracea_choice") == 1
        with tracea.options(implementation="xla"):
            found = jax.jit(fast)(x, w)
        plain = jax.jit(f)(x, w)
        assert_same_bits(found, plain)
        assert jax.typeof(found) == jax.typeof(plain)


# --- what else reads such programs ----------------------------------------------------


def test_scopes_are_named_once():
    def f(x, w):
        with jax.named_scope("inner"):
            return jax.nn.relu(x @ w)

    for implementation in (None, "xla"):
        with tracea.options(implementation=implementation):
            fast = jax.jit(tracea.transform(f))
            text = fast.lower(normal(4, 8), normal(8, 4)).as_text(debug_info=True)
        assert "inner" in text and "inner/inner" not in text


def test_a_policy_saves_what_it_saved():
    f, (p, x) = case("mlp", "float32")
    policy = jax.checkpoint_policies.dots_saveable

    def of(f):
        return step(jax.checkpoint(f, policy=policy))

    for implementation in (None, "xla"):
        with tracea.options(implementation=implementation):
            found = jax.jit(tracea.transform(of(f)))(p, x)
            assert_near = functools.partial(
                np.testing.assert_allclose, rtol=1e-3, atol=1e-3
            )
            jax.tree.map(assert_near, found, of(f)(p, x))
            names = ("dot_general", *OURS)
            plain = count(of(f), p, x, name="dot_general")
            assert (
                sum(count(tracea.transform(of(f)), p, x, name=n) for n in names)
                <= plain
            )


def test_a_program_in_a_program_is_not_looked_at_again():
    f, args = case("mlp", "float32")
    once, twice = tracea.transform(f), tracea.transform(tracea.transform(f))
    for name in ("tracea_choice", "tracea_matmul"):
        assert count(twice, *args, name=name) == count(once, *args, name=name)


def test_explain_shows_the_calls_and_their_gradients():
    f, args = case("mlp", "float32")
    with tracea.options(implementation="xla"):
        explanation = tracea.explain(step(f))(*args)
    assert {site.variant for site in explanation.sites} == {"xla"}
    assert explanation.ops["matmul"] > 3  # and not the three of the forward pass alone


def test_choices_are_made_again_where_settings_differ():
    f, args = case("mlp", "float32")
    fast = jax.jit(tracea.transform(f))
    ours = fast(*args)
    with tracea.options(implementation="xla"):
        assert_same_bits(fast(*args), jax.jit(f)(*args))
    assert_same_bits(fast(*args), ours)
    with choice.without_choices():
        assert count(tracea.transform(f), *args, name="tracea_choice") == 0
    assert count(tracea.transform(f), *args, name="tracea_choice") == 1

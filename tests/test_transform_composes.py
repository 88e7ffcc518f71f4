"""transform under jit and together with JAX's other transformations."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import arguments, block, total
from jax import export, lax
from jax.experimental import checkify
from jaxprs import count, equations
from numerics import normal
from transformed import assert_alike, assert_near, jit

import tracea_jax as tracea
from tracea_jax.ops import export_checks
from tracea_jax.options import publish_epoch


def counted(f):
    """f, and a list that grows by one entry whenever it is traced."""
    traces = []

    @functools.wraps(f)
    def g(*args, **kwargs):
        traces.append(None)
        return f(*args, **kwargs)

    return g, traces


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

    splice = module.splice
    monkeypatch.setattr(module, "splice", counting)
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
        return jax.nn.gelu(x @ w + b)

    text = jax.jit(tracea.transform(f)).lower(*arguments()).as_text(debug_info=True)
    assert "test_transform_composes.py" in text


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


def test_export_needs_no_list_of_checks():
    args = arguments()
    for f in (jax.jit(tracea.transform(block)), tracea.transform(jax.jit(block))):
        with tracea.options(implementation="gemm_cpu"):
            exported = export.export(f)(*args)
        assert "tracea_cpu_gemm" in exported.mlir_module()
        again = export.deserialize(exported.serialize())
        assert_near(again.call(*args), block(*args), 2e-5)


# --- what it composes with ------------------------------------------------------------


def both(f):
    return tracea.transform(f), f


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
    assert count(fast, *args) == 1


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
        assert count(f, *args) == 1
        assert len(equations(f, *args, name="dot_general")) == 0
        assert_near(f(*args), block(*args), 2e-5)


def test_inner_functions_with_static_arguments():
    @functools.partial(jax.jit, static_argnames=("n",), static_argnums=(0,))
    def inner(activation, x, w, *, n):
        return activation(x @ w)[:n]

    x, w, b = arguments()

    def f(x, w):
        return inner(jax.nn.relu, x, w, n=2), inner(jax.nn.silu, x, w, n=3)

    assert count(tracea.transform(f), x, w) == 2
    assert_alike(f, x, w, fast=tracea.transform(f))


@pytest.mark.parametrize("errors", ["float_checks", "user_checks"])
def test_checkify_finds_what_it_finds_in_the_plain_function(errors):
    x, w, b = arguments()

    def grad(x, w, b):
        return jax.grad(total)(x, w, b)

    def said(f, x):
        checked = checkify.checkify(f, errors=getattr(checkify, errors))
        return jax.jit(checked)(x, w, b)[0].get()

    broken = x.at[:, 0].set(jnp.nan)
    for f in (block, grad):
        assert said(tracea.transform(f), x) is None
        assert said(tracea.transform(f), broken) == said(f, broken)
    assert ("nan generated" in str(said(block, broken))) == (errors != "user_checks")

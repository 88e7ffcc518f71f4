"""attention under JAX's transformations, with both ways to compute its derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import CASES, definition, exact, qkv, random_mask
from jax import checkpoint_policies as policies
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close, each_in_f64, in_f64, in_f64_once

from tracea_jax.ops import attention, remat_policy
from tracea_jax.ops.common import lowering

pytestmark = pytest.mark.once

theirs = jax.nn.dot_product_attention


@pytest.fixture(params=["reference", "flash"])
def path(request, monkeypatch):
    """Which derivative the rule takes: the reference's, or that of kernels."""
    if request.param == "flash":
        monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)
    return request.param


def _slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)


def exactly(*args, **settings):
    return definition(*args, **settings)[0]


def counts(f, *args):
    """How often f's forward, tangent and backward primitives are traced."""
    return tuple(
        len(equations(f, *args, name=f"tracea_attention{suffix}"))
        for suffix in ("", "_tangent", "_backward")
    )


def dots(f, *args):
    return len(equations(f, *args, name="dot_general"))


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    slow_unless(
        ["bias", "everything"],
        ["plain", "bias", "shared bias", "lengths", "everything"],
    ),
)
def test_derivatives_are_those_of_the_definition(path, case):
    settings = dict(CASES[case])
    bias = settings.pop("bias", None)
    args = (*qkv(), *(() if bias is None else (bias,)))
    tangents = tuple(normal(*x.shape, seed=2) for x in args)
    weights = normal(2, 6, 4, 8, seed=3)

    def derivatives(f, args, tangents, weights):
        f = functools.partial(f, **settings)

        def loss(*args):
            return (weights * f(*args) ** 2).sum()

        every = tuple(range(len(args)))
        gradient = jax.grad(loss, argnums=every)
        return {
            "value": f(*args),
            "jvp": jax.jvp(f, args, tangents)[1],
            "linearize": jax.linearize(f, *args)[1](*tangents),
            "grad": gradient(*args),
            "hvp": jax.jvp(gradient, args, tangents)[1],
        }

    found = jax.jit(functools.partial(derivatives, attention))(args, tangents, weights)
    expected = in_f64_once(
        case, functools.partial(derivatives, exactly), args, tangents, weights
    )
    for name in found:
        assert_close(found[name], expected[name], 2e-5)


def test_jacobians_and_reverse_over_reverse(path):
    args = qkv(1, 3, 4, 2, 1, 2)

    def derivatives(f, *args):
        f = functools.partial(f, is_causal=True)
        gradient = jax.grad(lambda *x: jnp.sin(f(*x)).sum(), argnums=(0, 1, 2))
        twice = jax.grad(
            lambda *x: sum((g**2).sum() for g in gradient(*x)), argnums=(0, 1, 2)
        )
        return twice(*args), jax.jacfwd(f)(*args), jax.jacrev(f)(*args)

    found = jax.jit(functools.partial(derivatives, attention))(*args)
    expected = in_f64_once("twice", functools.partial(derivatives, exactly), *args)
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("wanted", [(0,), (2, 3), *map(_slow, [(1,), (2,), (3,)])])
def test_derivatives_of_some_operands(path, wanted):
    args = (*qkv(), normal(1, 4, 6, 1))

    def some(*args):
        return jax.grad(lambda *x: (attention(*x) ** 2).sum(), argnums=wanted)(*args)

    expected = in_f64_once("some", functools.partial(gradients, exactly), *args)
    assert_close(jax.jit(some)(*args), [expected[i] for i in wanted], 2e-5)


def test_one_forward_and_one_backward_pass_serve_a_gradient(flash):
    def loss(*args):
        return (attention(*args, is_causal=True) ** 2).sum()

    assert counts(loss, *qkv()) == (1, 0, 0)
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    assert counts(gradient, *qkv()) == (1, 0, 1)
    (forward,) = equations(gradient, *qkv(), name="tracea_attention")
    (backward,) = equations(gradient, *qkv(), name="tracea_attention_backward")
    o, lse = forward.outvars
    assert (lse.aval.shape, lse.aval.dtype) == ((2, 4, 6), "float32")
    assert {o, lse} < set(backward.invars) and len(backward.outvars) == 3
    with_bias = jax.grad(lambda q, b: loss(q, *qkv()[1:], b), argnums=(0, 1))
    (backward,) = equations(
        with_bias, Q, normal(1, 4, 1, 5), name="tracea_attention_backward"
    )
    assert [x.aval.shape for x in backward.outvars][3:] == [(1, 4, 1, 5)]


Q, K, V = qkv()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_alone_gets_the_gradient_that_jax_would_compute(dtype):
    args = [x.astype(dtype) for x in qkv(2, 64, 48, 4, 2, 16)]

    def gradients(f, *args):
        def loss(*args):
            return (f(*args, is_causal=True).astype("float32") ** 2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    by_xla = functools.partial(attention, implementation="xla")
    ours, plain = (functools.partial(gradients, f) for f in (by_xla, theirs))
    assert counts(ours, *args) == (0, 0, 0)
    assert dots(ours, *args) == dots(plain, *args)
    ours, plain = (jax.jit(f).lower(*args).compile() for f in (ours, plain))
    jax.tree.map(np.testing.assert_array_equal, ours(*args), plain(*args))
    assert costs(ours)["flops"] == costs(plain)["flops"]
    assert costs(ours)["scratch"] <= costs(plain)["scratch"]


def costs(program):
    """Operations and temporary memory of a compiled program."""
    analysis, memory = program.cost_analysis(), program.memory_analysis()
    return {"flops": analysis["flops"], "scratch": memory.temp_size_in_bytes}


def test_the_log_sum_exp_costs_nothing_where_nobody_wants_it():
    ours, plain = (
        jax.jit(functools.partial(f, local_window_size=3)).lower(*qkv()).compile()
        for f in (attention, theirs)
    )
    for text in (str(ours.as_text()), str(plain.as_text())):
        assert "exponential" in text and " log(" not in text
    assert costs(ours) == costs(plain)


def test_the_log_sum_exp_has_no_derivative(path):
    def residual(f, q):
        o, lse = f(q, K, V, return_residual=True)
        return lse.sum() + (o * lse[..., None]).sum()

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(residual, f)))(Q)
        for f in (attention, theirs)
    )
    assert_close(found, jax.tree.map(np.asarray, expected), 1e-5)
    narrow = [x.astype("bfloat16") for x in (Q, K, V)]
    o, pull = jax.vjp(functools.partial(attention, return_residual=True), *narrow)
    assert o[1].dtype == "bfloat16"
    assert [g.dtype for g in pull(o)] == ["bfloat16"] * 3


def test_bfloat16_gradients_are_near(path):
    args = [x.astype("bfloat16") for x in (*qkv(), normal(1, 4, 6, 5))]

    def gradients(f, *args):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3))(*args)

    found = jax.jit(functools.partial(gradients, attention))(*args)
    assert {g.dtype.name for g in found} == {"bfloat16"}
    expected = in_f64_once("bfloat16", functools.partial(gradients, exactly), *args)
    assert_close(found, expected, 3e-2)


def test_linear_transpose():
    ct = normal(2, 6, 4, 8, seed=5)
    (found,) = jax.linear_transpose(lambda v: attention(Q, K, v, is_causal=True), V)(ct)
    expected = in_f64(
        lambda v, ct: jax.vjp(lambda v: exactly(Q, K, v, is_causal=True), v)[1](ct)[0],
        V,
        ct,
    )
    assert_close(found, expected)
    with pytest.raises(ValueError, match="linear in value only"):
        jax.linear_transpose(lambda q: attention(q, K, V), Q)(ct)


# --- vmap -----------------------------------------------------------------------------

MAPPED = {
    "q": (0, None, None, None, None, None),
    "k and v": (None, 1, 2, None, None, None),
    "bias": (None, None, None, 3, None, None),
    "mask and lengths": (None, None, None, None, 0, 1),
    "all": (1, 0, 2, 4, 3, 0),
}


def both(f, q, k, v, bias, mask, kv_lengths):
    """Gradients of a loss, and what f gives."""

    def loss(q, k, v, bias):
        short = kv_lengths.astype("int32")
        o = f(q, k, v, bias, mask > 0, key_value_seq_lengths=short)
        return (o**2).sum(), o

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)


both_exactly = functools.partial(both, exactly)


@pytest.mark.parametrize("what", slow_unless(["mask and lengths", "all"], MAPPED))
def test_vmap_of_values_and_gradients(path, what):
    shapes = [(2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (1, 4, 6, 5)]
    args = [normal(*s, seed=i) for i, s in enumerate(shapes)]
    args += [random_mask(2, 1, 1, 5).astype("float32"), jnp.asarray([3.0, 5.0])]
    stacked = [
        x if d is None else jnp.stack([x, x[::-1], jnp.roll(x, 1, axis=0)], d)
        for x, d in zip(args, MAPPED[what], strict=True)
    ]

    axes = MAPPED[what]
    found = jax.jit(jax.vmap(functools.partial(both, attention), axes))(*stacked)
    assert_close(found, each_in_f64(both_exactly, axes, *stacked), 2e-5)


def test_nested_vmap_with_a_residual():
    q, k, v = normal(3, 2, 6, 4, 8), normal(2, 5, 2, 8), normal(3, 5, 2, 8)
    one = functools.partial(attention, return_residual=True)
    inner = jax.vmap(one, in_axes=(0, 0, None))
    found = jax.jit(jax.vmap(inner, in_axes=(0, None, 0)))(q, k, v)
    repeated = (
        jnp.broadcast_to(k, (3, *k.shape)),
        jnp.broadcast_to(v[:, None], (3, 2, 5, 2, 8)),
    )
    flat = [x.reshape(6, *x.shape[2:]) for x in (q, *repeated)]
    assert_close([x.reshape(6, *x.shape[2:]) for x in found], exact(*flat), 4e-6)


def test_vmap_folds_into_one_call():
    q = normal(3, 2, 6, 4, 8)
    f = jax.vmap(attention, in_axes=(0, None, None, None))
    (call,) = equations(f, q, K, V, normal(1, 4, 6, 5), name="tracea_attention")
    shapes = [x.aval.shape for x in call.invars]
    assert shapes == [(6, 6, 4, 8), (6, 5, 2, 8), (6, 5, 2, 8), (1, 4, 6, 5)]


# --- control flow and rematerialisation -----------------------------------------------


def layers(f, x, weights):
    """Three layers of self-attention."""

    def layer(x, w):
        q, k, v = jnp.split((x @ w).reshape(2, 6, 6, 4), 3, axis=2)
        return x + f(q, k, v, is_causal=True).reshape(x.shape), None

    return jax.lax.scan(layer, x, weights)[0]


def test_scan_while_and_cond(path):
    x, weights = normal(2, 6, 8), normal(3, 8, 24)

    def gradients(f, x, weights):
        def loss(x, weights):
            y = layers(f, x, weights)
            return jax.lax.cond(y.sum() < jnp.inf, lambda y: (y**2).sum(), jnp.sum, y)

        return jax.grad(loss, argnums=(0, 1))(x, weights)

    def tangent(f, x, weights):
        def loop(x):
            body = functools.partial(layers, f, weights=weights[:1])
            return jax.lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, x)
            )[1]

        return jax.jvp(loop, (x,), (x,))[1]

    for of in (gradients, tangent):
        found = jax.jit(functools.partial(of, attention))(x, weights)
        expected = in_f64_once(of.__name__, functools.partial(of, exactly), x, weights)
        assert_close(found, expected, 2e-5)


POLICIES = {
    "nothing_saveable": 2,
    "everything_saveable": 1,
    "dots_saveable": 1,
    "dots_with_no_batch_dims_saveable": 2,
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_decide_as_on_the_scores(flash, name):
    policy = remat_policy(getattr(policies, name))

    def loss(q):
        return jnp.sin(attention(q, K, V)).sum()

    gradient = jax.grad(jax.checkpoint(loss, policy=policy))
    assert counts(gradient, Q) == (POLICIES[name], 0, 1)
    if name == "dots_saveable":
        expected = in_f64(jax.grad(lambda q: jnp.sin(exactly(q, K, V)).sum()), Q)
        assert_close(jax.jit(gradient)(Q), expected, 2e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_see_xla_s_products_as_they_see_jax_s(name):
    def gradient(f):
        checkpointed = jax.checkpoint(
            lambda q: jnp.sin(f(q, K, V)).sum(), policy=getattr(policies, name)
        )
        return jax.grad(checkpointed)

    assert dots(gradient(attention), Q) == dots(gradient(theirs), Q)


# --- several devices ------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def gradients(f, *args):
    every = tuple(range(len(args)))
    return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=every)(*args)


def test_shard_map_over_batch_and_heads(path, mesh):
    args = (*qkv(), normal(1, 4, 6, 5))
    expected = in_f64_once("mesh", functools.partial(gradients, exactly), *args)
    for specs in (
        (P("x"), P("x"), P("x"), P()),
        (*[P(None, None, "x")] * 3, P(None, "x")),
    ):
        f = jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=specs[0])
        found = jax.jit(functools.partial(gradients, f))(*args)
        assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("replicated", [1, 3])
def test_gradients_of_replicated_operands_are_summed_over_the_mesh(
    path, mesh, replicated
):
    args = (*qkv(), normal(1, 4, 6, 5))
    specs = [P("x"), P("x"), P("x"), P()]
    if replicated == 1:  # one example's keys for two examples' queries
        specs[1] = P()
        args = (args[0], args[1][:1], *args[2:])

    def local(*args):
        return jax.grad(lambda *a: (attention(*a) ** 2).sum(), argnums=replicated)(
            *args
        )

    sharded = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    whole = in_f64_once(
        ("replicated", replicated),
        jax.grad(
            lambda q, k, v, b: (
                exactly(q, jnp.broadcast_to(k, v.shape), v, b) ** 2
            ).sum(),
            argnums=replicated,
        ),
        *args,
    )
    assert_close(jax.jit(sharded)(*args), whole, 2e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_partitioner_is_given_plain_xla(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(getattr(AxisType, kind),))
    args = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in qkv()]
    f = jax.jit(attention)
    assert f(*args).sharding.spec[0] == "x"
    assert "all-gather" not in str(f.lower(*args).compile().as_text())
    found = jax.jit(functools.partial(gradients, attention))(*args)
    expected = in_f64_once("qkv", functools.partial(gradients, exactly), *qkv())
    assert_close(found, expected, 2e-5)


def test_export_of_a_gradient(path):
    f = functools.partial(gradients, attention)
    program = export.export(jax.jit(f))(*qkv())
    found = export.deserialize(program.serialize()).call(*qkv())
    expected = in_f64_once("qkv", functools.partial(gradients, exactly), *qkv())
    assert_close(found, expected, 2e-5)

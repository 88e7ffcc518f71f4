"""Functions with rules, effects or errors of their own, differentiated inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from insides import arguments, check, layer, loss, mlp_loss, names
from jax import lax
from numerics import normal
from transformed import assert_near, jit

import tracea_jax as tracea
from tracea_jax.rewrite import left

pytestmark = pytest.mark.usefixtures("our_attention")

# --- functions with rules of their own ------------------------------------------------


def test_implicit_differentiation():
    def root(c):
        return lax.custom_root(
            lambda u: u - jnp.tanh(c * u + 1.0),
            0.0,
            lambda f, u: lax.fori_loop(0, 20, lambda _, u: u - f(u), u),
            lambda g, b: b / g(1.0),
        )

    def own(p, x, y):
        return root(0.5 * jnp.cos(p["bias"][0])) * mlp_loss(p, x, y)

    check(lambda f: lambda p, x, y: jax.grad(f)(p, x, y), of=own, has=())


@jax.custom_vjp
def tripled(p, x):
    return x @ p["up"] @ p["down"]


def _tripled_backward(saved, ct):
    plain = lambda p, x: x @ p["up"] @ p["down"]  # noqa: E731
    return jax.tree.map(lambda g: 3 * g, jax.vjp(plain, *saved)[1](ct))


tripled.defvjp(lambda p, x: (tripled(p, x), (p, x)), _tripled_backward)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_custom_vjp_is_left_alone(around):
    def own(p, x, y):
        return mlp_loss(p, tripled(p, x), y)

    def make(f):
        return lambda p, x, y: jax.grad(around(f))(p, x, y)

    check(make, of=own, has=("tracea_matmul", "dot_general"))


def test_custom_vjp_bodies_are_told():
    def own(p, x, y):
        return loss(p, tripled(p, x), y)

    misses = tracea.explain(jax.grad(own))(*arguments()).misses
    assert [m.reason for m in misses] == [left.OWN_DERIVATIVE] * 2
    assert all(m.scope == "jvp()" and m.op == "matmul" for m in misses)


def test_custom_jvp():
    @jax.custom_jvp
    def seven(x):
        return jnp.tanh(x)

    seven.defjvp(lambda primals, tangents: (seven(*primals), 7 * tangents[0]))

    def own(p, x, y):
        return seven(mlp_loss(p, x, y))

    check(lambda f: lambda *args: jax.grad(f)(*args), of=own, has=("tracea_matmul",))


# --- effects, failures and errors -----------------------------------------------------


def test_effects_happen_once():
    seen = []

    def noisy(p, x, y):
        jax.debug.callback(lambda s: seen.append(float(s)), x.sum())
        return mlp_loss(p, x, y)

    args = arguments()
    fast = tracea.transform(lambda *args: jax.grad(noisy)(*args))
    assert names(fast, *args)["tracea_matmul"]
    fast(*args)
    jax.effects_barrier()
    assert len(seen) == 1


def only_for_jax_itself(x):
    """x, with a rule of derivatives that wants a value that only JAX's trace has."""
    scale = jnp.sin(x)

    @jax.custom_jvp
    def scaled(v):
        return v * scale

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * scale))
    return scaled(x)


def of_known_values(p, x, y):
    if type(p["bias"]).__name__ == "DynamicJaxprTracer":
        raise RuntimeError("traced before it was differentiated")
    return mlp_loss(p, x, y)


def test_what_cannot_be_traced_before_is_differentiated_as_it_is():
    args = arguments()

    def gradient(p, x, y):
        return jax.grad(of_known_values)(p, x, y)

    fast = tracea.transform(gradient)
    got, expected = jit(lambda *args: (fast(*args), gradient(*args)))(*args)
    assert_near(got, expected, 3e-5)
    # Single products are still found, after they were differentiated.
    assert names(fast, *args)["tracea_matmul"]
    assert left.TOO_EARLY in {m.reason for m in tracea.explain(gradient)(*args).misses}


def test_failing_rules_fail_as_in_jax():
    def gradient(x):
        return jax.grad(lambda x: only_for_jax_itself(x).sum())(x)

    with pytest.raises(Exception) as plain:
        jax.jit(gradient)(normal(3))
    with pytest.raises(plain.type):
        tracea.transform(gradient)(normal(3))


def test_a_failure_after_effects_is_not_tried_again():
    tries = []

    @jax.custom_vjp
    def failing(x):
        return x

    def forward(x):
        tries.append(1)
        raise RuntimeError("no derivative")

    failing.defvjp(forward, lambda saved, ct: (ct,))

    def loss(x, noisy):
        if noisy:
            jax.debug.print("{}", x.sum())
        return failing(x).sum()

    for noisy, count in ((True, 1), (False, 2)):
        tries.clear()
        with pytest.raises(RuntimeError, match="no derivative"):
            tracea.transform(jax.grad(loss))(normal(3), noisy)
        assert len(tries) == count


def test_errors_are_those_of_the_user():
    args = arguments()

    def raising(p, x, y):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        tracea.transform(lambda *args: jax.grad(raising)(*args))(*args)
    assert raised.value.__context__ is None
    vector = tracea.transform(lambda p, x, y: jax.grad(lambda p: layer(p, x))(p))
    with pytest.raises(TypeError, match="scalar"):
        vector(*args)


def test_references_are_left_alone():
    def counting(p, count, x, y):
        count[...] += 1
        return mlp_loss(p, x, y)

    def step(p, x, y):
        count = jax.new_ref(jnp.zeros(()))
        as_argument = jax.vjp(counting, p, count, x, y)[0]
        captured = jax.grad(lambda p: counting(p, count, x, y))(p)
        made_inside = jax.grad(lambda p: counting(p, jax.new_ref(1.0), x, y))(p)
        return as_argument, captured, made_inside, count[...]

    args = arguments()
    fast = tracea.transform(step)
    got, expected = jit(lambda *args: (fast(*args), step(*args)))(*args)
    assert_near(got, expected, 3e-5)
    assert got[-1] == 2

"""transform of functions that differentiate inside: as good as transform of the loss.

Each step is compared with itself untransformed, and its sites with those of the same
step made of a transformed loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from insides import (
    BOTH_ATTENTIONS,
    LENGTH,
    WIDTH,
    arguments,
    check,
    descended,
    hessian_product,
    in_scan,
    jacobian,
    layer,
    loss,
    mlp_loss,
    names,
    parameters,
    step,
)
from jax import checkpoint_policies as policies
from jax import grad as imported_by_name
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transformed import assert_near, jit

import tracea_jax as tracea

pytestmark = pytest.mark.usefixtures("our_attention")

# --- ways to differentiate ------------------------------------------------------------


def with_aux(loss):
    def aux(p, x, y):
        value = loss(p, x, y)
        return value, {"twice": 2 * value, "x": x, "n": 3, "known": np.arange(3)}

    def step(p, x, y):
        (value, aux_), grads = jax.value_and_grad(aux, has_aux=True)(p, x, y)
        assert aux_["n"] == 3 and isinstance(aux_["known"], np.ndarray)
        return value, aux_["twice"], aux_["x"], grads

    return step


def with_aux_of_any_kind(loss):
    def aux(p, x, y):
        return loss(p, x, y), ("text", None, len, {"shape": x.shape})

    def step(p, x, y):
        grads, aux_ = jax.grad(aux, has_aux=True)(p, x, y)
        assert aux_ == ("text", None, len, {"shape": (2, LENGTH, WIDTH)})
        return grads

    return step


def pulled_back(loss):
    def step(p, x, y):
        value, pull = jax.vjp(lambda p, x: loss(p, x, y), p, x)
        return value, pull(jnp.sin(value)), pull(value)

    return step


def pulled_back_with_aux(loss):
    def step(p, x, y):
        def f(p):
            return loss(p, x, y), {"x": jnp.cos(x)}

        value, pull, aux = jax.vjp(f, p, has_aux=True)
        return value, pull(value), aux

    return step


def linearized(loss):
    def step(p, x, y):
        value, push = jax.linearize(lambda p: loss(p, x, y), p)
        return value, push(p), push(descended(p, p))

    return step


def hessian(loss):
    def step(p, x, y):
        return jax.hessian(lambda c: loss({**p, "up": c[0] * p["up"]}, x + c[1], y))(
            jnp.ones(2)
        )

    return step


def forward_over_reverse(loss):
    def step(p, x, y):
        return jax.jvp(lambda p: jax.grad(loss)(p, x, y), (p,), (p,))

    return step


def imported_gradient(loss):
    return lambda p, x, y: imported_by_name(loss, argnums=(0, 1))(p, x, y)


def jitted_inside(loss):
    def step(p, x, y):
        grads = jax.jit(jax.grad(jax.jit(loss)), donate_argnums=0)(p, x, y)
        return jax.jit(descended)(p, grads)

    return step


FIRST_ORDER = (
    step,
    pytest.param(with_aux, marks=pytest.mark.slow),
    with_aux_of_any_kind,
    pytest.param(pulled_back, marks=pytest.mark.slow),
    pulled_back_with_aux,
    linearized,
    jacobian,
    imported_gradient,
    jitted_inside,
)


@pytest.mark.parametrize("make", FIRST_ORDER)
def test_first_derivatives(make):
    forward_only = make in (linearized, jacobian)  # its bias comes after attention
    check(make, has=BOTH_ATTENTIONS[:1] if forward_only else BOTH_ATTENTIONS)


@pytest.mark.parametrize("make", [hessian, hessian_product, forward_over_reverse])
def test_second_derivatives(make):
    check(make, of=mlp_loss, has=("tracea_matmul",), tolerance=1e-4)


def test_second_derivatives_of_attention():
    check(hessian_product, has=("tracea_attention",), tolerance=2e-4)


MADE_AT_IMPORT = jax.grad(loss)


JITTED_AT_IMPORT = jax.jit(jax.value_and_grad(loss))


def test_gradients_made_at_import():
    args = arguments()
    for ours, made in (
        (jax.grad, MADE_AT_IMPORT),
        (jax.value_and_grad, JITTED_AT_IMPORT),
    ):
        check(lambda f, ours=ours, made=made: made if f is loss else ours(f), *args)


def test_forward_mode_is_differentiated_first():
    def push(p, x, y):
        return jax.jvp(lambda p: mlp_loss(p, x, y), (p,), (p,))

    args = arguments()
    fast = tracea.transform(push)
    assert names(fast, *args)["tracea_matmul"]
    got, expected = jit(lambda *args: (fast(*args), push(*args)))(*args)
    assert_near(got, expected, 3e-5)


# --- programs around it ---------------------------------------------------------------


def in_while(loss):
    def step(p, x, y):
        return lax.while_loop(
            lambda c: c[0] < 2,
            lambda c: (c[0] + 1, descended(c[1], jax.grad(loss)(c[1], x, y))),
            (0, p),
        )

    return step


def in_cond(loss):
    def step(p, x, y):
        return lax.cond(x.sum() > 0, jax.grad(loss), lambda p, x, y: p, p, x, y)

    return step


def of_each_example(loss):
    def one(p, x, y):
        return jax.grad(loss)(p, x[None], y[None])

    return lambda p, x, y: jax.vmap(one, (None, 0, 0))(p, x, y)


def of_captured_tracers(loss):
    def step(p, x, y):
        doubled, target = 2 * x, jnp.sin(y)

        def of_scale(c):
            return loss({**p, "q": c * p["q"]}, doubled, target)

        return jax.grad(of_scale)(2.0), jax.grad(lambda x: loss(p, x, target))(doubled)

    return step


def rematerialised(loss):
    return lambda p, x, y: jax.grad(jax.checkpoint(loss))(p, x, y)


@pytest.mark.parametrize(
    "make",
    [
        in_scan,
        in_while,
        in_cond,
        of_each_example,
        of_captured_tracers,
        rematerialised,
    ],
)
def test_programs(make):
    check(make)


def deep(layer):
    """The loss of a scan over layers."""

    def loss(stacked, x, y):
        x, _ = lax.scan(lambda x, p: (layer(p, x), None), x, stacked)
        return ((x - y) ** 2).mean()

    return loss


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        None,
        pytest.param(policies.dots_saveable, marks=pytest.mark.slow),
        pytest.param(
            policies.save_only_these_names("attended"), marks=pytest.mark.slow
        ),
    ],
    ids=["none", "nothing", "dots", "names"],
)
def test_a_scan_of_layers(policy):
    p, x, y = arguments()
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.9 * w]), p)
    body = layer if policy == "none" else jax.checkpoint(layer, policy=policy)
    check(step, stacked, x, y, of=deep(body))


def test_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def parallel(loss):
        def local(p, x, y):
            # Parameters that are the same everywhere would be summed by JAX itself.
            p = jax.tree.map(lambda w: lax.pcast(w, "d", to="varying"), p)
            return lax.pmean(jax.grad(loss)(p, x, y), "d")

        specs = P(), P("d"), P("d")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    check(parallel)


def test_random_numbers():
    def dropped(p, xk, y):
        x, key = xk
        return mlp_loss(p, x * jax.random.bernoulli(key, 0.8, x.shape), y)

    def make(loss):
        return lambda p, x, y, key: jax.grad(loss)(
            p, (x, jax.random.fold_in(key, 1)), y
        )

    def known_key(loss):
        return lambda p, x, y: jax.grad(loss)(p, (x, jax.random.key(3)), y)

    products_only = {"of": dropped, "has": ("tracea_matmul",)}
    check(make, *arguments(), jax.random.key(0), **products_only)
    check(known_key, **products_only)


# --- values that are no floating-point tracers ----------------------------------------


def test_integers_and_known_numbers():
    def repeated(p, n, scale):
        x, y = arguments()[1:]
        return scale * sum(mlp_loss(p, x, y) for _ in range(int(n)))

    def make(loss):
        def step(p, count):
            value, pull = jax.vjp(loss, p, 2, 0.5)
            grads = pull(value)[0]
            both = jax.grad(lambda p, n: loss(p, 1, 1.0) * n, (0, 1), allow_int=True)
            return value, grads, both(p, count)[0], jax.grad(loss, 2)(p, 1, 3.0)

        return step

    check(make, parameters(), jnp.int32(3), of=repeated, has=("tracea_matmul",))


def test_holomorphic_functions():
    def make(loss):
        def step(p, x, y):
            z = jax.grad(lambda z: (z * z).sum(), holomorphic=True)(x * (1 + 2j))
            return z, jax.grad(loss)(p, x, y)

        return step

    check(make, of=mlp_loss, has=("tracea_matmul",))

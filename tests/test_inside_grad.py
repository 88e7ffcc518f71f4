"""transform of functions that differentiate inside: as good as transform of the loss.

Each step is compared with itself untransformed, and its sites with those of the same
step made of a transformed loss.
"""

from __future__ import annotations

import collections
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import checkpoint_policies as policies
from jax import grad as imported_by_name
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import all_equations
from numerics import normal
from transformed import assert_near, jit

import tracea_jax as tracea
from tracea_jax import _compat
from tracea_jax.rewrite import left

LENGTH, HEADS, WIDTH = 8, 2, 16
BOTH_ATTENTIONS = ("tracea_attention", "tracea_attention_backward")


@pytest.fixture(autouse=True)
def our_attention(monkeypatch, calls_only):
    """Attention that XLA would compute as fast keeps primitives of ours: seen here."""
    from tracea_jax.ops.attention import primitives

    monkeypatch.setattr(primitives, "_left_to_xla", lambda *_, **__: False)


# --- a model --------------------------------------------------------------------------


def attend(p, x):
    """Causal attention as people write it: (batch, length, width) to the same."""
    q, k, v = (
        (x @ p[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for name in "qkv"
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return o.reshape(x.shape) @ p["o"]


def layer(p, x):
    with jax.named_scope("layer"):
        x = x + checkpoint_name(attend(p, x), "attended")
        return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def loss(p, x, y):
    return ((layer(p, x) - y) ** 2).mean()


def mlp_loss(p, x, y):
    return ((jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"] - y) ** 2).mean()


def parameters():
    shapes = {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "o", "up", "down")}
    matrices = {
        name: 0.2 * normal(*shape, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {**matrices, "bias": normal(WIDTH)}


def arguments():
    x, y = (normal(2, LENGTH, WIDTH, seed=seed) for seed in (7, 8))
    return parameters(), x, y


def descended(p, grads):
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)


# --- comparing ------------------------------------------------------------------------


def products(f, *args) -> collections.Counter[Any]:
    """The sites of a program, and products left to JAX: kind, types and choices.

    Only of what its results need: where JAX differentiates what is under ``jit``, which
    a transformed loss is, it drops the rest itself.
    """
    found = collections.Counter()
    whole = jax.make_jaxpr(f)(*args).jaxpr
    needed, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    for e in all_equations(needed):
        name = e.primitive.name
        if name.startswith("tracea_") or name == "dot_general":
            params = {k: str(v) for k, v in e.params.items() if k != "body"}
            types = tuple(x.aval.str_short() for x in e.invars)
            found[name, types, tuple(sorted(params.items()))] += 1
    return found


def names(f, *args) -> collections.Counter[str]:
    """How many equations there are of each primitive of ours."""
    found = collections.Counter[str]()
    for (name, *_), count in products(f, *args).items():
        if name.startswith("tracea_"):
            found[name] += count
    return found


def check(
    make: Callable[[Any], Any],
    *args: Any,
    of: Any = loss,
    has: tuple[str, ...] = BOTH_ATTENTIONS,
    tolerance: float = 3e-5,
) -> Callable[..., Any]:
    """Asserts that transform(make(loss)) is make(transform(loss)), and right.

    Args:
      make: of a loss, a function of the arguments that differentiates it.
      *args: its arguments; those of the loss by default.
      of: the loss.
      has: primitives of ours that must be there.
      tolerance: relative to the largest entry of each result.

    Returns:
      The transformed step.
    """
    args = args or arguments()
    plain, fast = make(of), tracea.transform(make(of))
    before = products(plain, *args)
    found = products(fast, *args)
    assert found == products(make(tracea.transform(of)), *args)
    assert {name for name, *_ in found} >= {*has}
    got, expected = jit(lambda *args: (fast(*args), plain(*args)))(*args)
    assert_near(got, expected, tolerance)
    assert products(plain, *args) == before
    assert not names(plain, *args)
    return fast


# --- ways to differentiate ------------------------------------------------------------


def step(loss):
    def step(p, x, y):
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return value, descended(p, grads)

    return step


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


def jacobian(loss):
    def step(p, x, y):
        return jax.jacrev(lambda b: jnp.stack([loss({**p, "bias": b}, x, y)] * 2))(
            p["bias"]
        )

    return step


def hessian(loss):
    def step(p, x, y):
        return jax.hessian(lambda c: loss({**p, "up": c[0] * p["up"]}, x + c[1], y))(
            jnp.ones(2)
        )

    return step


def hessian_product(loss):
    def step(p, x, y):
        def along(p):
            grads = jax.tree.leaves(jax.grad(loss)(p, x, y))
            return sum(map(jnp.sum, map(jnp.multiply, grads, jax.tree.leaves(p))))

        return jax.grad(along)(p)

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
    pulled_back,
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


def in_scan(loss):
    def body(p, xy):
        return descended(p, jax.grad(loss)(p, *xy)), None

    return lambda p, x, y: lax.scan(body, p, (jnp.stack([x, y]), jnp.stack([y, x])))[0]


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
        policies.save_only_these_names("attended"),
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


# --- libraries ------------------------------------------------------------------------


def test_an_optax_step():
    optimizer = optax.adam(1e-2)
    p, x, y = arguments()

    def make(loss):
        @jax.jit
        def step(p, state, x, y):
            value, grads = jax.value_and_grad(loss)(p, x, y)
            updates, state = optimizer.update(grads, state, p)
            return optax.apply_updates(p, updates), state, value

        return step

    check(make, p, optimizer.init(p), x, y, tolerance=1e-3)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(x)))


def test_flax_linen_with_state():
    model = Linen()
    _, x, y = arguments()
    variables = model.init(jax.random.key(0), x)

    def linen_loss(p, stats, x, y):
        both = {"params": p, "batch_stats": stats}
        out, updated = model.apply(both, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean(), updated

    def make(loss):
        def step(variables, x, y):
            p, stats = variables["params"], variables["batch_stats"]
            return jax.value_and_grad(loss, has_aux=True)(p, stats, x, y)

        return step

    check(make, variables, x, y, of=linen_loss, tolerance=1e-4)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(nnx.gelu(self.norm(x + self.attention(x))))


def test_flax_nnx_with_state_and_optimizer():
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    _, x, y = arguments()

    @nnx.jit
    def train(model, optimizer, x, y):
        def of_model(model):
            return ((model(x) - y) ** 2).mean()

        value, grads = nnx.value_and_grad(of_model)(model)
        optimizer.update(model, grads)
        return value

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        value = train(model, optimizer, x, y)
        return value, jax.tree.leaves(nnx.state((model, optimizer)))

    fast = tracea.transform(step)
    found = names(fast, state, x, y)
    assert found["tracea_attention"] == found["tracea_attention_backward"] == 1
    # Each on a state of its own: what a step changes in its arguments, both do.
    got, expected = (jit(f)(state, x, y) for f in (fast, step))
    assert_near(got, expected, 1e-3)


class Equinox(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    activation: Any

    def __call__(self, x):
        return self.activation(self.attention(x, x, x))


def test_equinox_filters():
    key = jax.random.key(0)
    model = Equinox(eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key), jax.nn.gelu)
    arrays, static = eqx.partition(model, eqx.is_array)
    _, x, y = arguments()

    def equinox_loss(model, x, y):
        return ((jax.vmap(model)(x) - y) ** 2).mean(), {"name": "text", "x": x}

    @eqx.filter_jit
    def train(model, x, y):
        of_model = eqx.filter_value_and_grad(equinox_loss, has_aux=True)
        (value, aux), grads = of_model(model, x, y)
        assert aux["name"] == "text"
        return value, eqx.apply_updates(model, grads)

    def step(arrays, x, y):
        value, updated = train(eqx.combine(arrays, static), x, y)
        return value, eqx.filter(updated, eqx.is_array)

    fast = tracea.transform(step)
    assert names(fast, arrays, x, y)["tracea_attention_backward"] == 1
    got, expected = jit(lambda *args: (fast(*args), step(*args)))(arrays, x, y)
    assert_near(got, expected, 3e-5)


def test_equinox_vjp_and_checkpoint():
    mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(mlp, eqx.is_array)

    def step(arrays, x):
        model = eqx.combine(arrays, static)
        f = eqx.filter_checkpoint(lambda m, x: jax.vmap(jax.vmap(m))(x).sum())
        value, pull = eqx.filter_vjp(f, model, x)
        _, tangent = eqx.filter_jvp(lambda x: f(model, x), (x,), (x,))
        grads = eqx.filter_grad(f)(model, x)
        return (
            value,
            [eqx.filter(g, eqx.is_array) for g in (pull(value), grads)],
            tangent,
        )

    args = arrays, arguments()[1]
    fast = tracea.transform(step)
    assert names(fast, *args)["tracea_matmul"]
    got, expected = jit(lambda *args: (fast(*args), step(*args)))(*args)
    assert_near(got, expected, 3e-5)


# --- transformations of a transformed step --------------------------------------------


def test_derivatives_and_vmap_of_a_transformed_step():
    def after(p, x, y):
        return mlp_loss(descended(p, jax.grad(mlp_loss)(p, x, y)), x, y)

    args = arguments()
    fast = tracea.transform(after)
    got, expected = jit(lambda *args: [jax.grad(f)(*args) for f in (fast, after)])(
        *args
    )
    assert_near(got, expected, 2e-4)
    mapped = [jax.vmap(f, (None, 0, 0)) for f in (fast, after)]
    got, expected = jit(lambda *args: [f(*args) for f in mapped])(*args)
    assert_near(got, expected, 3e-5)


def test_a_transformed_loss_in_a_transformed_step():
    args = arguments()
    inner = step(tracea.transform(loss))
    assert products(tracea.transform(inner), *args) == products(inner, *args)
    # What the inner one was told to leave is found as it is outside of derivatives.
    some = step(tracea.transform(loss, ops=["matmul"]))
    assert "tracea_attention" not in names(some, *args)


def test_layers_in_a_row():
    def chained(p, x, y):
        x = x.reshape(-1, WIDTH)
        return jax.nn.relu(jax.nn.gelu(x @ p["up"]) @ p["down"]).sum()

    check(step, of=chained, has=("tracea_matmul",))


def test_scopes_are_those_of_jax():
    found = {str(site.scope) for site in tracea.explain(step(loss))(*arguments()).sites}
    assert found == {"jvp(layer)", "transpose(jvp(layer))"}


def test_leaks_and_internal_checks():
    args = arguments()
    fast, plain = (f(step(mlp_loss)) for f in (tracea.transform, jax.jit))
    with jax.checking_leaks(), jax.enable_checks(True):
        got = fast(*args)
    assert_near(got, plain(*args), 3e-5)


def test_export():
    args = arguments()
    fast = jax.jit(tracea.transform(step(mlp_loss)))
    again = jax.export.deserialize(jax.export.export(fast)(*args).serialize())
    assert_near(again.call(*args), step(mlp_loss)(*args), 3e-5)


# --- traces that are kept -------------------------------------------------------------


@pytest.mark.parametrize("make", [step, jacobian, in_scan, hessian_product])
def test_the_loss_is_traced_no_more_often_than_by_jax(make):
    calls = []

    def counted(p, x, y):
        calls.append(1)
        return mlp_loss(p, x, y)

    args = arguments()
    counts = []
    for program in (make(counted), tracea.transform(make(counted))):
        calls.clear()
        jax.make_jaxpr(program)(*args)
        counts.append(len(calls))
    plain, ours = counts
    assert 1 <= ours <= plain


def test_traces_are_kept_apart():
    traces = []

    @jax.jit
    def gradient(p, x, y):
        traces.append(1)
        return jax.grad(loss)(p, x, y)

    args = arguments()
    gradient(*args)
    fast = tracea.transform(gradient)
    found = products(fast, *args)
    assert found and len(traces) == 2
    assert {*BOTH_ATTENTIONS} <= {name for name, *_ in found}
    assert not names(gradient, *args)
    assert products(fast, *args) == found and len(traces) == 2
    only = tracea.transform(gradient, ops=["matmul"])
    assert {*names(only, *args)} == {"tracea_matmul"} and len(traces) == 3
    assert not names(gradient, *args) and len(traces) == 3


def test_threads():
    args = arguments()
    ready, found = threading.Barrier(2), []

    def transforming():
        ready.wait()
        fast = [tracea.transform(lambda *a: jax.grad(mlp_loss)(*a)) for _ in range(3)]
        found.extend(bool(names(f, *args)) for f in fast)

    def differentiating():
        ready.wait()
        for _ in range(6):
            found.append(not names(lambda *a: jax.grad(mlp_loss)(*a), *args))

    threads = [threading.Thread(target=f) for f in (transforming, differentiating)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 9


def test_donation():
    p, x, y = arguments()
    fast = tracea.transform(jax.jit(step(mlp_loss), donate_argnums=0))
    expected = step(mlp_loss)(p, x, y)
    lowered = fast.lower(p, x, y)
    assert lowered.as_text().count("tf.aliasing_output") == len(p)
    assert_near(lowered.compile()(jax.tree.map(jnp.copy, p), x, y), expected, 3e-5)


# --- what cannot be reached -----------------------------------------------------------


def test_explain_lists_the_sites_of_a_transformed_loss():
    def mixed(p, x, y):
        integers = x.astype(jnp.int32) @ jnp.ones((WIDTH, WIDTH), jnp.int32)
        return loss(p, x, y) + integers.sum()

    args = arguments()
    train = jax.jit(step(mixed))
    found = tracea.explain(train)(*args)
    inside = tracea.explain(step(tracea.transform(mixed)))(*args)
    assert [s.problem for s in found.sites] == [s.problem for s in inside.sites]
    assert found.ops["attention"] == 2
    (miss,) = found.misses
    assert "int32" in miss.what and miss.scope == "jvp()"
    # Nothing that is kept hides it.
    assert tracea.explain(train)(*args).misses == found.misses


def test_explain_tells_what_was_differentiated_too_early():
    args = arguments()
    _, pull = jax.vjp(loss, *args)
    misses = tracea.explain(lambda ct: pull(ct))(jnp.ones(())).misses
    early = [m for m in misses if m.reason == left.TOO_EARLY]
    assert early and all("transpose(jvp(layer))" in m.scope for m in early)
    assert "apply it to the loss" in str(early[0])

    def push(p):
        return jax.jvp(tracea.transform(lambda p: loss(p, *args[1:])), (p,), (p,))

    assert not tracea.explain(push)(args[0]).misses
    meant = tracea.explain(step(loss), after_grad=True)(*args)
    assert not meant.misses and {*meant.ops} == {"matmul"}


@pytest.fixture
def plain_linearize(monkeypatch):
    """JAX's own function, and a way to replace it: as if nothing was installed yet."""
    from jax._src.interpreters import ad

    original = getattr(ad.linearize, "__wrapped__", ad.linearize)
    monkeypatch.setattr(ad, "linearize", original)
    left._warn.cache_clear()
    yield functools.partial(monkeypatch.setattr, ad, "linearize"), original
    left._warn.cache_clear()


def test_it_is_installed_by_the_first_transform_only(plain_linearize):
    from jax._src.interpreters import ad

    _, original = plain_linearize
    args = arguments()
    jax.make_jaxpr(jax.grad(mlp_loss))(*args)
    assert ad.linearize is original
    fast = tracea.transform(step(loss))
    found = names(fast, *args)
    installed = ad.linearize
    assert installed is not original and "tracea_attention" in found
    assert names(tracea.transform(step(loss)), *args) == found
    assert ad.linearize is installed


def changed(original):
    def linearize(traceable, primals_ft, *rest, unknown=None, **kwargs):
        return original(traceable, primals_ft, *rest, **kwargs)

    return linearize


def renamed(original):
    def linearize(fun, primals_ft, *rest, **kwargs):
        return original(fun, primals_ft, *rest, **kwargs)

    return linearize


@pytest.mark.parametrize("other", [changed, renamed])
def test_an_unknown_jax_is_left_as_it_is(other, plain_linearize):
    replace, original = plain_linearize
    replace(unknown := other(original))
    _assert_degrades("unknown arguments: ")
    from jax._src.interpreters import ad

    assert ad.linearize is unknown


def test_a_jax_without_the_function_is_left_as_it_is(plain_linearize, monkeypatch):
    from jax._src.interpreters import ad

    def missing():
        return "it is gone"

    monkeypatch.setattr(_compat, "install_linearize_hook", missing)
    _assert_degrades("it is gone")
    monkeypatch.undo()
    monkeypatch.delattr(ad, "linearize")
    assert "has no such function" in str(_compat.install_linearize_hook())


def _assert_degrades(why):
    args = arguments()
    gradient = step(loss)
    fast = tracea.transform(gradient)
    with pytest.warns(UserWarning, match="apply transform to the loss") as caught:
        found = names(fast, *args)
    assert why in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert names(tracea.transform(step(loss)), *args) == found
        tracea.transform(layer)(*args[:2])
    assert {*found} == {"tracea_matmul"}
    got, expected = jit(lambda *args: (fast(*args), gradient(*args)))(*args)
    assert_near(got, expected, 3e-5)
    misses = tracea.explain(gradient)(*args).misses
    assert left.TOO_EARLY in {m.reason for m in misses}


def test_an_equinox_step_that_returns_its_model():
    """As equinox users write it, and with the layers' activation among the leaves."""
    mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(mlp, eqx.is_array))
    _, x, y = arguments()

    def loss(model, x, y):
        return ((jax.vmap(jax.vmap(model))(x) - y) ** 2).mean()

    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    fast = tracea.transform(step)
    expected = eqx.filter_jit(step)(mlp, state, x, y)
    for made in (fast, eqx.filter_jit(fast), tracea.transform(eqx.filter_jit(step))):
        got = made(mlp, state, x, y)
        assert got[0].activation is mlp.activation
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        of_arrays = eqx.filter((got, expected), eqx.is_array)
        assert_near(of_arrays[0], of_arrays[1], 3e-5)
    assert tracea.explain(step)(mlp, state, x, y).ops["matmul"] >= 6

"""Rules of calls that raise: XLA computes the call, and one warning says so.

Faults are put into every rule of every primitive, and into planning and emission.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import evaluated
from numerics import normal

import tracea_jax as tracea
from tracea_jax import catalogue, dispatch, emission, faults
from tracea_jax.ops.channel_affine import primitive as channel_affine
from tracea_jax.ops.channel_affine.fork import fork_p
from tracea_jax.ops.channel_affine.steps import Result
from tracea_jax.ops.channel_sums import primitive as channel_sums
from tracea_jax.ops.common import jax_rules
from tracea_jax.ops.elementwise.primitive import bind as elementwise
from tracea_jax.ops.group_norm import primitive as group_norm
from tracea_jax.ops.linear_cross_entropy import chunks
from tracea_jax.ops.matmul.chain import Layer, chain
from tracea_jax.ops.max_pool import primitive as max_pool
from tracea_jax.problem import Epilogue

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("our_attention", "small_chunks"),
]

LINE = re.compile(r"report this line: \w+: KeyError: 'a fault' \([\w/]+\.py:\d+; ")


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(faults, "_WARNED", set())


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("a fault")


def layers(x, w, v):
    step = Epilogue(activation="silu")
    how: Any = {"layout": "nn", "out": jnp.dtype("float32"), "precision": None}
    pair = (Layer(epilogue=step, **how), Layer(epilogue=Epilogue(), **how))
    return chain(pair, x, w, v)


def cross_entropy(x, w, bias):
    labels = jnp.arange(len(x)) % len(w)
    return tracea.ops.linear_cross_entropy(x, w, labels, bias=bias)


def paged(q, k, v):
    lengths, pages = jnp.full(len(q), 3, jnp.int32), jnp.zeros((len(q), 2), jnp.int32)
    return tracea.ops.paged_attention(q, k, v, lengths, pages)


def affine(x, scale, shift):
    result = Result(steps=("mul", "add"), activation="relu", copies=2)
    y, _ = channel_affine.bind(x, x, scale, shift, result=result)
    return y


def forked(x):
    a, b = fork_p.bind(x)
    return a * jnp.sin(b)


# name -> (a call, its arguments). The primitives of all ops but users' kernels.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (
        functools.partial(tracea.ops.matmul, activation="gelu"),
        (normal(5, 3), normal(3, 7, seed=1)),
    ),
    "matmul_chain": (
        layers,
        (normal(5, 3), normal(3, 7, seed=1), normal(7, 2, seed=2)),
    ),
    "gated_matmul": (
        tracea.ops.gated_matmul,
        (normal(5, 3), normal(3, 7, seed=1), normal(3, 7, seed=2)),
    ),
    "conv2d": (tracea.ops.conv2d, (normal(1, 5, 4, 3), normal(3, 3, 3, 2, seed=1))),
    "attention": (
        tracea.ops.attention,
        tuple(normal(1, 5, 2, 8, seed=i) for i in range(3)),
    ),
    "paged_attention": (
        paged,
        (normal(2, 2, 8), normal(1, 3, 8, 8, seed=1), normal(1, 3, 8, 8, seed=2)),
    ),
    "elementwise": (
        functools.partial(
            elementwise, function="multiply", implementation=None, config=None
        ),
        (normal(5, 3), normal(5, 3, seed=1)),
    ),
    "group_norm": (
        functools.partial(group_norm.bind, groups=2, epsilon=1e-5, activation="silu"),
        (normal(2, 5, 4), normal(4, seed=1), normal(4, seed=2)),
    ),
    "max_pool": (
        functools.partial(
            max_pool.bind, kernel=(2, 2), strides=(2, 2), padding=((0, 0), (0, 0))
        ),
        (normal(1, 4, 4, 3),),
    ),
    "channel_sums": (lambda x: channel_sums.bind(x)[1], (normal(5, 3),)),
    "channel_affine": (
        affine,
        (normal(5, 3), normal(1, 3, seed=1), normal(1, 3, seed=2)),
    ),
    "fork": (forked, (normal(5, 3),)),
    "linear_cross_entropy": (
        cross_entropy,
        (normal(5, 3), normal(70, 3, seed=1), normal(70, seed=2)),
    ),
}


def grad(f):
    return lambda *xs: jax.grad(
        lambda *ys: jnp.sin(f(*ys)).sum(), argnums=tuple(range(len(xs)))
    )(*xs)


def jvp(f):
    return lambda *xs: jax.jvp(f, xs, xs)


def mapped(f):
    return lambda *xs: jax.vmap(f)(*(jnp.stack([x, 2 * x]) for x in xs))


# kind of rule -> transformations that use it, of a call or of its derivatives.
FORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "map": {
        "vmap": mapped,
        "vmap of jvp": lambda f: mapped(jvp(f)),
        "vmap of grad": lambda f: mapped(grad(f)),
    },
    "differentiate": {
        "jvp": jvp,
        "jvp of jvp": lambda f: jvp(jvp(f)),
        "jvp of grad": lambda f: jvp(grad(f)),
    },
    "transpose": {
        "grad": grad,
        "grad of grad": lambda f: grad(
            lambda *xs: sum(jnp.sin(g).sum() for g in grad(f)(*xs))
        ),
        "transpose of vjp": lambda f: (
            lambda *xs: jax.linear_transpose(jax.vjp(f, *xs)[1], f(*xs))(xs)
        ),
        "transpose": lambda f: (
            lambda *xs: jax.linear_transpose(lambda x: f(*xs[:-1], x), xs[-1])(f(*xs))
        ),
    },
}


@functools.cache
def values(name: str, form: str) -> list[np.ndarray]:
    call, args = CALLS[name]
    (transformed,) = (forms[form] for forms in FORMS.values() if form in forms)
    return evaluated(jax.make_jaxpr(transformed(call))(*args), *args)


def name_of(primitive: Any) -> str:
    """The call that uses a primitive: the longest name that begins the primitive's."""
    own = primitive.name.removeprefix("tracea_").replace(
        "matmul_tangent", "matmul_chain"
    )
    return max((name for name in CALLS if own.startswith(name)), key=len)


RULES = sorted(
    (key for key in jax_rules.OWN if key[1] != "emit"),
    key=lambda key: (key[0].name, key[1]),
)
_QUICK = "matmul", "elementwise", "fork", "channel_affine"
CASES = [
    pytest.param(
        rule,
        marks=[] if name_of(rule[0]).startswith(_QUICK) else pytest.mark.slow,
        id=f"{rule[0].name}-{rule[1]}",
    )
    for rule in RULES
]


def test_every_primitive_has_guarded_rules():
    theirs = {p for p in catalogue.planned() if p.name != "tracea_cuda_kernel"}
    theirs |= {c.primitive for c in catalogue.composites()}
    assert {(p, kind) for p in theirs for kind in ("differentiate", "map")} <= set(
        RULES
    )


@pytest.mark.parametrize("rule", CASES)
def test_the_rule_of_the_reference_is_used(rule, monkeypatch):
    name = name_of(rule[0])
    call, args = CALLS[name]
    for form, transformed in FORMS[rule[1]].items():
        try:
            jaxpr = with_fault(rule, transformed(call), args, monkeypatch)
        except NotImplementedError:  # the op has no such derivative
            continue
        if jaxpr is not None:
            pairs = zip(evaluated(jaxpr, *args), values(name, form), strict=True)
            for found, expected in pairs:
                np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
            return
    pytest.fail("no form uses the rule")


def with_fault(rule: Any, f: Any, args: Any, monkeypatch: Any) -> Any:
    """The jaxpr of a function that met a fault in a rule, or None."""
    met: list[Any] = []

    def broken(*_: Any, **__: Any) -> Any:
        met.append(rule)
        raise KeyError("a fault")

    faults._WARNED.clear()
    jax.clear_caches()
    with monkeypatch.context() as changed, warnings.catch_warnings(record=True) as all_:
        warnings.simplefilter("always")
        changed.setitem(jax_rules.OWN, rule, broken)
        jaxpr = jax.make_jaxpr(f)(*args)
    messages = [str(w.message) for w in all_]
    assert len(messages) == bool(met), messages
    assert all(map(LINE.search, messages)), messages
    return jaxpr if met else None


# --- planning and emission ------------------------------------------------------------


PLACES: dict[str, Callable[[Any], Any]] = {
    "problem": lambda m: m.setattr(catalogue.Planned, "__getattribute__", _failing),
    "plan": lambda m: m.setattr(dispatch, "diagnose", failing),
    "call": lambda m: m.setattr(dispatch, "_broken_limit", failing),
    "emission": lambda m: m.setattr(emission, "emit", failing),
}


def _failing(planned: Any, name: str) -> Any:
    return failing if name == "problem_of" else object.__getattribute__(planned, name)


def lowered_with_fault(place: str, f: Any, args: Any, monkeypatch: Any) -> Any:
    """A compiled function's results; one warning tells the fault."""
    jax.clear_caches()
    with monkeypatch.context() as changed, warnings.catch_warnings(record=True) as all_:
        warnings.simplefilter("always")
        PLACES[place](changed)
        found = jax.jit(f)(*args)
    messages = [str(w.message) for w in all_]
    assert len(messages) == 1 and LINE.search(messages[0]), messages
    return found


SERVED = {
    "matmul": CALLS["matmul"],
    "attention": (tracea.ops.attention, (normal(1, 64, 2, 16),) * 3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SERVED)
def test_xla_serves_what_cannot_be_planned_or_emitted(name, place, monkeypatch):
    call, args = SERVED[name]
    found = lowered_with_fault(place, call, args, monkeypatch)
    with tracea.options(implementation="xla"):
        np.testing.assert_array_equal(found, jax.jit(lambda *xs: call(*xs))(*args))


@pytest.mark.parametrize("place", ["plan", "emission"])
def test_sites_and_composites_with_faults(place, monkeypatch):
    """A model of both, in training: each kind of call is left to XLA."""

    def loss(x, w, head):
        logits = jnp.tanh(x @ w) @ head.T
        labels = jnp.arange(len(x)) % len(head)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), labels[:, None], 1
        ).sum()

    args = normal(5, 3), normal(3, 7, seed=1), normal(70, 7, seed=2)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    found = lowered_with_fault(place, tracea.transform(step), args, monkeypatch)
    pairs = zip(*map(jax.tree.leaves, (found, jax.jit(step)(*args))), strict=True)
    for ours, plain in pairs:
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", ["forward", "tangent", "backward"])
@pytest.mark.parametrize("when", ["traced", "lowered"])
def test_loops_of_a_composite(loop, when, monkeypatch):
    """Faults in what an op is made of."""
    call, args = CALLS["linear_cross_entropy"]
    transformed = (jvp if loop == "tangent" else grad)(call)
    expected = values("linear_cross_entropy", "jvp" if loop == "tangent" else "grad")
    jax.clear_caches()
    with monkeypatch.context() as changed, warnings.catch_warnings(record=True) as all_:
        warnings.simplefilter("always")
        traced = None if when == "traced" else jax.jit(transformed).trace(*args)
        changed.setattr(chunks, loop, failing)
        traced = traced or jax.jit(transformed).trace(*args)
        found = traced.lower().compile()(*args)
    messages = [str(w.message) for w in all_]
    assert len(messages) == 1 and LINE.search(messages[0]), messages
    for ours, plain in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_a_demanded_kernel_raises(place, monkeypatch):
    call, args = CALLS["matmul"]
    config = {"kc": 384, "nc": 512, "tasks": 2}
    PLACES[place](monkeypatch)
    for how in (
        {"implementation": "gemm_cpu"},
        {"implementation": "tracea"},
        {"config": config},
    ):
        with pytest.raises(KeyError, match="a fault"):
            jax.jit(functools.partial(call, **how))(*args)
    with tracea.options(implementation="tracea"), pytest.raises(KeyError):
        jax.jit(call)(*args)


def test_explain_shows_the_reason(monkeypatch):
    call, args = CALLS["matmul"]
    monkeypatch.setattr(dispatch, "diagnose", failing)
    with pytest.warns(RuntimeWarning, match="failed to plan a matmul"):
        text = str(tracea.explain(call)(*args))
    assert "its rule failed with KeyError: 'a fault'" in text


def test_errors_of_users_are_raised():
    x, w = CALLS["matmul"][1]
    for wrong in (
        lambda x, w: tracea.ops.matmul(x, w.T),
        lambda x, w: tracea.ops.matmul(x, w, config={"tile_m": 7}),
        lambda x, w: tracea.ops.matmul(x, w, implementation="gemm_sm90"),
    ):
        for transformed in (wrong, jvp(wrong), grad(wrong), mapped(wrong)):
            with pytest.raises(ValueError):
                jax.jit(transformed)(x, w)
    with pytest.raises(ValueError, match="not linear"):
        jax.linear_transpose(lambda x: tracea.ops.matmul(x, w, activation="relu"), x)(
            tracea.ops.matmul(x, w)
        )
    with tracea.options(on_miss="error"), pytest.raises(LookupError, match="on_miss"):
        jax.jit(tracea.ops.matmul)(x, w)

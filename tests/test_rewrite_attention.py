"""Attention is found in every common spelling, and becomes one call that means it."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import GROUPS, Case
from attention_spellings.base import (
    LENGTHS,
    NARROW,
    SCALE,
    TRIL,
    B,
    H,
    K,
    N,
    T,
    bnth,
    btnh,
    ones,
    scores,
    softmax,
)
from attention_spellings.biases import BIASES
from attention_spellings.jax_nn import JAX_NN
from attention_spellings.layouts import SHARED, attend
from attention_spellings.softmaxes import shifted, unshifted
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxprs import equations
from numerics import normal
from slow_cases import slow_unless
from transformed import jit

from tracea_jax.rewrite import Miss, splice
from tracea_jax.transform import rules_of, transform

CASES = [(group, name) for group, cases in GROUPS.items() for name in cases]


def sites(fn: Any, *args: Any) -> list[Any]:
    """The calls of attention after the rewrite; no product may be left."""
    fast = transform(fn)
    assert not equations(fast, *args, name="dot_general")
    return equations(fast, *args, name="tracea_attention")


def reasons(fn: Any, *args: Any) -> list[str]:
    """Why a function stays exactly as it is."""
    misses: list[Miss] = []
    jaxpr = jax.make_jaxpr(fn)(*args)
    assert splice(jaxpr, rules_of(("attention",)), misses) is jaxpr
    return [miss.reason for miss in misses]


def is_narrow(case: Case) -> bool:
    return case.args[0].dtype in NARROW


@pytest.mark.parametrize("group, name", CASES)
def test_becomes_one_call(group, name):
    case = GROUPS[group][name]
    (site,) = sites(case.fn, *case.args)
    spec = site.params["spec"]
    rounding = 1e-2 if is_narrow(case) else 1e-6  # of the program's own scale
    assert spec.scale == pytest.approx(case.scale, rel=rounding)
    assert (spec.is_causal, spec.window) == (case.is_causal, case.window)
    assert spec.aligned_at_end == case.aligned_at_end
    found = {
        name: x.aval.shape for name, x in zip(spec.names, site.invars, strict=True)
    }
    assert {*found} == {*case.shapes, "q", "k", "v"}
    assert {**found, **case.shapes} == found
    assert len({x.aval.dtype for x in site.invars[:3]}) == 1


# The others are slow tests; test_becomes_one_call finds all of them.
COMPILED = ("jax.nn", "softmax", "layouts", "shared heads", "masks", "biases", "models")


@pytest.mark.parametrize("group", slow_unless(COMPILED, GROUPS))
def test_means_the_same(group):
    cases = GROUPS[group]
    # XLA has no float16 products with float32 sums on CPUs.
    run = [n for n, c in cases.items() if c.args[0].dtype != jnp.float16]
    plain = {name: cases[name].fn for name in run}
    fast = {name: transform(fn) for name, fn in plain.items()}
    args = {name: cases[name].args for name in run}
    found, expected = jit(
        lambda args: [{n: f[n](*args[n]) for n in run} for f in (fast, plain)]
    )(args)
    for name in run:
        x, y = found[name], expected[name]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        tolerance = 0.03 if is_narrow(cases[name]) else 3e-6
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max(), name


@pytest.mark.parametrize(
    "case",
    [JAX_NN["lengths"], SHARED["repeated 2 True"], BIASES["twice"], BIASES["bias 2"]],
)
def test_has_the_same_gradients(case):
    def with_arrays(*args: Any) -> Any:
        return case.fn(*args, *case.args[len(args) :])

    floats = [x for x in case.args if getattr(x, "dtype", None) == jnp.float32]
    assert_same_gradients(with_arrays, *floats)


def assert_same_gradients(fn: Any, *args: Any) -> None:
    """The same value and gradients with respect to all arguments."""

    def of(f: Any, *args: Any) -> Any:
        numbers = tuple(range(len(args)))
        return jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), numbers)(*args)

    fast = transform(fn)
    found, expected = jit(lambda *x: (of(fast, *x), of(fn, *x)))(*args)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert float(jnp.abs(x - y).max()) <= 1e-5 * float(jnp.abs(y).max())


# --- what is around it ----------------------------------------------------------------


def masked(q, k, v, mask):
    return softmax(jnp.where(mask, q @ jnp.swapaxes(k, -1, -2) * SCALE, -1e9)) @ v


def in_scan(q, k, v):
    body = jax.checkpoint(lambda q, _: (masked(q, k, v, jnp.asarray(TRIL)), None))
    return jax.lax.scan(body, q, None, length=2)[0]


def in_scan_with_constants(q, k, v):
    rows, columns = jnp.arange(T)[:, None], jnp.arange(T)
    mask = nn.make_causal_mask(jnp.ones((B, T)))

    def body(q, _):
        q = masked(q, k, v, rows >= columns)
        return masked(q, k, v, mask > 0), None

    return jax.lax.scan(body, q, None, length=2)[0]


def in_remat_with_added_mask(q, k, v):
    mask = jnp.where(jnp.tril(ones()), 0, -1e9)

    @jax.checkpoint
    def block(q, k, v, mask):
        return softmax(q @ jnp.swapaxes(k, -1, -2) * SCALE + mask) @ v

    return jax.jit(block)(q, k, v, mask)


def in_cond(q, k, v):
    captured = functools.partial(masked, mask=jnp.asarray(TRIL))
    return jax.lax.cond(q[0, 0, 0, 0] > 9, lambda q, *_: q, captured, q, k, v)


@pytest.mark.parametrize(
    "fn, count",
    [
        (in_scan, 1),
        (in_scan_with_constants, 2),
        (in_remat_with_added_mask, 1),
        (in_cond, 1),
        (jax.jit(in_scan), 1),
    ],
)
def test_nested(fn, count):
    found = sites(fn, *bnth())
    assert [x.params["spec"].is_causal for x in found] == [True] * count
    assert not any(x.params["spec"].optional for x in found)


@pytest.mark.parametrize("fn", [in_scan_with_constants, in_cond])
def test_nested_has_the_same_gradients(fn):
    assert_same_gradients(fn, *bnth())


def test_masks_with_unknown_values_from_outside_stay_masks():
    def fn(q, k, v, lengths):
        mask = jnp.arange(T) < lengths[:, None, None, None]
        return jax.checkpoint(masked)(q, k, v, mask & TRIL)

    (site,) = sites(fn, *bnth(), jnp.asarray(LENGTHS))
    assert site.params["spec"].optional == ("mask",)
    assert site.invars[3].aval.shape == (B, 1, T, T)


def test_attention_of_attention():
    def fn(q, k, v):
        return attend(attend(q, k, v), k, v)

    args = [x[0, 0] for x in bnth()]
    assert len(sites(fn, *args)) == 2
    assert_same_gradients(fn, *args)


def test_a_bias_with_a_mask_that_layers_share():
    def fn(q, k, v, bias):
        bias = bias + jnp.where(jnp.tril(ones()), 0, -1e9)
        for _ in range(2):
            q = softmax(scores(q, k) + bias) @ v
        return q

    found = sites(fn, *bnth(), normal(N, T, T))
    specs = [x.params["spec"] for x in found]
    assert [(x.is_causal, x.optional) for x in specs] == [(True, ("bias",))] * 2


def test_products_around_it_are_found():
    case = GROUPS["layouts"]["projected"]
    products = equations(transform(case.fn), *case.args, name="tracea_matmul")
    assert len(products) == 4


def test_under_vmap():
    plain = functools.partial(masked, mask=TRIL)
    stacked = [jnp.stack([x, x[::-1]]) for x in bnth()]
    both = jax.jit(lambda *x: [jax.vmap(f)(*x) for f in (transform(plain), plain)])
    found, expected = both(*stacked)
    assert np.allclose(found, expected, atol=1e-5)


# --- what is none ---------------------------------------------------------------------


def twice(q, k, v):
    p = softmax(scores(q, k))
    return p @ v, p


def scores_returned(q, k, v):
    s = scores(q, k)
    return softmax(s) @ v, s


def capped(q, k, v):
    return softmax(5 * jnp.tanh(scores(q, k) / 5)) @ v


def wrong_axis(q, k, v):
    return softmax(scores(q, k), axis=-2) @ v


def over_heads(q, k, v):
    return softmax(scores(q, k), axis=1) @ v


def highest(q, k, v):
    s = jnp.einsum("bnth,bnsh->bnts", q, k, precision="highest")
    return softmax(s) @ v


def dropout(q, k, v):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (B, N, T, T))
    return jnp.where(keep, softmax(scores(q, k)) / 0.9, 0) @ v


def scaled_late(q, k, v):
    return (softmax(scores(q, k)) * 0.9) @ v


def learned_scale(q, k, v):
    return softmax(scores(q, k) * v[0, 0, 0, 0]) @ v


def weakly_masked(q, k, v):
    return softmax(jnp.where(TRIL, scores(q, k), -5.0)) @ v


def filled(q, k, v):
    s = scores(q, k)
    return softmax(jnp.where(TRIL, s, s[::-1])) @ v


def other_width(q, k, v):
    return softmax(scores(q, k)) @ v[..., :3]


def mixed(q, k, v):
    return softmax(scores(q, k)) @ v.astype(jnp.bfloat16)


def one_key(q, k, v):
    return softmax(scores(q, k[:, :, :1])) @ v[:, :, :1]


def masked_late(q, k, v):
    return jnp.where(TRIL, softmax(scores(q, k)), 0) @ v


def residual(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, return_residual=True)


def own_values(q, k, v):
    return jnp.einsum(
        "bnts,bntsh->bnth", softmax(scores(q, k)), v[:, :, None] + q[..., None, :]
    )


REFUSED = {
    twice: "the probabilities are used 2 times",
    scores_returned: "the scores are used elsewhere, too",
    residual: "the scores are used elsewhere, too",
    capped: "its scores have a soft cap, and no kernel here computes that",
    wrong_axis: "the softmax is not over what the product after it sums",
    over_heads: "the softmax is not over what the product after it sums",
    highest: "it asks for a precision other than the default",
    dropout: "dropout acts on the weights",
    scaled_late: "the probabilities go through mul",
    learned_scale: "the scores are scaled by what is not known while tracing",
    weakly_masked: "masked scores are replaced by -5, no large number",
    filled: "masked scores are replaced by what is not known",
    other_width: "a head of the keys has 8 numbers, of the values 3, and no kernel "
    "here computes that",
    mixed: "queries, keys and values have different dtypes: float32, float32, bfloat16",
    one_key: "there is only one key",
    masked_late: "the probabilities are masked, but not their scores",
    own_values: "each query has values of its own",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_left_as_it_is(fn):
    args = btnh() if fn is residual else bnth()
    assert reasons(fn, *args) == [REFUSED[fn]]


def test_what_nobody_takes_for_attention():
    def classifier(x, w):
        return softmax(x @ w)

    def loss(x, w, y):
        return -(jax.nn.log_softmax(x @ w) * y).sum()

    def router(x, w, experts):
        return jnp.einsum("te,etd->td", softmax(x @ w), jnp.tanh(experts))

    def positions(x, w):
        return softmax(w) @ x

    x, w, y = normal(4, 8), normal(8, 3), normal(4, 3)
    assert reasons(classifier, x, w) == []
    assert reasons(loss, x, w, y) == []
    assert reasons(positions, x, normal(4, 4)) == []
    wide = normal(4, 600), normal(600, 3), normal(3, 600)
    assert reasons(lambda x, w, v: softmax(x @ w) @ v, *wide) == [
        "a head has 600 numbers, more than 512"
    ]
    assert len(reasons(router, x, w, normal(3, 4, 8))) == 1  # each token has its own


def test_float64_is_left():
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(x, np.float64)) for x in bnth()]
        assert reasons(capped, *args)
        assert reasons(lambda q, k, v: softmax(scores(q, k)) @ v, *args) == [
            "float64 is left to XLA"
        ]


# --- random programs ------------------------------------------------------------------


@st.composite
def programs(draw: Any) -> tuple[Any, tuple[jax.Array, ...], bool]:
    """(function, arguments, whether its mask consists of bounds on positions)."""
    s, kv = draw(st.sampled_from([(T, N), (T + 2, N), (T, K), (T + 3, 1)]))
    q_order, kv_order, scores_order, out_order = (
        "".join(draw(st.permutations(x))) for x in ("bthd", "bshd", "bhts", "bthd")
    )
    factor = [draw(st.sampled_from([1.0, 0.5, 2.0])) for _ in range(3)]
    low, high = draw(st.integers(0, T)), draw(st.integers(0, T))
    kind = draw(st.sampled_from(["none", "band", "added", "random", "odd"]))
    form = draw(st.sampled_from([softmax, shifted, unshifted]))
    table = np.asarray(normal(B, 1, T, s, seed=low) > 0) | (np.arange(s) == 0)

    def seen() -> Any:
        i, j = jnp.arange(T)[:, None], jnp.arange(s)
        if kind in ("band", "added"):
            return (i - j <= low) & (j - high <= i)
        if kind == "odd":
            return ((i + j) % 2 == 0) & (j <= i + high)
        return table

    def fn(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, N // kv, kv_order.index("h")) for x in (k, v))
        x = jnp.einsum(f"{q_order},{kv_order}->{scores_order}", q * factor[0], k / 2)
        x = x * factor[1]
        places = [scores_order.index(c) for c in "bhts"]
        x = x.transpose(places)
        if kind == "added":
            x = x + jnp.where(seen(), 0, -1e9)
        elif kind != "none":
            x = jnp.where(seen(), x, -1e9)
        p = form(x / factor[2])
        return jnp.einsum(f"bhts,{kv_order}->{out_order}", p, v)

    sizes = {"b": B, "t": T, "s": s, "d": H}
    args = (
        normal(*({**sizes, "h": N}[c] for c in q_order)),
        *(normal(*({**sizes, "h": kv}[c] for c in kv_order), seed=i) for i in (1, 2)),
    )
    return fn, args, kind in ("none", "band", "added")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(programs())
def test_random_programs(program):
    fn, args, of_bounds = program
    (site,) = sites(fn, *args)
    assert site.params["spec"].optional == (() if of_bounds else ("mask",))
    fast = transform(fn)
    found, expected = jit(lambda *args: (fast(*args), fn(*args)))(*args)
    assert np.allclose(found, expected, atol=1e-5)

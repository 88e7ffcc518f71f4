"""Segments, soft caps and wide values in programs: found, or left for a reason."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import CAPS, RARE
from attention_spellings.base import TRIL, B, N, T, bnth, scores, softmax
from attention_spellings.masks import IDS, SEGMENTS
from attention_spellings.sinks import SINKS
from jaxprs import equations
from numerics import normal
from transformed import assert_all_alike

import tracea_jax as tracea
from tracea_jax.ops.common import choice, lowering
from tracea_jax.transform import transform

IDS_64 = np.asarray(IDS, np.int64) + (np.arange(T) << 40)


@pytest.fixture
def computed(monkeypatch):
    """As on a device with a kernel for everything."""
    monkeypatch.setattr(lowering, "would_be_xla", lambda *_: False)


def spec_of(fn, *args):
    (site,) = equations(transform(fn), *args, name="tracea_attention")
    return site.params["spec"]


@pytest.mark.parametrize(
    "group, name", [(group, name) for group, cases in RARE.items() for name in cases]
)
def test_becomes_one_call(computed, group, name):
    case = RARE[group][name]
    (site,) = equations(transform(case.fn), *case.args, name="tracea_attention")
    spec = site.params["spec"]
    assert (spec.soft_cap or 0) == pytest.approx(CAPS.get((group, name), 0), rel=1e-6)
    rounding = 1e-2 if case.args[0].dtype == jnp.bfloat16 else 1e-6
    assert spec.scale == pytest.approx(case.scale, rel=rounding)
    assert (spec.is_causal, spec.window) == (case.is_causal, case.window)
    assert (spec.aligned_at_end, spec.alibi) == (case.aligned_at_end, case.alibi)
    shapes = {n: x.aval.shape for n, x in zip(spec.names, site.invars, strict=True)}
    assert {*shapes} == {*case.shapes, "q", "k", "v"}
    assert {**shapes, **case.shapes} == shapes


@pytest.mark.parametrize("group", RARE)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_means_the_same(computed, group, dtype):
    """Values, and gradients of all that is floating, slopes and sinks too."""
    chosen = {n: c for n, c in RARE[group].items() if c.args[0].dtype == dtype}
    with choice.without_choices():  # what is called, also where XLA serves it
        assert_all_alike(
            {name: (case.fn, case.args) for name, case in chosen.items()},
            tolerance=2e-5 if dtype == "float32" else 0.04,
        )


@pytest.mark.parametrize("name", ["capped", "narrow values"])
def test_without_a_kernel_the_products_stay_sites_of_their_own(name):
    case = RARE["capped"][name]
    text = str(tracea.explain(case.fn)(*case.args))
    assert "2 sites: 2 matmul" in text and "no kernel here computes that" in text


def test_explain_names_them():
    case = SEGMENTS["grouped"]
    text = str(tracea.explain(case.fn)(*case.args))
    assert "causal segments" in text and "1 site: 1 attention" in text


@pytest.mark.parametrize("device", ["H200", None])
def test_segments_run_on_the_kernels_that_masks_run_on(device):
    def loss(f, *args):
        return f(*args).astype("float32").sum()

    args = [normal(2, 512, 4, 64, dtype="bfloat16", seed=i) for i in range(3)]
    ids = jnp.arange(1024).reshape(2, 512) // 100

    def packed(q, k, v):
        same = (ids[:, :, None] == ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=same)

    with tracea.options(device=device):
        gradient = jax.grad(functools.partial(loss, packed))
        text = str(tracea.explain(gradient)(*args))
    assert "backward segments" in text and "segments &lse" in text
    assert "xla," not in text


# --- what only looks alike ------------------------------------------------------------


def masked_by(mask, s):
    return jnp.where(mask, s, -1e9)


def with_scores(change):
    return lambda q, k, v, *rest: softmax(change(scores(q, k), *rest)) @ v


LOOKALIKES = {
    "masked before the cap": (
        lambda s: 5 * jnp.tanh(masked_by(TRIL, s) / 5),
        "the scores are masked before their cap",
    ),
    "shifted before the cap": (
        lambda s: jnp.tanh(s + 1.0),
        "the scores are shifted before their cap",
    ),
    "shifted by their maximum": (
        lambda s: jnp.tanh(s - s.max(-1, keepdims=True)),
        "the scores are shifted before their cap",
    ),
    "a bias after the cap": (
        lambda s: jnp.tanh(s) + jnp.asarray(normal(T, T)),
        "the scores go through a tanh that is no soft cap",
    ),
    "a negative cap": (
        lambda s: -2 * jnp.tanh(s),
        "the scores go through a tanh that is no soft cap",
    ),
    "twice": (
        lambda s: jnp.tanh(2 * jnp.tanh(s)),
        "the scores go through a tanh that is no soft cap",
    ),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_is_no_soft_cap_stays(computed, name):
    change, reason = LOOKALIKES[name]
    assert reason in str(tracea.explain(with_scores(change))(*bnth()))


TOGETHER = "its scores and sinks are changed together"
SHIFTED = "its scores are shifted otherwise than its sink"
TOP = functools.partial(jnp.max, axis=-1, keepdims=True)


def joined(change=lambda s: s, keep=slice(T), sinks=SINKS[:, None, None]):
    """Scores and sinks put together, changed, and what is kept of the weights."""

    def fn(q, k, v):
        logits = jnp.broadcast_to(sinks, (*q.shape[:3], 1))
        p = softmax(change(jnp.concatenate([masked_by(TRIL, scores(q, k)), logits], 3)))
        return p[..., keep] @ v

    return fn


def summed(numerator, denominator):
    """exp(shifted scores) by a sum that something is added to."""

    def fn(q, k, v):
        s = masked_by(TRIL, scores(q, k))
        e = jnp.exp(numerator(s))
        total = e.sum(-1, keepdims=True) + denominator(s, SINKS[:, None, None])
        return (e / total) @ v

    return fn


NO_SINKS = {
    "masked together": (
        joined(lambda s: jnp.where(jnp.arange(T + 1) != 2, s, -1e9)),
        TOGETHER,
    ),
    "scaled together": (joined(lambda s: 2 * s), TOGETHER),
    "capped together": (joined(lambda s: jnp.tanh(s)), TOGETHER),
    "a key is dropped": (joined(keep=slice(1, T + 1)), "the probabilities are cut"),
    "of queries": (
        joined(sinks=jnp.asarray(normal(1, 1, T, 1))),
        "its sinks are not one for each head",
    ),
    "shifted before": (
        lambda q, k, v: _with_shifted_scores(q, k) @ v,
        SHIFTED,
    ),
    "sink not shifted": (
        summed(lambda s: s - TOP(s), lambda _, m: jnp.exp(m)),
        SHIFTED,
    ),
    "scores not shifted": (
        summed(lambda s: s, lambda s, m: jnp.exp(m - TOP(s))),
        SHIFTED,
    ),
    "other shift": (
        summed(lambda s: s - TOP(s), lambda s, m: jnp.exp(m - jnp.maximum(TOP(s), m))),
        SHIFTED,
    ),
    "shifted twice": (
        summed(lambda s: (s - TOP(s)) - 1.0, lambda s, m: jnp.exp(m - TOP(s))),
        SHIFTED,
    ),
    "epsilon": (
        summed(lambda s: s - TOP(s), lambda *_: 1e-6),
        "something is added to the sum of its softmax",
    ),
    "no exponential": (
        summed(lambda s: s, lambda _, m: m**2),
        "something is added to the sum of its softmax",
    ),
}


def _with_shifted_scores(q, k):
    s = scores(q, k)
    sinks = jnp.broadcast_to(SINKS[:, None, None], (*s.shape[:3], 1))
    return softmax(jnp.concatenate([s - TOP(s), sinks], 3))[..., :-1]


@pytest.mark.parametrize("name", NO_SINKS)
def test_what_is_no_sink_stays(computed, name):
    fn, reason = NO_SINKS[name]
    assert reason in str(tracea.explain(fn)(*bnth()))


def late(numerator=lambda o: o, total=lambda e: e.sum(-1, keepdims=True)):
    """A product of exponentials, divided by something."""

    def fn(q, k, v):
        e = jnp.exp(scores(q, k))
        return numerator(e @ v) / total(e)

    return fn


@pytest.mark.parametrize(
    "fn",
    [
        late(total=lambda e: e.sum(-1, keepdims=True).swapaxes(0, 0)[::-1]),
        late(total=lambda e: e.sum(-2)[..., None]),
        late(total=lambda e: e.sum((-1, -2), keepdims=True)),
        late(total=lambda e: e.sum(-1, keepdims=True) + 1e-6),
        late(total=lambda e: jnp.maximum(e.sum(-1, keepdims=True), 1e-6)),
        late(numerator=jnp.tanh),
        late(numerator=lambda o: o + 1),
    ],
)
def test_what_is_divided_by_something_else_stays(computed, fn):
    assert not equations(transform(fn), *bnth(), name="tracea_attention")


def test_empty_rows_and_special_sinks_are_the_programs(computed):
    """A query that sees no key gives all its weight to the sink."""

    def fn(q, k, v, sinks, mask):
        s = jnp.where(mask, scores(q, k), jnp.finfo(q.dtype).min)
        logits = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
        return softmax(jnp.concatenate([s, logits], -1))[..., :-1] @ v

    mask = jnp.asarray(TRIL).at[2].set(False)
    for special in (-jnp.inf, 1e30, jnp.nan, -0.0):
        args = (*bnth(), SINKS.at[1].set(special), mask)
        assert spec_of(fn, *args).optional == ("mask", "sinks")
        with choice.without_choices():
            found = jax.jit(transform(fn))(*args)
        # With no key and a sink of no weight, the program's weights are those of keys.
        seen = np.asarray(mask.any(-1)) if special == -jnp.inf else slice(None)
        plain = jax.jit(fn)(*args)
        np.testing.assert_allclose(found[:, :, seen], plain[:, :, seen], atol=1e-5)


def test_explain_names_sinks_and_slopes(computed):
    for group, name, words in (
        ("sinks", "maxtext", "causal sinks"),
        ("alibi", "bloom", "alibi linear"),
    ):
        case = RARE[group][name]
        text = str(tracea.explain(case.fn)(*case.args))
        assert words in text and "1 site: 1 attention" in text


@pytest.mark.parametrize("device", ["H200", None])
def test_slopes_are_used_where_that_costs_no_gradient_its_kernel(device):
    def fn(q, k, v, slopes):
        ahead = jnp.arange(512) - jnp.arange(512)[:, None]
        s = jnp.einsum("btnh,bsnh->bnts", q, k).astype("float32") / 8
        s = jnp.where(ahead <= 0, s + slopes[:, None, None] * ahead, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", softmax(s).astype(q.dtype), v)

    args = [normal(2, 512, 4, 64, dtype="bfloat16", seed=i) for i in range(3)]
    with tracea.options(device=device):
        site = spec_of(fn, *args, jnp.ones(4))
        text = str(tracea.explain(fn)(*args, jnp.ones(4)))
    assert site.is_causal and site.optional in (("bias",), ("alibi_slopes",))
    assert device is None or "sm90" in text or "cudnn" in text


OTHER_IDS = {
    "wide": (lambda s, i: masked_by(i[:, None, :, None] == i[:, None, None], s), "i8"),
    "floats": (
        lambda s, i: masked_by(i[:, None, :, None] == i[:, None, None], s),
        "f4",
    ),
    "next document": (
        lambda s, i: masked_by(i[:, None, :, None] == i[:, None, None] + 1, s),
        "i4",
    ),
    "ids of pairs": (
        lambda s, i: masked_by((i[:, :, None] * i[:, None])[:, None] == 7, s),
        "i4",
    ),
    "ids of heads": (
        lambda s, i: masked_by(
            jnp.arange(N)[:, None, None] % 2 + i[:, None, :, None] == i[:, None, None],
            s,
        ),
        "i4",
    ),
}


@pytest.mark.parametrize("name", OTHER_IDS)
def test_other_comparisons_stay_masks(name):
    change, dtype = OTHER_IDS[name]
    with jax.enable_x64(True):
        ids = jnp.asarray(IDS_64 if dtype == "i8" else np.asarray(IDS), dtype)
        fn, args = with_scores(change), (*bnth(), ids)
        spec = spec_of(fn, *args)
        assert spec.optional == ("mask",)
        found, plain = (jax.jit(f)(*args) for f in (transform(fn), fn))
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_a_second_pair_of_ids_stays_a_mask():
    def fn(q, k, v, a, b):
        same = (a[:, :, None] == a[:, None]) & (b[:, :, None] == b[:, None])
        return softmax(masked_by(same[:, None], scores(q, k))) @ v

    q, k, v = bnth()
    args = (q, k, v, IDS, IDS[::-1])
    assert spec_of(fn, *args).optional == ("mask", "q_segments", "kv_segments")
    np.testing.assert_allclose(transform(fn)(*args), fn(*args), atol=1e-5)


def test_special_values_behind_a_cap(computed):
    def fn(q, k, v, bias):
        s = 2 * jnp.tanh((scores(q, k) + bias) / 2)
        return softmax(masked_by(TRIL, s)) @ v

    bias = np.zeros((T, T), np.float32)
    bias[1, 0], bias[2, 1], bias[3, 0], bias[4, 4] = np.inf, -np.inf, np.nan, -0.0
    q, k, v = bnth()
    q = q.at[0, 0, 5, 0].set(jnp.inf)
    args = (q, k, v, jnp.asarray(bias))
    fast = jax.jit(transform(fn))
    assert spec_of(fn, *args).soft_cap == 2
    np.testing.assert_allclose(fast(*args), jax.jit(fn)(*args), atol=1e-5)
    assert B == len(q) and np.isnan(fast(*args)).any()

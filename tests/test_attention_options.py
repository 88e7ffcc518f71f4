"""Segment ids, soft caps, sinks, wide values, positions from the end: by definition."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import EXTRAS, definition, exact, lengths, qkv, random_mask
from jax import export
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close, each_in_f64, in_f64, in_f64_once

import tracea_jax as tracea
from tracea_jax import masks
from tracea_jax.campaign import local_device
from tracea_jax.device import NAMED
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops import attention
from tracea_jax.ops.attention.reference import Spec, reference
from tracea_jax.ops.common import lowering
from tracea_jax.problem import AttentionProblem

pytestmark = pytest.mark.once

Q, K, _ = qkv()
NARROW = normal(2, 5, 2, 3, seed=1)  # values of another size than the keys
DIFFERENTIABLE = ("bias", "sinks", "alibi_slopes")


@pytest.fixture(params=["reference", "flash"])
def path(request):
    """Which derivative the rule takes: the reference's, or that of kernels."""
    if request.param == "flash":
        request.getfixturevalue("flash")


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)


def exactly(*args, **settings):
    return definition(*args, **settings)[0]


@pytest.mark.parametrize("case", EXTRAS)
def test_values_are_those_of_the_definition(case):
    found = attention(Q, K, NARROW, **EXTRAS[case], return_residual=True)
    assert_close(found, exact(Q, K, NARROW, **EXTRAS[case]), 4e-6)
    narrow = [x.astype("bfloat16") for x in (Q, K, NARROW)]
    o = attention(*narrow, **EXTRAS[case])
    assert o.dtype == "bfloat16" and o.shape == (2, 6, 4, 3)
    assert_close(o.astype("float32"), exact(*narrow, **EXTRAS[case])[0], 2e-2)


@pytest.mark.parametrize(
    "case", slow_unless(["all extras"], ["cap", "alibi", "all extras"])
)
def test_derivatives_are_those_of_the_definition(path, case):
    fixed = dict(EXTRAS[case])
    named = {n: fixed.pop(n) for n in DIFFERENTIABLE if n in fixed}
    args = (Q, K, NARROW, *named.values())
    tangents = tuple(normal(*x.shape, seed=2) for x in args)

    def derivatives(f, args, tangents):
        def given(*args):
            return f(*args[:3], **dict(zip(named, args[3:], strict=True)), **fixed)

        gradient = jax.grad(lambda *a: jnp.sin(given(*a)).sum(), range(len(args)))
        return {
            "jvp": jax.jvp(given, args, tangents)[1],
            "grad": gradient(*args),
            "hvp": jax.jvp(gradient, args, tangents)[1],
        }

    found = jax.jit(functools.partial(derivatives, attention))(args, tangents)
    of_exact = functools.partial(derivatives, exactly)
    expected = in_f64_once(("options", case), of_exact, args, tangents)
    for name in found:
        assert_close(found[name], expected[name], 2e-5)


def test_only_the_gradients_that_are_wanted(flash):
    bias, sinks = normal(1, 4, 6, 5), normal(4)

    def gradients(f, wanted, *args):
        def loss(q, k, v, bias, sinks):
            return jnp.sin(f(q, k, v, bias, sinks=sinks)).sum()

        return jax.grad(loss, argnums=wanted)(*args)

    given = (Q, K, NARROW, bias, sinks)
    expected = in_f64(functools.partial(gradients, exactly, range(5)), *given)
    for wanted in ((4,), (3,), (0, 4)):
        found = jax.jit(functools.partial(gradients, attention, wanted))(*given)
        assert_close(found, [expected[i] for i in wanted], 2e-5)


MAPPED = {
    "queries": (0, None, None, None, None),
    "sinks": (None, None, None, 0, None),
    "segments": (None, None, None, None, 1),
    "all": (1, 0, 2, 0, 0),
}


def both(f, q, k, v, sinks, q_ids):
    """Gradients of a loss, and what f gives."""

    def loss(q, k, v, sinks):
        segments = {**IDS, "query_segment_ids": q_ids.astype("int32")}
        o = f(q, k, v, sinks=sinks, logits_soft_cap=1.0, **segments)
        return (o**2).sum(), o

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)


both_exactly = functools.partial(both, exactly)
IDS = EXTRAS["segments"]


@pytest.mark.parametrize("what", slow_unless(list(MAPPED)[-2:], MAPPED))
def test_vmap_of_values_and_gradients(flash, what):
    # Arrays in float64 have no integer ids; these are made integers inside.
    args = [Q, K, NARROW, normal(4), IDS["query_segment_ids"].astype("float32")]
    stacked = [
        x if d is None else jnp.stack([x, jnp.roll(x, 1, axis=0)], d)
        for x, d in zip(args, MAPPED[what], strict=True)
    ]

    axes = MAPPED[what]
    found = jax.jit(jax.vmap(functools.partial(both, attention), axes))(*stacked)
    assert_close(found, each_in_f64(both_exactly, axes, *stacked), 2e-5)


# --- what only the primitives say -----------------------------------------------------


@pytest.mark.parametrize("window", [None, (2, 1)])
def test_positions_from_the_end_are_those_of_the_last_keys(window):
    q_lengths, kv_lengths = [6, 3], [4, 5]
    spec = Spec(
        scale=0.5,
        is_causal=window is None,
        window=window,
        aligned_at_end=True,
        optional=("q_lengths", "kv_lengths"),
    )
    v = K + 1
    for cap in (None, 3.0):  # JAX's attention with a mask, and the one that is ours
        how = Spec(**{**{n: getattr(spec, n) for n in spec.__slots__}, "soft_cap": cap})
        given = (Q, K, v, lengths(*q_lengths), lengths(*kv_lengths))
        (o,) = jax.jit(functools.partial(reference, spec=how))(*given)
        for b, (rows, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
            i = np.arange(rows)[:, None] + keys - rows
            j = np.arange(keys)[None]
            mask = j <= i if window is None else (j >= i - 2) & (j <= i + 1)
            sees = mask.any(1)
            own = (np.asarray(x)[b : b + 1] for x in given[:3])
            q, k, values = (
                x[:, :n] for x, n in zip(own, (rows, keys, keys), strict=True)
            )
            settings = {"mask": mask, "scale": 0.5, "logits_soft_cap": cap}
            (expected,) = exact(q, k, values, **settings)[0]
            assert_close(o[b, :rows][sees], expected[sees])
            assert not o[b, rows:].any() and sees.any()


def test_a_mask_of_blocks_is_the_mask_it_stands_for():
    blocks = random_mask(2, 1, 2, 3)
    dense = jnp.repeat(jnp.repeat(blocks, 4, axis=2)[:, :, :6], 2, axis=3)[..., :5]
    spec = Spec(scale=0.5, optional=("mask",), mask_block=(4, 2))
    (o,) = jax.jit(functools.partial(reference, spec=spec))(Q, K, K, blocks)
    whole = jax.jit(lambda *x: attention(*x, scale=0.5))(Q, K, K, None, dense)
    np.testing.assert_array_equal(o, whole)


# --- kernels that read no segments ----------------------------------------------------


def test_a_kernel_of_masks_is_given_one():
    own = jnp.asarray([0, 0, 1, 1, 2, 2])
    mask = masks.causal(from_end=True) & masks.lengths(kv=lengths(6, 4))
    mask &= masks.segments(own) & masks.block_sparse(np.ones((3, 2), bool), (2, 3))
    by_hand = own[:, None] == own
    ends = jnp.asarray([6, 4])[:, None, None]
    by_hand = by_hand & (jnp.arange(6) <= jnp.arange(6)[:, None] + ends - 6)
    by_hand = (by_hand & (jnp.arange(6) < ends))[:, None]

    def gradients(f, q, k, mask):
        def loss(q, k):
            # Queries without keys are left out.
            o = f(q, k, k + 1, mask=mask)
            return (jnp.where(by_hand.any(-1)[:, 0, :, None, None], o, 0) ** 2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))(q, k)

    of_kernel = functools.partial(attention, implementation="attention_cpu")
    k = normal(2, 6, 2, 8)
    found = jax.jit(functools.partial(gradients, of_kernel))(Q, k, mask)
    plain = functools.partial(attention, implementation="xla")
    expected = jax.jit(functools.partial(gradients, plain))(Q, k, by_hand)
    assert_close(found, jax.tree.map(np.asarray, expected), 2e-5)
    with_config = functools.partial(of_kernel, config={"block_q": 7, "block_kv": 64})
    text = jax.jit(with_config).lower(Q, k, k, mask=mask).as_text()
    assert text.count("tracea_cpu_attention_v1") == 1 and "block_q = 7" in text


def test_a_kernel_of_biases_is_given_that_of_slopes():
    settings: dict[str, Any] = {**EXTRAS["linear alibi"], "bias": normal(2, 1, 6, 5)}
    kernel = functools.partial(attention, implementation="attention_cpu", **settings)
    values = normal(2, 5, 2, 8)
    (expected, _) = exact(Q, K, values, **settings)
    assert_close(jax.jit(kernel)(Q, K, values), expected, 4e-6)
    with pytest.raises(tracea.Unsupported, match="no gradient of one"):
        jax.grad(lambda q: kernel(q, K, values).sum())(Q)


def test_vmap_of_slopes(flash):
    slopes = normal(3, 4)

    def loss(f, slopes):
        o = f(Q, K, NARROW, alibi_slopes=slopes, is_causal=True)
        return (o**2).sum()

    def mapped(f):
        return jax.jit(jax.vmap(jax.value_and_grad(functools.partial(loss, f))))

    found = mapped(attention)(slopes)
    assert_close(found, in_f64(mapped(exactly), slopes), 2e-5)


@pytest.mark.parametrize("kernel", ["cudnn", "attention_cpu"])
def test_kernels_of_masks_refuse_what_no_mask_says(kernel):
    device = NAMED["H200"] if kernel == "cudnn" else local_device()
    problem = AttentionProblem(
        batch=2,
        q_len=256,
        kv_len=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        scale=0.1,
        segments=True,
        is_causal=True,
    )
    assert kernel in diagnose(problem, device).candidates
    for fields, reason in (
        ({"soft_cap": 3.0}, "it caps no scores"),
        ({"sinks": True}, "it has no sinks"),
        ({"value_dim": 32}, "values of 32 columns for keys of 64"),
    ):
        other = dataclasses.replace(problem, **fields)
        assert diagnose(other, device).reason(kernel) == reason
    sloped = diagnose(dataclasses.replace(problem, alibi="linear"), device)
    assert ("attention_cpu" in sloped.candidates) is (kernel == "attention_cpu")


# --- special cases --------------------------------------------------------------------


def test_segments_are_bit_for_bit_the_mask_that_people_write():
    ids = EXTRAS["segments"]
    own, theirs = ids.values()
    mask = (own[:, :, None] == theirs[:, None, :])[:, None]
    found = jax.jit(lambda *x: attention(*x, is_causal=True, **ids))(Q, K, K)
    plain = jax.jit(
        lambda *x: jax.nn.dot_product_attention(*x, mask=mask, is_causal=True)
    )(Q, K, K)
    np.testing.assert_array_equal(found, plain)


def test_a_query_without_keys_gives_its_weight_to_the_sink():
    ids: dict[str, Any] = {
        "query_segment_ids": jnp.arange(6),
        "key_value_segment_ids": jnp.arange(5),
    }
    o = attention(Q, K, NARROW, **ids, sinks=jnp.full(4, -1e4))
    assert not o[:, 5].any()  # the sink is far below any score, but above what is none
    mean = jnp.repeat(NARROW.mean(1), 2, axis=1)
    assert_close(attention(Q, K, NARROW, **ids)[:, 5], np.asarray(mean))


def test_without_a_batch_and_with_half_precision():
    ids = EXTRAS["shared segments"]["query_segment_ids"]
    one = functools.partial(attention, query_segment_ids=ids, sinks=jnp.zeros(4))
    given = (Q[0], Q[0], normal(6, 4, 3))
    o, half = one(*given), one(*(x.astype("float16") for x in given))
    assert o.shape == half.shape == (6, 4, 3) and half.dtype == "float16"
    batch = (np.asarray(x)[None] for x in given)
    (expected,) = exact(*batch, query_segment_ids=ids, sinks=jnp.zeros(4))[0]
    assert_close(o, expected)
    assert_close(half.astype("float32"), expected, 2e-3)


def test_export_keeps_the_options(flash):
    def gradient(*args):
        return jax.grad(lambda *a: attention(*a, **EXTRAS["all extras"]).sum())(*args)

    program = export.export(jax.jit(gradient))(Q, K, NARROW)
    found = export.deserialize(program.serialize()).call(Q, K, NARROW)
    np.testing.assert_array_equal(found, jax.jit(gradient)(Q, K, NARROW))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_segment_ids": jnp.arange(6)}, "needs key_value_segment_ids: there ar"),
        ({"key_value_segment_ids": jnp.arange(5)}, "needs query_segment_ids"),
        (
            {"query_segment_ids": jnp.arange(5), "key": Q, "value": Q},
            r"must have shape \(2, 6\) or \(6,\)",
        ),
        (
            {"query_segment_ids": jnp.zeros(6), "key": Q, "value": Q},
            "must be integers of up to 32 bits, not float32",
        ),
        ({"logits_soft_cap": 0}, "must be positive and finite, .* not 0"),
        ({"logits_soft_cap": 1e39}, "must be .* finite, also as float32, not 1e\\+39"),
        ({"logits_soft_cap": 1e-40}, "must be positive .* also as float32, not 1e-40"),
        ({"logits_soft_cap": "much"}, "must be a number that is known, not 'much'"),
        ({"alibi": "far"}, "alibi='far' must be one of distance, linear"),
        ({"alibi_slopes": jnp.zeros((4, 1))}, r"alibi_slopes must be floating point"),
        ({"sinks": jnp.zeros(2)}, r"sinks must be floating point of shape \(4,\)"),
        ({"value": NARROW[:, :4]}, "value must have key's shape .* but for the last"),
    ],
)
def test_errors_say_what_came_and_what_is_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        arguments: dict[str, Any] = {"query": Q, "key": K, "value": NARROW, **changes}
        attention(**arguments)


def test_a_traced_cap_is_refused():
    with pytest.raises(ValueError, match="must be a number that is known"):
        jax.jit(lambda c: attention(Q, K, K, logits_soft_cap=c))(2.0)


def test_explain_and_a_demand_say_what_no_kernel_of_a_device_computes():
    settings: dict[str, Any] = {"sinks": jnp.zeros(4), "logits_soft_cap": 30.0}
    text = str(tracea.explain(lambda *x: attention(*x, **settings))(Q, K, NARROW))
    assert "dim 8/3" in text and "cap 30" in text and "sinks" in text
    with pytest.raises(tracea.Unsupported, match="attention_cpu: .*it caps no scores"):
        attention(Q, K, NARROW, implementation="tracea", **settings)

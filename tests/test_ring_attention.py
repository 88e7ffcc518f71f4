"""Ring attention: what ``ops.attention`` computes of a sequence on several devices."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import definition, exact
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import all_equations, equations
from numerics import array, normal
from transforms import assert_close, in_f64_once

import tracea_jax as tracea
from tracea_jax import masks, ops
from tracea_jax.ops import zigzag
from tracea_jax.ops.attention.ring.plan import chunks

pytestmark = pytest.mark.once
slow = pytest.mark.slow
attention: Any = ops.attention
shard_map: Any = jax.shard_map

CAUSAL: dict[str, Any] = {"is_causal": True}
NEAR: dict[str, Any] = {"is_causal": True, "local_window_size": (7, 0)}
BOTH_SIDES: dict[str, Any] = {"local_window_size": (9, 4)}
FIRST = "first derivatives in reverse mode only"


def mesh_of(*sizes, names="xy"):
    axes = tuple(names[: len(sizes)])
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))


def qkv(total, dtype="float32", heads=4, kv_heads=2, batch=2):
    """q, k, v and weights of the output."""
    shapes = [(batch, total, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [normal(*s, seed=i).astype(dtype) for i, s in enumerate(shapes)]


def ring(devices, order="contiguous", **settings):
    """``attention`` of whole arrays, over a ring of devices."""
    f = functools.partial(attention, axis_name="x", sequence_order=order, **settings)
    split = P(None, "x")
    mapped = shard_map(f, mesh=mesh_of(devices), in_specs=split, out_specs=split)
    if order == "contiguous":
        return mapped

    def permuted(*args):
        o = mapped(*(zigzag(x, devices) for x in args))
        return zigzag(o, devices, inverse=True)

    return permuted


def results(f, q, k, v, w):
    """Value, and gradients of its sum with weights."""
    o, gradients = jax.vjp(f, q, k, v)
    return o, *gradients(w.astype(o.dtype))


def exactly(*args, **settings):
    """``results`` of the whole sequence in float64."""

    def f(*args):
        return definition(*args, **settings)[0]

    case = str((settings, [(x.shape, x.dtype) for x in args]))
    return in_f64_once(case, functools.partial(results, f), *args)


def check(devices, length, order, settings, dtype="float32", tolerance=3e-6, **how):
    args = qkv(devices * length, dtype, **how)
    implementation = settings.pop("implementation", None)
    ours = ring(devices, order, **settings, implementation=implementation)
    found = jax.jit(functools.partial(results, ours))(*args)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    assert_close(found, exactly(*args, **settings), tolerance)


@pytest.mark.parametrize(
    ("devices", "length", "order", "settings"),
    [
        (2, 6, "contiguous", CAUSAL),
        (4, 5, "zigzag", CAUSAL | {"implementation": "tracea"}),
        (8, 2, "zigzag", CAUSAL),
        (2, 5, "contiguous", {"implementation": "tracea"}),
        (4, 6, "contiguous", NEAR | {"implementation": "tracea"}),
        (1, 3, "zigzag", CAUSAL),
        (2, 4, "contiguous", CAUSAL | {"logits_soft_cap": 1.5}),
    ],
)
def test_values_and_gradients_are_those_of_one_device(devices, length, order, settings):
    check(devices, length, order, dict(settings))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "tracea"])
@pytest.mark.parametrize("settings", [{}, CAUSAL, NEAR, BOTH_SIDES], ids=str)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("devices", "length"),
    [(2, 1), (2, 6), (3, 7), (4, 5), (4, 64), (8, 2), (8, 3), (8, 33)],
)
def test_values_and_gradients_of_every_kind(
    devices, length, order, settings, implementation
):
    settings = {**settings, "implementation": implementation}
    check(devices, length, order, settings, tolerance=1e-5)


@pytest.mark.parametrize("order", ["zigzag", pytest.param("contiguous", marks=slow)])
def test_bfloat16_is_merged_in_float32(order):
    settings = CAUSAL | {"implementation": "tracea"}
    check(4, 6, order, settings, "bfloat16", tolerance=8e-3, heads=6, kv_heads=2)


@slow
def test_values_of_another_size_than_keys():
    q, k, _, _ = qkv(8)
    v, w = normal(2, 8, 2, 3), normal(2, 8, 4, 3)
    found = jax.jit(functools.partial(results, ring(2, **CAUSAL)))(q, k, v, w)
    assert_close(found, exactly(q, k, v, w, **CAUSAL), 3e-6)


# --- rows without keys, segments ------------------------------------------------------


def whole(**settings):
    return functools.partial(attention, **settings, implementation="xla")


@pytest.mark.parametrize("implementation", ["tracea", pytest.param("xla", marks=slow)])
def test_queries_without_keys_get_the_mean_of_all_values(implementation):
    # The last queries see no key.
    window: dict[str, Any] = {"local_window_size": (-3, 6)}
    args = qkv(4 * 5)
    ours = ring(4, **window, implementation=implementation)
    found = jax.jit(functools.partial(results, ours))(*args)
    expected = jax.jit(functools.partial(results, whole(**window)))(*args)
    assert_close(found, expected, 3e-6)
    mean = np.asarray(args[2]).mean(1)
    np.testing.assert_allclose(found[0][:, -1, ::2], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "settings"),
    [
        ("zigzag", CAUSAL),
        ("contiguous", NEAR),
        *(
            pytest.param(order, settings, marks=slow)
            for order, settings in (
                ("contiguous", {}),
                ("zigzag", {}),
                ("contiguous", CAUSAL),
                ("zigzag", NEAR),
            )
        ),
    ],
    ids=str,
)
def test_segments_travel_with_keys(order, settings):
    devices, length = 4, 6
    rng = np.random.default_rng(0)
    ids = array(np.sort(rng.integers(0, 4, (2, devices * length))).astype(np.int32))
    other = ids.at[:, 5].set(9)  # the query of a segment without keys, if there is one
    args = qkv(devices * length)
    split = P(None, "x")

    def ours(q, k, v):
        def local(q, k, v, ids, other):
            segments = {"query_segment_ids": other, "key_value_segment_ids": ids}
            how = {"axis_name": "x", "sequence_order": order, **segments}
            return attention(q, k, v, **how, **settings, implementation="tracea")

        mapped = shard_map(
            local, mesh=mesh_of(devices), in_specs=split, out_specs=split
        )
        if order == "contiguous":
            return mapped(q, k, v, ids, other)
        o = mapped(*(zigzag(x, devices) for x in (q, k, v, ids, other)))
        return zigzag(o, devices, inverse=True)

    segments = {"query_segment_ids": other, "key_value_segment_ids": ids}
    found = jax.jit(functools.partial(results, ours))(*args)
    expected = functools.partial(results, whole(**settings, **segments))
    assert_close(found, jax.jit(expected)(*args), 3e-6)


def test_a_mask_of_rules_is_taken():
    ids = array(np.repeat(np.arange(4, dtype=np.int32), 3))
    q, k, v, _ = qkv(12)

    def local(q, k, v, ids):
        mask = masks.causal(from_end=True) & masks.segments(ids)
        return attention(q, k, v, mask=mask, axis_name="x")

    specs = (*[P(None, "x")] * 3, P("x"))
    f = shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=P(None, "x"))
    expected, _ = exact(q, k, v, **CAUSAL, query_segment_ids=ids)
    assert_close(jax.jit(f)(q, k, v, ids), expected)


def test_nan_reaches_the_queries_that_see_it():
    q, k, v, _ = qkv(8)
    k = k.at[1, 5, 0].set(jnp.nan)
    o = np.asarray(jax.jit(ring(4, **CAUSAL))(q, k, v))
    assert np.isnan(o[1, 5:, :2]).all()
    assert np.isfinite(o[1, :5]).all() and np.isfinite(o[1, :, 2:]).all()
    assert np.isfinite(o[0]).all()


def test_the_residual_is_that_of_all_keys():
    q, k, v, w = qkv(8)
    f = ring(2, **CAUSAL, return_residual=True)
    expected = exact(q, k, v, **CAUSAL)
    assert_close(jax.jit(f)(q, k, v), expected)

    def loss(q):  # as in jax.nn, it has no derivative
        return f(q, k, v)[1].sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(q), 0)


# --- transformations ------------------------------------------------------------------


def test_vmap_over_examples():
    args = qkv(8)
    split = P("x")

    def one(q, k, v, w):
        f = functools.partial(attention, **CAUSAL, axis_name="x")
        local = functools.partial(results, f)
        specs = {"in_specs": split, "out_specs": split}
        return shard_map(local, mesh=mesh_of(2), **specs)(q, k, v, w)

    assert_close(jax.jit(jax.vmap(one))(*args), exactly(*args, **CAUSAL), 3e-6)


@slow
def test_vmap_over_the_axis_itself():
    args = qkv(8)

    def parts(x):  # (devices, batch, ...)
        return x.reshape(2, 4, 2, *x.shape[2:]).swapaxes(0, 1)

    def local(*args):
        f = functools.partial(attention, **CAUSAL, axis_name="devices")
        return results(f, *args)

    found = jax.jit(jax.vmap(local, axis_name="devices"))(*map(parts, args))
    found = [x.swapaxes(0, 1).reshape(2, 8, *x.shape[3:]) for x in found]
    assert_close(found, exactly(*args, **CAUSAL), 3e-6)


@pytest.mark.parametrize(
    ("axis", "spec", "check_vma"),
    [
        (("x", "y"), P(None, ("x", "y")), True),
        ("y", P("x", "y"), False),
        pytest.param("y", P("x", "y"), True, marks=slow),
    ],
    ids=str,
)
def test_several_axes_of_a_mesh_and_unchecked_ones(axis, spec, check_vma):
    args = qkv(8)
    f = functools.partial(attention, **CAUSAL, axis_name=axis)
    how = {"in_specs": spec, "out_specs": spec, "check_vma": check_vma}
    mapped = shard_map(f, mesh=mesh_of(2, 2), **how)
    found = jax.jit(functools.partial(results, mapped))(*args)
    assert_close(found, exactly(*args, **CAUSAL), 3e-6)


def test_transform_keeps_it():
    args = qkv(8)
    step = tracea.transform(functools.partial(results, ring(2, **CAUSAL)))
    assert_close(jax.jit(step)(*args), exactly(*args, **CAUSAL), 3e-6)


def test_explain_shows_each_block_and_misses_nothing():
    f = functools.partial(results, ring(4, "zigzag", **CAUSAL))
    shown = tracea.explain(f)(*qkv(4 * 64))
    asked: list[Any] = [site.problem for site in shown.sites]
    problems = collections.Counter((p.direction, p.q_len, p.kv_len) for p in asked)
    once = {(64, 64): 1, (32, 64): 3, (64, 32): 3}
    assert problems == {
        (direction, *sizes): n
        for direction in ("forward", "backward")
        for sizes, n in once.items()
    }
    assert not shown.misses


def test_derivatives_beyond_the_first_are_refused():
    q, k, v, _ = qkv(4)

    def loss(q):
        return (ring(2)(q, k, v) ** 2).sum()

    with pytest.raises(ValueError, match=FIRST):
        jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum())(q)
    with pytest.raises(ValueError, match=FIRST):
        jax.jvp(jax.grad(loss), (q,), (q,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(loss), (q,), (q,))


# --- what is sent ---------------------------------------------------------------------


def messages(f, *args):
    """The permutations of f's jaxpr, by the shapes that they send."""
    found = equations(f, *args, name="ppermute")
    return sorted(e.invars[0].aval.shape for e in found)


@pytest.mark.parametrize("settings", [{}, CAUSAL], ids=str)
def test_keys_and_values_are_sent_once_to_every_other_device(settings):
    args = qkv(16)
    f = ring(4, "zigzag", **settings)
    assert messages(f, *args[:3]) == [(2, 4, 2, 8)] * 2 * 3
    # Once more for gradients, which follow them and go home.
    assert messages(functools.partial(results, f), *args) == [(2, 4, 2, 8)] * 6 * 3


def test_parts_that_follow_each_other_are_exchanged_if_the_mask_is_causal():
    q, k, v, _ = qkv(16)
    halves = [(2, 2, 2, 8)] * 4 + [(2, 2, 4, 8)] * 4  # of k and v, of q and o
    expected = sorted([*halves, *[(2, 4, 2, 8)] * 6])
    assert messages(ring(4, **CAUSAL), q, k, v) == expected
    # A window needs the device before; keys are sent no further.
    assert (
        messages(ring(4, **CAUSAL, local_window_size=3), q, k, v) == [(2, 4, 2, 8)] * 2
    )


def test_the_next_keys_are_sent_before_the_present_ones_are_used():
    args = qkv(16)
    f = functools.partial(results, ring(4, "zigzag"))
    names = [e.primitive.name for e in all_equations(jax.make_jaxpr(f)(*args).jaxpr)]
    kinds = ("ppermute", "tracea_attention", "tracea_attention_part_backward")
    order = [kinds.index(name) for name in names if name in kinds]
    forward = [0, 0, 1] * 3 + [1]
    backward = [0, 0, 2] * 2 + [0, 0, 0, 0, 2, 0, 0, 2, 0, 0]
    assert order == forward + backward


# --- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": normal(1, 4, 4, 4)}, "does not take bias"),
        ({"mask": array(np.ones((1, 1, 4, 4), bool))}, "does not take mask"),
        ({"sinks": normal(4)}, "does not take sinks"),
        ({"alibi_slopes": normal(4)}, "does not take alibi_slopes"),
        (
            {"key_value_seq_lengths": array(np.asarray([3, 4], np.int32))},
            "does not take key_value_seq_lengths",
        ),
        ({"axis_name": "z"}, "axis_name='z' is no axis here"),
        ({"sequence_order": "striped"}, "must be one of contiguous, zigzag"),
        ({"implementation": "cudnn"}, "cudnn"),
    ],
)
def test_arguments_that_a_ring_does_not_take(given, message):
    def local(q, k, v):
        return attention(q, k, v, **{"axis_name": "x", **given})

    split = P(None, "x")
    f = shard_map(local, mesh=mesh_of(2), in_specs=split, out_specs=split)
    with pytest.raises(ValueError, match=message):
        jax.jit(f)(*qkv(8)[:3])


def test_positions_from_the_end_need_as_many_keys_as_queries():
    def local(q, k, v):
        return attention(q, k, v, mask=masks.causal(from_end=True), axis_name="x")

    q, k, v, _ = qkv(4)
    split = P(None, "x")
    f = shard_map(local, mesh=mesh_of(2), in_specs=split, out_specs=split)
    with pytest.raises(ValueError, match="positions from the end"):
        jax.jit(f)(q[:, :2], k, v)


def test_an_order_needs_an_axis():
    q, k, v, _ = qkv(4)
    with pytest.raises(ValueError, match="needs axis_name"):
        attention(q, k, v, sequence_order="zigzag")
    with pytest.raises(ValueError, match="is no axis here"):
        attention(q, k, v, axis_name="x")


# --- zigzag order ---------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_zigzag_order_gives_each_device_its_chunks_and_has_an_inverse(devices, length):
    x = normal(2, devices * length, 3)
    found = np.asarray(zigzag(x, devices))
    for rank, part in enumerate(np.split(found, devices, axis=1)):
        own = chunks("zigzag", rank, devices, length)
        expected = [x[:, c.position : c.position + c.size] for c in own]
        np.testing.assert_array_equal(part, np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(zigzag(found, devices, inverse=True), x)
    last = zigzag(x.swapaxes(1, 2), devices, axis=-1)
    np.testing.assert_array_equal(np.swapaxes(last, 1, 2), found)


@pytest.mark.parametrize(
    ("args", "how", "error"),
    [
        ((7, 2), {}, "must be a multiple of devices=2"),
        ((8, 0), {}, "must be a multiple of devices=0"),
        ((8, 2), {"axis": 2}, "axis=2 is no axis"),
        ((8, 2.5), {}, "devices"),
    ],
)
def test_zigzag_refuses_what_does_not_fit(args, how, error):
    size, devices = args
    with pytest.raises((TypeError, ValueError), match=error):
        zigzag(normal(1, size), devices, **how)

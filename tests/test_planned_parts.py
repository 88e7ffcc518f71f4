"""Products that XLA serves as a whole: devices plan their parts of them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import normal
from partitioned import assert_alike, compiled, mesh, pair, placed

import tracea_jax as tracea
from tracea_jax import policy
from tracea_jax.ops.common import lowering
from tracea_jax.ops.conv2d.primitive import conv2d_p
from tracea_jax.rewrite import parts

SHAPES = (32, 24), (24, 40), (40,), (40, 16)
ARRAYS = tuple(normal(*shape, seed=i) for i, shape in enumerate(SHAPES))
BATCH = (P("x"), P(), P(), P())
WEIGHTS = (P("x"), P("x"), P(), P("x"))


def layers(x, w, bias, v):
    return jax.nn.gelu(x @ w + bias) @ v


def loss(*args):
    return (layers(*args) ** 2).mean()


def scanned(x, w, bias, v):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    square = jnp.stack([w @ w.T, 0.5 * w @ w.T]) / 99
    y, _ = jax.lax.scan(jax.checkpoint(layer), x, square)
    return (y**2).sum() + (bias.sum() * v).sum()


@pytest.fixture
def xla(monkeypatch, tmp_path):
    """XLA is the default for every problem."""
    decide = policy.decide

    def decided(diagnosis):
        found = decide(diagnosis)
        (choice,) = (c for c in found.heroes if c.variant == "xla")
        return dataclasses.replace(found, choice=choice)

    monkeypatch.setattr(policy, "decide", decided)
    with tracea.options(cache_dir=tmp_path):  # without decisions of other tests
        yield


def gradients(f):
    return jax.value_and_grad(f, argnums=(0, 1, 2, 3))


def default(f, specs, out=None):
    """Both programs under the default settings."""
    args = placed(mesh(8), ARRAYS, specs)
    return compiled(f, *args, out=out), compiled(tracea.transform(f), *args, out=out)


@pytest.mark.parametrize("specs", [BATCH, WEIGHTS], ids=["DP", "FSDP"])
@pytest.mark.parametrize("f", [loss, scanned])
def test_they_are_split_by_the_rule_of_the_op(f, specs, xla):
    plain, ours = default(gradients(f), specs)
    assert_alike(plain, ours)
    assert not ours.kernels
    assert {d.name for d in ours.decisions} == {"tracea_matmul"}
    assert len(ours.decisions) >= 5


def test_gradients_of_split_weights_are_scattered(xla):
    out = jax.sharding.NamedSharding(mesh(8), P("x"))
    args = placed(mesh(8), ARRAYS[:2], WEIGHTS[:2])

    def f(x, w):
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    ours = compiled(tracea.transform(f), *args, out=out)
    assert ours.collectives == {"all-gather": 1, "reduce-scatter": 1}
    np.testing.assert_allclose(ours.results, f(*ARRAYS[:2]), rtol=1e-4, atol=1e-4)


def test_differentiated_outside_of_transform(xla):
    plain = compiled(gradients(loss), *placed(mesh(8), ARRAYS, WEIGHTS))
    ours = gradients(tracea.transform(loss))
    ours = compiled(ours, *placed(mesh(8), ARRAYS, WEIGHTS))
    assert_alike(plain, ours)
    assert len(ours.decisions) >= 3


def test_on_one_device_the_program_is_the_written_one(xla):
    ours = jax.jit(tracea.transform(layers))
    programs = ours, jax.jit(layers)
    text, plain = (str(f.lower(*ARRAYS).compile().as_text()) for f in programs)
    assert "tracea_cpu" not in text and text.count(" dot(") == plain.count(" dot(") == 2
    np.testing.assert_array_equal(ours(*ARRAYS), jax.jit(layers)(*ARRAYS))


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_of_one_device_keeps_products_in_larger_sites(
    count, xla, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    sites = equations(tracea.transform(layers), *ARRAYS, name="tracea_choice")
    written = [e.primitive.name for e in sites[0].params["written"].closed.eqns]
    assert ("dot_general" in written) == (count == 1)
    assert ("tracea_choice" in written) == (count == 2)


def test_where_xla_is_demanded_xla_partitions():
    with tracea.options(implementation="xla"):
        plain, ours = default(gradients(loss), WEIGHTS)
    assert not ours.decisions
    assert ours.work.sent == plain.work.sent


def test_without_the_op_products_stay():
    f = tracea.transform(gradients(loss), ops="attention")
    ours = compiled(f, *placed(mesh(8), ARRAYS, WEIGHTS))
    assert not ours.decisions


def test_other_products_stay():
    """Integers, other precisions: the rule of products leaves them as they are."""
    x, w = ARRAYS[:2]
    f = functools.partial(jnp.matmul, precision="high")
    for g, args in ((f, (x, w)), (jnp.matmul, (x.astype("int32"), w.astype("int32")))):
        args = placed(mesh(8), args, WEIGHTS[:2])
        ours = compiled(tracea.transform(g), *args)
        assert not ours.decisions
        np.testing.assert_array_equal(ours.results, compiled(g, *args).results)


def test_a_product_that_cannot_become_a_choice_stays(xla, monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(parts, "View", fails)
    with pytest.warns(RuntimeWarning, match="planted"):
        ours = compiled(tracea.transform(layers), *placed(mesh(8), ARRAYS, WEIGHTS))
    np.testing.assert_allclose(ours.results, layers(*ARRAYS), rtol=1e-4, atol=1e-5)


def test_custom_derivatives_stay_as_they_are(xla):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(saved, dy):
        x, w = saved
        return dy @ w.T, x.T @ dy

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    f = jax.grad(lambda w, x: (product(x, w) ** 2).sum())
    ours = compiled(tracea.transform(f), *placed(mesh(8), ARRAYS[1::-1], WEIGHTS[:2]))
    assert not ours.decisions


def test_convolutions_too(xla):
    def f(x, w):
        how = {"window_strides": (1, 1), "padding": "SAME"}
        y = jax.lax.conv_general_dilated(
            x, w, **how, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    arrays = normal(8, 6, 5, 3), normal(3, 3, 3, 4)
    args = placed(mesh(8), arrays, (P("x"), P()))
    g = jax.grad(f, argnums=1)
    plain, ours = compiled(g, *args), compiled(tracea.transform(g), *args)
    assert_alike(plain, ours, tolerance=1e-4)
    assert {d.name for d in ours.decisions} == {conv2d_p.name}


def test_demanded_kernels_are_as_before():
    plain, ours = pair(gradients(loss), mesh(8), ARRAYS, BATCH)
    assert_alike(plain, ours)
    assert sum(ours.kernels.values()) >= 5


def test_explain_shows_the_parts(xla):
    args = placed(mesh(8), ARRAYS, BATCH)
    explanation = tracea.explain(lambda x, w: x @ w)(*args[:2])
    (site,) = explanation.sites
    (part,) = site.local
    assert part.devices == 8
    assert str(part.problem).startswith("matmul 4x40x24 ")


@pytest.mark.parametrize("on_miss", ["error", "tune"])
def test_answers_are_asked_for_whole_sites_only(on_miss, xla, monkeypatch):
    with tracea.options(on_miss=on_miss):
        sites = equations(tracea.transform(layers), *ARRAYS, name="tracea_choice")
    written = [e.primitive.name for e in sites[0].params["written"].closed.eqns]
    assert "tracea_choice" not in written and "dot_general" in written


def test_a_part_is_planned_for_several_devices_only(xla, monkeypatch):
    asked = []
    served = lowering.served
    monkeypatch.setattr(
        lowering, "served", lambda *args: asked.append(args) or served(*args)
    )
    jax.jit(tracea.transform(lambda x, w: jax.nn.relu(x @ w))).lower(*ARRAYS[:2])
    assert {params["epilogue"].activation for *_, params, _ in asked} == {"relu"}

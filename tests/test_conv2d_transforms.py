"""conv2d in control flow, rematerialised, sharded and exported."""

from __future__ import annotations

import functools
from typing import Any

import convolutions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolutions import GELU, PLAIN_GELU, arguments, gradients, ours, plain
from jax import checkpoint_policies as policies
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import normal
from transforms import assert_close, in_f64, products

import tracea_jax as tracea
from tracea_jax.ops import conv2d, export_checks, remat_policy

# --- control flow and rematerialisation -----------------------------------------------


def test_scan_and_cond():
    x, w = normal(2, 4, 3, 2), normal(3, 3, 3, 2, 2)

    def scanned(f, x, w):
        return jax.lax.scan(lambda x, w: (f(x, w, activation="gelu"), None), x, w)[0]

    def branched(f, x, w):
        for i in range(3):
            run = functools.partial(f, activation="gelu")
            x = jax.lax.cond(x.sum() < jnp.inf, run, lambda x, w: x, x, w[i])
        return x

    def derivatives(g, f, x, w):
        return gradients(functools.partial(g, f), x, w, argnums=(0, 1))

    expected = in_f64(jax.jit(functools.partial(derivatives, scanned, plain)), x, w)
    for g in (scanned, branched):
        found = jax.jit(functools.partial(derivatives, g, ours))(x, w)
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ],
)
def test_remat(name):
    x, w = normal(2, 4, 3, 2), normal(3, 3, 2, 2)
    policy = getattr(policies, name)

    def layers(f, x, w):
        return jnp.sin(f(f(x, w, activation="gelu"), w)).sum()

    def count(f, policy, name):
        rematerialised = jax.checkpoint(functools.partial(layers, f), policy=policy)
        return products(jax.grad(rematerialised, (0, 1)), x, w, name=name)

    # Ours are computed again exactly where JAX computes its own again.
    theirs = count(plain, policy, "conv_general_dilated")
    assert count(ours, remat_policy(policy), "tracea_conv2d") == theirs
    f = jax.checkpoint(functools.partial(layers, ours), policy=remat_policy(policy))
    found = jax.jit(jax.grad(f, (0, 1)))(x, w)
    expected = in_f64(jax.jit(jax.grad(functools.partial(layers, plain), (0, 1))), x, w)
    assert_close(found, expected, 1e-5)


def test_policies_see_a_convolution():
    x, w, *_ = arguments()
    seen = []

    def policy(primitive, *avals, **params):
        seen.append((primitive, [a.shape for a in avals], params))
        return True

    def derive(f):
        layer = functools.partial(f, strides=(2, 1), dilation=(1, 2))
        layers = jax.checkpoint(
            lambda *a: jnp.sin(layer(*a)).sum(), policy=remat_policy(policy)
        )
        jax.grad(layers)(x, w)

    derive(conv2d)
    derive(convolutions.lax_conv)
    convs = [s for s in seen if s[0] is jax.lax.conv_general_dilated_p]
    assert len(convs) == 2 and convs[0][:2] == convs[1][:2]
    ours, theirs = convs[0][2], convs[1][2]
    assert ours.pop("preferred_element_type") == "float32"
    assert theirs.pop("preferred_element_type") is None
    assert ours == theirs


# --- several devices ------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


SHARDED = (P("x"), P(), P(), P("x"))


def test_shard_map_over_examples(mesh):
    args = arguments(batch=8)
    sharded = jax.shard_map(GELU, mesh=mesh, in_specs=SHARDED, out_specs=P("x"))
    convolutions.exact(*args, activation="gelu").assert_near(jax.jit(sharded)(*args))
    expected = in_f64(jax.jit(functools.partial(gradients, PLAIN_GELU)), *args)
    assert_close(jax.jit(functools.partial(gradients, sharded))(*args), expected, 1e-5)


def test_gradients_of_replicated_operands_are_summed_over_the_mesh(mesh):
    # grad inside of shard_map: what data-parallel training steps do
    args = arguments(batch=8)
    local = functools.partial(gradients, GELU, argnums=(1, 2))
    step = jax.shard_map(local, mesh=mesh, in_specs=SHARDED, out_specs=P())
    expected = in_f64(
        jax.jit(functools.partial(gradients, PLAIN_GELU, argnums=(1, 2))), *args
    )
    assert_close(jax.jit(step)(*args), expected, 1e-5)


def test_shard_map_over_channels(mesh):
    x, w = normal(2, 4, 4, 8), normal(3, 3, 8, 5)
    specs = (P(None, None, None, "x"), P(None, None, "x"))

    def partial_sums(x, w):
        return jax.lax.psum(conv2d(x, w), "x")

    f = jax.shard_map(partial_sums, mesh=mesh, in_specs=specs, out_specs=P())
    convolutions.exact(x, w).assert_near(jax.jit(f)(x, w))
    found = jax.jit(functools.partial(gradients, f, argnums=(0, 1)))(x, w)
    expected = in_f64(
        jax.jit(functools.partial(gradients, plain, argnums=(0, 1))), x, w
    )
    assert_close(found, expected, 1e-5)


def test_shard_map_refuses_what_it_refuses_of_lax(mesh):
    x, w, *_ = arguments(batch=4)
    for f in (conv2d, convolutions.lax_conv):
        sharded = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
        with pytest.raises(ValueError, match="(?s)out_specs"):
            sharded(x, w)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_arrays_that_the_compiler_splits(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(getattr(AxisType, kind),))
    args = arguments(batch=8)
    args = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, SHARDED, strict=True)
    ]
    result = jax.jit(GELU)(*args)
    convolutions.exact(*args, activation="gelu").assert_near(result)
    assert result.sharding.spec[0] == "x"
    expected = in_f64(
        jax.jit(functools.partial(gradients, PLAIN_GELU)), *map(np.asarray, args)
    )
    found = jax.jit(functools.partial(gradients, GELU))(*args)
    assert_close(found, expected, 1e-5)
    if kind == "Explicit":
        assert list(map(jax.typeof, found)) == list(map(jax.typeof, args))
    demanded = jax.jit(functools.partial(GELU, implementation="tracea"))
    convolutions.exact(*args, activation="gelu").assert_near(demanded(*args))
    text = demanded.lower(*args).compile().as_text()
    assert text is not None and "tracea_cpu_conv2d" in text


# --- export ---------------------------------------------------------------------------


def round_trip(f, *shapes):
    exported = export.export(jax.jit(f), disabled_checks=export_checks())(*shapes)
    return export.deserialize(exported.serialize())


def test_an_exported_program_computes_the_same():
    args = arguments(stride=2)
    f = functools.partial(GELU, strides=2)
    np.testing.assert_array_equal(round_trip(f, *args).call(*args), jax.jit(f)(*args))
    g = functools.partial(gradients, f)
    found, expected = round_trip(g, *args).call(*args), jax.jit(g)(*args)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("strides", [1, 2])
def test_symbolic_shapes_are_left_to_xla(strides):
    n, h, w = export.symbolic_shape("n, h, w")
    kernel = normal(3, 2, 2, 3)
    how: Any = dict(strides=(strides, strides))

    def f(x):
        return conv2d(x, kernel, activation="silu", **how)

    program = round_trip(f, jax.ShapeDtypeStruct((n, h, w, 2), "float32"))
    for size in ((1, 4, 5), (3, 7, 6)):
        x = normal(*size, 2)
        expected = convolutions.exact(x, kernel, activation="silu", **how)
        expected.assert_near(program.call(x))
    with pytest.raises(tracea.Unsupported, match="'tracea'.*the shapes are symbolic"):
        round_trip(
            functools.partial(conv2d, w=kernel, implementation="tracea"),
            jax.ShapeDtypeStruct((n, h, w, 2), "float32"),
        )


def test_a_symbolic_number_of_examples_has_gradients():
    (n,) = export.symbolic_shape("n")
    x, w, *_ = arguments(stride=2)
    f = functools.partial(gradients, functools.partial(conv2d, strides=2))
    f = functools.partial(f, argnums=(0, 1))
    program = round_trip(f, jax.ShapeDtypeStruct((n, *x.shape[1:]), "float32"), w)
    assert_close(program.call(x, w), jax.tree.map(np.asarray, f(x, w)), 1e-5)

"""Models of flax nnx and of equinox with our convolutions."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import tracea_jax as tracea
from tracea_jax import interop
from tracea_jax.interop import convolution

RNGS: Any = {"rngs": nnx.Rngs(0)}
NN: Any = eqx.nn
KEY = jax.random.key(0)


class FlaxNet(nnx.Module):
    def __init__(self) -> None:
        how: Any = {"rngs": nnx.Rngs(0)}
        self.first = nnx.Conv(3, 8, (3, 3), strides=2, **how)
        self.second = nnx.Conv(8, 8, (3, 3), feature_group_count=2, **how)
        self.circular = nnx.Conv(8, 4, (3, 3), padding="CIRCULAR", **how)
        self.line = nnx.Conv(4, 4, (3,), **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.line(self.circular(y).mean(1))


class EquinoxNet(eqx.Module):
    first: Any
    rest: tuple[Any, ...]

    def __init__(self) -> None:
        self.first = NN.Conv2d(3, 8, 3, stride=2, padding=1, key=KEY)
        self.rest = (
            NN.Conv2d(8, 8, 3, groups=2, padding="SAME", use_bias=False, key=KEY),
            NN.Conv2d(8, 4, 3, padding=1, padding_mode="REFLECT", key=KEY),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.first(x))
        for layer in self.rest:
            y = layer(y)
        return y


# --- flax -----------------------------------------------------------------------------


def test_a_model_of_flax():
    model, x = FlaxNet(), jax.random.normal(KEY, (2, 9, 9, 3))

    @nnx.jit
    def gradients(model: Any) -> Any:
        return nnx.grad(lambda m: jnp.sum(jnp.sin(m(x))))(model)

    plain, plain_gradients = model(x), gradients(model)
    assert interop.flax.patch_conv2d(model) is model
    np.testing.assert_allclose(model(x), plain, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(gradients(model)), jax.tree.leaves(plain_gradients), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert "tracea_conv2d" in str(jax.make_jaxpr(lambda x: model(x))(x))

    report = interop.flax.layers(model)
    assert (report.replaced, len(report.layers)) == (3, 4)
    assert "line: as before; its kernel has 1 dimensions; it takes 2" in str(report)
    interop.flax.unpatch(model)
    assert interop.flax.layers(model).replaced == 0
    assert "tracea_conv2d" not in str(jax.make_jaxpr(lambda x: model(x))(x))


def test_layers_of_flax_with_functions_of_their_own_stay():
    def mine(*args: Any, **how: Any) -> jax.Array:
        return lax.conv_general_dilated(*args, **how)

    layer = nnx.Conv(3, 4, (3, 3), conv_general_dilated=mine, **RNGS)
    strided = nnx.Conv(3, 4, (3, 3), input_dilation=2, **RNGS)
    for model in (layer, strided):
        (said,) = interop.flax.layers(interop.flax.patch_conv2d(model)).layers
        assert said.name == "itself" and said.runs == "as before"
    assert layer.conv_general_dilated is mine
    with pytest.raises(TypeError, match="takes an nnx.Module, not a value of list"):
        interop.flax.patch_conv2d([layer])


# --- equinox --------------------------------------------------------------------------


def test_a_model_of_equinox():
    model, x = EquinoxNet(), jax.random.normal(KEY, (2, 3, 9, 9))

    @eqx.filter_jit
    def gradients(model: Any) -> Any:
        return eqx.filter_grad(lambda m: jnp.sum(jnp.sin(jax.vmap(m)(x))))(model)

    patched = interop.equinox.patch_conv2d(model)
    plain = jax.jit(jax.vmap(model))(x)
    found = jax.jit(jax.vmap(patched))(x)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)
    pairs = (jax.tree.leaves(gradients(m)) for m in (patched, model))
    for ours, theirs in zip(*pairs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)

    report = interop.equinox.layers(patched)
    assert [layer.name for layer in report.layers] == ["first", "rest[0]", "rest[1]"]
    assert report.replaced == 2 and "padding_mode REFLECT" in str(report)
    assert interop.equinox.layers(model).replaced == 0
    back = interop.equinox.unpatch(patched)
    assert eqx.tree_equal(back, model)


@pytest.mark.parametrize(
    "x",
    [jnp.ones((4, 9, 9), "bfloat16"), jnp.ones((3, 9, 9)), jnp.ones((1, 4, 9, 9))],
    ids=["dtype", "channels", "batch"],
)
def test_what_equinox_refuses_is_refused_in_its_words(x):
    layer = NN.Conv2d(4, 6, 3, key=jax.random.key(0))
    said = []
    for each in (layer, interop.equinox.patch_conv2d(layer)):
        with pytest.raises((TypeError, ValueError)) as e:
            each(x)
        said.append((e.type, str(e.value)))
    assert said[0] == said[1]


def test_layers_of_equinox_of_other_classes_stay():
    class Mine(NN.Conv2d):
        pass

    mine = Mine(3, 4, 3, key=KEY)
    assert interop.equinox.patch_conv2d(mine) is mine
    (said,) = interop.equinox.layers(mine).layers
    assert "its class is Mine" in str(said.fallback)


# --- the convolution of lax -----------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "is_ours"),
    [
        ({"dimension_numbers": ("NHWC", "HWIO", "NHWC")}, True),
        ({"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "rhs_dilation": (2, 1)}, True),
        (
            {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "lhs_dilation": (2, 1)},
            False,
        ),
        ({"dimension_numbers": ("HWNC", "HWIO", "HWNC")}, False),
    ],
)
def test_arguments_of_lax(how, is_ours):
    x, w = jax.random.normal(KEY, (4, 7, 8, 3)), jax.random.normal(KEY, (2, 3, 3, 5))
    if how["dimension_numbers"][0] == "HWNC":
        x = jnp.moveaxis(x, 0, 2)
    args = (x, w, (1, 2), [(1, 0), (0, 1)])
    found = convolution.as_lax(*args, **how)
    wanted = lax.conv_general_dilated(*args, **how)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    text = str(jax.make_jaxpr(lambda x: convolution.as_lax(x, *args[1:], **how))(x))
    assert ("tracea_conv2d" in text) == is_ours


def test_torch_is_named_where_it_is_missing(monkeypatch):
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tracea_jax.interop.torch", raising=False)
    with pytest.raises(ImportError, match="pip install 'tracea_jax\\[torch\\]'"):
        importlib.import_module("tracea_jax.interop.torch")
    with pytest.raises(AttributeError, match="has no attribute 'keras'"):
        _ = tracea.interop.keras
    assert dir(tracea.interop) == ["equinox", "flax", "torch"]

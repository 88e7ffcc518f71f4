"""Convolutions on a GPU: those that are products, forward and both gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from numerics import normal

import tracea_jax as tracea
from tracea_jax.ops.conv2d import workload
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.variants.conv2d_product import ProductConfig

pytestmark = pytest.mark.gpu

CHOICE = Choice(variant="conv2d_product", config=ProductConfig())
IMAGE: dict[str, Any] = {"batch": 3, "in_channels": 24, "out_channels": 40}
PRODUCTS = {
    "patches": Conv2dProblem(
        **{**IMAGE, "in_channels": 3},
        height=32,
        width=48,
        kernel_height=16,
        kernel_width=16,
        strides=(16, 16),
        epilogue=Epilogue(bias="row"),
    ),
    "pixels": Conv2dProblem(
        **IMAGE,
        height=13,
        width=11,
        kernel_height=1,
        kernel_width=1,
        epilogue=Epilogue(bias="row", activation="gelu", save_preactivation=True),
    ),
    "strided pixels": Conv2dProblem(
        **IMAGE,
        height=13,
        width=11,
        kernel_height=1,
        kernel_width=1,
        strides=(2, 3),
        epilogue=Epilogue(bias="row", activation="relu", residual=True),
    ),
}


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_direction_of_a_product(name, dtype, layout):
    dtypes: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": dtype}
    forward = dataclasses.replace(PRODUCTS[name], layout=layout, **dtypes)
    for direction in ROLES:
        epilogue = forward.epilogue if direction == "forward" else Epilogue()
        changes: dict[str, Any] = {"direction": direction, "epilogue": epilogue}
        problem = dataclasses.replace(forward, **changes)
        inputs = workload.operands(problem, seed=1)

        def run(*inputs, problem=problem):
            return workload.execute(*inputs, problem=problem, choice=CHOICE)

        # The product with an epilogue is a kernel's, which rounds once.
        demanded = None if epilogue.is_identity else "tracea"
        with tracea.options(implementation=demanded):
            call = jax.jit(run).lower(*inputs).compile()
        assert "cudnn$conv" not in str(call.as_text())
        results = list(call(*inputs))
        assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1


def test_transform_finds_patches_and_their_gradients():
    x, w = normal(2, 32, 32, 3, dtype="bfloat16"), normal(16, 16, 3, 64)

    def loss(w):
        patches = jax.lax.conv_general_dilated(
            x,
            w.astype(x.dtype),
            (16, 16),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return (patches.astype("float32") ** 2).sum()

    step = jax.value_and_grad(loss)
    compiled = jax.jit(tracea.transform(step)).lower(w).compile()
    assert "cudnn$conv" not in str(compiled.as_text())
    (found, grad), (wanted, exact) = compiled(w), jax.jit(step)(w)
    assert abs(found - wanted) <= 1e-2 * wanted
    assert abs(grad - exact).max() <= 2e-2 * abs(exact).max()

"""Programs that learn a bias, or compute it from positions, with their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from biased_programs import alibi, parameters, t5
from jaxprs import equations
from numerics import normal

import tracea_jax as tracea


@pytest.mark.parametrize("loss", [t5, alibi])
def test_gradients_are_those_of_the_program(loss):
    """On a CPU, where XLA runs them; of the table, too."""
    found, expected = (
        jax.jit(jax.grad(f))(parameters(2, 8, "float32"), normal(2, 9, 16, seed=9))
        for f in (tracea.transform(loss), loss)
    )
    assert {*found} == {"q", "k", "v", "o", "table"}
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("loss", "has_bias"), [(t5, True), (alibi, False)])
def test_kernels_compute_the_gradients(loss, has_bias):
    """A bias that is learned has a gradient, and ALiBi is computed from slopes."""
    given = jax.eval_shape(lambda: parameters(16, 128))
    x = jax.ShapeDtypeStruct((4, 4096, 2048), jnp.bfloat16)
    with tracea.options(device="H200", implementation="tracea"):
        (equation,) = equations(
            jax.grad(tracea.transform(loss)), given, x, name="tracea_attention_backward"
        )
    assert equation.params["bias_gradient"] is has_bias
    spec = equation.params["spec"]
    assert spec.optional == (("bias",) if has_bias else ("alibi_slopes",))
    assert spec.is_causal is not has_bias

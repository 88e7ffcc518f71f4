"""Workload of gated products for the tuner."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import Judge, Workload, forced, random_normal
from tracea_jax.ops.common.exact import ACTIVATIONS_F64
from tracea_jax.ops.common.precision import precision_from_name
from tracea_jax.ops.gated_matmul.primitive import gated_matmul_p
from tracea_jax.ops.matmul import stored
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.policy import Choice
from tracea_jax.problem import GatedMatmulProblem

# To the output's dtype: both factors may be stored before y is.
_ROUNDINGS = {"y": 3, "g": 1, "u": 1}


def execute(
    *inputs: jax.Array, problem: GatedMatmulProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    return gated_matmul_p.bind(
        *stored.converted(problem, *inputs),
        layout=problem.layout,
        out=jnp.dtype(problem.out),
        precision=precision_from_name(problem.precision),
        activation=problem.activation,
        save_products=problem.save_products,
        **stored.params_of(problem),
        **forced(choice),
    )


def operands(problem: GatedMatmulProblem, seed: int) -> list[jax.Array]:
    """Random normal operands; the weights are scaled, so that products are normal too.

    Unscaled, the product of two products leaves float16's range.
    """
    lhs, rhs = matmul_workload.factor_shapes(problem)
    x, *weights = random_normal([lhs, rhs, rhs], seed)
    scale = max(problem.k, 1) ** -0.5
    if problem.rhs_stored:  # integers cannot be scaled, but x can
        x = _scaled(x, scale / stored.spread(problem.rhs_stored))
        weights = [stored.as_integers(w, problem.rhs_stored) for w in weights]
    else:
        weights = [_scaled(w, scale) for w in weights]
    return [stored.as_integers(x, problem.lhs_stored), *weights]


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def judge(
    problem: GatedMatmulProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    """The worst ``matmul_workload.worst_error`` of y, g and u.

    y's scale is |u| times g's plus |activation(g)| times u's.
    """
    exact = {
        which: matmul_workload.remembered(
            functools.partial(_exact_rows, problem, inputs, which)
        )
        for which in _ROUNDINGS
    }
    return lambda results: max(
        matmul_workload.worst_error(
            problem, device, result, exact[which], seed, _ROUNDINGS[which]
        )
        for which, result in zip(_ROUNDINGS, results, strict=False)
    )


def _exact_rows(
    problem: GatedMatmulProblem,
    inputs: list[jax.Array],
    which: str,
    b: int,
    rows: np.ndarray,
) -> matmul_workload.Rows:
    lhs, gate, up = inputs
    rows_of = functools.partial(matmul_workload.product_rows, problem.layout, lhs)
    g, g_scale = rows_of(gate, b, rows)
    u, u_scale = rows_of(up, b, rows)
    if which != "y":
        return (g, g_scale) if which == "g" else (u, u_scale)
    activated = ACTIVATIONS_F64[problem.activation](g)
    return activated * u, np.abs(u) * g_scale + np.abs(activated) * u_scale


GATED_MATMUL = Workload(
    check=matmul_workload.check,
    operands=operands,
    execute=execute,
    ragged=matmul_workload.ragged,
    judge=judge,
)

"""Problems of max pooling, compared with float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import f64

from tracea_jax.ops.max_pool import workload
from tracea_jax.problem import MaxPoolProblem

WINDOWS: dict[str, dict[str, Any]] = {
    "resnet": {"kernel": (3, 3), "strides": (2, 2), "padding": ((0, 1), (0, 1))},
    "torch": {"kernel": (3, 3), "strides": (2, 2), "padding": ((1, 1), (1, 1))},
    "inception": {"kernel": (3, 3), "strides": (1, 1), "padding": ((1, 1), (1, 1))},
    "valid": {"kernel": (3, 3), "strides": (2, 2)},
    "tiles": {"kernel": (2, 2), "strides": (2, 2)},
    "steps": {"kernel": (2, 2), "strides": (1, 1), "padding": ((1, 0), (0, 1))},
    "uneven": {"kernel": (3, 2), "strides": (3, 1), "padding": ((2, 2), (1, 0))},
    "lines": {"kernel": (1, 3), "strides": (1, 2)},
}


def pool(direction: str, dtype: str, **changes: Any) -> MaxPoolProblem:
    sizes = {"batch": 3, "height": 13, "width": 10, "channels": 24}
    return MaxPoolProblem(direction=direction, dtype=dtype, **{**sizes, **changes})


def check(problem: MaxPoolProblem, choice: Any, **changes: Any) -> None:
    """Compares the results of a choice, into arrays of NaN, with float64.

    Of entries that are few different ones, so that many maxima are not alone.
    """
    inputs = workload.operands(problem, seed=3)
    inputs[0] = jnp.round(inputs[0])
    wanted, sizes = workload.exact(problem, *inputs)

    def run(poison: Any, *x: Any) -> Any:
        return workload.execute(*x, problem=problem, choice=choice)

    poison = [jnp.full(wanted.shape, jnp.nan, problem.dtype)]
    call = jax.jit(run, donate_argnums=0, keep_unused=True)
    (found,) = call(poison, *inputs)
    assert found.dtype == inputs[0].dtype
    unit = float(jnp.finfo(problem.dtype).eps)
    assert (np.abs(f64(found) - wanted) <= 2 * unit * sizes).all()

"""Problems of elementwise functions from plain values: the graph, the command line."""

from __future__ import annotations

from jax.typing import DTypeLike

from tracea_jax.catalogue import Argument
from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import array, sizes
from tracea_jax.problem import ElementwiseProblem
from tracea_jax.problem.elementwise import FUNCTIONS


def build(
    function: str,
    size: int,
    *,
    dtype: DTypeLike = "float32",
    scalar: str = "none",
) -> ElementwiseProblem:
    """function(x[i], y[i]), or of x[i] alone.

    Args:
      function: as ``ops.elementwise`` has it.
      size: elements of the result.
      dtype: of the operands.
      scalar: the operand that is one number: "none", "left" or "right".
    """
    (count,) = sizes(size=size)
    name = array(dtype, ()).dtype.name
    return ElementwiseProblem(function=function, size=count, dtype=name, scalar=scalar)


ARGUMENTS = (
    Argument("function", {"choices": tuple(FUNCTIONS), "help": "of each element"}),
    arguments.size("size", "elements of the result"),
    Argument(
        "--scalar",
        {
            "choices": ("none", "left", "right"),
            "default": "none",
            "help": "the operand that is one number",
        },
    ),
)

"""The step before a convolution on Hopper that reads its weights transposed.

See ``emit.conv_operands`` for when it does. The transposition is array code: where
weights are constants, or are transposed for another use, XLA does it once.
"""

from __future__ import annotations

from typing import Any

from tracea_jax.emit.conv_operands import transposes_weights
from tracea_jax.emit.kernel import Kernel
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps


def reading_weights(problem: Conv2dProblem, kernel: Kernel) -> Call:
    """The kernel, behind the transposition of its weights if it needs one."""
    p, epilogue = problem, problem.epilogue
    if not transposes_weights(p):
        return kernel
    rest = ("bias",) * (epilogue.bias != "none") + ("residual",) * epilogue.residual
    results = ("y", "z") if epilogue.save_preactivation else ("y",)
    shape = (p.kernel_height, p.kernel_width, p.out_channels, p.in_channels)
    rows = Buffer(name="rows", shape=shape, dtype=p.rhs)
    return Steps(
        operands=("x", "w", *rest),
        results=results,
        scratch=(rows,),
        steps=(
            Expression(
                name="transpose",
                function=transposed,
                reads=("w",),
                writes=(rows.name,),
            ),
            Launch(
                name="convolve",
                kernel=kernel,
                reads=("x", rows.name, *rest),
                writes=results,
            ),
        ),
    )


def transposed(module: Any, w: Any) -> Any:
    """The weights (R, S, I, O) as (R, S, O, I)."""
    return module.transpose(w, (0, 1, 3, 2))

"""Random small programs of products and the steps that surround them in models.

A program is a list of steps; each applies a function to values of earlier steps. The
program runs as written, and with other dtypes to judge results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from numerics import normal
from program_layers import (
    attention,
    dense,
    gated,
    integers,
    nested,
    product,
    repeated,
    weak,
)
from program_steps import (
    SIZES,
    Step,
    bias,
    conversion,
    effect,
    elementwise,
    reduction,
    selection,
    shape,
    together,
)

MAX_SIZE = 400


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """Steps after the arguments, and the values that are returned."""

    arguments: tuple[Any, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __call__(self, *arguments: Any) -> list[Any]:
        return self.run(lambda dtype: dtype, *arguments)

    def run(self, cast: Callable[[str], str], *arguments: Any) -> list[Any]:
        values = list(arguments)
        for step in self.steps:
            values.append(step.function(cast, *(values[i] for i in step.operands)))
        return [values[i] for i in self.results]

    def __repr__(self) -> str:
        kinds = [f"{x.dtype}{list(x.shape)}" for x in self.arguments]
        steps = [f"{s.name}{list(s.operands)}" for s in self.steps]
        return f"Program({kinds}, {steps}, {list(self.results)})"


# Products and what may be fused with them are most of it.
STEPS = (
    *(product, dense, dense, dense, dense, gated, attention, nested, nested),
    *(weak, integers),
    repeated,
    *(bias, bias, together, together, elementwise, elementwise, shape, shape),
    *(reduction, conversion, selection, effect),
)


# Differentiable but for kinks that rounding rarely meets.
SMOOTH = (
    *(product, dense, dense, dense, gated, attention, nested, nested),
    *(bias, together, together, elementwise, shape, shape, selection, effect),
)


@st.composite
def programs(
    draw: Any,
    steps: Sequence[Any] = STEPS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    length: int = 14,
) -> Program:
    """A program, its arguments, and which of its values it returns.

    Args:
      draw: hypothesis's.
      steps: what it is made of.
      dtypes: of its floating arguments.
      length: how many steps it has at most.
    """
    sizes = st.sampled_from(SIZES)
    shapes = [
        tuple(draw(sizes) for _ in range(draw(st.sampled_from([1, 2, 2, 3]))))
        for _ in range(3)
    ]
    arguments = [
        normal(*s, dtype=draw(st.sampled_from(dtypes)), seed=i)
        for i, s in enumerate(shapes)
    ]
    arguments.append(jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    kinds = [jax.typeof(x) for x in arguments]
    made: list[Step] = []
    for _ in range(draw(st.integers(length // 2, length))):
        step = draw(st.sampled_from(steps))(draw, kinds)
        if step is None:
            continue
        kind = jax.eval_shape(
            functools.partial(step.function, lambda dtype: dtype),
            *(
                jax.ShapeDtypeStruct(kinds[i].shape, kinds[i].dtype)
                for i in step.operands
            ),
        )
        if math.prod(kind.shape) > MAX_SIZE or kind.ndim > 4:
            continue
        made.append(step)
        kinds.append(kind)
    last = len(kinds) - 1
    results = [last, *draw(st.lists(st.integers(0, last), max_size=2))]
    return Program(tuple(arguments), tuple(made), tuple(results))

"""A convolution as the product that kernels of mma.sync compute, and how it is told.

    forward       (pixels of y, taps and channels of x) @ (taps and channels of x, k)
    input_grad    (pixels of x, taps and channels of dy) @ (taps and channels of dy, c)
    weight_grad   (taps and channels of x, pixels of y) @ (pixels of y, k)

Groups are a batch of such products. Operands are copied in units of 16 bytes; no unit
lies across two taps. Callers: the emitters of convolutions since sm_80, their variant.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.emit import gemm_sm80
from tracea_jax.emit.conv_axes import ConvAxis, source_channels, source_size, walks
from tracea_jax.emit.kernel import Scalar
from tracea_jax.ir.fast_divide import FastDivisor
from tracea_jax.problem import ITEMSIZE, Conv2dProblem, Epilogue, GemmProblem
from tracea_jax.problem.conv2d import Direction
from tracea_jax.problem.gemm import Layout

DTYPES = gemm_sm80.DTYPES  # of operands; float32 as TF32
OUT_DTYPES = gemm_sm80.OUT_DTYPES
MOST_TAPS = 15  # of an axis
UNIT_BYTES = 16
_LAYOUTS: dict[Direction, Layout] = {
    "forward": "nn",
    "input_grad": "nt",
    "weight_grad": "tn",
}
_FIELDS = tuple(field.name for field in dataclasses.fields(ConvAxis))


def unit(problem: Conv2dProblem) -> int:
    """Channels that are copied at once."""
    return UNIT_BYTES // ITEMSIZE[problem.lhs]


def units(problem: Conv2dProblem) -> int:
    """The largest of the numbers by which operands are addressed, in units."""
    sides = zip(source_size(problem), problem.padding, strict=True)
    image = math.prod(size + sum(map(abs, pads)) for size, pads in sides)
    source = problem.batch * image * source_channels(problem)
    return max(source, *problem.elements) // unit(problem)


def pixels(problem: Conv2dProblem) -> int:
    """Pixels of the result over all phases; those of y for the gradient of weights."""
    rows, columns = walks(problem)
    return problem.batch * sum(h.extent for h in rows) * sum(w.extent for w in columns)


def channels_out(problem: Conv2dProblem) -> int:
    """Columns of the products of all groups."""
    is_gradient = problem.direction == "input_grad"
    return problem.in_channels if is_gradient else problem.out_channels


def product(problem: Conv2dProblem) -> GemmProblem:
    """The product, of all taps.

    Of the gradient of a strided convolution each phase is one, of fewer taps.
    """
    p = problem
    taps = p.kernel_height * p.kernel_width * source_channels(p) // p.groups
    is_sum = p.direction == "weight_grad"
    return GemmProblem(
        batch=p.groups,
        m=taps if is_sum else pixels(p),
        n=channels_out(p) // p.groups,
        k=pixels(p) if is_sum else taps,
        lhs=p.lhs,
        rhs=p.rhs,
        out="float32" if is_sum else p.out,
        layout=_LAYOUTS[p.direction],
        lhs_batched=True,
        rhs_batched=True,
        precision=p.precision,
        epilogue=p.epilogue if p.direction == "forward" else Epilogue(),
    )


def axis_params(walk: ConvAxis) -> tuple[Scalar, ...]:
    """The arguments of which device code makes a ``DividedAxis``."""
    divisor = FastDivisor.of(walk.extent)
    return (
        *(Scalar(value=getattr(walk, name)) for name in _FIELDS),
        Scalar(value=divisor.multiplier, dtype="uint32"),
        Scalar(value=divisor.shift),
    )


def axis_text(name: str) -> tuple[list[str], str]:
    """Parameters of an entry for these arguments, and the ``DividedAxis`` of them."""
    parameters = [f"int {name}_{field}" for field in _FIELDS]
    parameters += [f"unsigned {name}_multiplier", f"int {name}_shift"]
    walk = ", ".join(f"{name}_{field}" for field in _FIELDS)
    divisor = f"static_cast<unsigned>({name}_extent), {name}_multiplier, {name}_shift"
    return parameters, f"{{{{{walk}}}, {{{divisor}}}}}"

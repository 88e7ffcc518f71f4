"""Convolutions over images among all that ``conv_general_dilated`` computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.conv2d.directions import SPECS, Form
from tracea_jax.ops.conv2d.primitive import bind
from tracea_jax.problem import Epilogue
from tracea_jax.problem.conv2d import ImageLayout
from tracea_jax.rewrite.view import Equation

_LAYOUTS: dict[tuple[int, ...], ImageLayout] = {
    (0, 3, 1, 2): "nhwc",
    (0, 1, 2, 3): "nchw",
}


def call(form: Form, *operands: Any, precision: Any, out: str, epilogue: Any) -> Any:
    """The result of the convolution's primitive."""
    (y,) = bind(
        *operands,
        **{field.name: getattr(form, field.name) for field in dataclasses.fields(form)},
        precision=precision,
        out=jnp.dtype(out),
        epilogue=epilogue,
        implementation=None,
        config=None,
    )
    return y


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A forward convolution in a layout of ours.

    Attributes:
      form: as the primitive has it.
      permutation: of the dimensions of the weights; None if they are in order.
      precision: as the program has it.
    """

    form: Form
    permutation: tuple[int, ...] | None
    precision: Any

    @property
    def channels(self) -> int:
        """The dimension of the result that has the channels."""
        return SPECS[self.form.layout]["y"][1]

    def __call__(
        self, x: Any, w: Any, scale: Any, *rest: Any, out: str, epilogue: Epilogue
    ) -> Any:
        """The convolution, with the weights of each output channel scaled."""
        if self.permutation is not None:
            w = w.transpose(self.permutation)
        if scale is not None:
            shape = [1] * 4
            shape[SPECS[self.form.layout]["w"][0]] = -1
            w = (w.astype(scale.dtype) * scale.reshape(shape)).astype(w.dtype)
        how = dict(precision=self.precision, out=out, epilogue=epilogue)
        return call(self.form, x, w, *rest, **how)


def why_not_2d(eqn: Equation) -> str | None:
    """Why this is no convolution over images with entries; None if it is."""
    dimensions = len(eqn.params["window_strides"])
    if dimensions != 2:
        return f"it is {dimensions}-dimensional, not 2-dimensional"
    result = eqn.outvars[0].aval
    if any(x.size == 0 for x in (eqn.invars[0].aval, eqn.invars[1].aval, result)):
        return "its arrays are empty"
    return "its dtype is weak" if result.weak_type else None


def convolution_at(eqn: Equation) -> Convolution | str:
    """The convolution that this is, or why it is none of ours."""
    params = eqn.params
    if set(params["lhs_dilation"]) != {1}:
        return f"it is transposed: its lhs_dilation is {params['lhs_dilation']}"
    if params["batch_group_count"] != 1:
        return "it has groups of images: its batch_group_count is not 1"
    numbers = params["dimension_numbers"]
    x, w, y = (
        tuple(map(int, spec))
        for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    )
    layout = _LAYOUTS.get(x)
    if layout is None or y != x:
        return (
            f"it reads {_letters(x)} and gives {_letters(y)}; both must be NHWC, or "
            "both NCHW"
        )
    if min(min(pair) for pair in params["padding"]) < 0:
        return f"it crops: its padding is {params['padding']}"
    rows, columns = ((int(low), int(high)) for low, high in params["padding"])
    form = Form(
        direction="forward",
        strides=_pair(params["window_strides"]),
        padding=(rows, columns),
        dilation=_pair(params["rhs_dilation"]),
        groups=int(params["feature_group_count"]),
        layout=layout,
        size=None,
    )
    order = tuple(w[SPECS[layout]["w"].index(i)] for i in range(4))
    return Convolution(
        form=form,
        permutation=None if order == (0, 1, 2, 3) else order,
        precision=params["precision"],
    )


def _pair(values: Any) -> tuple[int, int]:
    height, width = values
    return int(height), int(width)


def _letters(spec: tuple[int, ...]) -> str:
    return "".join("NCHW"[spec.index(i)] for i in range(4))

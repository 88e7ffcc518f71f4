"""Convolutions over images among all that ``conv_general_dilated`` computes.

One over lines (audio, text) is one over images of height 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.conv2d.directions import SPECS, Form
from tracea_jax.ops.conv2d.primitive import bind
from tracea_jax.problem import Epilogue
from tracea_jax.problem.conv2d import ImageLayout
from tracea_jax.rewrite.relayout import Relayout
from tracea_jax.rewrite.view import Equation

Pair = tuple[int, int]


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
      x, w, y: how operands and result of the program become those of the form.
      precision: as the program has it.
    """

    form: Form
    x: Relayout
    w: Relayout
    y: Relayout
    precision: Any

    @property
    def transposes_images(self) -> bool:
        return self.x.transposes or self.y.transposes

    def __call__(
        self,
        x: Any,
        w: Any,
        scale: Any,
        shift: Any,
        residual: Any,
        *,
        out: str,
        epilogue: Epilogue,
    ) -> Any:
        """The convolution of the program's arrays, in the program's layout.

        Args:
          x, w, residual: of the program.
          scale: of the weights of each output channel; or None, as the two others.
          shift: to add to each output channel.
          out, epilogue: of the form's call.
        """
        x, w = self.x(x), self.w(w)
        if scale is not None:
            shape = [1] * 4
            shape[SPECS[self.form.layout]["w"][0]] = -1
            w = (w.astype(scale.dtype) * scale.reshape(shape)).astype(w.dtype)
        more = [] if shift is None else [shift]
        if residual is not None:
            more.append(self.y(residual))
        how = dict(precision=self.precision, out=out, epilogue=epilogue)
        return self.y.back(call(self.form, x, w, *more, **how))


def why_not_image(eqn: Equation) -> str | None:
    """Why this is no convolution over images or lines with entries; None if it is."""
    dimensions = len(eqn.params["window_strides"])
    if dimensions not in (1, 2):
        return f"it is {dimensions}-dimensional, not 1- or 2-dimensional"
    result = eqn.outvars[0].aval
    if any(x.size == 0 for x in (eqn.invars[0].aval, eqn.invars[1].aval, result)):
        return "its arrays are empty"
    return "its dtype is weak" if result.weak_type else None


def has_channels_first(eqn: Equation) -> bool:
    """True if this reads and gives images, or lines, with their channels first."""
    numbers = eqn.params["dimension_numbers"]
    first = tuple(range(len(numbers.lhs_spec)))
    return tuple(numbers.lhs_spec) == tuple(numbers.out_spec) == first


def convolution_at(eqn: Equation, layout: ImageLayout) -> Convolution | str:
    """The convolution that this is, in that layout, or why it is none of ours."""
    params = eqn.params
    if set(params["lhs_dilation"]) != {1}:
        return f"it is transposed: its lhs_dilation is {params['lhs_dilation']}"
    if reason := why_not_forward(eqn):
        return reason
    if min(min(pair) for pair in params["padding"]) < 0:
        return f"it crops: its padding is {params['padding']}"
    x, w, y = relayouts(eqn, layout)
    form = Form(
        direction="forward",
        strides=in_plane(params["window_strides"], 1),
        padding=in_plane([tuple(map(int, p)) for p in params["padding"]], (0, 0)),
        dilation=in_plane(params["rhs_dilation"], 1),
        groups=int(params["feature_group_count"]),
        layout=layout,
        size=None,
    )
    return Convolution(form=form, x=x, w=w, y=y, precision=params["precision"])


def why_not_forward(eqn: Equation) -> str | None:
    """Why no image becomes another by the same weights everywhere; None if it does."""
    params = eqn.params
    if params["batch_group_count"] != 1:
        return "it has groups of images: its batch_group_count is not 1"
    numbers = params["dimension_numbers"]
    x, y = tuple(numbers.lhs_spec), tuple(numbers.out_spec)
    first = tuple(range(len(x)))
    if {x, y} <= {first, (0, first[-1], *first[1:-1])}:
        return None
    last, channels = ("NHWC", "NCHW") if len(x) == 4 else ("NWC", "NCW")
    return (
        f"it reads {_letters(x)} and gives {_letters(y)}; each must be {last} or "
        f"{channels}"
    )


def relayouts(
    eqn: Equation, layout: ImageLayout
) -> tuple[Relayout, Relayout, Relayout]:
    """Relayouts of image, weights and result for a forward form."""
    numbers = eqn.params["dimension_numbers"]
    specs = {"x": numbers.lhs_spec, "w": numbers.rhs_spec, "y": numbers.out_spec}
    x, w, y = (
        Relayout.of([int(i) for i in spec], role, layout)
        for role, spec in specs.items()
    )
    return x, w, y


def in_plane(values: Any, above: Any) -> Any:
    """A form's values for height and width; a line has the neutral value in height."""
    values = [v if isinstance(v, tuple) else int(v) for v in values]
    return (above, *values) if len(values) == 1 else tuple(values)


def _letters(spec: tuple[int, ...]) -> str:
    names = "NCHW" if len(spec) == 4 else "NCW"
    return "".join(names[spec.index(i)] for i in range(len(spec)))

"""Transposed convolutions: entries of an image spread over windows of the result.

Such a convolution is the gradient of another one's image, whose strides are the
distances between windows, and whose weights are these, turned and transposed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax

from tracea_jax.ops.conv2d.directions import SPECS, Form, grown
from tracea_jax.problem import Epilogue
from tracea_jax.rewrite.convolution import call, in_plane, relayouts, why_not_forward
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.relayout import Relayout
from tracea_jax.rewrite.view import Equation

_LAYOUT = "nhwc"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransposedSite:
    """A call of the convolution's primitive, as the gradient of an image.

    Attributes:
      form: of that gradient.
      x, w, y: how operands and result of the program become those of the form.
      precision: as the program has it.
      out: dtype of the result.
    """

    form: Form
    x: Relayout
    w: Relayout
    y: Relayout
    precision: Any
    out: str

    @property
    def transposes_images(self) -> bool:
        return self.x.transposes or self.y.transposes

    def __call__(self, x: Any, w: Any) -> Any:
        turned = lax.rev(self.w(w), SPECS[_LAYOUT]["w"][2:])
        how = dict(precision=self.precision, out=self.out, epilogue=Epilogue())
        return self.y.back(call(self.form, self.x(x), turned, **how))


def transposed_at(index: int, eqn: Equation) -> Match | None:
    """The transposed convolution that this equation is, if a gradient computes it."""
    params = eqn.params
    is_spread = set(params["lhs_dilation"]) != {1}
    if not is_spread or set(params["window_strides"]) != {1} or why_not_forward(eqn):
        return None
    form = _form(eqn)
    if form is None:
        return None
    x, _, y = relayouts(eqn, _LAYOUT)
    outputs, inputs, *taps = map(int, params["dimension_numbers"].rhs_spec)
    site = TransposedSite(
        form=form,
        x=x,
        w=Relayout.of([inputs, outputs, *taps], "w", _LAYOUT),
        y=y,
        precision=params["precision"],
        out=eqn.outvars[0].aval.dtype.name,
    )
    return Match(
        root=index,
        equations=frozenset({index}),
        operands=tuple(eqn.invars),
        site=site,
    )


def _form(eqn: Equation) -> Form | None:
    """The gradient, unless the convolution would crop its image."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if params["feature_group_count"] != 1:
        return None
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    images, kernels, results = (
        in_plane([x.aval.shape[i] for i in spec[2:]], 1)
        for x, spec in zip((*eqn.invars, *eqn.outvars), specs, strict=True)
    )
    strides = in_plane(params["lhs_dilation"], 1)
    dilation = in_plane(params["rhs_dilation"], 1)
    lows = in_plane([low for low, _ in params["padding"]], 0)
    padding = []
    for p, k, n, stride, d, low in zip(
        images, kernels, results, strides, dilation, lows, strict=True
    ):
        before = grown(k, d) - 1 - int(low)
        least = grown(p, stride) + grown(k, d) - 1 - n - before
        # Some entries of the result may lie behind the last window.
        padding.append((before, max(least, min(0, least + stride - 1))))
    if min(map(min, padding)) < 0:
        return None
    rows, columns = padding
    return Form(
        direction="input_grad",
        strides=strides,
        padding=(rows, columns),
        dilation=dilation,
        groups=1,
        layout=_LAYOUT,
        size=results,
    )

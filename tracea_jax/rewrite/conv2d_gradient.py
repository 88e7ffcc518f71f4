"""Convolutions that JAX's differentiation makes of one over images.

Where a program differentiates inside, its backward pass has convolutions with permuted
dimensions, or with holes between the entries of an operand. They are recognised by
guessing the forward convolution and deriving its gradient again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from tracea_jax.ops.conv2d.directions import ROLES, SPECS, Form, spatial
from tracea_jax.problem import Epilogue
from tracea_jax.problem.conv2d import Direction, ImageLayout
from tracea_jax.rewrite.convolution import call
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.view import Atom, Equation, View

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientSite:
    """A call of the convolution's primitive in the direction of a gradient.

    Attributes:
      form: the direction and the forward convolution.
      precision: as the program has it.
      out: dtype of the result.
    """

    form: Form
    precision: Any
    out: str

    def __call__(self, lhs: Any, rhs: Any) -> Any:
        how = dict(precision=self.precision, out=self.out, epilogue=Epilogue())
        return call(self.form, lhs, rhs, **how)


def gradient_at(view: View, index: int) -> Match | None:
    """The gradient of a convolution over images, if this equation computes one."""
    eqn = view.eqns[index]
    if len(eqn.params["window_strides"]) != 2:
        return None
    for layout in get_args(ImageLayout):
        for direction in ("weight_grad", "input_grad"):
            form = _guess(eqn, direction, layout)
            if form is None or not _is(eqn, form):
                continue
            lhs, rhs = eqn.invars
            if direction == "input_grad":
                rhs = _unturned(view, rhs, layout)
            if rhs is not None:
                return _match(index, eqn, (lhs, rhs), form)
    return None


def _match(index: int, eqn: Equation, operands: tuple[Atom, Atom], form: Form) -> Match:
    out = eqn.outvars[0].aval.dtype.name
    return Match(
        root=index,
        equations=frozenset({index}),
        operands=operands,
        site=GradientSite(form=form, precision=eqn.params["precision"], out=out),
    )


def _guess(eqn: Equation, direction: Direction, layout: ImageLayout) -> Form | None:
    """The gradient that this must be, if it is one in this direction and layout."""
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    steps, padding, grown, taps = (_plain(eqn.params[name]) for name in names)
    roles = zip(ROLES[direction], (*eqn.invars, *eqn.outvars), strict=True)
    size = {role: spatial(x.aval.shape, role, layout) for role, x in roles}
    lows = [low for low, _ in padding]
    if direction == "weight_grad":
        strides, dilation, groups = taps, steps, eqn.params["batch_group_count"]
        extents = _extents(size["w"], dilation)
    else:
        strides, dilation, groups = grown, taps, 1
        extents = _extents(size["w"], dilation)
        lows = [e - 1 - low for e, low in zip(extents, lows, strict=True)]
    rows, columns = (
        (low, _high(n, p, extent, stride, low))
        for low, n, p, extent, stride in zip(
            lows, size["x"], size["y"], extents, strides, strict=True
        )
    )
    if min(*rows, *columns) < 0:
        return None
    return Form(
        direction=direction,
        layout=layout,
        size=size["w" if direction == "weight_grad" else "x"],
        strides=strides,
        padding=(rows, columns),
        dilation=dilation,
        groups=int(groups),
    )


def _extents(kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]


def _high(n: int, p: int, extent: int, stride: int, low: int) -> int:
    """The least padding after n entries that gives p windows; not negative if it can.

    Several paddings give as many windows, and the same gradient.
    """
    least = (p - 1) * stride + extent - n - low
    return max(least, min(0, least + stride - 1))


def _is(eqn: Equation, form: Form) -> bool:
    """Returns whether this is what the gradient is in lax."""
    arguments = form.lax_arguments(*(x.aval.shape for x in eqn.invars))
    return all(_plain(eqn.params[k]) == _plain(v) for k, v in arguments.items())


def _plain(value: Any) -> Any:
    """Nested sequences as tuples of ints."""
    if isinstance(value, Sequence):
        return tuple(map(_plain, value))
    return int(value)


def _unturned(view: View, w: Atom, layout: str) -> Atom | None:
    """The weights before their taps were reversed; None if they were not."""
    eqn = view.producer(w, "rev")
    taps = SPECS[layout]["w"][2:]
    if eqn is None or sorted(map(int, eqn.params["dimensions"])) != sorted(taps):
        return None
    return eqn.invars[0]

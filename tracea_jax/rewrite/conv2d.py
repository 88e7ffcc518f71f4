"""Convolutions over images with what follows them: batch norm, bias, residual, ..."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracea_jax.options import planned_device
from tracea_jax.problem import Activation, Epilogue
from tracea_jax.rewrite.activation import activation_of
from tracea_jax.rewrite.channels import (
    Channels,
    Step,
    scale_and_shift,
    step_at,
)
from tracea_jax.rewrite.channels_last import with_channels_last
from tracea_jax.rewrite.conv2d_gradient import gradient_at
from tracea_jax.rewrite.convolution import Convolution, convolution_at, why_not_image
from tracea_jax.rewrite.match import Match, Rule, Viewed
from tracea_jax.rewrite.product import DTYPES, why_not
from tracea_jax.rewrite.replace import is_served
from tracea_jax.rewrite.scales import may_be_in_weights, normalises
from tracea_jax.rewrite.transposed import transposed_at
from tracea_jax.rewrite.view import Atom, Equation, View, is_reshape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conv2dSite:
    """A call of ``conv2d_p`` with results in the program's shape and dtype.

    Attributes:
      convolution: what it begins with.
      steps: on its channels.
      residual: whether an array is added then.
      activation: what comes last.
      channels: how many the result has.
      conv_shape: of the convolution's result.
      shape, out: of the site's result, and its dtype.
    """

    convolution: Convolution
    steps: tuple[Step, ...]
    residual: bool
    activation: Activation
    channels: int
    conv_shape: tuple[int, ...]
    shape: tuple[int, ...]
    out: str

    @property
    def transposes_images(self) -> bool:
        """Returns whether images are transposed on their way to the op or from it."""
        return self.convolution.transposes_images

    def __call__(self, x: Any, w: Any, *rest: Any) -> Any:
        scale, shift = scale_and_shift(self.steps, rest, self.channels)
        residual = rest[-1].reshape(self.conv_shape) if self.residual else None
        epilogue = Epilogue(
            bias="none" if shift is None else "row",
            residual=self.residual,
            activation=self.activation,
        )
        y = self.convolution(
            x, w, scale, shift, residual, out=self.out, epilogue=epilogue
        )
        return y.reshape(self.shape)


def match_conv2d(view: View, index: int) -> Match | str:
    """The convolution with the longest epilogue that follows it, or why it stays."""
    eqn = view.eqns[index]
    if reason := why_not_image(eqn) or why_not(eqn):
        return reason
    found = gradient_at(view, index) or transposed_at(index, eqn)
    if found is not None:
        return found
    last = convolution_at(eqn, "nhwc")
    if isinstance(last, str):
        return last
    longest = _longest_chain(view, index)
    may_transpose = _may_transpose(eqn) or not last.transposes_images
    first = convolution_at(eqn, "nchw")
    if isinstance(first, Convolution) and _is_native(eqn, first):
        match = longest.match(view, first)
        if not may_transpose or is_served(match, view.eqns[match.root]):
            return match
    if not may_transpose:
        return "its images would be transposed, which is done for 16 bits on a GPU"
    return longest.match(view, last)


def _may_transpose(eqn: Equation) -> bool:
    """Returns whether images with channels first may get channels last.

    XLA's own convolutions on GPUs take images of 16 bits with channels last, too; those
    of float32 were not timed.
    """
    return eqn.invars[0].aval.dtype.itemsize == 2 or planned_device().platform == "cpu"


def _is_native(eqn: Equation, convolution: Convolution) -> bool:
    """Returns whether the op takes the images as they are."""
    is_plane = len(eqn.params["window_strides"]) == 2
    return is_plane and not convolution.transposes_images


def _longest_chain(view: View, index: int) -> Chain:
    eqn = view.eqns[index]
    result = eqn.outvars[0].aval
    axis = int(eqn.params["dimension_numbers"].out_spec[1])
    channels = Channels(axis=axis, count=result.shape[axis])
    chain = longest = Chain(
        conv=eqn, root=index, equations=frozenset({index}), channels=channels
    )
    while (chain := chain.extended(view)) is not None:
        longest = chain if chain.is_complete(view) else longest
    return longest


def _prepared(
    rule: Rule, eqns: Sequence[Equation], outvars: Sequence[Atom], viewed: Viewed
) -> Sequence[Equation]:
    """The program with channels last, if a kernel serves a convolution only so."""
    if not all(_may_transpose(e) for e in eqns if e.primitive.name in rule.anchors):
        return eqns
    last = with_channels_last(eqns, outvars)
    if last is eqns or not _served(rule, viewed(last)) > _served(rule, viewed(eqns)):
        return eqns
    return last


def _served(rule: Rule, view: View) -> int:
    """Number of convolutions that kernels would serve without transposed images."""
    found = [
        rule.match(view, index)
        for index, eqn in enumerate(view.eqns)
        if eqn.primitive.name in rule.anchors
    ]
    return sum(
        isinstance(match, Match)
        and not getattr(match.site, "transposes_images", False)
        and is_served(match, view.eqns[match.root])
        for match in found
    )


CONV2D = Rule(
    op="conv2d",
    anchors=frozenset({"conv_general_dilated"}),
    match=match_conv2d,
    after_grad=True,
    prepare=_prepared,
)


# --- what follows it ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A convolution and the steps after it: channels, residual, activation.

    Attributes:
      conv: its equation.
      root: index of the equation with the result so far.
      equations: indices of all that is replaced so far.
      channels: where they are in the result.
      steps, operands: on the channels, and what they take.
      residual: what is added then.
      activation: what comes last.
      is_normalised: whether a step divides by a standard deviation, as a batch norm;
        what is multiplied with then is the norm's.
    """

    conv: Equation
    root: int
    equations: frozenset[int]
    channels: Channels
    steps: tuple[Step, ...] = ()
    operands: tuple[Atom, ...] = ()
    residual: Atom | None = None
    activation: Activation = "none"
    is_normalised: bool = False

    @property
    def dtype(self) -> Any:
        """Dtype of the convolution's own result."""
        return self.conv.outvars[0].aval.dtype

    def is_complete(self, view: View) -> bool:
        """Tests whether the result may be a site's: of a dtype that the site can be of.

        A bfloat16 convolution may have a float32 result if its steps are in float32,
        as XLA on a CPU leaves out the rounding in between. Scaled bfloat16 weights
        would cost the accuracy.
        """
        result = view.eqns[self.root].outvars[0].aval
        if result.weak_type or result.dtype.name not in DTYPES:
            return False
        if self.dtype.name != "bfloat16" or result.dtype.name != "float32":
            return self.dtype.name == "float32" or result.dtype == self.dtype
        if self._is_plain:
            return self._is_scaled_next(view)
        is_step = view.eqns[self.root].primitive.name != "convert_element_type"
        return is_step and all(step.keeps_precision for step in self.steps)

    @property
    def _is_plain(self) -> bool:
        """Returns whether nothing but conversions follows so far."""
        after = (self.steps, self.residual is not None, self.activation != "none")
        return not any(after)

    def _is_scaled_next(self, view: View) -> bool:
        """Returns whether the only use of the result is a step on its channels."""
        value = view.eqns[self.root].outvars[0]
        index = view.sole_consumer(value)
        eqn = None if index is None else view.eqns[index]
        return eqn is not None and step_at(view, eqn, value, self.channels) is not None

    def match(self, view: View, convolution: Convolution) -> Match:
        """The site of the chain, with the convolution in one of its layouts."""
        result = view.eqns[self.root].outvars[0].aval
        site = Conv2dSite(
            convolution=convolution,
            steps=self.steps,
            residual=self.residual is not None,
            activation=self.activation,
            channels=self.channels.count,
            conv_shape=tuple(self.conv.outvars[0].aval.shape),
            shape=tuple(result.shape),
            out=result.dtype.name,
        )
        residual = () if self.residual is None else (self.residual,)
        return Match(
            root=self.root,
            equations=self.equations,
            operands=(*self.conv.invars, *self.operands, *residual),
            site=site,
        )

    def extended(self, view: View) -> Chain | None:
        """The chain with its next step; None if what follows is none.

        A reshape is part of a step that follows it, and left alone otherwise.
        """
        chain, value = self, view.eqns[self.root].outvars[0]
        while True:
            if (step := chain._step(view, value)) is not None:
                return step
            consumer = view.sole_consumer(value)
            if consumer is None or not is_reshape(view.eqns[consumer]):
                return None
            result = view.eqns[consumer].outvars[0]
            channels = chain.channels.reshaped(value.aval.shape, result.aval.shape)
            chain, value = chain._with(consumer, channels=channels), result

    def _step(self, view: View, value: Any) -> Chain | None:
        index = view.sole_consumer(value)
        if index is not None:
            if self._may_pass(view.eqns[index]):
                return self._with(index)
            chain = None
            if self.activation == "none":
                chain = self._on_channels(view, value, index)
                chain = chain or self._added(view, value, index)
            if chain is not None:
                return chain
        found = activation_of(view, value) if self.activation == "none" else None
        if found is None:
            return None
        equations = self.equations | found.equations
        chain = dataclasses.replace(self, equations=equations)
        return chain._with(found.root, activation=found.name)

    def _may_pass(self, eqn: Equation) -> bool:
        """True if this only widens or narrows, as around a batch norm, or copies."""
        if eqn.primitive.name == "copy":
            return True
        if eqn.primitive.name != "convert_element_type":
            return False
        old, new = (x.aval.dtype.name for x in (*eqn.invars, *eqn.outvars))
        if self.dtype.name == "float32":
            # XLA's variant rounds the convolution of narrow operands to the result's
            # dtype: what the program does in between in float32 must not follow it.
            wide = self.conv.invars[0].aval.dtype.name == "float32"
            return old == "float32" and new in DTYPES and (wide or self._is_plain)
        if self.dtype.name == "float16":
            return new == "float16"  # a result out of its range is infinite in float32
        return new in ("float32", "bfloat16")

    def _on_channels(self, view: View, value: Any, index: int) -> Chain | None:
        found = step_at(view, view.eqns[index], value, self.channels)
        if found is None:
            return None
        step, operand = found
        if step.scales and (self.residual is not None or not self._may_scale()):
            return None
        unknown = operand is not None and view.constant(operand) is None
        is_norm = self.is_normalised and step.name == "mul" and unknown
        if not (is_norm or may_be_in_weights(view, step, operand)):
            return None
        taken = () if operand is None else (operand,)
        return self._with(
            index,
            steps=(*self.steps, step),
            operands=(*self.operands, *taken),
            is_normalised=self.is_normalised or normalises(view, step, operand),
        )

    def _may_scale(self) -> bool:
        """Returns whether weights should be scaled.

        That may cost neither accuracy (scaled float16 weights might overflow or vanish,
        and narrow ones would round a float32 result) nor time: few weights and a large
        result are the case where a pass over the weights is the cheaper one.
        """
        weights, result = self.conv.invars[1].aval, self.conv.outvars[0].aval
        narrow = {weights.dtype.name, result.dtype.name} == {"bfloat16"}
        is_accurate = narrow or weights.dtype.name == "float32"
        return is_accurate and weights.size <= result.size

    def _added(self, view: View, value: Any, index: int) -> Chain | None:
        """The chain with a residual, if what is added is one."""
        eqn = view.eqns[index]
        if eqn.primitive.name not in ("add", "add_any") or self.residual is not None:
            return None
        other = eqn.invars[1] if eqn.invars[0] is value else eqn.invars[0]
        shapes = {x.aval.shape for x in (value, other, eqn.outvars[0])}
        if len(shapes) != 1 or view.producer(other, "broadcast_in_dim") is not None:
            return None  # a broadcast is cheaper where it is than as an array
        return self._with(index, residual=_unwidened(view, other))

    def _with(self, root: int, **changes: Any) -> Chain:
        equations = self.equations | {root}
        return dataclasses.replace(self, root=root, equations=equations, **changes)


def _unwidened(view: View, atom: Atom) -> Atom:
    """The 16-bit value that this is, exactly, in float32."""
    eqn = view.producer(atom, "convert_element_type")
    if eqn is None or atom.aval.dtype.name != "float32":
        return atom
    source = eqn.invars[0]
    return source if source.aval.dtype.name in DTYPES else atom

"""A traced program as steps that our kernels run, without JAX and without XLA.

    lowered(jaxpr, device) -> Program

What depends on no input is computed now. Calls of ops become calls of CPU kernels or
launches of CUDA kernels, as ``serving`` answers; reshaping costs nothing, other moves
in memory are copies; functions of each element and reductions are steps each. Anything
else is refused in a sentence that names the equation and its line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxpr_as_fun

from tracea_jax import _compat, catalogue, serving
from tracea_jax.bundle import pointwise
from tracea_jax.bundle.arrays import Spread, View
from tracea_jax.bundle.builder import Builder, value_type
from tracea_jax.bundle.moves import Move, inner_of_spread, moves, transposed, widened
from tracea_jax.bundle.program import Program
from tracea_jax.catalogue import Planned
from tracea_jax.device import Device
from tracea_jax.dispatch import Unsupported
from tracea_jax.ops.channel_affine import fork
from tracea_jax.ops.channel_affine.primitive import channel_affine_p
from tracea_jax.ops.channel_affine.steps import reference as channel_affine
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.ranks import are_flat
from tracea_jax.ops.elementwise.primitive import PLANNED as ELEMENTWISE
from tracea_jax.problem.elementwise import ELEMENTS
from tracea_jax.variants import Inline

# Equations that hold the equations of a function.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body")
_CALLING = frozenset(
    """jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr tracea_matmul_chain""".split()
)
# That leave the numbers in memory as they are, if only dimensions of one element move.
_RESHAPING = frozenset(
    """reshape squeeze expand_dims broadcast_in_dim transpose copy copy_p
    convert_element_type stop_gradient optimization_barrier reduce_precision""".split()
)
_ELEMENTWISE = {
    "add": "add",
    "add_any": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "neg": "negative",
    "abs": "abs",
}
# Ops that differ from what the user wrote in their derivatives alone.
_REFERENCES = {channel_affine_p: channel_affine, fork.fork_p: fork.reference}


def lowered(jaxpr: Any, device: Device) -> Program:
    """The program of a closed jaxpr, in which our ops are called and not chosen.

    Raises:
      Unsupported: naming the first equation that no kernel of ours runs.
      CompileError, ToolchainMissing: if a kernel cannot be compiled.
    """
    made = _Lowering(device)
    builder = made.builder
    inputs = [builder.input(i, aval) for i, aval in enumerate(jaxpr.in_avals)]
    results = made.run(jaxpr, inputs)
    outputs = [builder.output(i, x) for i, x in enumerate(results)]
    return builder.finished(inputs, outputs)


class _Lowering:
    """Walks a jaxpr. Values are arrays that are known, or views of what is not."""

    def __init__(self, device: Device) -> None:
        self.builder = Builder(device)
        # Known arrays that are broadcasts: by identity, the array, of what, and inner.
        self._spread: dict[int, tuple[Any, Any, int]] = {}

    def run(self, jaxpr: Any, operands: Sequence[Any], source: str = "") -> list[Any]:
        """The results of a jaxpr.

        Args:
          jaxpr: closed, or open without constants.
          operands: its inputs.
          source: the line that its equations stand for, if they have none.
        """
        known: dict[Any, Any] = {}
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        known.update(zip(inner.invars, operands, strict=True))
        known.update(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True))

        def value(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else known[x]

        for eqn in inner.eqns:
            given = [value(x) for x in eqn.invars]
            results = self._equation(eqn, given, inner, _source(eqn) or source)
            known.update(zip(eqn.outvars, results, strict=True))
        return [value(x) for x in inner.outvars]

    def _equation(
        self, eqn: Any, operands: list[Any], jaxpr: Any, source: str
    ) -> Sequence[Any]:
        name = eqn.primitive.name
        if not any(map(_is_unknown, operands)) and not eqn.effects:
            alone = _compat.closed_jaxpr(
                [x for x in eqn.invars if not isinstance(x, Literal)],
                eqn.outvars,
                [eqn],
                like=jaxpr,
            )
            given = zip(eqn.invars, operands, strict=True)
            results = jaxpr_as_fun(alone)(
                *(value for x, value in given if not isinstance(x, Literal))
            )
            inner = inner_of_spread(eqn)
            if inner is not None and results[0].size > np.size(operands[0]):
                self._spread[id(results[0])] = (results[0], operands[0], inner)
            return results
        if name in _CALLING:
            (body,) = (eqn.params[key] for key in _CALLS if key in eqn.params)
            return self.run(body, operands, source)
        if (planned := catalogue.planned().get(eqn.primitive)) is not None:
            return self._call(planned, operands, eqn.params, source)
        if (reference := _REFERENCES.get(eqn.primitive)) is not None:
            f = functools.partial(reference, **eqn.params)
            return self._traced(f, operands, source)
        if name in _RESHAPING and _keeps_order(eqn):
            views = map(self.builder.in_memory, operands)
            return [
                dataclasses.replace(view, shape=tuple(out.aval.shape))
                for view, out in zip(views, eqn.outvars, strict=True)
            ]
        if (inner := inner_of_spread(eqn)) is not None:
            if (dtype := eqn.invars[0].aval.dtype.name) in pointwise.DTYPES:
                view = self.builder.in_memory(operands[0])
                assert view.dtype == dtype
                shape = tuple(eqn.outvars[0].aval.shape)
                return [Spread(view=view, inner=inner, shape=shape)]
        spread = any(isinstance(self._spread_of(x), Spread) for x in operands)
        if name in _ELEMENTWISE and not spread and _has_kernel(eqn):
            params = {"function": _ELEMENTWISE[name], "implementation": None}
            params["config"] = None
            return self._call(ELEMENTWISE, operands, params, source)
        if (parts := moves(eqn, operands)) is not None:
            return [
                self._moved(out, copies, operands, source)
                for out, copies in zip(eqn.outvars, parts, strict=True)
            ]
        if (fields := pointwise.mapped(eqn) or pointwise.reduced(eqn)) is not None:
            return [self._computed(eqn, fields, operands, source)]
        raise Unsupported(_refused(eqn, source))

    def _traced(
        self, function: Callable[..., Any], operands: Sequence[Any], source: str
    ) -> Sequence[Any]:
        """The results of a function in jnp, one equation after the other."""
        jaxpr = jax.make_jaxpr(function)(*map(value_type, operands))
        return self.run(jaxpr, operands, source)

    def _moved(
        self, out: Any, copies: Sequence[Move], operands: Sequence[Any], source: str
    ) -> View:
        """A result of an equation that copies."""
        made = self.builder.view("workspace", out.aval, source)
        if sum(math.prod(copy.counts) for copy in copies) < math.prod(made.shape):
            self.builder.step("zero", [], [made], source)
        for copy in copies:
            view = self.builder.in_memory(operands[copy.operand])
            self.builder.move(copy, view, made, source)
        return made

    def _computed(
        self, eqn: Any, fields: dict[str, Any], operands: list[Any], source: str
    ) -> View:
        """The result of a function of each element, or of a reduction."""
        (out,) = eqn.outvars
        reads: list[View | Spread] = []
        if "exponent" in fields:
            for var, x in zip(eqn.invars, operands, strict=True):
                reads.append(self._elements(var, x, eqn, source))
        elif (order := pointwise.order_to_reduce(eqn)) is not None:
            turned = transposed(eqn.invars[0].aval.shape, order)
            reads.append(self._copied(turned, operands[0], source))
        else:
            reads.append(self.builder.in_memory(operands[0]))
        made = self.builder.view("workspace", out.aval, source)
        self.builder.pointwise(fields, reads, made, source)
        return made

    def _elements(self, var: Any, x: Any, eqn: Any, source: str) -> View | Spread:
        """An operand of a function of each element, in the result's shape."""
        shape = tuple(eqn.outvars[0].aval.shape)
        y = self._spread_of(x)
        if isinstance(y, Spread) and var.aval.shape == shape:
            return y
        inner = pointwise.repeated(var, eqn)
        if inner is None:
            return self._copied(widened(var.aval.shape, shape), x, source)
        view = self.builder.in_memory(x)
        return view if inner == 1 else Spread(view=view, inner=inner, shape=shape)

    def _copied(self, move: Move, operand: Any, source: str) -> View:
        """A strided copy of all of an array, in its new shape."""
        view = self.builder.in_memory(operand)
        aval = jax.ShapeDtypeStruct(move.counts, jax.numpy.dtype(view.dtype))
        made = self.builder.view("workspace", aval, source)
        self.builder.move(move, view, made, source)
        return made

    def _spread_of(self, value: Any) -> Any:
        """The value, as a ``Spread`` of a smaller constant if it is one."""
        found = self._spread.get(id(value))
        if found is None:
            return value
        whole, part, inner = found
        view = self.builder.in_memory(part)
        return Spread(view=view, inner=inner, shape=np.shape(whole))

    # --- calls of ops ---------------------------------------------------------------

    def _call(
        self,
        planned: Planned,
        operands: Sequence[Any],
        params: dict[str, Any],
        source: str,
    ) -> Sequence[Any]:
        """The results of a call, by the best variant whose steps are all ours.

        What would be chosen may be a library's, or array code that XLA compiles.
        """
        names = [v.name for v in catalogue.get(planned.op).variants if v.name != "xla"]
        chosen = params["implementation"]
        others = names if chosen is None else []
        tried = [chosen, *others]
        reasons: list[str] = []
        for name in tried:
            mark = self.builder.mark()
            try:
                given = {**params, "implementation": name}
                return self._called(planned, operands, given, source)
            except Unsupported as e:
                reasons.append(str(e))
                self.builder.back_to(mark)
        raise Unsupported(reasons[0])

    def _called(
        self,
        planned: Planned,
        operands: Sequence[Any],
        params: dict[str, Any],
        source: str,
    ) -> Sequence[Any]:
        avals = [value_type(x) for x in operands]
        request = lowering.request(planned, avals, params)
        served = serving.serve(request, self.builder.device, compiles=True)
        if served.error is not None:
            raise Unsupported(f"{source}: {served.error}") from served.error
        if served.failure is not None or served.is_xla:
            raise Unsupported(f"{source}: XLA would serve it: {served.reason}")
        assert served.plan is not None
        if planned.flattened is not None and not are_flat(params):
            merged = functools.partial(planned.flattened, **params)
            return self._traced(merged, operands, source)
        self.builder.planned(source, served.plan)
        if isinstance(served.call, Inline):
            given = {**params, **dict(served.call.params)}
            rule = functools.partial(planned.rules[served.call.rule], **given)
            return self._traced(rule, operands, source)
        views = [self.builder.in_memory(x) for x in operands]
        function = functools.partial(planned.reference, **params)
        types = jax.tree.leaves(jax.eval_shape(function, *avals))
        results = [self.builder.view("workspace", aval, source) for aval in types]
        self.builder.call(served, views, results, source)
        return results


def _source(eqn: Any) -> str:
    return source_info_util.summarize(eqn.source_info)


def _refused(eqn: Any, source: str) -> str:
    operands = ", ".join(str(x.aval) for x in eqn.invars)
    results = ", ".join(str(x.aval) for x in eqn.outvars)
    return (
        f"{source}: the equation {results} = {eqn.primitive.name}({operands}) cannot "
        "be bundled: no kernel of tracea_jax runs it. A bundle has products, "
        "convolutions and attention with their epilogues; functions of each element; "
        "sums, maxima and minima; slices, padding and transposes"
    )


def _long(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _keeps_order(eqn: Any) -> bool:
    """Returns whether the results are the operands' numbers, in the same order."""
    pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
    if any(x.aval.dtype != out.aval.dtype for x, out in pairs):
        return False
    name, params = eqn.primitive.name, eqn.params
    ((x, out), *_) = pairs
    if name == "reduce_precision":
        finfo = jax.numpy.finfo(x.aval.dtype)
        wanted = (finfo.nexp, finfo.nmant)
        return (params["exponent_bits"], params["mantissa_bits"]) == wanted
    if name == "reshape":
        return params.get("dimensions") is None
    if name == "transpose":
        moved = [i for i in params["permutation"] if x.aval.shape[i] != 1]
        return moved == sorted(moved)
    if name == "broadcast_in_dim":
        return _long(x.aval.shape) == _long(out.aval.shape)
    return True


def _is_unknown(value: Any) -> bool:
    return isinstance(value, View | Spread)


def _has_kernel(eqn: Any) -> bool:
    """Returns whether the elementwise kernels take the dtype and the shapes."""
    shapes = {tuple(x.aval.shape) for x in eqn.invars}
    is_one = len(shapes - {()}) <= 1
    return is_one and eqn.invars[0].aval.dtype.name in ELEMENTS

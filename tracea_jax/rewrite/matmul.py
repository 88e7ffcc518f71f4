"""Products with what follows them: bias, activation, residual, a narrower result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.common.ranks import as_ranks
from tracea_jax.ops.matmul.primitive import bind
from tracea_jax.ops.matmul.stored import as_stored
from tracea_jax.problem import Epilogue
from tracea_jax.rewrite.activation import activation_of
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import Extents, Operand, Product, product_at
from tracea_jax.rewrite.view import Atom, Equation, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSite:
    """A call of ``matmul_p`` with results in the program's shape and dtype."""

    lhs: Operand
    rhs: Operand
    extents: Extents
    precision: Any
    epilogue: Epilogue
    out: str
    shape: tuple[int, ...]
    stored: tuple[str | None, str | None]

    def __call__(self, lhs: Any, rhs: Any, *rest: Any) -> Any:
        operands, pending = [self.lhs(lhs), self.rhs(rhs)], list(rest)
        extents = self.extents
        if self.epilogue.bias != "none":
            own = extents.batch if self.epilogue.bias == "batched_row" else ()
            operands.append(pending.pop(0).reshape(*own, *extents.columns))
        if self.epilogue.residual:
            operands.append(pending.pop(0).reshape(extents.result))
        (y,) = bind(
            *operands,
            layout=self.lhs.letter + self.rhs.letter,
            out=jnp.dtype(self.out),
            precision=self.precision,
            epilogue=self.epilogue,
            **as_ranks(extents.ranks),
            **as_stored(*self.stored),
            implementation=None,
            config=None,
        )
        return y.reshape(self.shape)


def match_matmul(view: View, index: int) -> Match | str:
    """The product at a ``dot_general`` with the longest epilogue that follows it."""
    product = product_at(view, index)
    if isinstance(product, str):
        return product
    chain = Chain.of(view, product)
    while (longer := chain.extended(view)) is not None:
        chain = longer
    result = view.eqns[chain.root].outvars[0].aval
    site = MatmulSite(
        lhs=product.lhs,
        rhs=product.rhs,
        extents=product.extents,
        precision=product.precision,
        epilogue=chain.epilogue,
        out=result.dtype.name,
        shape=tuple(result.shape),
        stored=product.stored,
    )
    extra = tuple(x for x in (chain.bias, chain.residual) if x is not None)
    return Match(
        root=chain.root,
        equations=chain.equations,
        operands=(*product.operands, *extra),
        site=site,
    )


MATMUL = Rule(
    op="matmul",
    anchors=frozenset({"dot_general"}),
    match=match_matmul,
    after_grad=True,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A product and the steps after it that one kernel can do.

    Attributes:
      product: what it begins with.
      root: index of the equation with the result so far.
      equations: indices of all that is replaced so far.
      epilogue: the steps.
      bias, residual: their operands, as the program has them.
    """

    product: Product
    root: int
    equations: frozenset[int]
    epilogue: Epilogue = Epilogue()
    bias: Atom | None = None
    residual: Atom | None = None

    @classmethod
    def of(cls, view: View, product: Product) -> Chain:
        return cls(product=product, root=product.root, equations=product.equations)

    def extended(self, view: View) -> Chain | None:
        """The chain with its next step; None if what follows is none.

        A reshape or copy is part of a step that follows it, and left alone otherwise.
        """
        value = view.eqns[self.root].outvars[0]
        passed: frozenset[int] = frozenset()
        while True:
            step = self._step(view, value, passed)
            if step is not None:
                return step
            consumer = view.sole_consumer(value)
            if consumer is None or not _keeps_order(view.eqns[consumer]):
                return None
            passed |= {consumer}
            value = view.eqns[consumer].outvars[0]

    def _step(self, view: View, value: Any, passed: frozenset[int]) -> Chain | None:
        consumer = view.sole_consumer(value)
        if consumer is not None:
            eqn = view.eqns[consumer]
            if eqn.primitive.name in ("add", "add_any"):
                return self._added(view, value, consumer, passed)
            if _narrows(eqn) and self._is_wide:
                return self._with(consumer, passed)
            if _widens(eqn) and self.epilogue == Epilogue():
                wide = self._with(consumer, passed)._before_float32(view)
                if wide is not None:
                    return wide
        if self.epilogue.activation != "none" or self.epilogue.residual:
            return None
        found = activation_of(view, value)
        if found is None:
            return None
        epilogue = _with_step(self.epilogue, activation=found.name)
        return self._with(found.root, passed | found.equations, epilogue)

    def _before_float32(self, view: View) -> Chain | None:
        """The chain of an unrounded product, if something is added to it in float32.

        XLA leaves out the rounding in between. Where no step follows that is part of
        the epilogue, it stays: the result would be twice as large in memory.
        """
        longer = self.extended(view)
        linear = longer is not None and longer.epilogue.activation == "none"
        return longer if linear else None

    @property
    def _is_wide(self) -> bool:
        """True if the epilogue stays in float32 where XLA computes a narrower result.

        The dtype of its operands decides, see ``ops.epilogue.written_dtype``: the
        program would otherwise round later than the rewritten one.
        """
        operands = [x for x in (self.bias, self.residual) if x is not None]
        wide = any(x.aval.dtype.name == "float32" for x in operands)
        return wide or self.epilogue == Epilogue()

    def _added(self, view: View, value: Any, index: int, passed: Any) -> Chain | None:
        """The chain with a bias or a residual, if what is added is one."""
        eqn = view.eqns[index]
        other = eqn.invars[1] if eqn.invars[0] is value else eqn.invars[0]
        if eqn.outvars[0].aval.shape != value.aval.shape:
            return None
        linear = self.epilogue.activation == "none"
        if self.bias is None and linear:
            found = bias_of(view, other, value.aval.shape, self.product)
            if found is not None:
                kind, bias = found
                epilogue = _with_step(self.epilogue, bias=kind)
                return self._with(index, passed, epilogue, bias=bias)
        if self.residual is None and other.aval.shape == value.aval.shape:
            epilogue = _with_step(self.epilogue, residual=True)
            return self._with(index, passed, epilogue, residual=other)
        return None

    def _with(
        self,
        root: int,
        passed: frozenset[int],
        epilogue: Epilogue | None = None,
        *,
        bias: Atom | None = None,
        residual: Atom | None = None,
    ) -> Chain:
        """The chain up to this root, with what the step adds to it."""
        return Chain(
            product=self.product,
            root=root,
            equations=self.equations | passed | {root},
            epilogue=epilogue or self.epilogue,
            bias=self.bias if bias is None else bias,
            residual=self.residual if residual is None else residual,
        )


@functools.lru_cache(maxsize=256)
def _with_step(epilogue: Epilogue, **step: Any) -> Epilogue:
    return dataclasses.replace(epilogue, **step)


def _keeps_order(eqn: Equation) -> bool:
    """Returns whether this changes neither the entries nor their order in memory."""
    if eqn.primitive.name == "reshape":
        return eqn.params["dimensions"] is None
    return eqn.primitive.name == "copy"


def _narrows(eqn: Equation) -> bool:
    """Returns whether this rounds to a shorter floating dtype that kernels store."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    narrow = new.name in ("bfloat16", "float16")
    return old.name == "float32" and narrow


def _widens(eqn: Equation) -> bool:
    """True if this gives bfloat16 the digits of float32; the range is the same."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (x.aval.dtype.name for x in (*eqn.invars, *eqn.outvars))
    return (old, new) == ("bfloat16", "float32")


def bias_of(
    view: View, atom: Atom, shape: tuple[int, ...], product: Product
) -> tuple[str, Atom] | None:
    """Kind and value of a bias: one entry a column, perhaps for each batch.

    Args:
      view: the equations.
      atom: what is added.
      shape: of what it is added to: batches, rows, columns, each maybe of several
        dimensions.
      product: its sizes.
    """
    columns = _columns(shape, product.n)
    if columns is None:
        return None
    split = len(shape) - columns
    full = _full_dimensions(view, atom, shape)
    if full is None:
        return None
    source, varies = full
    across = {i for i in range(len(shape)) if shape[i] != 1} & varies
    own = {i for i in range(split, len(shape)) if shape[i] != 1}
    if across == own:
        return "row", source
    leading = _leading(shape, product.batch)
    if leading and across == own | {i for i in leading if shape[i] != 1}:
        return "batched_row", source
    return None


def _columns(shape: tuple[int, ...], n: int) -> int | None:
    """Number of last dimensions that make up the n columns."""
    for count in range(1, len(shape) + 1):
        if math.prod(shape[-count:]) == n:
            return count
    return 0 if n == 1 else None


def _leading(shape: tuple[int, ...], batch: int | None) -> tuple[int, ...]:
    """The first dimensions, as many as make up the batch."""
    if batch is None:
        return ()
    for count in range(1, len(shape) + 1):
        if math.prod(shape[:count]) == batch:
            return tuple(range(count))
    return ()


def _full_dimensions(
    view: View, atom: Atom, shape: tuple[int, ...]
) -> tuple[Atom, set[int]] | None:
    """A value without the broadcast that made it, and dimensions along which it varies.

    None if its size is not that of these dimensions, as a scalar's may be.
    """
    eqn = view.producer(atom, "broadcast_in_dim")
    if eqn is not None and len(eqn.invars) == 1:
        source = eqn.invars[0]
        places = [int(i) for i in eqn.params["broadcast_dimensions"]]
        varies = {
            place
            for place, size in zip(places, source.aval.shape, strict=True)
            if size == shape[place] and size != 1
        }
    elif atom.aval.ndim == len(shape):
        source = atom
        sizes = zip(atom.aval.shape, shape, strict=True)
        varies = {i for i, (size, whole) in enumerate(sizes) if size == whole != 1}
    else:
        return None
    if math.prod(source.aval.shape) != math.prod(shape[i] for i in varies):
        return None
    return source, varies

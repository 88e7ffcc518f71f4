"""Derivatives of a user's kernel from ``backward=``, in both modes.

``backward`` computes cotangents, and is linear in those that it gets. So it is the
transpose of the derivative J of the kernel:

    backward(operands, results, dy) = J^T dy      tangent(operands, results, dx) = J dx

The tangents are a primitive, linear in dx. Its transpose is ``backward``, as the user
wrote it: reverse mode never sees anything else. Forward mode is the derivative of
``reference``, or without one the transpose of ``backward`` that JAX derives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax._compat import varying_axes
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Primitive,
    Tangents,
    Zero,
    ad,
    asarray,
    batching,
    jvp,
    lax,
    linear_transpose,
    make_jaxpr,
    mlir,
    xla,
    zeros_like,
)
from tracea_jax.ops.common.typed import zeros as zeros_of
from tracea_jax.ops.cuda_kernel.given import as_list

tangent_p = Primitive("tracea_cuda_kernel_tangent")
tangent_p.multiple_results = True
tangent_p.def_impl(functools.partial(xla.apply_primitive, tangent_p))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Pullback:
    """The user's ``backward`` of one call, or of many at once.

    Attributes:
      name: of the kernel.
      backward: ``(*operands, *results, *cotangents)`` -> a cotangent of each operand.
      reference: ``(*operands)`` -> the results, in jnp; None if there is none.
      operands, results: how many there are.
      wanted, given: which operands and which results have a derivative; integers have
        none.
      mapped: for each axis of ``vmap``, the outermost first, the dimension of each
        operand and result that is mapped; cotangents are all mapped in front.
    """

    name: str
    backward: Callable[..., Any]
    reference: Callable[..., Sequence[jax.Array]] | None
    operands: int
    results: int
    wanted: tuple[int, ...]
    given: tuple[int, ...]
    mapped: tuple[tuple[int | None, ...], ...] = ()

    @property
    def kept(self) -> int:
        """Operands and results, before what is linear."""
        return self.operands + self.results

    def __call__(self, kept: Arrays, cotangents: Arrays) -> tuple[jax.Array, ...]:
        """The cotangents of the wanted operands."""
        return self._mapped(self._one, len(self.given))(*kept, *cotangents)

    def pushed(self, kept: Arrays, tangents: Arrays) -> list[jax.Array]:
        """The tangents of the results that have any, for those of wanted operands.

        Raises:
          NotImplementedError: there is no reference, and JAX cannot transpose
            ``backward``.
        """
        if self.reference is not None:
            f = self._mapped(self._of_reference, len(self.wanted))
            return list(f(*kept, *tangents))
        results = [kept[self.operands + i] for i in self.given]

        def pulled(*cotangents: jax.Array) -> tuple[jax.Array, ...]:
            return self(kept, cotangents)

        transposed = linear_transpose(
            pulled,
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results),
        )
        try:
            return list(transposed(tuple(tangents)))
        except (NotImplementedError, ValueError) as e:
            raise NotImplementedError(
                f"cuda_kernel {self.name!r} has no derivative in forward mode: JAX "
                f"cannot transpose its backward= ({e}); pass reference=, whose "
                "derivative is then used"
            ) from e

    def _mapped(self, f: Callable[..., Any], linear: int) -> Callable[..., Any]:
        for dims in reversed(self.mapped):
            f = jax.vmap(f, in_axes=(*dims, *[0] * linear))
        return f

    def _of_reference(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        assert self.reference is not None
        operands = args[: self.operands]
        known = dict(zip(self.wanted, args[self.kept :], strict=True))
        full = [known[i] if i in known else _nothing(x) for i, x in enumerate(operands)]
        _, out = jvp(self.reference, tuple(operands), tuple(full))
        return tuple(out[i] for i in self.given)

    def _one(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        arrays = args[: self.kept]
        known = dict(zip(self.given, args[self.kept :], strict=True))
        results = enumerate(arrays[self.operands :])
        cotangents = [known[i] if i in known else _nothing(x) for i, x in results]
        found = as_list(self.backward(*arrays, *cotangents))
        if len(found) != self.operands:
            raise TypeError(
                f"backward= of {self.name} returns {len(found)} cotangents; it has "
                f"{self.operands} operands"
            )
        zeros = (zeros_like(arrays[i]) for i in self.wanted)
        pairs = zip(self.wanted, zeros, strict=True)
        return tuple(self._checked(found[i], zero) for i, zero in pairs)

    def _checked(self, cotangent: Any, zero: jax.Array) -> jax.Array:
        if cotangent is None:
            return zero
        given = asarray(cotangent)
        if given.shape != zero.shape:
            raise ValueError(
                f"backward= of {self.name} returns a cotangent of shape {given.shape} "
                f"for an operand of shape {zero.shape}"
            )
        return given.astype(zero.dtype)


def differentiable(
    call: Callable[..., Arrays],
    name: str,
    backward: Callable[..., Any],
    reference: Callable[..., Sequence[jax.Array]] | None,
) -> Callable[..., Arrays]:
    """The call of a kernel with the user's derivative; see ``Pullback``."""
    made: Any = jax.custom_jvp(call)

    def rule(primals: Arrays, tangents: Tangents) -> Differentiated:
        results = made(*primals)
        real = [i for i, x in enumerate(primals) if _has_tangent(x)]
        pullback = Pullback(
            name=name,
            backward=backward,
            reference=reference,
            operands=len(primals),
            results=len(results),
            wanted=tuple(real),
            given=tuple(i for i, y in enumerate(results) if _has_tangent(y)),
        )
        linear = [tangents[i] for i in real]
        out = _bind(*primals, *results, *linear, pullback=pullback)
        known = dict(zip(pullback.given, out, strict=True))
        full = [known[i] if i in known else _nothing(y) for i, y in enumerate(results)]
        return results, tuple(full)

    made.defjvp(rule)
    return made


def _has_tangent(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _nothing(x: Any) -> Any:
    """The tangent, or cotangent, of integers."""
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def _bind(*args: Any, pullback: Pullback) -> list[jax.Array]:
    return tangent_p.bind(*lowering.align_varying_axes(args), pullback=pullback)


def _tangents(*args: jax.Array, pullback: Pullback) -> list[jax.Array]:
    """J dx."""
    return pullback.pushed(args[: pullback.kept], args[pullback.kept :])


def _abstract(*avals: Aval, pullback: Pullback) -> list[Aval]:
    results = [avals[pullback.operands + i] for i in pullback.given]

    def zeros(*args: jax.Array) -> list[jax.Array]:
        axes = tuple(frozenset[str]().union(*map(varying_axes, args)))
        made = [zeros_of(s.shape, s.dtype) for s in results]
        return [lax.pcast(x, axes, to="varying") if axes else x for x in made]

    return list(make_jaxpr(zeros)(*avals).out_avals)


def _jvp(primals: Arrays, tangents: Tangents, *, pullback: Pullback) -> Differentiated:
    """Second order: the derivative of the function that the tangents are."""
    full = [ad.instantiate_zeros(t) if isinstance(t, Zero) else t for t in tangents]
    f = functools.partial(_tangents, pullback=pullback)
    _, out = jvp(f, tuple(primals), tuple(full))
    return _bind(*primals, pullback=pullback), out


def _transpose(cts: Tangents, *args: Operand, pullback: Pullback) -> Cotangents:
    kept, given = args[: pullback.kept], args[pullback.kept :]
    if all(isinstance(ct, Zero) for ct in cts):
        return [None] * len(kept) + [Zero(x.aval) for x in given]
    full = [ad.instantiate_zeros(ct) if isinstance(ct, Zero) else ct for ct in cts]
    found = pullback(kept, full)
    linear = map(ad.is_undefined_primal, given)
    pairs = zip(found, linear, strict=True)
    return [None] * len(kept) + [x if is_linear else None for x, is_linear in pairs]


def _batch(args: Arrays, dims: Dims, *, pullback: Pullback) -> Batched:
    sized = (x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    size = next(sized)
    kept, given = args[: pullback.kept], args[pullback.kept :]
    pairs = zip(given, dims[pullback.kept :], strict=True)
    front = [batching.bdim_at_front(x, d, size) for x, d in pairs]
    of_kept = [None if d is None else 0 for d in dims[: pullback.kept]]
    moved = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(kept, dims, strict=False)
    ]
    # The abstract results are as large as those that are kept, so these are mapped too.
    for i in range(pullback.operands, pullback.kept):
        if of_kept[i] is None:
            moved[i] = jnp.broadcast_to(moved[i], (size, *moved[i].shape))
            of_kept[i] = 0
    mapped = (tuple(of_kept), *pullback.mapped)
    many = dataclasses.replace(pullback, mapped=mapped)
    out = _bind(*moved, *front, pullback=many)
    return out, [0] * len(out)


tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangents, multiple_results=True))

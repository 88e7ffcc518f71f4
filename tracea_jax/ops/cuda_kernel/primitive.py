"""The primitive of a user's kernel: its lowering, derivative and batching.

What a kernel is, ``definition`` says; the callable that users hold is in ``public``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax._compat import varying_axes
from tracea_jax.dispatch import Unsupported
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Differentiated,
    Dims,
    Primitive,
    Tangents,
    ad,
    batching,
    jvp,
    lax,
    make_jaxpr,
)
from tracea_jax.ops.common.typed import zeros as zeros_of
from tracea_jax.ops.cuda_kernel.given import as_list
from tracea_jax.ops.cuda_kernel.sharding import rule
from tracea_jax.problem.cuda_kernel import CudaKernelProblem

cuda_kernel_p = Primitive("tracea_cuda_kernel")
cuda_kernel_p.multiple_results = True


def bind(*operands: Any, **params: Any) -> list[jax.Array]:
    """The results of a kernel.

    Args:
      operands: arrays.
      **params: ``kernel``, which has a method ``launcher``; ``numbers``, see
        ``numbers``; implementation; config.
    """
    return cuda_kernel_p.bind(*lowering.align_varying_axes(operands), **params)


def _abstract(*avals: Aval, kernel: Any, numbers: Any, **_: Any) -> list[Aval]:
    results = kernel.launcher(avals, numbers).results

    def zeros() -> list[jax.Array]:
        return [zeros_of(s.shape, s.dtype) for s in results]

    def varying(*operands: jax.Array) -> list[jax.Array]:
        axes = tuple(frozenset[str]().union(*map(varying_axes, operands)))
        return [lax.pcast(x, axes, to="varying") if axes else x for x in zeros()]

    return list(make_jaxpr(varying)(*avals).out_avals)


cuda_kernel_p.def_abstract_eval(_abstract)


def problem_of(
    avals: Sequence[Aval], *, kernel: Any, numbers: Any, **_: Any
) -> CudaKernelProblem:
    return kernel.launcher(avals, numbers).problem


def reference(*operands: Any, kernel: Any, numbers: Any, **_: Any) -> list[Any]:
    """The results of the user's function in jnp."""
    launcher = kernel.launcher(operands, numbers)
    if not launcher.has_reference:
        name = launcher.problem.kernel
        raise Unsupported(
            f"cuda_kernel {name!r} has no reference=, which would run where a CUDA "
            "kernel cannot: on other devices, for symbolic shapes, and for arrays that "
            "are partitioned automatically (use shard_map, or declare sharding=)"
        )
    return launcher.reference(*operands)


PLANNED = lowering.register(
    "cuda_kernel",
    cuda_kernel_p,
    problem_of,
    reference,
    sharding=functools.partial(rule, cuda_kernel_p),
)


# --- derivatives ----------------------------------------------------------------------


def _jvp(primals: Arrays, tangents: Tangents, **params: Any) -> Differentiated:
    """The kernel's results, and the tangents of its reference."""
    launcher = params["kernel"].launcher(primals, params["numbers"])
    if not launcher.has_reference:
        raise TypeError(
            f"cuda_kernel {launcher.problem.kernel!r} has no derivative: pass "
            "backward=, or reference=, whose derivative is then used"
        )
    full = [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]
    _, out = jvp(functools.partial(reference, **params), tuple(primals), tuple(full))
    return bind(*primals, **params), out


ad.primitive_jvps[cuda_kernel_p] = _jvp


# --- vmap -----------------------------------------------------------------------------


def _batch(operands: Arrays, dims: Dims, **params: Any) -> Batched:
    rule = params["kernel"].vmap
    size = next(
        x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None
    )
    moved = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    is_mapped = [d is not None for d in dims]
    if callable(rule):
        return _by_rule(rule, size, is_mapped, moved)
    if rule == "leading":
        return _leading(size, is_mapped, moved, params)
    one = functools.partial(bind, **params)
    results = _one_by_one(one, is_mapped, moved)
    return results, [0] * len(results)


def _one_by_one(
    one: Callable[..., Any], is_mapped: list[bool], operands: Arrays
) -> list[jax.Array]:
    """One launch after another, in a loop on the device."""

    def of_mapped(mapped: list[jax.Array]) -> list[jax.Array]:
        rest = iter(mapped)
        pairs = zip(operands, is_mapped, strict=True)
        return one(*(next(rest) if m else x for x, m in pairs))

    pairs = zip(operands, is_mapped, strict=True)
    return lax.map(of_mapped, [x for x, m in pairs if m])


def _leading(
    size: int, is_mapped: list[bool], operands: Arrays, params: dict[str, Any]
) -> Batched:
    """One launch for all: the kernel takes arrays with more leading dimensions."""
    pairs = list(zip(operands, is_mapped, strict=True))
    one = [jax.ShapeDtypeStruct(x.shape[m:], x.dtype) for x, m in pairs]
    full = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in pairs]
    results = bind(*full, **params)
    wanted = params["kernel"].launcher(one, params["numbers"]).results
    for x, s in zip(results, wanted, strict=True):
        if x.shape != (size, *s.shape):
            raise ValueError(
                f"vmap='leading' of a cuda_kernel: results {list(s.shape)} become "
                f"{list(x.shape)} for operands with {size} in front; out= must keep "
                "leading dimensions, or vmap='sequential'"
            )
    return results, [0] * len(results)


def _by_rule(
    rule: Callable[..., Any], size: int, is_mapped: list[bool], operands: Arrays
) -> Batched:
    """The user's rule, which is like one of ``jax.custom_batching.custom_vmap``."""
    found = rule(size, is_mapped, *operands)
    try:
        results, mapped = found
    except (TypeError, ValueError) as e:
        raise TypeError(
            "vmap= of a cuda_kernel returns (results, whether each is mapped)"
        ) from e
    return as_list(results), [0 if m else batching.not_mapped for m in as_list(mapped)]


batching.primitive_batchers[cuda_kernel_p] = _batch

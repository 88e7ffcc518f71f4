"""How attention is split over devices: examples, heads, and queries.

Keys are gathered where queries are split, as XLA does. Devices with some of the queries
of a causal attention see the keys up to their last query: their queries stand at the
end of as many keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.attention import reference as references
from tracea_jax.ops.attention.reference import Spec
from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Params, Primitive, full, lax

# Factors of the dimensions of operands and results: examples, queries, heads of keys
# and their groups, columns of keys, keys, columns of values.
_DIMENSIONS = {
    "q": ("b", "t", "hg", "d"),
    "k": ("b", "s", "h", "d"),
    "v": ("b", "s", "h", "e"),
    "o": ("b", "t", "hg", "e"),
    "do": ("b", "t", "hg", "e"),
    "lse": ("b", "hg", "t"),
    "bias": ("b", "hg", "t", "s"),
    "mask": ("b", "hg", "t", "s"),
    "q_lengths": ("b",),
    "kv_lengths": ("b",),
    "q_segments": ("b", "t"),
    "kv_segments": ("b", "s"),
    "sinks": ("hg",),
    "alibi_slopes": ("hg",),
}


def rule(
    primitive: Primitive,
    avals: Sequence[Aval],
    *,
    spec: Spec,
    backward: bool,
    **params: Any,
) -> Rule:
    """The rule of the primitives of the forward and the backward pass."""
    x = spec.named(avals)
    q, k, v = x["q"], x["k"], x["v"]
    sizes = {
        "b": q.shape[0],
        "t": q.shape[1],
        "h": k.shape[2],
        "g": q.shape[2] // k.shape[2],
        "d": q.shape[3],
        "s": k.shape[1],
        "e": v.shape[3],
    }
    names = [*spec.names, *(("o", "lse", "do") if backward else ())]
    shapes = dict(zip(names, (a.shape for a in avals), strict=True))
    operands = {name: _dims(name, shape, sizes) for name, shape in shapes.items()}
    if backward:
        which = {n: params[n] for n in ("bias_gradient", "sinks_gradient")}
        results = [operands[n] for n in references.differentiated(**which)]
    else:
        o = (*q.shape[:3], v.shape[3])
        results = [_dims("o", o, sizes)]
        if params["lse"] is not None:
            results.append(_dims("lse", (o[0], o[2], o[1]), sizes))
    whole: dict[str, str | None] = {
        "s": None,
        "d": "head_dim is summed over by every score",
        "e": "scores of all columns of values are one kernel's",
    }
    if reason := _why_whole(spec, x):
        whole["t"] = reason
    return Rule(
        operands=tuple(operands.values()),
        results=tuple(results),
        sizes=sizes,
        whole=whole,
        local=functools.partial(_local, primitive, {"spec": spec, **params}),
    )


def _dims(name: str, shape: Sequence[int], sizes: dict[str, int]) -> Dims:
    """The factors of an array; none of a dimension of size 1 or that is broadcast."""
    return tuple(
        tuple(f for f in letters if sizes[f] > 1)
        if size == math.prod(sizes[f] for f in letters)
        else ()
        for letters, size in zip(_DIMENSIONS[name], shape, strict=True)
    )


def _why_whole(spec: Spec, x: dict[str, Any]) -> str | None:
    """Why queries are not split, or None: what positions of some mean to a mask."""
    if spec.mask_block is not None:
        return "entries of the mask stand for several queries"
    if spec.alibi is not None:
        return "slopes are multiplied with positions"
    if spec.aligned_at_end:
        return "queries are aligned at the end of the keys"
    if x["q_lengths"] is not None:
        return "examples have queries of their own number"
    if spec.is_causal and x["kv_lengths"] is not None:
        return "examples of a causal attention have keys of their own number"
    if spec.is_causal and x["q"].shape[1] > x["k"].shape[1]:
        return "a causal attention has more queries than keys"
    if spec.window is not None and not spec.is_causal:
        return "a window has keys behind its query"
    return None


def _local(
    primitive: Primitive,
    params: Params,
    operands: Sequence[jax.Array],
    device: Device,
) -> list[jax.Array]:
    spec: Spec = params["spec"]
    primals, rest = spec.split(operands)
    if spec.is_causal and (axes := device.over["t"]):
        examples, count = primals[0].shape[:2]
        seen = (lax.axis_index(axes) + 1) * count
        x = dict(zip(spec.names, primals, strict=True))
        x["kv_lengths"] = full((examples,), seen, "int32")
        optional = tuple(name for name in references.OPTIONAL if name in x)
        spec = dataclasses.replace(spec, aligned_at_end=True, optional=optional)
        primals = [x[name] for name in spec.names]
    outs = primitive.bind(*primals, *rest, **{**params, "spec": spec})
    return [device.complete(y, i) for i, y in enumerate(outs)]

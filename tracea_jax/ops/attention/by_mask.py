"""Attention for kernels that read no segments: all that a mask can say is made one.

``attention_cpu`` asks for it where a problem has segment ids, a mask of blocks or
positions from the end; the same primitive without these then runs with its config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.reference import OPTIONAL, Spec
from tracea_jax.ops.common.typed import Primitive


def call(primitive: Primitive, *operands: Any, spec: Spec, **params: Any) -> list[Any]:
    """The primitive's results, of a problem that has only a boolean mask."""
    primals, following = spec.split(operands)
    x = spec.named(primals)
    x = {**x, "mask": definition.allowed(spec, x), "q_segments": None}
    x["kv_segments"] = None
    at_start = not spec.aligned_at_end
    plain = dataclasses.replace(
        spec,
        is_causal=spec.is_causal and at_start,
        window=spec.window if at_start else None,
        aligned_at_end=False,
        mask_block=None,
        optional=tuple(name for name in OPTIONAL if x[name] is not None),
    )
    inner = [x[name] for name in plain.names]
    return primitive.bind(*inner, *following, spec=plain, **params)

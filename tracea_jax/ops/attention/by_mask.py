"""Attention for kernels that read no segments: masks and biases say what they can.

``attention_cpu`` asks for it where a problem has segment ids, a mask of blocks,
positions from the end or slopes of ALiBi; the same primitive without these then runs
with its config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.reference import OPTIONAL, Spec
from tracea_jax.ops.common.typed import Primitive


def call(primitive: Primitive, *operands: Any, spec: Spec, **params: Any) -> list[Any]:
    """The primitive's results, of a problem that has only a mask and a bias."""
    primals, following = spec.split(operands)
    x = spec.named(primals)
    absent = dict.fromkeys(("q_segments", "kv_segments", "alibi_slopes"))
    said = {"mask": definition.allowed(spec, x), "bias": definition.bias(spec, x)}
    x = {**x, **absent, **said}
    at_start = not spec.aligned_at_end
    plain = dataclasses.replace(
        spec,
        is_causal=spec.is_causal and at_start,
        window=spec.window if at_start else None,
        aligned_at_end=False,
        mask_block=None,
        alibi=None,
        optional=tuple(name for name in OPTIONAL if x[name] is not None),
    )
    inner = [x[name] for name in plain.names]
    return primitive.bind(*inner, *following, spec=plain, **params)

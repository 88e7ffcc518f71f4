"""How functions of elements are split over devices: along every dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracea_jax.ops.common.sharding import Rule
from tracea_jax.ops.common.typed import Aval


def rule(avals: Sequence[Aval], **_: Any) -> Rule:
    """The rule of elementwise's primitive; an operand may be a single number."""
    shape = max((x.shape for x in avals), key=len)
    names = tuple(f"d{i}" for i in range(len(shape)))
    sizes = dict(zip(names, shape, strict=True))
    whole = tuple((f,) if sizes[f] > 1 else () for f in names)
    return Rule(
        operands=tuple(whole if x.ndim else () for x in avals),
        results=(whole,),
        sizes=sizes,
    )

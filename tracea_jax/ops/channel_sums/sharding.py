"""How sums of channels are split over devices: rows, which are summed, and channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracea_jax.ops.common.sharding import Dims, Rule
from tracea_jax.ops.common.typed import Aval


def rule(avals: Sequence[Aval], *, relu: str, **_: Any) -> Rule:
    """The rule of the primitive of channel_sums."""
    shape = avals[0].shape
    names = tuple(f"d{i}" for i in range(len(shape)))
    sizes = dict(zip(names, shape, strict=True))
    whole = tuple((f,) if sizes[f] > 1 else () for f in names)

    def of(aval: Aval) -> Dims:
        return whole if aval.ndim == len(shape) else whole[-1:]

    kept = [whole] if relu == "result" else []
    return Rule(
        operands=tuple(map(of, avals)),
        results=(whole[-1:], whole[-1:], *kept),
        sizes=sizes,
    )

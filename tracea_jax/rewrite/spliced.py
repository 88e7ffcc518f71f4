"""The note on equations that were spliced before they were differentiated.

Whoever walks a program later reads here which equations to leave alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax import _compat
from tracea_jax.rewrite.match import Miss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spliced:
    """One function that was spliced, in each equation of it and of its derivatives.

    Attributes:
      misses: what was left in it, with reasons.
    """

    misses: tuple[Miss, ...]


def is_spliced(name_stack: Any) -> bool:
    """True if equations of this name stack come from a function that was spliced."""
    return any(isinstance(note, Spliced) for _, note in _compat.notes(name_stack))

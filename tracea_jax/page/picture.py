"""A picture of signs on a page, such as that of the tiles of a mask.

Its text is itself, and ``page.html`` keeps its form. Made by whoever makes the page.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """Signs in lines, whose places mean something."""

    text: str

"""A few configs of a search space that is too large to try all of it."""

from __future__ import annotations

from typing import Any

from tracea_jax.variants import Space


def one_of_each(space: Space, *fields: str) -> list[Any]:
    """A config for each combination of these fields; the other fields take turns."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for config in space.configs():
        key = tuple(getattr(config, field) for field in fields)
        groups.setdefault(key, []).append(config)
    return [group[7 * i % len(group)] for i, group in enumerate(groups.values())]

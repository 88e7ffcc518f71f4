"""Names of entries: where each lies below any directory of them.

The files are read and written by ``store.entries``; everything that looks entries up
asks by these names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.tuning.store.environment import problem_key
from tracea_jax.tuning.store.formats import Damaged
from tracea_jax.tuning.store.records import Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """Path of an entry below any directory of this layout."""

    environment: str
    op: str
    problem: str

    @classmethod
    def of(cls, problem: dict[str, Any], environment: str) -> Name:
        """The name for ``Problem.to_json()`` in the environment with this key."""
        key = problem_key(problem)
        return cls(environment=environment, op=problem["op"], problem=key)

    def check(self, entry: Entry) -> None:
        """Raises Damaged if the entry came here by a file that was renamed or moved."""
        if Name.of(entry.problem, entry.environment.key) != self:
            raise Damaged("it is about another problem or environment")

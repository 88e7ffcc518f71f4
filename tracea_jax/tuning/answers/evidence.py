"""Evidence for answers: entries by problem, kindred environments, neighbours.

``knowledge.Knowledge`` holds one; the kinds of answers read it. It writes nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tracea_jax import catalogue, variants
from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.tuning.answers import kindred
from tracea_jax.tuning.answers.answer import Question
from tracea_jax.tuning.answers.legality import current_best
from tracea_jax.tuning.answers.neighbours import Nearby, Neighbour
from tracea_jax.tuning.store.code import roots_hash
from tracea_jax.tuning.store.environment import (
    Environment,
    canonical,
    digest,
    environment,
    environment_key,
)
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.readers import Readers, freeze
from tracea_jax.tuning.store.records import Entry

T = TypeVar("T")


class Evidence:
    """Entries of some readers; what was looked at once stays as it was.

    Attributes:
      readers: with the origins of what they read; the first that has an entry counts.
    """

    def __init__(self, readers: Readers) -> None:
        self.readers = readers
        self._seen: dict[Any, Any] = {}
        # By environment, in place of the readers that they were copied from.
        self._fixed: dict[str, Readers] = {}

    def entries(
        self, problem: Problem, key: str, *, complete: Callable[[Entry], bool]
    ) -> Iterator[tuple[str, Entry | str]]:
        """Origin and entry of each reader that has one, or why it is of no use.

        Args:
          problem: which the entries are about.
          key: of the environment in which it was measured.
          complete: (entry without observations) -> whether they are wanted.
        """
        name = Name.of(problem.to_json(), key)
        for origin, reader in self._readers(key):
            try:
                entry = reader.read(name, complete=False)
                if entry is not None and complete(entry):
                    entry = reader.read(name, complete=True)
            except (Damaged, NewerSchema) as e:
                yield origin, f"the {origin} entry cannot be read: {e}"
                continue
            if entry is not None:
                yield origin, entry

    def measured(self, problem: Problem, device: Device) -> Entry | None:
        """The first entry that was measured on the device and would run today."""

        def find() -> Entry | None:
            key = environment_key(device)
            for _, entry in self.entries(problem, key, complete=lambda entry: False):
                if isinstance(entry, Entry) and current_best(
                    entry.best, problem, device
                ):
                    return entry
            return None

        return self._once(("measured", problem, device), find)

    def has_any(self, op: str, key: str) -> bool:
        """Returns whether there is an entry of an op in an environment."""

        def find() -> bool:
            return any(reader.has_any(key, op) for _, reader in self._readers(key))

        return self._once(("any", op, key), find)

    def kin(self, op: str, here: Environment) -> tuple[Environment, ...]:
        """The kindred environments in which something is known about an op."""
        find = functools.partial(kindred.kin, self.readers, op, here)
        return self._once(("kin", op, here), find)

    def near(self, question: Question, key: str) -> tuple[Neighbour, ...]:
        """The neighbours that were tuned to the end in one environment."""
        op, device = question.problem.op, question.device
        read = functools.partial(Nearby, self._readers(key), key, op, device)
        nearby = self._once(("near", key, op, device), read)
        return nearby.of(question.problem)

    def digest(self, device: Device) -> str:
        """Hash of all that answers for a device are made from.

        The first call fixes it: from then on nothing is read from directories, so that
        processes with equal digests give equal answers.
        """
        return self._once(("digest", device), functools.partial(self._fix, device))

    def _fix(self, device: Device) -> str:
        here, ops = environment(device), catalogue.recorded()
        keys = {op: [e.key for e in (here, *self.kin(op, here))] for op in ops}
        held = freeze(self.readers, keys)
        self._fixed |= dict.fromkeys(itertools.chain(*keys.values()), held)
        kernels = [roots_hash(v.sources, device) for op in ops for v in variants.of(op)]
        contents = [(origin, reader.digest()) for origin, reader in held]
        return digest(canonical([keys, kernels, contents]), 64)

    def _readers(self, key: str) -> Readers:
        return self._fixed.get(key, self.readers)

    def _once(self, what: Any, make: Callable[[], T]) -> T:
        if what not in self._seen:
            # setdefault: if two threads come here at once, both get the first result.
            return self._seen.setdefault(what, make())
        return self._seen[what]

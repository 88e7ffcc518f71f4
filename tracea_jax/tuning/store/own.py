"""The user's entries: what was measured on this machine, kept, listed and forgotten.

``answers.knowledge`` reads answers from them; tunings write them here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.runtime.trust import Untrusted, warn_once
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment, environment_key
from tracea_jax.tuning.store.files import Journal
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.readers import Memory, Readers
from tracea_jax.tuning.store.records import Entry, Observation, union
from tracea_jax.tuning.store.unions import recorded

# What a directory could not take, by directory, for the life of the process: whoever
# looks into a read-only cache next still finds what was tuned.
_unwritten: dict[pathlib.Path, dict[Name, Entry]] = {}


class Own:
    """Entries in ``<directory>/tuned``, and in memory those that it could not take.

    Attributes:
      directory: the user's cache, created by the first write; None keeps everything in
        memory, in this instance.
    """

    def __init__(self, directory: pathlib.Path | None) -> None:
        self.directory = directory
        self._store: Store | None = None
        self._memory: dict[Name, Entry] = {}
        if directory is not None:
            self._store = Store.of_cache(directory)
            self._memory = _unwritten.setdefault(directory.absolute(), {})

    @property
    def readers(self) -> Readers:
        """Readers of the entries, those in memory first."""
        memory: Readers = (("tuned", Memory(self._memory)),)
        return memory if self._store is None else (*memory, ("tuned", self._store))

    def observations(self, problem: Problem, device: Device) -> tuple[Observation, ...]:
        """All that was measured, finished or not, with whatever kernels."""
        name = Name.of(problem.to_json(), environment_key(device))
        memory = self._memory.get(name)
        stored = self._store.observations(name) if self._store else ()
        return union(memory.observations if memory else (), stored)

    def journal(self, problem: Problem, device: Device) -> Journal:
        """A new journal for one tuning; it keeps nothing if it cannot be written."""
        if self._store is not None:
            place, asked = environment(device), problem.to_json()
            try:
                return self._store.journal(Name.of(asked, place.key), place, asked)
            except OSError as e:
                self._warn_unwritten(e)
        return Journal(None)

    def append(self, journal: Journal, observations: tuple[Observation, ...]) -> None:
        """Appends to a journal; a full disk costs a warning, not the tuning."""
        try:
            journal.append(observations)
        except OSError as e:
            self._warn_unwritten(e)

    def record(
        self,
        entry: Entry,
        journal: Journal | None = None,
        combine: Callable[[Entry, Entry], Entry] = recorded,
    ) -> Entry:
        """Stores an entry, united with what is stored already; returns the union.

        Journals whose writers are gone are folded in and removed, as is ``journal``,
        the caller's own. If the directory cannot be written, the entry is kept for the
        life of the process, and a warning says so once.

        Args:
          entry: what to store.
          journal: holds what the entry has.
          combine: makes one entry of (the new, the stored); by default the best of the
            new one counts, unless the stored one is more recent.
        """
        name = Name.of(entry.problem, entry.environment.key)
        if name in self._memory:
            entry = combine(entry, self._memory[name])
        if self._store is not None:
            try:
                entry = self._store.write(name, entry, journal, combine)
            except (OSError, NewerSchema) as e:
                self._warn_unwritten(e)
            else:
                self._memory.pop(name, None)
                return entry
        self._memory[name] = entry
        return entry

    def hold(self, entry: Entry) -> None:
        """Keeps an entry that another process stored, for the life of this one."""
        self._memory[Name.of(entry.problem, entry.environment.key)] = entry

    def entries(self, *, complete: bool = False) -> Iterator[Entry]:
        """The user's entries of all environments and ops.

        Without their observations unless ``complete``: listing thousands is quick.
        """
        yield from tuple(self._memory.values())
        if self._store is None:
            return
        for name in self._store.names():
            if name in self._memory:
                continue
            try:
                entry = self._store.read(name, complete=complete)
            except (Damaged, NewerSchema):
                continue
            if entry is not None:
                yield entry

    def remove(self, entry: Entry) -> bool:
        """Forgets an entry of the user's; whether it was there."""
        name = Name.of(entry.problem, entry.environment.key)
        in_memory = self._memory.pop(name, None) is not None
        return (self._store is not None and self._store.remove(name)) or in_memory

    def _warn_unwritten(self, error: Exception) -> None:
        if isinstance(error, Untrusted):
            error.warn()
            return
        warn_once(
            f"the tuning cache {self.directory} cannot be written ({_brief(error)}); "
            "results are kept in memory until this process ends"
        )


def _brief(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

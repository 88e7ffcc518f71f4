"""Sources of entries: directories on disk, or the memory of a process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tracea_jax.tuning.store.formats import head_problem
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry


class Reader(Protocol):
    """Entries by name; ``store.Store`` is one."""

    def read(self, name: Name, *, complete: bool) -> Entry | None:
        """The entry, or None; raises Damaged or NewerSchema."""
        ...

    def content(self, name: Name) -> bytes | None:
        """``Entry.to_bytes()`` of what ``read`` gives, None if it raises."""
        ...

    def environments(self) -> Sequence[str]:
        """Keys of the environments that something is known in, sorted."""
        ...

    def has_any(self, environment: str, op: str) -> bool:
        """Returns whether there are entries, readable or not; quick."""
        ...

    def problems(
        self, environment: str, op: str, *, journals: bool
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        """Names and problems of what is known in one environment."""
        ...


Readers = tuple[tuple[str, Reader], ...]  # with the origin of answers from each


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Entries that no directory took."""

    entries: Mapping[Name, Entry]

    def read(self, name: Name, *, complete: bool) -> Entry | None:
        return self.entries.get(name)

    def content(self, name: Name) -> bytes | None:
        entry = self.entries.get(name)
        return entry and entry.to_bytes()

    def environments(self) -> Sequence[str]:
        return sorted({name.environment for name in self.entries})

    def has_any(self, environment: str, op: str) -> bool:
        return _any(self.entries, environment, op)

    def problems(
        self, environment: str, op: str, *, journals: bool
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        for name, entry in tuple(self.entries.items()):
            if (name.environment, name.op) == (environment, op):
                yield name, entry.problem


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """Files as they were at one moment: ``Entry.to_bytes`` by name."""

    files: Mapping[Name, bytes]

    def digest(self) -> str:
        """Hash of names and contents."""
        whole = hashlib.sha256()
        for name in sorted(self.files, key=dataclasses.astuple):
            content = hashlib.sha256(self.files[name]).hexdigest()
            whole.update(f"{dataclasses.astuple(name)} {content}\n".encode())
        return whole.hexdigest()

    def read(self, name: Name, *, complete: bool) -> Entry | None:
        data = self.files.get(name)
        return None if data is None else Entry.from_bytes(data, complete=complete)

    def content(self, name: Name) -> bytes | None:
        return self.files.get(name)

    def environments(self) -> Sequence[str]:
        return sorted({name.environment for name in self.files})

    def has_any(self, environment: str, op: str) -> bool:
        return _any(self.files, environment, op)

    def problems(
        self, environment: str, op: str, *, journals: bool
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        for name, data in self.files.items():
            problem = head_problem(data)
            if (name.environment, name.op) == (environment, op) and problem is not None:
                yield name, problem


def _any(names: Iterable[Name], environment: str, op: str) -> bool:
    return any((n.environment, n.op) == (environment, op) for n in tuple(names))


def freeze(
    readers: Readers, environments: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, Frozen], ...]:
    """A copy of the entries that can answer, one reader for each origin.

    Args:
      readers: with their origins; of one origin, the first that has an entry counts.
      environments: keys of the environments that answer for each op.
    """
    held: dict[str, dict[Name, bytes]] = {origin: {} for origin, _ in readers}
    for origin, reader in readers:
        for op, keys in sorted(environments.items()):
            for key in keys:
                for name, _ in reader.problems(key, op, journals=False):
                    if (data := reader.content(name)) is not None:
                        held[origin].setdefault(name, data)
    return tuple((origin, Frozen(files)) for origin, files in held.items())

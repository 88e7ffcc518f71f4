"""One directory of entries on disk, shared by any number of processes.

<directory>/<environment key>/environment.json
<directory>/<environment key>/<op>/<problem key>.json
<directory>/<environment key>/<op>/<problem key>.<process>.journal

Where nothing is written, entries may also be bound in volumes (``store.volumes``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tracea_jax.runtime import trust
from tracea_jax.runtime.trust import Trust, warn_once
from tracea_jax.tuning.store import files, volumes
from tracea_jax.tuning.store.environment import Environment, problem_key
from tracea_jax.tuning.store.formats import (
    Damaged,
    NewerSchema,
    head_problem,
    parse_problem,
    problem_line,
)
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry, Observation, union
from tracea_jax.tuning.store.unions import readable, recorded

_HEAD_BYTES = 4096  # more than a head has, unless failures talk a lot
_HEAD_LIMIT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """Entries below ``directory``, which need not exist; only writing creates it.

    Attributes:
      directory: where the entries are.
      read_only: damaged files stay where they are.
      whose: whose files count.
      top: the cache directory that ``directory`` is in, if it is in one.
    """

    directory: pathlib.Path
    read_only: bool = False
    whose: Trust = Trust.USER
    top: pathlib.Path | None = None

    @classmethod
    def of_cache(cls, directory: pathlib.Path, whose: Trust = Trust.USER) -> Store:
        """The entries of a cache directory, the user's or a shared one."""
        is_shared = whose is not Trust.USER
        return cls(directory / "tuned", is_shared, whose, directory)

    def path(self, name: Name) -> pathlib.Path:
        return pathlib.Path(self._path(name))

    def _path(self, name: Name) -> str:
        # Text, as making a ``pathlib.Path`` takes as long as reading the file.
        return f"{self.directory}/{name.environment}/{name.op}/{name.problem}.json"

    def read(self, name: Name, *, complete: bool) -> Entry | None:
        """The entry, or None if there is none.

        Raises:
          NewerSchema: if a newer version wrote it.
          Damaged: if it is unreadable; the file is set aside and a warning says where.
            Also if the file belongs elsewhere; then it stays until one is written.
        """
        data = self._bytes(name)
        return None if data is None else self._entry(name, data, complete=complete)

    @property
    def _top(self) -> pathlib.Path:
        return self.top or self.directory

    def _check(self, name: Name) -> None:
        """Raises ``trust.Untrusted`` if others decide what the entry is."""
        inner = () if self.top is None else (self.directory.name,)
        trust.check(self._top, *inner, name.environment, name.op, trust=self.whose)

    def _is_trusted(self, environment: str, op: str) -> bool:
        """True if the files there count; if others decide what they are, it warns."""
        try:
            self._check(Name(environment=environment, op=op, problem=""))
        except OSError as e:
            self._warn_unread(e)
            return False
        return True

    def intact(self, name: Name) -> Entry:
        """The entry with its observations, without warnings or setting aside.

        Raises:
          NewerSchema, Damaged: as ``read``.
          OSError: if it cannot be read, or others could have written it.
        """
        self._check(name)
        return Entry.from_bytes(self._content(self._path(name)))

    def content(self, name: Name) -> bytes | None:
        """The file of an entry that can be read; None without one."""
        try:
            data = self._bytes(name)
            if data is not None:
                self._entry(name, data, complete=False)
        except (Damaged, NewerSchema):
            return None
        return data

    def _bytes(self, name: Name) -> bytes | None:
        try:
            self._check(name)
            return self._content(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return self._volume(name.environment, name.op).get(name.problem)
        except IsADirectoryError as e:
            raise Damaged(str(e)) from e
        except trust.Refused as e:
            self._set_aside(self.path(name), Damaged(str(e)))
            raise Damaged(str(e)) from e
        except OSError as e:
            self._warn_unread(e)
            raise Damaged(str(e)) from e

    def _content(self, path: str | pathlib.Path) -> bytes:
        limit = files.LIMIT_BYTES
        return trust.read_file(path, limit, top=self._top, trust=self.whose)

    def _volume(self, environment: str, op: str) -> Mapping[str, bytes]:
        """Bound entries, by problem."""
        if not self.read_only or self.whose is Trust.SHARED:
            return {}
        path = f"{self.directory}/{environment}/{op}{volumes.SUFFIX}"
        return volumes.opened(path, self.whose)

    def _warn_unread(self, error: OSError) -> None:
        """Warns once for each cache directory."""
        if isinstance(error, trust.Untrusted):
            error.warn()
            return
        warn_once(
            f"the tuning cache {self._top} cannot be read ({error}); what is "
            "tuned there is not used; set TRACEA_CACHE_DIR to a directory of your own",
            f"unread {self._top}",
        )

    def _entry(self, name: Name, data: bytes, *, complete: bool) -> Entry:
        try:
            entry = Entry.from_bytes(data, complete=complete)
        except Damaged as e:
            self._set_aside(self.path(name), e)
            raise
        name.check(entry)
        return entry

    def write(
        self,
        name: Name,
        entry: Entry,
        journal: files.Journal | None = None,
        combine: Callable[[Entry, Entry], Entry] | None = None,
    ) -> Entry:
        """Unites the entry with the stored one and with orphaned journals.

        Args:
          name, entry: what to write.
          journal: the caller's own, removed when its content is in the entry.
          combine: makes one of (the entry, the stored one), in place of ``recorded``.

        Raises:
          NewerSchema: if the stored one must not be overwritten.
          trust.Refused: if nobody could read the union again.
          OSError: if the directory cannot be written; what was stored still is.
        """
        with self._writing(name, entry.environment) as path:
            orphans = [j for j in self._journals(name) if files.is_orphan(j)]
            journalled = {j: found for j in orphans if (found := self._journalled(j))}
            found = union(
                entry.observations, *(j.observations for j in journalled.values())
            )
            entry = dataclasses.replace(entry, observations=found)
            try:
                stored = Entry.from_bytes(self._content(path))
                name.check(stored)
                entry = (combine or recorded)(entry, stored)
            except FileNotFoundError:
                pass
            except (Damaged, trust.Refused) as e:
                warn_once(files.damage(path, e, files.rename_aside(path)))
            trust.write_atomically(path, readable(entry))
            # Only now: a kill before this line finds the observations in the journals.
            # What could not be read stays.
            for orphan, held in journalled.items():
                if held.skipped:
                    aside = files.rename_aside(orphan)
                    warn_once(
                        f"{held.skipped} lines of {orphan} cannot be read and are left "
                        f"out; it was renamed to {aside.name}"
                    )
                else:
                    orphan.unlink(missing_ok=True)
            if journal is not None:
                journal.discard()
        return entry

    def journal(
        self, name: Name, environment: Environment, problem: dict[str, Any]
    ) -> files.Journal:
        """A new journal of this process for one problem, ``Problem.to_json()``.

        Raises:
          OSError: if the directory cannot be written.
        """
        # Under the lock, because a journal that is not locked yet looks orphaned.
        with self._writing(name, environment) as path:
            file = files.journal_path(path.parent, path.stem)
            return files.Journal(file, problem_line(problem))

    def observations(self, name: Name) -> tuple[Observation, ...]:
        """All observations of the entry and of every journal, finished or not."""
        # Journals first: one that is folded in meanwhile is then found in the entry.
        found = [self._journalled(j) for j in self._journals(name)]
        journalled = [j.observations for j in found if j]
        try:
            entry = self.read(name, complete=True)
        except (Damaged, NewerSchema):
            entry = None
        return union(entry.observations if entry else (), *journalled)

    def _journalled(self, path: pathlib.Path) -> files.Journalled | None:
        """A journal's content; None, with a warning, if it cannot be used."""
        try:
            found = files.read_journal(path, self._top, self.whose)
        except FileNotFoundError:
            return None  # folded into the entry meanwhile
        except OSError as e:
            self._warn_unread(e)
            return None
        about = found.problem
        if about is not None and problem_key(about) != path.name.partition(".")[0]:
            warn_once(f"the journal {path} is about another problem and not used")
            return None
        return found

    def environments(self) -> list[str]:
        """Keys of all environments, sorted."""
        return self._subdirectories(self.directory)

    def names(self) -> Iterator[Name]:
        """Names of all entries, sorted."""
        for environment in self.environments():
            place = f"{self.directory}/{environment}"
            ops = {
                file.removesuffix(volumes.SUFFIX)
                for file in self._files(place)
                if file.endswith(volumes.SUFFIX)
            }
            for op in sorted(ops.union(self._subdirectories(place))):
                yield from self._names(environment, op)

    def _names(self, environment: str, op: str) -> Iterator[Name]:
        found = self._filed(environment, op).union(self._volume(environment, op))
        for problem in sorted(found):
            yield Name(environment=environment, op=op, problem=problem)

    def _filed(self, environment: str, op: str) -> set[str]:
        """Keys of the problems whose entries are files of their own."""
        files = self._files(f"{self.directory}/{environment}/{op}")
        parts = (file.partition(".") for file in files)
        return {problem for problem, _, suffix in parts if suffix == "json"}

    def has_any(self, environment: str, op: str) -> bool:
        """Returns whether there are entries, readable or not."""
        return any(True for _ in self._names(environment, op))

    def heads(self) -> Iterator[tuple[Name, Entry]]:
        """All entries that can be read, sorted by name, without observations."""
        for name in self.names():
            try:
                entry = self.read(name, complete=False)
            except (Damaged, NewerSchema):
                continue
            if entry is not None:
                yield name, entry

    def others(self) -> Iterator[pathlib.Path]:
        """All files that are no entries, sorted; not those that others decide about."""
        for environment in self.environments():
            place = self.directory / environment
            if not self._is_trusted(environment, ""):
                continue
            if os.path.lexists(place / "environment.json"):
                yield place / "environment.json"
            for op in self._subdirectories(place):
                if not self._is_trusted(environment, op):
                    continue
                yield from (
                    place / op / file
                    for file in self._files(place / op)
                    if file.count(".") > 1 or not file.endswith(".json")
                )

    def problems(
        self, environment: str, op: str, *, journals: bool
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        """Entries of one environment, from their heads alone: quick, unchecked.

        Args:
          environment, op: as in ``Name``.
          journals: whether problems whose tuning was never finished count.
        """
        bound, filed = self._volume(environment, op), self._filed(environment, op)
        for key in sorted(filed.union(bound)):
            name = Name(environment=environment, op=op, problem=key)
            in_file = key in filed
            head = self._lines(self.path(name), 2) if in_file else bound[key]
            problem = head_problem(head)
            if problem is not None:
                yield name, problem
        if not journals:
            return
        directory = self.directory / environment / op
        for file in self._files(directory):
            if file.endswith(".journal"):
                key = file.partition(".")[0]
                problem = parse_problem(self._lines(directory / file, 1))
                if problem is not None:
                    yield Name(environment=environment, op=op, problem=key), problem

    def _lines(self, path: pathlib.Path, count: int) -> bytes:
        """The start of a file that has so many lines, or nothing; damage is no matter.

        Whoever uses the entry reads it whole, and is told of damage then.
        """
        data = b""
        try:
            with trust.opened(path, top=self._top, trust=self.whose) as (fd, _):
                while data.count(b"\n") < count and len(data) < _HEAD_LIMIT_BYTES:
                    if not (more := os.read(fd, _HEAD_BYTES)):
                        break
                    data += more
        except OSError:
            return b""
        return b"\n".join([*data.split(b"\n")[:count], b""])

    def remove(self, name: Name, expected: Entry | None = None) -> bool:
        """Removes an entry and its orphaned journals; whether there was anything.

        With ``expected``, only if the entry was not written again since it was read.
        """
        path = self.path(name)
        self._check(name)
        if not os.path.isdir(path.parent):
            return False
        with self._locked(name.environment):
            if expected is not None:
                try:  # not by ``read``, which takes this lock to set damage aside
                    if self.intact(name).written != expected.written:
                        return False
                except (OSError, Damaged, NewerSchema):
                    return False
            doomed = [j for j in self._journals(name) if files.is_orphan(j)]
            doomed += [path] if os.path.lexists(path) else []
            for file in doomed:
                file.unlink(missing_ok=True)
        return bool(doomed)

    @contextlib.contextmanager
    def _writing(self, name: Name, environment: Environment) -> Iterator[pathlib.Path]:
        """Holds the environment's lock; gives the path of the entry to write."""
        path = self.path(name)
        self._check(name)
        trust.make_private_directory(path.parent)
        described = self.directory / name.environment / "environment.json"
        with self._locked(name.environment):
            # Whoever wrote them held this lock.
            trust.remove_leftovers(described, is_locked=True)
            trust.remove_leftovers(path, is_locked=True)
            if not os.path.lexists(described):
                text = json.dumps(environment.to_json(), indent=1) + "\n"
                trust.write_atomically(described, text.encode())
            yield path

    def _locked(self, environment: str) -> contextlib.AbstractContextManager[bool]:
        return files.locked(self.directory / environment / ".lock")

    def _journals(self, name: Name) -> list[pathlib.Path]:
        """All journals of a problem, of living and dead processes."""
        place = self.path(name).parent
        if not self._is_trusted(name.environment, name.op):
            return []
        return [
            place / file
            for file in self._files(place)
            if file.startswith(f"{name.problem}.") and file.endswith(".journal")
        ]

    def _set_aside(self, path: pathlib.Path, why: Damaged) -> None:
        """Renames a damaged file, unless someone repaired it meanwhile."""
        aside = None
        try:
            if not self.read_only:
                with files.locked(path.parent.parent / ".lock"):
                    aside = self._rename_if_damaged(path)
                    if aside is None:
                        return
        except FileNotFoundError:
            return  # another process was faster, and warned
        except OSError:
            pass  # the directory cannot be written: the file stays where it is
        warn_once(files.damage(path, why, aside))

    def _rename_if_damaged(self, path: pathlib.Path) -> pathlib.Path | None:
        try:
            Entry.from_bytes(self._content(path))
        except (Damaged, trust.Refused):
            return files.rename_aside(path)
        except NewerSchema:
            pass
        return None

    def _files(self, directory: str | os.PathLike[str]) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            self._warn_unread(e)
            return []

    def _subdirectories(self, directory: str | os.PathLike[str]) -> list[str]:
        """Names of the directories in one, sorted; links are none of ours."""
        follow = self.whose is Trust.PACKAGE
        try:
            with os.scandir(directory) as found:
                return sorted(e.name for e in found if e.is_dir(follow_symlinks=follow))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            self._warn_unread(e)
            return []

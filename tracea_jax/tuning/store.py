"""One directory of entries on disk, shared by any number of processes.

<directory>/<environment key>/environment.json
<directory>/<environment key>/<op>/<problem key>.json
<directory>/<environment key>/<op>/<problem key>.<process>.journal
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tracea_jax.tuning import files
from tracea_jax.tuning.environment import Environment, problem_key
from tracea_jax.tuning.formats import (
    Damaged,
    NewerSchema,
    head_problem,
    problem_line,
)
from tracea_jax.tuning.records import (
    Entry,
    Observation,
    after,
    merge,
    union,
)

_HEAD_BYTES = 4096  # more than a head has, unless failures talk a lot

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warns the first time that this process has this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """Where an entry lies below any directory of this layout."""

    environment: str
    op: str
    problem: str

    @classmethod
    def of(cls, problem: dict[str, Any], environment: str) -> Name:
        """The name for ``Problem.to_json()`` in the environment with this key."""
        key = problem_key(problem)
        return cls(environment=environment, op=problem["op"], problem=key)


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """Entries below ``directory``, which need not exist; only writing creates it.

    With ``read_only``, damaged files stay where they are.
    """

    directory: pathlib.Path
    read_only: bool = False

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
        """
        data = self._bytes(name)
        return None if data is None else self._entry(name, data, complete=complete)

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
            with open(self._path(name), "rb", buffering=0) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise Damaged(str(e)) from e

    def _entry(self, name: Name, data: bytes, *, complete: bool) -> Entry:
        try:
            return Entry.from_bytes(data, complete=complete)
        except Damaged as e:
            self._set_aside(self.path(name), e)
            raise

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
          OSError: if the directory cannot be written; what was stored still is.
        """
        with self._writing(name, entry.environment) as path:
            orphans = [j for j in self._journals(name) if files.is_orphan(j)]
            found = union(entry.observations, *map(files.read_journal, orphans))
            entry = dataclasses.replace(entry, observations=found)
            try:
                stored = Entry.from_bytes(path.read_bytes())
                entry = (combine or recorded)(entry, stored)
            except FileNotFoundError:
                pass
            except Damaged as e:
                warn_once(_damage(path, e, _rename_aside(path)))
            files.write_atomically(path, entry.to_bytes())
            # Only now: a kill before this line finds the observations in the journals.
            for orphan in orphans:
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
        journalled = [files.read_journal(j) for j in self._journals(name)]
        try:
            entry = self.read(name, complete=True)
        except (Damaged, NewerSchema):
            entry = None
        return union(entry.observations if entry else (), *journalled)

    def environments(self) -> list[str]:
        """Keys of all environments, sorted."""
        return _subdirectories(self.directory)

    def names(self) -> Iterator[Name]:
        """Names of all entries, sorted."""
        for environment in self.environments():
            for op in _subdirectories(f"{self.directory}/{environment}"):
                yield from self._names(environment, op)

    def _names(self, environment: str, op: str) -> Iterator[Name]:
        for file in _files(f"{self.directory}/{environment}/{op}"):
            problem, dot, suffix = file.partition(".")
            if dot + suffix == ".json":
                yield Name(environment=environment, op=op, problem=problem)

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
        """All files that are no entries, sorted."""
        for environment in self.environments():
            place = self.directory / environment
            if (place / "environment.json").exists():
                yield place / "environment.json"
            for op in _subdirectories(place):
                yield from (
                    place / op / file
                    for file in _files(place / op)
                    if file.count(".") > 1 or not file.endswith(".json")
                )

    def problems(
        self, environment: str, op: str, *, journals: bool
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        """What is known of in one environment, from heads alone: quick, unchecked.

        Args:
          environment, op: as in ``Name``.
          journals: whether problems whose tuning was never finished count.
        """
        for name in self._names(environment, op):
            problem = head_problem(self._head(name))
            if problem is not None:
                yield name, problem
        if not journals:
            return
        directory = self.directory / environment / op
        for file in _files(directory):
            if file.endswith(".journal"):
                key = file.partition(".")[0]
                problem = files.read_title(directory / file)
                if problem is not None:
                    yield Name(environment=environment, op=op, problem=key), problem

    def _head(self, name: Name) -> bytes:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                data = file.read(_HEAD_BYTES)
                while data.count(b"\n") < 2 and (more := file.read(_HEAD_BYTES)):
                    data += more
        except OSError:
            return b""
        return data

    def remove(self, name: Name, expected: Entry | None = None) -> bool:
        """Removes an entry and its orphaned journals; whether there was anything.

        With ``expected``, only if the entry was not written again since it was read.
        """
        path = self.path(name)
        if not path.parent.is_dir():
            return False
        with self._locked(name.environment):
            if expected is not None:
                found = self.read(name, complete=False)
                if found is None or found.written != expected.written:
                    return False
            doomed = [j for j in self._journals(name) if files.is_orphan(j)]
            doomed += [path] if path.exists() else []
            for file in doomed:
                file.unlink(missing_ok=True)
        return bool(doomed)

    @contextlib.contextmanager
    def _writing(self, name: Name, environment: Environment) -> Iterator[pathlib.Path]:
        """Holds the environment's lock; gives the path of the entry to write."""
        path = self.path(name)
        files.make_private_directory(self.directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        described = self.directory / name.environment / "environment.json"
        with self._locked(name.environment):
            _remove_leftovers(described)
            _remove_leftovers(path)
            if not described.exists():
                text = json.dumps(dataclasses.asdict(environment), indent=1) + "\n"
                files.write_atomically(described, text.encode())
            yield path

    def _locked(self, environment: str) -> contextlib.AbstractContextManager[bool]:
        return files.locked(self.directory / environment / ".lock")

    def _journals(self, name: Name) -> list[pathlib.Path]:
        return files.journals(self.path(name).parent, name.problem)

    def _set_aside(self, path: pathlib.Path, why: Damaged) -> None:
        """Renames a damaged file, unless someone repaired it meanwhile."""
        aside = None
        try:
            if not self.read_only:
                with files.locked(path.parent.parent / ".lock"):
                    aside = _rename_if_damaged(path)
                    if aside is None:
                        return
        except FileNotFoundError:
            return  # another process was faster, and warned
        except OSError:
            pass  # the directory cannot be written: the file stays where it is
        warn_once(_damage(path, why, aside))


def recorded(entry: Entry, stored: Entry) -> Entry:
    """The union of an entry that is recorded now with what was stored before."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    written = after(entry.written, now, stored.written)
    return merge(dataclasses.replace(entry, written=written), stored)


def _remove_leftovers(path: pathlib.Path) -> None:
    """Removes temporary files of writers that were killed; we hold their lock."""
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _rename_if_damaged(path: pathlib.Path) -> pathlib.Path | None:
    try:
        Entry.from_bytes(path.read_bytes())
    except Damaged:
        return _rename_aside(path)
    except NewerSchema:
        pass
    return None


def _rename_aside(path: pathlib.Path) -> pathlib.Path:
    stamp = f"{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09d}"
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    os.replace(path, aside)
    return aside


def _damage(path: pathlib.Path, why: Damaged, aside: pathlib.Path | None) -> str:
    renamed = f"; it was renamed to {aside.name}" if aside else ""
    return f"the tuning cache file {path} is damaged ({why}) and not used{renamed}"


def _files(directory: str | os.PathLike[str]) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _subdirectories(directory: str | os.PathLike[str]) -> list[str]:
    try:
        with os.scandir(directory) as found:
            return sorted(e.name for e in found if e.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []

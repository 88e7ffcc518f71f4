"""Files that several processes share: locks, journals, and what is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tracea_jax.runtime import trust
from tracea_jax.tuning.store.formats import parse_problem
from tracea_jax.tuning.store.records import (
    Observation,
    observation_line,
    parse_observation,
)

try:
    import fcntl
except ImportError:  # not a POSIX system: writes stay atomic, merges may race
    fcntl = None


@contextlib.contextmanager
def locked(
    path: pathlib.Path, on_wait: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Holds the exclusive lock of this file; True if there really is a lock.

    The system releases it when the process ends, however it ends, so a killed holder
    blocks nobody. File systems without locks are used unlocked.

    Args:
      path: created if missing; its directory must exist.
      on_wait: called once if another process holds the lock.

    Raises:
      OSError: if the file cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | trust.NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        yield _lock(fd, on_wait)
    finally:
        os.close(fd)


def _lock(fd: int, on_wait: Callable[[], None] | None) -> bool:
    if fcntl is None:
        return False
    if _try_lock(fd):
        return True
    try:
        if on_wait is not None:
            on_wait()
        # Blocking, not polling: the system wakes a waiter as soon as the lock is free,
        # and a signal (Ctrl-C) still ends the wait.
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _try_lock(fd: int) -> bool:
    """Takes the lock if it is free."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


LIMIT_BYTES = 64 << 20  # of an entry or a journal


@dataclasses.dataclass(frozen=True, slots=True)
class Journalled:
    """The contents of a journal.

    Attributes:
      observations: of all lines that can be read.
      skipped: number of whole lines that cannot be read; a torn one at the end is
        what a kill leaves and does not count.
      problem: what they are about, as the first line says; None if it does not.
    """

    observations: tuple[Observation, ...]
    skipped: int
    problem: dict[str, Any] | None = None


class Journal:
    """Observations of one tuning in progress, on disk as soon as they are made.

    Each tuning process appends to a journal of its own, ``<key>.<process>.journal``,
    and keeps it locked. With one shared file, a process that finishes could not remove
    it without losing the lines that another one, still measuring, appends to the
    unlinked file. With one each, whoever finishes folds in exactly those whose lock is
    free: their writers are gone, killed or not. The rest are left to their owners.
    """

    def __init__(self, path: pathlib.Path | None, title: str = "") -> None:
        """Opens the journal; None keeps nothing.

        Args:
          path: of the file, which is created.
          title: the first line, written with the first observations.

        Raises:
          OSError: if the file cannot be created.
        """
        self.path = path
        self._title = title
        self._is_torn = False
        self._fd = -1
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            flags |= trust.NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
            _try_lock(self._fd)

    def append(self, observations: Iterable[Observation]) -> None:
        """Writes one line for each observation and waits until they are on disk.

        Raises:
          OSError: if they could not be written.
        """
        if self._fd < 0:
            return
        lines = "".join(observation_line(o) + "\n" for o in observations)
        if self._title:
            lines = f"{self._title}\n{lines}"
        # What a full disk cut off must not swallow the first line after it.
        start = "\n" if self._is_torn else ""
        self._is_torn = True
        trust.write_all(self._fd, (start + lines).encode())
        os.fsync(self._fd)
        self._is_torn = False
        self._title = ""

    def discard(self) -> None:
        """Removes the file: its observations are in the entry."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Releases the lock; the file stays for the next tuning, unless it is empty."""
        if self._fd >= 0:
            if self.path is not None and os.fstat(self._fd).st_size == 0:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def journal_path(directory: pathlib.Path, key: str) -> pathlib.Path:
    """A name that no other process has; a process of the same number may have died."""
    for attempt in range(1 << 16):
        path = directory / f"{key}.{os.getpid()}-{attempt}.journal"
        if not os.path.lexists(path):
            return path
    raise FileExistsError(f"too many journals {key}.{os.getpid()}-* in {directory}")


def is_orphan(path: pathlib.Path) -> bool:
    """Returns whether the journal's writer is gone."""
    try:
        fd = os.open(path, trust.READ_FLAGS | os.O_RDWR)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and _try_lock(fd)
    finally:
        os.close(fd)


def read_journal(
    path: pathlib.Path,
    top: pathlib.Path | str = "",
    whose: trust.Trust = trust.Trust.PACKAGE,
) -> Journalled:
    """The contents of a journal.

    Args:
      path: of the file.
      top, whose: the cache directory, and whose files count there.

    Raises:
      OSError: if it cannot be read; see ``trust.read_file``.
    """
    data = trust.read_file(path, LIMIT_BYTES, top=top, trust=whose)
    *lines, torn = data.split(b"\n")  # the last one is empty, or cut off by a kill
    problem = parse_problem(lines[0]) if lines else None
    # A title comes again where it is not known whether the disk took the first one.
    lines = [line for line in lines if line.strip() and parse_problem(line) is None]
    parsed = [parse_observation(line) for line in lines]
    last = parse_observation(torn)
    found = tuple(o for o in (*parsed, last) if o is not None)
    return Journalled(found, skipped=parsed.count(None), problem=problem)


def rename_aside(path: pathlib.Path) -> pathlib.Path:
    """Takes a damaged file out of the way; where it is now."""
    stamp = f"{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09d}"
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    os.replace(path, aside)
    return aside


def damage(path: pathlib.Path, why: Exception, aside: pathlib.Path | None) -> str:
    """The warning about a damaged file."""
    renamed = f"; it was renamed to {aside.name}" if aside else ""
    return f"the tuning cache file {path} is damaged ({why}) and not used{renamed}"

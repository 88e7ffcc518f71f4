"""Removing compiled kernels from a store that has grown too large."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator

from tracea_jax.runtime import trust

try:
    import fcntl
except ImportError:  # not a POSIX system: a collector and a writer may cross
    fcntl = None

LIMIT_BYTES = 2 << 30  # of a store, unless the user says otherwise
_MIN_AGE_S = 600.0  # what is younger may be in use by a tuning; it is not collected
# The names that ``store`` writes, and those of its writers' temporary files.
_KERNEL = re.compile(r"([0-9a-f]{64})(\.cu|\.json|\.cubin|\.failed\.json|\.winner)")
_LEFTOVER = re.compile(rf"\.{_KERNEL.pattern}\.[0-9a-f]+\.tmp")


@contextlib.contextmanager
def locked(directory: pathlib.Path, *, is_collector: bool) -> Iterator[None]:
    """Writers share the lock of the store, a collector has it alone.

    Without a lock, as on file systems that have none, the worst is a kernel that is
    compiled again.
    """
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                flags = trust.READ_FLAGS | os.O_CREAT
                fd = os.open(directory / "cubin" / ".lock", flags, 0o600)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX if is_collector else fcntl.LOCK_SH)
        yield


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Numbers of kernels and bytes that a collection removed and left."""

    kernels: int
    freed_bytes: int
    left_bytes: int


def collect(
    directory: pathlib.Path,
    limit_bytes: int = LIMIT_BYTES,
    keep: frozenset[str] = frozenset(),
    *,
    min_age_s: float = _MIN_AGE_S,
) -> Collected:
    """Removes kernels until the rest of the store takes ``limit_bytes`` at most.

    First go what kills left behind, then kernels that no tuning chose, then the rest,
    each the longest unused first. Readers see a kernel whole or not at all; programs
    that have loaded one are not affected. Files that the store did not write stay, and
    so does all that links lead to. What cannot be read or removed stays, and what
    others could have put there stays with a warning.

    Args:
      directory: the cache directory that holds the store.
      limit_bytes: size to shrink to.
      keep: keys of kernels that stay.
      min_age_s: nothing written or used within that many seconds is removed.
    """
    freed = kernels = 0
    with contextlib.ExitStack() as stack:
        folders = stack.enter_context(_folders(directory))
        if folders:  # else the lock could be another's, who never gives it back
            stack.enter_context(locked(directory, is_collector=True))
        stored = [s for folder in folders for s in _stored(folder)]
        size = sum(s.size_bytes for s in stored)
        young = time.time() - min_age_s
        for kernel in sorted(stored, key=lambda s: (s.rank, s.used, s.key)):
            is_needed = kernel.rank > 0 and size - freed <= limit_bytes
            if is_needed or kernel.key in keep or kernel.used > young:
                continue
            if not kernel.remove():
                continue
            freed += kernel.size_bytes
            kernels += kernel.rank > 0
    return Collected(kernels=kernels, freed_bytes=freed, left_bytes=size - freed)


def count(directory: pathlib.Path) -> int:
    """Number of compiled kernels in a store; what cannot be read does not count."""
    with _folders(directory) as folders:
        return sum(s.files[0].endswith(".cubin") for f in folders for s in _stored(f))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The files of one key.

    Attributes:
      folder: descriptor of the directory that has them.
      key: of the kernel; "" for a file that no kill should have left.
      files: names of what there is, the image first.
      size_bytes: of all files.
      used: when it was last written or read, in seconds of the wall clock.
      rank: 0 for leftovers, 1 for kernels, 2 for those that a tuning chose.
    """

    folder: int
    key: str
    files: tuple[str, ...]
    size_bytes: int
    used: float
    rank: int

    def remove(self) -> bool:
        """Returns whether it could be removed."""
        try:
            for file in self.files:  # without its image, nobody looks at the rest
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=self.folder)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _folders(directory: pathlib.Path) -> Iterator[list[int]]:
    """Descriptors of the store's directories, one for each architecture.

    All is done through them: a link put in place of a directory leads nowhere.
    """
    with contextlib.ExitStack() as stack:

        def entered(name: str, parent: int | None = None) -> int:
            found = trust.directory(name, top=directory, parent=parent)
            return stack.enter_context(found)

        folders: list[int] = []
        try:
            cubin = entered("cubin", entered(str(directory)))
            for name in sorted(os.listdir(cubin)):
                with contextlib.suppress(NotADirectoryError, PermissionError):
                    folders.append(entered(name, cubin))
        except trust.Untrusted as e:
            e.warn()
            folders = []
        except OSError:
            pass  # there is no store, or none that can be read
        yield folders


def _stored(folder: int) -> list[_Stored]:
    groups: dict[str, list[str]] = {}
    for file in os.listdir(folder):
        if whole := _KERNEL.fullmatch(file):
            groups.setdefault(whole[1], []).append(file)
        elif _LEFTOVER.fullmatch(file):
            groups[file] = [file]
    found = (_stored_files(folder, key, files) for key, files in groups.items())
    return [s for s in found if s is not None]


def _stored_files(folder: int, key: str, files: list[str]) -> _Stored | None:
    suffixes = {file[len(key) :] for file in files}
    is_whole = bool(suffixes & {".cubin", ".failed.json"})
    try:
        stats = [os.stat(f, dir_fd=folder, follow_symlinks=False) for f in files]
    except OSError:
        return None  # someone else removes it
    if not all(stat.S_ISREG(s.st_mode) for s in stats):
        return None
    return _Stored(
        folder=folder,
        key=key,
        files=tuple(sorted(files, key=lambda f: not f.endswith(".cubin"))),
        size_bytes=sum(s.st_size for s in stats),
        used=max(max(s.st_mtime, s.st_atime) for s in stats),
        rank=is_whole + (is_whole and ".winner" in suffixes),
    )

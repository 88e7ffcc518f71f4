"""Removing compiled kernels from a store that has grown too large."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # not a POSIX system: a collector and a writer may cross
    fcntl = None

LIMIT_BYTES = 2 << 30  # of a store, unless the user says otherwise
_MIN_AGE_S = 600.0  # what is younger may be in use by a tuning; it is not collected


@contextlib.contextmanager
def locked(directory: pathlib.Path, *, is_collector: bool) -> Iterator[None]:
    """Writers share the lock of the store, a collector has it alone.

    Without a lock, as on file systems that have none, the worst is a kernel that is
    compiled again.
    """
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
                fd = os.open(directory / "cubin" / ".lock", flags, 0o644)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX if is_collector else fcntl.LOCK_SH)
        yield


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection removed and left: numbers of kernels, and bytes."""

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
    that have loaded one are not affected.

    Args:
      directory: the cache directory that holds the store.
      limit_bytes: size to shrink to.
      keep: keys of kernels that stay.
      min_age_s: nothing written or used within that many seconds is removed.
    """
    freed = kernels = 0
    with locked(directory, is_collector=True):
        stored = _stored(directory)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The files of one key.

    Attributes:
      key: of the kernel; "" for a file that no kill should have left.
      files: what there is, the image first.
      size_bytes: of all files.
      used: when it was last written or read, in seconds of the wall clock.
      rank: 0 for leftovers, 1 for kernels, 2 for those that a tuning chose.
    """

    key: str
    files: tuple[pathlib.Path, ...]
    size_bytes: int
    used: float
    rank: int

    def remove(self) -> bool:
        """Whether it could be removed."""
        try:
            for file in self.files:  # without its image, nobody looks at the rest
                file.unlink(missing_ok=True)
        except OSError:
            return False
        return True


def _stored(directory: pathlib.Path) -> list[_Stored]:
    groups: dict[tuple[pathlib.Path, str], list[pathlib.Path]] = {}
    for file in (directory / "cubin").glob("*/*"):
        key = file.name.partition(".")[0]  # "" for temporary files
        groups.setdefault((file.parent, key or file.name), []).append(file)
    found = (_stored_files(key, files) for (_, key), files in groups.items())
    return [s for s in found if s is not None]


def _stored_files(key: str, files: list[pathlib.Path]) -> _Stored | None:
    suffixes = {"".join(file.suffixes) for file in files}
    is_whole = bool(suffixes & {".cubin", ".failed.json"}) and not key.startswith(".")
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return None  # someone else removes it
    return _Stored(
        key=key,
        files=tuple(sorted(files, key=lambda f: f.suffix != ".cubin")),
        size_bytes=sum(s.st_size for s in stats),
        used=max(max(s.st_mtime, s.st_atime) for s in stats),
        rank=is_whole + (is_whole and ".winner" in suffixes),
    )

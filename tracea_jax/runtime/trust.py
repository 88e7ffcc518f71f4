"""Which files may decide what code runs, and how files are read and written safely.

| where                      | whose files count                 | who may write |
|----------------------------|-----------------------------------|---------------|
| the user's cache           | the user's and root's             | the owner     |
| shared, named in a setting | also the directory's owner's      | the owner     |
| shipped with the package   | anyone's: the package is code too | anyone        |
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import pathlib
import re
import secrets
import stat
import time
import warnings
from collections.abc import Iterator

from tracea_jax import schema

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# A FIFO that nobody writes to would block the opening for ever.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
_LEFTOVER_AGE_S = 3600.0  # what is younger may still be written

_logger = logging.getLogger(__name__)
_warned: set[str] = set()


def warn_once(message: str, key: str | None = None) -> None:
    """Warns the first time that this process has this message, or this key."""
    key = key or message
    if key not in _warned:
        _warned.add(key)
        _logger.info("%s", schema.visible(message))
        warnings.warn(schema.visible(message), RuntimeWarning, stacklevel=3)


class Trust(enum.Enum):
    """Whose files count in a directory; see the table above."""

    USER = enum.auto()
    SHARED = enum.auto()
    PACKAGE = enum.auto()


class Untrusted(PermissionError):
    """Others decide what is in a file or directory; the message names the fix.

    Attributes:
      top: the cache directory, which the one warning is about.
    """

    def __init__(self, message: str, top: str) -> None:
        super().__init__(message)
        self.top = top

    def warn(self) -> None:
        """Warns, once for each cache directory."""
        warn_once(str(self), f"untrusted {self.top}")


class Refused(OSError):
    """The file is none that is read: no regular one, or too large."""


def check(top: pathlib.Path | str, *below: str, trust: Trust = Trust.USER) -> None:
    """Checks a cache directory and the ones below it that lead to a file.

    What does not exist passes: it is made by the first write, for the user alone.

    Args:
      top: the cache directory.
      below: names of directories, each in the one before.
      trust: whose files count.

    Raises:
      Untrusted: if others own or may write one of them.
      OSError: if one cannot be looked at.
    """
    owners = _owners(str(top), trust)
    if owners is None:
        return
    place = str(top)
    for name in ("", *below):
        place = f"{place}/{name}" if name else place
        try:
            status = os.lstat(place)
            if stat.S_ISLNK(status.st_mode):
                _check_owner(place, status, owners, str(top))  # who made it decides
                status = os.stat(place)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISDIR(status.st_mode):
            return  # nothing is in it, and /dev/null has to stay as it is
        _check_status(place, status, owners, str(top))


def _owners(top: str, trust: Trust) -> set[int] | None:
    """The users whose files count; None if all do."""
    if trust is Trust.PACKAGE or not hasattr(os, "geteuid"):
        return None
    owners = {0, os.geteuid()}
    if trust is Trust.SHARED:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            owners.add(os.stat(top).st_uid)
    return owners


def _check_status(
    path: str, status: os.stat_result, owners: set[int], top: str
) -> None:
    _check_owner(path, status, owners, top)
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(
            f"{path} can be written by others and is ignored: they could replace "
            f"kernels; if nobody did, run `chmod -R go-w {top}`",
            top,
        )


def _check_owner(path: str, status: os.stat_result, owners: set[int], top: str) -> None:
    if status.st_uid not in owners:
        raise Untrusted(
            f"{path} belongs to user {status.st_uid} and is ignored: its owner could "
            "replace kernels; set TRACEA_CACHE_DIR to a directory of your own, or name "
            "a cache whose owner you trust in TRACEA_CACHE_PATH",
            top,
        )


@contextlib.contextmanager
def directory(
    name: str, *, top: pathlib.Path, parent: int | None = None
) -> Iterator[int]:
    """Opens a directory of the user's cache ``top``; gives its descriptor.

    Args:
      name: its path, or its name in ``parent``, where a link is none.
      top: the cache directory that the warning is about.
      parent: descriptor of the directory that has it.

    Raises:
      Untrusted: if others own it or may write it.
      OSError: if it cannot be opened.
    """
    place = name if parent is None else f"{name} in {top}"
    if parent is None:
        check(name)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
    fd = os.open(name, flags | (0 if parent is None else NOFOLLOW), dir_fd=parent)
    try:
        owners = _owners(str(top), Trust.USER)
        if owners is not None:
            _check_status(place, os.fstat(fd), owners, str(top))
        yield fd
    finally:
        os.close(fd)


def make_private_directory(path: pathlib.Path) -> None:
    """Creates the path for this user alone, whatever the umask.

    Raises:
      OSError: if it cannot be created.
    """
    missing: list[pathlib.Path] = []
    for place in (path, *path.parents):
        if os.path.lexists(place):
            break
        missing.append(place)
    for directory in reversed(missing):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            continue
        # Only what this process made, not what a link was put there for meanwhile.
        mode = directory.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
            directory.chmod(0o700)  # a umask that denies the user as well


def read_file(
    path: str | os.PathLike[str],
    limit_bytes: int,
    *,
    top: pathlib.Path | str = "",
    trust: Trust = Trust.PACKAGE,
) -> bytes:
    """The content of a regular file.

    Args:
      path: of the file.
      limit_bytes: how large it may be.
      top: the cache directory it belongs to.
      trust: whose files count; with PACKAGE a link is followed.

    Raises:
      Untrusted: if the file is another user's, or others may write it.
      Refused: if it is a device, a pipe, a link, or too large.
      OSError: if it cannot be read.
    """
    with opened(path, top=top, trust=trust) as (fd, size_bytes):
        return _read_all(fd, path, size_bytes, limit_bytes)


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    *,
    top: pathlib.Path | str = "",
    trust: Trust = Trust.PACKAGE,
) -> Iterator[tuple[int, int]]:
    """Opens a regular file for reading; gives the descriptor and the size in bytes.

    Arguments and errors are those of ``read_file``.
    """
    owners = _owners(str(top), trust)
    flags = READ_FLAGS if owners is not None else READ_FLAGS & ~NOFOLLOW
    try:
        fd = os.open(path, flags)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise Refused(f"{os.fspath(path)} is a symbolic link") from e
        raise
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{os.fspath(path)} is not a regular file")
        if owners is not None:
            _check_status(os.fspath(path), status, owners, str(top))
        yield fd, status.st_size
    finally:
        os.close(fd)


def _read_all(
    fd: int, path: str | os.PathLike[str], size_bytes: int, limit_bytes: int
) -> bytes:
    """The contents of the file; one that is being appended to may have grown."""
    if size_bytes > limit_bytes:
        raise Refused(
            f"{os.fspath(path)} has {size_bytes} bytes; at most {limit_bytes} are read"
        )
    data = os.read(fd, size_bytes + 1)
    if len(data) == size_bytes:
        return data
    parts, left = [data], limit_bytes - len(data)
    while left >= 0 and (more := os.read(fd, min(left + 1, 1 << 20))):
        parts.append(more)
        left -= len(more)
    if left < 0:
        raise Refused(f"{os.fspath(path)} grew beyond {limit_bytes} bytes")
    return b"".join(parts)


def write_atomically(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the file at once: a reader sees the old content or the new, never half.

    Args:
      path, data: what to write where.
      mode: who may read it, before the umask; by default the user alone.

    Raises:
      OSError: as the system reports it; the old content is untouched.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | NOFOLLOW
    try:
        fd = os.open(new, flags, mode)
    except OSError as e:
        e.filename = os.fspath(path)  # what the caller knows
        raise
    try:
        write_all(fd, data)
        os.fsync(fd)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    finally:
        os.close(fd)


def try_writing(directory: pathlib.Path) -> None:
    """Writes a file into a cache directory as its stores do, and removes it.

    The directory is made, as by any first write. Of those below it, which may be other
    users', only the permissions are looked at.

    Raises:
      OSError: naming what cannot be written.
    """
    make_private_directory(directory)
    probe = directory / f".{secrets.token_hex(8)}.probe"
    write_atomically(probe, bytes(4096))  # enough to meet a disk that is full
    probe.unlink()
    for place, _, _ in os.walk(directory):
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of the data, in as many pieces as the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_leftovers(path: pathlib.Path, *, is_locked: bool = False) -> None:
    """Removes the temporary files of killed writers of this file.

    Args:
      path: what they were writing.
      is_locked: whether it is a file of the cache, and the caller keeps writers away:
        then young ones go too, and those that earlier versions named, which elsewhere
        may be files of the user's.
    """
    name = re.escape(path.name)
    pattern = (
        rf"\.?{name}\.[0-9a-f]+\.tmp"
        if is_locked
        else rf"\.{name}\.[0-9a-f]{{16}}\.tmp"
    )
    with contextlib.suppress(OSError):
        for leftover in filter(re.compile(pattern).fullmatch, os.listdir(path.parent)):
            with contextlib.suppress(OSError):
                _remove_leftover(path.with_name(leftover), is_locked)


def _remove_leftover(path: pathlib.Path, is_locked: bool) -> None:
    status = path.lstat()
    is_old = time.time() - status.st_mtime >= _LEFTOVER_AGE_S
    if stat.S_ISREG(status.st_mode) and (is_old or is_locked):
        path.unlink()

"""Entries bound in one file: what ships is thousands of entries that nobody writes.

<directory>/<environment key>/<op>.volume: for each entry, sorted by the key of its
problem, a line "<problem key> <bytes>" and then the bytes of the entry's file

In a wheel a volume takes a tenth of what its entries take as files, and to look through
its problems is to read one file. ``store.entries`` reads volumes, in directories that
are only read.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Mapping

from tracea_jax.runtime import trust
from tracea_jax.runtime.trust import Trust, warn_once

SUFFIX = ".volume"
LIMIT_BYTES = 256 << 20
_NOTHING: Mapping[str, bytes] = types.MappingProxyType({})


def bound(entries: Mapping[str, bytes]) -> bytes:
    """A volume's content from the files of entries, by the keys of their problems."""
    parts = [(f"{key} {len(entries[key])}\n", entries[key]) for key in sorted(entries)]
    return b"".join(line.encode() + data for line, data in parts)


def opened(path: str, whose: Trust) -> Mapping[str, bytes]:
    """The files that a volume was made of; nothing, with a warning, if it is damaged.

    Entries have checksums of their own, so damage within one is found by its reader.

    Args:
      path: of the volume, which need not exist.
      whose: whose files count.
    """
    try:
        found = os.stat(path)
    except OSError:
        return _NOTHING
    return _opened(path, found.st_mtime_ns, found.st_size, whose)


@functools.lru_cache(maxsize=16)
def _opened(path: str, mtime_ns: int, size: int, whose: Trust) -> Mapping[str, bytes]:
    try:
        data = trust.read_file(path, LIMIT_BYTES, trust=whose)
        return types.MappingProxyType(_split(data))
    except (OSError, ValueError) as e:
        warn_once(f"the tuned answers in {path} cannot be read ({e}) and are not used")
        return _NOTHING


def _split(data: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        begin = data.index(b"\n", start) + 1
        key, size = data[start:begin].decode("ascii").split()
        start = begin + int(size)
        if start > len(data):
            raise ValueError("it is cut off")
        found[key] = data[begin:start]
    return found

"""Python values in a pipe as frames: a header with length and checksum, then a pickle.

What the values mean is in ``worker`` (parent) and ``serving`` (child), the callers.
"""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from typing import Any

_HEADER = struct.Struct("<8sQI")
_MAGIC = b"tracea1\n"
_MAX_BYTES = 1 << 28  # a header that announces a longer pickle is garbage


class Garbage(ValueError):
    """The bytes are no frame."""


def encode(value: Any) -> bytes:
    """A value as the bytes of a frame."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(_MAGIC, len(data), zlib.crc32(data)) + data


class Frames:
    """Reads values from bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Any:
        """The next value; None if more bytes are needed.

        Raises:
          Garbage: if the bytes are no frame; no later value can be read either.
        """
        if len(self._buffer) < _HEADER.size:
            if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
                raise Garbage(f"{bytes(self._buffer)!r}")
            return None
        magic, size, checksum = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or size > _MAX_BYTES:
            raise Garbage(f"{bytes(self._buffer[:80])!r}")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        if zlib.crc32(data) != checksum:
            raise Garbage("its checksum is wrong")
        try:
            return pickle.loads(data)
        except Exception as e:
            raise Garbage(f"it cannot be unpickled: {type(e).__name__}: {e}") from e


def write(fd: int, value: Any) -> None:
    """Writes a value; blocks until the pipe has taken it.

    Raises:
      OSError: if the pipe's reader is gone.
    """
    view = memoryview(encode(value))
    while view:
        view = view[os.write(fd, view) :]

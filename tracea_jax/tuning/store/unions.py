"""Merges an entry with one that is stored already, if that can be read.

How two entries become one is ``records.merge``. ``store.entries`` writes, and
``store.own`` keeps in memory what no directory took.
"""

from __future__ import annotations

import dataclasses
import datetime

from tracea_jax import schema
from tracea_jax.runtime import trust
from tracea_jax.tuning.store import files
from tracea_jax.tuning.store.formats import Damaged
from tracea_jax.tuning.store.records import Entry, after, merge


def readable(entry: Entry) -> bytes:
    """The content of the entry's file.

    Each of two entries may be within the limits and their union beyond: written, it
    would be set aside as damaged, and with it what was stored before.

    Raises:
      trust.Refused: if it would not be read again.
    """
    try:
        data = entry.to_bytes()
        if len(data) > files.LIMIT_BYTES:
            raise Damaged(f"it has {len(data)} bytes")
        Entry.from_bytes(data)
    except ValueError as e:
        raise trust.Refused(f"nobody could read it again: {e}") from e
    return data


def recorded(entry: Entry, stored: Entry) -> Entry:
    """The union of an entry that is recorded now with what was stored before."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    written = after(entry.written, now, stored.written)
    if schema.line(written) is not None:  # what is stored claims to be the last ever
        written, stored = entry.written, dataclasses.replace(stored, written="")
    return merge(dataclasses.replace(entry, written=written), stored)

"""The common format of cache files: their first lines, and kinds of damage."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tracea_jax.schema import mapping
from tracea_jax.tuning.store.environment import SCHEMA, canonical

# What reading plain data that is not as expected raises.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Damaged(ValueError):
    """The bytes are not an entry as it was written."""


class NewerSchema(ValueError):
    """The file was written by a newer version of the package."""


def signed(body: str) -> bytes:
    """The content of a file: a line with schema and checksum, then the body."""
    data = body.encode()
    return _first_line(data) + b"\n" + data


def _first_line(body: bytes) -> bytes:
    checksum = hashlib.sha256(body).hexdigest()
    return f'{{"schema": {SCHEMA}, "checksum": "sha256:{checksum}",'.encode()


def checked(data: bytes) -> bytes:
    """The body of a file; the inverse of ``signed``.

    Raises:
      NewerSchema: if only a newer version can read it.
      Damaged: if it is not what was written.
    """
    first, _, body = data.partition(b"\n")
    expected = _first_line(body)
    if first == expected:
        return body
    try:
        header = json.loads(first.rstrip(b",") + b"}")
        if header["schema"] != SCHEMA:
            raise Damaged(f"schema {ascii(header['schema'])[:60]}")
        if header["checksum"] != json.loads(expected[:-1] + b"}")["checksum"]:
            raise Damaged("its checksum is wrong")
        return body
    except UNREADABLE as e:
        if (newer := _schema(data)) is not None and newer > SCHEMA:
            raise NewerSchema(
                f"schema {ascii(newer)[:20]} is newer than {SCHEMA}"
            ) from None
        raise Damaged(str(e) or type(e).__name__) from e


def _schema(data: bytes) -> int | None:
    """The schema number of any JSON object that has one, whatever its layout."""
    for text in (data, data.partition(b"\n")[0].rstrip(b",") + b"}"):
        try:
            schema = json.loads(text).get("schema")
        except (ValueError, AttributeError, RecursionError):
            continue
        if isinstance(schema, int):
            return schema
    return None


def head_problem(data: bytes) -> dict[str, Any] | None:
    """The problem of an entry's first bytes, unchecked; None if they do not tell.

    For looking through thousands. Whoever uses the entry reads it whole and finds
    damage then.
    """
    end = data.find(b"\n", start := data.find(b"\n") + 1)
    try:
        problem = json.loads(data[start + len(b'"head": ') : end - 1])["problem"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return problem if mapping(problem) is None else None


def problem_line(problem: dict[str, Any]) -> str:
    """The first line of a journal; readers of observations skip it."""
    return canonical({"problem": problem})


def parse_problem(line: bytes | str) -> dict[str, Any] | None:
    """The problem of a journal's first line; None if it is another line."""
    try:
        problem = json.loads(line)["problem"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return problem if mapping(problem) is None else None

"""Texts of the headers of GPU kernels: what a kernel includes, and a hash of it.

Include names are relative to ``kernels/cuda`` ("tile/swizzle.cuh"), in every file: the
compiler is given the texts by these names and never looks at a file system. Another
dialect has a directory beside it, where its kernels look first.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterable
from typing import Literal

Dialect = Literal["cuda", "hip", "metal"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@functools.cache
def directory(dialect: Dialect = "cuda") -> pathlib.Path:
    """The directory of the headers: installed as package data, or the source tree.

    Raises:
      FileNotFoundError: neither place exists.
    """
    package = pathlib.Path(__file__).resolve().parent.parent
    places = [root / "kernels" / dialect for root in (package, package.parent)]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no headers of {dialect} in {places[0]} (installed) or {places[1]} "
        "(source tree); install tracea_jax again"
    )


@functools.cache
def text(name: str, dialect: Dialect = "cuda") -> str:
    """The text of one header: the dialect's own, or else that of CUDA kernels.

    Raises:
      FileNotFoundError: there is no header of that name below ``directory()``.
    """
    path = directory() / name
    if dialect != "cuda" and (own := directory(dialect) / name).is_file():
        path = own
    if not path.is_file():
        known = sorted(
            p.relative_to(directory()).as_posix() for p in directory().rglob("*.cuh")
        )
        raise FileNotFoundError(
            f"no CUDA header {name!r}; names are relative to {directory()}, which has "
            f"{', '.join(known)}"
        )
    return path.read_text(encoding="utf-8")


def headers(*names: str, dialect: Dialect = "cuda") -> tuple[tuple[str, str], ...]:
    """(include name, text) of the named headers and of all they include, by name.

    Each header comes once, in the sorted order of the names, so equal sets of headers
    are equal values.

    Raises:
      FileNotFoundError: a header, or one that it includes, does not exist.
    """
    found: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = text(name, dialect)
            pending += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


def inlined(source: str, texts: Iterable[tuple[str, str]]) -> str:
    """A source with the texts of its headers in place of the includes, each once.

    Includes of what is not among the texts stay.
    """
    left = dict(texts)

    def header(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names:
            return match[0]
        body = left.pop(name, "").replace("#pragma once\n", "", 1)
        return _INCLUDE.sub(header, body.rstrip())

    names = set(left)
    return _INCLUDE.sub(header, source)


def source_hash(*names: str) -> str:
    """sha256 in hexadecimal of the named headers, all they include, and their names."""
    return content_hash(headers(*names))


def content_hash(texts: Iterable[tuple[str, str]]) -> str:
    """sha256 in hexadecimal of (name, text) pairs in their order."""
    digest = hashlib.sha256()
    for name, body in texts:
        for part in (name.encode(), body.encode()):
            # The length keeps two different splits of the same bytes apart.
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()

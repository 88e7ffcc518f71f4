"""Texts of the CUDA headers: what a kernel includes, and a hash of it.

Include names are relative to ``kernels/cuda`` ("tile/swizzle.cuh"), in every file: the
compiler is given the texts by these names and never looks at a file system.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterable

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@functools.cache
def directory() -> pathlib.Path:
    """The directory of the headers: installed as package data, or the source tree.

    Raises:
      FileNotFoundError: neither place exists.
    """
    package = pathlib.Path(__file__).resolve().parent.parent
    places = (package / "kernels" / "cuda", package.parent / "kernels" / "cuda")
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no CUDA headers in {places[0]} (installed) or {places[1]} (source tree); "
        "install tracea_jax again"
    )


@functools.cache
def text(name: str) -> str:
    """The text of one header.

    Raises:
      FileNotFoundError: there is no header of that name below ``directory()``.
    """
    path = directory() / name
    if not path.is_file():
        known = sorted(
            p.relative_to(directory()).as_posix() for p in directory().rglob("*.cuh")
        )
        raise FileNotFoundError(
            f"no CUDA header {name!r}; names are relative to {directory()}, which has "
            f"{', '.join(known)}"
        )
    return path.read_text(encoding="utf-8")


def headers(*names: str) -> tuple[tuple[str, str], ...]:
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
            found[name] = text(name)
            pending += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


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

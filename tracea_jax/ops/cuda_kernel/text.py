"""The text of a user's kernel: where it is from, and the headers that it includes.

Caller: ``public``.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import linecache
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, cast

from tracea_jax.emit import sources
from tracea_jax.mistakes import shown

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]', re.MULTILINE)


def read(source: Any) -> tuple[str, tuple[str, int] | None]:
    """The text, and the place of its first line if it is a file."""
    if isinstance(source, os.PathLike):
        path = pathlib.Path(cast("os.PathLike[str]", source))
    elif isinstance(source, str):
        if "\n" in source or "{" in source:
            return source, None
        if not source:
            raise ValueError("source is empty; it must be CUDA C++ or a path")
        path = pathlib.Path(source)
    else:
        raise TypeError(f"source must be CUDA C++ or a path, not {shown(source)}")
    try:  # some editors begin files with a mark, which is none of the program's
        return path.read_text(encoding="utf-8-sig"), (path.name, 1)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no text in UTF-8: {e}") from e


def place_of(text: str) -> tuple[str, int] | None:
    """Place of the text in the caller's file; None if it is not found there."""
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    whole = "".join(linecache.getlines(file, frame.f_globals))
    start = whole.find(text)
    if start < 0:
        return None
    return os.path.basename(file), whole.count("\n", 0, start) + 1


def included(
    text: str, given: Mapping[str, str | os.PathLike[str]]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Every header that is included and that the user or the package has, and what
    makes the compiler find others."""
    found: dict[str, str] = {}
    others: list[str] = []
    pending = [*given, *_INCLUDE.findall(text)]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        if name in given:
            found[name], _ = read(given[name])
        else:
            try:
                found |= dict(sources.headers(name))
            except FileNotFoundError:
                others.append(name)
                continue
        pending += _INCLUDE.findall(found[name])
    place = toolkit() if others else None
    return tuple(sorted(found.items())), () if place is None else (f"-I{place}",)


@functools.cache
def toolkit() -> str | None:
    """The directory of the CUDA toolkit's headers; None if there is none."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [pathlib.Path(name, "include") for name in named if name]
    packages = importlib.util.find_spec("nvidia")
    for root in (packages and packages.submodule_search_locations) or ():
        places += sorted(pathlib.Path(root).glob("*/include"), reverse=True)
    places.append(pathlib.Path("/usr/local/cuda/include"))
    return next((str(p) for p in places if (p / "cuda_fp16.h").is_file()), None)

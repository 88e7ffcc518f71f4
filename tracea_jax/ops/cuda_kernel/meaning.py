"""The meaning of a definition as a text that is the same in every process.

Functions of the user are told by their code and by what they refer to.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable
from typing import Any, cast


def digest(definition: Any) -> str:
    """SHA-256 of all of a definition's fields but where its source is."""
    parts = [
        (f.name, _text(getattr(definition, f.name), ()))
        for f in dataclasses.fields(definition)
        if f.name != "place"
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def has_digest(definition: Any) -> bool:
    """Whether every field has such a text: objects may show their address."""
    return all(
        " at 0x" not in _text(getattr(definition, f.name), ())
        for f in dataclasses.fields(definition)
    )


def _text(value: Any, outer: tuple[Any, ...]) -> str:
    """What a value is.

    Args:
      value: any.
      outer: functions that refer to it, which may be recursive.
    """
    if any(value is f for f in outer):
        return "itself"
    if isinstance(value, functools.partial):
        return _join("partial", [value.func, value.args, value.keywords], outer)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.CodeType):
        kept = (value.co_code, value.co_names, value.co_varnames)
        return f"{kept} " + _join("constants", value.co_consts, outer)
    if isinstance(value, types.FunctionType):
        return _of_function(value, (*outer, value))
    if isinstance(value, tuple | list):
        return _join("list", cast("list[Any]", value), outer)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return _join("dict", [part for item in items for part in item], outer)
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:  # of jax.jit and functools.wraps
        return f"{type(value).__name__} of {_text(wrapped, outer)}"
    return repr(value)


def _of_function(f: types.FunctionType, outer: tuple[Any, ...]) -> str:
    name = f"{f.__module__}.{f.__qualname__}"
    if f.__module__.partition(".")[0] in ("jax", "numpy", "tracea_jax"):
        return name  # of the versions that a program is compiled with anyway
    cells = [cell.cell_contents for cell in f.__closure__ or ()]
    referred = [f.__globals__.get(n) for n in f.__code__.co_names]
    parts = [f.__code__, f.__defaults__, f.__kwdefaults__, cells, referred]
    return _join("function", parts, outer)


def _join(kind: str, parts: Iterable[Any], outer: tuple[Any, ...]) -> str:
    return f"{kind}({', '.join(_text(part, outer) for part in parts)})"

"""The words of errors about what a caller passed: what came, and what was meant.

A value is shown in a few words, never as its whole ``repr``: of an array that would be
its numbers. Which values are allowed, the functions that raise the errors know; checks
of data from files are in ``schema``. Callers: whatever users call.
"""

from __future__ import annotations

import difflib
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

_CHARACTERS = 80  # of a value that is shown

F = TypeVar("F", bound=Callable[..., Any])


def shown(value: Any) -> str:
    """A value in a few words: "3", "an array float32[8,4]", "the function gelu"."""
    if isinstance(value, int) and value.bit_length() > 64:  # the longest do not print
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, str | int | float | complex | bytes):
        text = repr(value)
        return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        dtype, shape = value.dtype, value.shape
    except Exception:  # whatever a property of a stranger's raises
        dtype = shape = None
    if dtype is not None and isinstance(shape, tuple):
        return f"an array {dtype}[{','.join(map(str, shape))}]"
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{_article(kind)} of {len(value)}"
    name = name_of(value)
    return _article(kind) if name is None else f"the function {name}"


def name_of(fn: Any) -> str | None:
    """The name of a function, also of a partial one; None of what is no function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    return name if callable(fn) and isinstance(name, str) else None


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def similar(name: Any, valid: Iterable[str], least: float = 0.6) -> str:
    """The end of an error about a name: "; did you mean 'gelu'?", or nothing.

    Args:
      name: what came.
      valid: names that are known.
      least: how alike they must be, up to 1: equal but for capital letters.
    """
    names = {other.lower(): other for other in valid}
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=least)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def check_kind(
    name: str, value: Any, kinds: type | types.UnionType, wanted: str
) -> None:
    """Refuses an argument of another type.

    Args:
      name: of the argument.
      value: what came.
      kinds: what it may be an instance of.
      wanted: the same in words, such as "a str".

    Raises:
      TypeError: naming the argument, what is allowed, and what came.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, not {shown(value)}")


def flag(name: str, value: Any) -> bool:
    """An argument that is True or False, also as a number or one of numpy's.

    Raises:
      TypeError: naming the argument, if it is anything else.
    """
    is_bool = isinstance(value, bool | np.bool_)
    if not is_bool and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def whole(name: str, value: Any) -> int:
    """An argument that is an integer, of Python or of an array library.

    Raises:
      TypeError: naming the argument, if it is anything else.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {shown(value)}") from None


def check_function(fn: Any, takes: str, call: str) -> None:
    """Refuses what cannot be called.

    Args:
      fn: what came.
      takes: the start of the error, such as "transform takes a function".
      call: how it is called, such as "transform(f)(*args)".

    Raises:
      TypeError: if ``fn`` is no function.
    """
    if not callable(fn):
        raise TypeError(f"{takes}, not {shown(fn)}; write {call}")


def function_alone(public: F) -> F:
    """Refuses arguments of the function that ``public`` takes, by ``public(f)(x)``."""

    @functools.wraps(public)
    def checked(*args: Any, **options: Any) -> Any:
        if len(args) > 1:
            name, second = public.__name__, args[1]
            are_names = isinstance(second, str | list | tuple) and all(
                isinstance(item, str) for item in second
            )
            raise TypeError(
                f"{name} takes a function alone; options are keywords: "
                f"{name}(f, ops={second!r})"
                if are_names and second
                else f"{name} takes a function alone; the arguments belong to the "
                f"result: {name}(f)(x), not {name}(f, x)"
            )
        return public(*args, **options)

    return checked  # pyright: ignore[reportReturnType]  the same but for that error

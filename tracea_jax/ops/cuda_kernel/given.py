"""Arguments of ``cuda_kernel``, in the forms that its modules take."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, cast

from tracea_jax.emit.signature import C_TYPES
from tracea_jax.mistakes import shown


def as_list(value: Any) -> list[Any]:
    """One value, or those of a tuple or list."""
    return [*cast("list[Any]", value)] if isinstance(value, tuple | list) else [value]


def frozen(value: Any) -> Any:
    """A list as a tuple, which can be hashed."""
    return tuple(as_list(value)) if isinstance(value, list) else value


def sizes(value: Any, what: str) -> tuple[int, int, int] | None:
    """A launch shape of one to three numbers; None as it is.

    Raises:
      TypeError: if it is something else.
      ValueError: on numbers that are none of a launch: only a grid may be empty.
    """
    if value is None:
        return None
    try:
        found = [operator.index(n) for n in as_list(value)]
    except TypeError:
        found = []
    if not 1 <= len(found) <= 3:
        raise TypeError(f"{what}={shown(value)} must be an integer, or up to three")
    if min(found) < (least := 0 if what == "grid" else 1):
        raise ValueError(f"{what}={shown(value)} must be at least {least}")
    first, second, third = [*found, 1, 1][:3]
    return first, second, third


def whole(value: Any, what: str) -> int:
    """A number of bytes.

    Raises:
      TypeError: if it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={shown(value)} must be an integer") from None


def macro(value: Any) -> str:
    """The text of a macro with this value."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def c_type(dtype: Any) -> str:
    """The CUDA type of the elements of an array."""
    name: str = dtype.name
    return C_TYPES.get(name, name)


def with_numbers(f: Callable[..., Any], named: dict[str, Any]) -> Callable[..., Any]:
    """The function with those numbers that it takes as keywords only.

    A positional parameter may be an operand that the user called like a number.
    """
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python
        return f
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return functools.partial(f, **named)
    taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return functools.partial(f, **{n: v for n, v in named.items() if n in taken})

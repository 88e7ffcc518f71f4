"""Checks of plain data from a file, done before anything else is done with it.

A table names the fields of a record and checks each one: type, range, finite, length,
printable. Fields that a table does not name come from a newer version; they only have
to be plain data and are returned separately, so that a rewrite can keep them. The
tables themselves stand beside their records: problem, runtime/cubins, tuning/store
(records, formats, environment) and tuning/answers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

# A check returns None if the value passes, else a phrase that says what it must be.
Check = Callable[[Any], str | None]

_NAME_CHARACTERS = 256
_TEXT_CHARACTERS = 1 << 20
_DEPTH = 16  # of nested plain data; encoders can recurse far deeper
# Control characters, characters that reorder text, line separators, lone surrogates.
# ``str.isprintable`` would differ between versions of Python.
_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_INT = 1 << 63  # larger integers are not numbers to every reader of JSON


class Mistyped(ValueError):
    """A record that does not match its table; the message names the field."""


def line(value: Any) -> str | None:
    """One line without control characters, such as a terminal's escape sequences."""
    fits = isinstance(value, str) and len(value) <= _NAME_CHARACTERS
    if fits and _CONTROLS.search(value) is None:
        return None
    return f"a line of at most {_NAME_CHARACTERS} printable characters"


def text(value: Any) -> str | None:
    """Printable lines."""
    fits = isinstance(value, str) and len(value) <= _TEXT_CHARACTERS
    if fits and _is_printable(value):
        return None
    return f"printable text of at most {_TEXT_CHARACTERS} characters"


def _is_printable(value: str) -> bool:
    return all(found[0] in "\n\t" for found in _CONTROLS.finditer(value))


def visible(value: str) -> str:
    """The text, cut if too long, with escapes in place of unprintable characters."""
    value = value[: _TEXT_CHARACTERS // 10]
    return _CONTROLS.sub(lambda c: c[0] if c[0] in "\n\t" else ascii(c[0])[1:-1], value)


def one_line(value: str, limit: int = 4000) -> str:
    """The text as a part of a line that is printed, so that it cannot forge others."""
    text = _CONTROLS.sub(lambda c: ascii(c[0])[1:-1], value[: limit + 1])
    return text if len(value) <= limit else f"{text[:limit]}..."


def anything(value: Any) -> str | None:
    """Text of any characters; whoever prints it must apply ``visible`` first."""
    if isinstance(value, str) and len(value) <= _TEXT_CHARACTERS:
        return None
    return f"text of at most {_TEXT_CHARACTERS} characters"


def word(value: Any) -> str | None:
    """A name such as "compile_error"."""
    if line(value) is None and value.isidentifier():
        return None
    return "a word"


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def integer(low: int, high: int) -> Check:
    """An integer from ``low`` to ``high``; true and false are not integers."""

    def check(value: Any) -> str | None:
        fits = type(value) is int and low <= value <= high
        return None if fits else f"an integer from {low} to {high}"

    return check


def number(low: float, high: float) -> Check:
    """A finite number from ``low`` to ``high``."""

    def check(value: Any) -> str | None:
        fits = type(value) in (int, float) and low <= value <= high  # never true of NaN
        return None if fits else f"a number from {low:g} to {high:g}"

    return check


def optional(check: Check) -> Check:
    """A value that passes ``check``, or null."""
    return lambda value: None if value is None else _or_null(check(value))


def _or_null(phrase: str | None) -> str | None:
    return phrase and f"{phrase}, or null"


def sequence(check: Check, limit: int) -> Check:
    """A list of at most ``limit`` values that pass ``check``."""

    def whole(value: Any) -> str | None:
        if isinstance(value, list) and len(value) <= limit:
            phrases = (check(item) for item in value)
            wrong = next((p for p in phrases if p is not None), None)
            return wrong and f"a list with each item {wrong}"
        return f"a list of at most {limit} items"

    return whole


def plain(value: Any, depth: int = _DEPTH) -> str | None:
    """Any JSON with finite numbers and printable text, nested at most 16 deep."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return None if -_INT <= value < _INT else "an integer of 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else "a finite number"
    if not isinstance(value, list | dict):
        return "plain data"
    if not depth:
        return f"nested at most {_DEPTH} deep"
    items = list(value)
    if isinstance(value, dict):
        if (phrase := next(filter(None, map(line, value)), None)) is not None:
            return f"an object whose names are {phrase}"
        items = list(value.values())
    return next((p for i in items if (p := plain(i, depth - 1)) is not None), None)


def mapping(value: Any) -> str | None:
    """An object of plain data."""
    return plain(value) if isinstance(value, dict) else "an object"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The fields of a kind of record.

    Attributes:
      name: of the kind of record, for messages.
      fields: the check of each field.
      required: names of the fields that must be present.
    """

    name: str
    fields: Mapping[str, Check]
    required: frozenset[str] = frozenset()

    def split(self, data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields that the table names, and the other fields.

        Raises:
          Mistyped: naming the first field that does not pass its check.
        """
        if not isinstance(data, dict):
            raise Mistyped(f"{self.name} must be an object, not {_shown(data)}")
        if missing := sorted(self.required - data.keys()):
            raise Mistyped(f"{self.name} has no {', '.join(missing)}")
        known: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for name, value in data.items():
            phrase = self.fields.get(name, plain)(value)
            if name not in self.fields:
                phrase = phrase or line(name)
            if phrase is not None:
                where = f"{name if line(name) is None else ascii(name)[:60]}"
                raise Mistyped(
                    f"{self.name} field {where} must be {phrase}, not {_shown(value)}"
                )
            (known if name in self.fields else unknown)[name] = value
        return known, unknown

    def __call__(self, value: Any) -> str | None:
        """The check of a field that holds a record of this table."""
        try:
            self.split(value)
        except Mistyped as e:
            return f"a record ({e})"
        return None


def _shown(value: Any) -> str:
    """The value for a message: short, and without control characters."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return ascii(value) if not isinstance(value, str) else ascii(value[:60])


# ---- dataclasses ---------------------------------------------------------------------


def check_types(record: Any) -> None:
    """Checks the fields of a dataclass against their annotations.

    Raises:
      Mistyped: naming the first field whose value is of another type.
    """
    for name, hint in _hints(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            wanted = getattr(hint, "__name__", None) or str(hint)
            raise Mistyped(f"{name} must be {wanted}, not {_shown(value)}")
        if dataclasses.is_dataclass(value):
            check_types(value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(a) and value == a for a in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is ...:
            return all(_fits(v, arguments[0]) for v in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, hint if origin is None else origin)

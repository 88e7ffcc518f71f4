"""Byte addresses as expressions of the lane index, evaluated in Python, printed in C++.

    >>> address = (LANE % 16) * 128 + LANE // 16 * 16
    >>> address(17)
    144
    >>> address.cxx()
    '(((lane % 16u) * 128u) + ((lane / 16u) * 16u))'

The object that a simulator evaluates is the object that a generator prints, so what was
verified is what runs. All arithmetic is that of a 32-bit unsigned integer.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TypeVar

_WORD = 0xFFFFFFFF

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "^": operator.xor,
    "&": operator.and_,
    "<<": operator.lshift,
    ">>": operator.rshift,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """``left op right``, or the lane index itself (``LANE``).

    Built with + * // % ^ & << >> from ``LANE`` and integers in 0 .. 2^32 - 1. There is
    no subtraction: it would wrap below zero.
    """

    op: str
    left: Address | int = 0
    right: Address | int = 0

    def __post_init__(self) -> None:
        if self.op != "lane" and self.op not in _OPERATORS:
            raise ValueError(f"op={self.op!r} must be one of {' '.join(_OPERATORS)}")
        for side in (self.left, self.right):
            if isinstance(side, int) and not 0 <= side <= _WORD:
                raise ValueError(f"{side} is no 32-bit unsigned integer")
        if self.op in ("<<", ">>") and not (
            isinstance(self.right, int) and self.right < 32
        ):
            raise ValueError(
                f"a shift takes a constant in 0 .. 31, not {_text(self.right)}"
            )
        if self.op in ("/", "%") and not (isinstance(self.right, int) and self.right):
            raise ValueError(
                f"{self.op} takes a positive constant, not {_text(self.right)}"
            )

    def __call__(self, lane: int) -> int:
        """The address of one lane."""
        if self.op == "lane":
            return lane
        left, right = _evaluate(self.left, lane), _evaluate(self.right, lane)
        return _OPERATORS[self.op](left, right) & _WORD

    def cxx(self, lane: str = "lane") -> str:
        """The C++ text, fully parenthesised, of an unsigned variable of that name."""
        if self.op == "lane":
            return lane
        return f"({_text(self.left, lane)} {self.op} {_text(self.right, lane)})"

    def __add__(self, other: Address | int) -> Address:
        return Address("+", self, other)

    def __radd__(self, other: int) -> Address:
        return Address("+", other, self)

    def __mul__(self, other: Address | int) -> Address:
        return Address("*", self, other)

    def __rmul__(self, other: int) -> Address:
        return Address("*", other, self)

    def __xor__(self, other: Address | int) -> Address:
        return Address("^", self, other)

    def __rxor__(self, other: int) -> Address:
        return Address("^", other, self)

    def __and__(self, other: Address | int) -> Address:
        return Address("&", self, other)

    def __rand__(self, other: int) -> Address:
        return Address("&", other, self)

    def __floordiv__(self, other: int) -> Address:
        return Address("/", self, other)

    def __mod__(self, other: int) -> Address:
        return Address("%", self, other)

    def __lshift__(self, other: int) -> Address:
        return Address("<<", self, other)

    def __rshift__(self, other: int) -> Address:
        return Address(">>", self, other)


LANE = Address("lane")

# A formula written for this type takes an integer to an integer and an expression to an
# expression: one definition serves enumeration, simulation and printing.
Index = TypeVar("Index", int, Address)


def _evaluate(side: Address | int, lane: int) -> int:
    return side(lane) if isinstance(side, Address) else side


def _text(side: Address | int, lane: str = "lane") -> str:
    return side.cxx(lane) if isinstance(side, Address) else f"{side}u"

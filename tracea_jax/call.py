"""The arguments of a call: arrays, and constants of the trace that is made with them.

A trace may be used again for a call whose constants it would treat alike, which is less
than that they are equal:

| constant                              | is known by                                |
|---------------------------------------|--------------------------------------------|
| number                                | type and bits: 0.0 is not -0.0, nan is nan |
| function, type, string, object of JAX | itself                                     |
| bound method, partial                 | its function and what that is bound to     |
| other object                          | itself and what its attributes now are     |
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

# Whose objects do not change, or mean the same to a trace if they do.
_UNCHANGING = ("builtins", "jax", "jaxlib", "numpy", "tracea_jax")
_SIMPLE = (str, bytes, int, bool, type(None), types.FunctionType)


@dataclasses.dataclass(frozen=True, slots=True, eq=True)
class Call:
    """The arguments of a call without their arrays: what a trace depends on.

    Attributes:
      tree: of (args, kwargs).
      constants: the leaves that are no arrays; None where an array is.
      is_array: for each leaf.
    """

    tree: Any
    constants: tuple[Constant | None, ...]
    is_array: tuple[bool, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> tuple[Call, list[Any]]:
        """The call and its arrays, numpy's included.

        Raises:
          TypeError: on a leaf that is no array and cannot be hashed.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = tuple(is_array_like(x) for x in leaves)
        pairs = list(zip(leaves, is_array, strict=True))
        constants = tuple(None if array else Constant.of(x) for x, array in pairs)
        return cls(tree, constants, is_array), [x for x, array in pairs if array]

    def arguments(self, arrays: Iterable[Any]) -> tuple[Any, Any]:
        """(args, kwargs) with these arrays in their places."""
        rest = iter(arrays)
        leaves = [next(rest) if c is None else c.value for c in self.constants]
        return jax.tree.unflatten(self.tree, leaves)


def is_array_like(x: Any) -> bool:
    kinds = jax.Array | Tracer | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, kinds)


@dataclasses.dataclass(frozen=True, slots=True, eq=True)
class Constant:
    """A value, equal to those that a trace would treat alike.

    Attributes:
      key: hashable; see the table above.
      value: as it was passed.
    """

    key: Any
    value: Any = dataclasses.field(compare=False)

    @classmethod
    def of(cls, x: Any) -> Constant:
        try:
            hash(x)
        except TypeError as e:
            raise TypeError(
                f"an argument of type {type(x).__name__} is no array and cannot be "
                "hashed; pass arrays, pytrees of them, or values that can be constants "
                "of a trace"
            ) from e
        try:
            return cls(_key(x, {}), x)
        except RecursionError:  # thousands of objects, one in the other
            return cls((type(x), x), x)


class _Same:
    """A key that only the very same object has; it keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _key(x: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """What x is known by.

    Args:
      x: a constant, or something inside of one.
      seen: number and object by id of what was looked through before; each is looked
        through once, as objects may hold each other.
    """
    kind = type(x)
    if isinstance(x, float):
        return kind, x.hex()
    if isinstance(x, complex):
        return kind, x.real.hex(), x.imag.hex()
    if isinstance(x, type) or kind in _SIMPLE:
        return kind, x
    if id(x) in seen:
        return _Same, seen[id(x)][0]
    seen[id(x)] = len(seen), x
    match x:
        case types.MethodType():
            return kind, x.__func__, _key(x.__self__, seen)
        case functools.partial():
            parts = (x.func, x.args, x.keywords)
            return kind, *(_key(part, seen) for part in parts)
        case list() | tuple():
            return kind, *(_key(item, seen) for item in x)
        case dict() | types.MappingProxyType():
            return kind, *((_key(k, seen), _key(v, seen)) for k, v in x.items())
        case set() | frozenset():
            return kind, frozenset(_key(item, seen) for item in x)
        case np.ndarray() | np.generic():
            return kind, *_contents(np.asarray(x), seen)
    if kind.__module__.partition(".")[0] in _UNCHANGING:
        return kind, _itself(x)
    state = ((name, _key(value, seen)) for name, value in _attributes(x))
    return kind, _itself(x), *state


def _itself(x: Any) -> Any:
    """x, hashable; arrays are compared by identity, not by their items."""
    if isinstance(x, jax.Array):
        return _Same(x)
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return x


def _contents(x: np.ndarray, seen: dict[int, tuple[int, Any]]) -> tuple[Any, ...]:
    if x.dtype == object:
        return x.shape, *(_key(item, seen) for item in x.flat)
    digest = hashlib.sha256(x.tobytes()).digest()
    return x.shape, x.dtype, digest


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's state; of a dataclass, what it is compared by."""
    if dataclasses.is_dataclass(x) and "__eq__" in vars(type(x)):
        names = [field.name for field in dataclasses.fields(x) if field.compare]
    else:
        slots = (vars(base).get("__slots__", ()) for base in type(x).__mro__)
        names = [n for s in slots for n in ((s,) if isinstance(s, str) else s)]
        names += getattr(x, "__dict__", {})
    for name in names:
        try:
            yield name, object.__getattribute__(x, name)
        except AttributeError:  # a slot that was never filled
            continue

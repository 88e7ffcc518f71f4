"""The arguments and results of a call: arrays, and the constants of its trace.

A trace may be used again for a call if its constants have the same keys:

| constant                              | key                                         |
|---------------------------------------|---------------------------------------------|
| number                                | type and bits: 0.0 is not -0.0, nan is nan  |
| function, type, string, object of JAX | the constant itself                         |
| bound method, partial                 | its function and the keys of its arguments  |
| list, tuple, dict, set, NumPy array   | type and contents                           |
| other object                          | itself and the keys of its attributes       |

A constant among the arguments may come back in the result, such as the activation
function in a model that a training step returns: ``Returned`` keeps its place.

Tracing itself is in ``transform`` and ``explain``, the callers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import source_info_util

from tracea_jax import _compat

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)

# Packages whose objects never change, or whose changes do not matter to a trace.
_UNCHANGING = ("builtins", "jax", "jaxlib", "numpy", "tracea_jax")
_SIMPLE = (str, bytes, int, bool, type(None), types.FunctionType)


@dataclasses.dataclass(frozen=True, slots=True, eq=True)
class Call:
    """The arguments of a call without their arrays: all that a trace depends on.

    Attributes:
      tree: the tree structure of (args, kwargs).
      constants: one for each leaf; None where the leaf is an array.
      is_array: for each leaf whether it is an array.
    """

    tree: Any
    constants: tuple[Constant | None, ...]
    is_array: tuple[bool, ...]

    @classmethod
    def of(cls, fn: Any, args: Any, kwargs: Any) -> tuple[Call, list[Any]]:
        """Splits arguments of fn into a call and its arrays, NumPy's included.

        A number of NumPy that is a static argument of a jitted function is a constant.

        Raises:
          TypeError: on a leaf that is not an array and cannot be hashed.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = tuple(is_array_like(x) for x in leaves)
        if (static := _compat.static_leaves(fn, args, kwargs)) is not None:
            pairs = zip(is_array, static, strict=True)
            is_array = tuple(array and not is_static for array, is_static in pairs)
        pairs = list(zip(leaves, is_array, strict=True))
        constants = tuple(None if array else Constant.of(x) for x, array in pairs)
        return cls(tree, constants, is_array), [x for x, array in pairs if array]

    def arguments(self, arrays: Iterable[Any]) -> tuple[Any, Any]:
        """(args, kwargs) with these arrays in their places."""
        return _together(self.tree, self.constants, arrays)

    def applied(self, fn: Callable[..., Any], arrays: Iterable[Any]) -> Any:
        """fn's result for these arrays, as a trace can return it; see ``unwrapped``."""
        args, kwargs = self.arguments(arrays)
        returned = _compat.traceable(fn)(*args, **kwargs)
        own = {id(c.value): c for c in self.constants if c is not None}
        leaves, tree = jax.tree.flatten(returned)
        constants = tuple(own.get(id(x)) for x in leaves)
        if all(c is None for c in constants):
            return returned
        pairs = zip(leaves, constants, strict=True)
        return Returned(tree, constants, [x for x, c in pairs if c is None])


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """A result with constants of the call in it, as a pytree of its arrays alone.

    Attributes:
      tree: the tree structure of the result.
      constants: one for each leaf; None where the leaf is an array.
      arrays: the other leaves.
    """

    tree: Any
    constants: tuple[Constant | None, ...]
    arrays: list[Any]

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, (self.tree, self.constants)

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Iterable[Any]) -> Returned:
        tree, constants = structure
        return cls(tree, constants, list(arrays))


def unwrapped(returned: Any) -> Any:
    """The result that ``Call.applied`` was returned, after the trace."""
    if not isinstance(returned, Returned):
        return returned
    return _together(returned.tree, returned.constants, returned.arrays)


def _together(
    tree: Any, constants: Iterable[Constant | None], arrays: Iterable[Any]
) -> Any:
    rest = iter(arrays)
    leaves = [next(rest) if c is None else c.value for c in constants]
    return jax.tree.unflatten(tree, leaves)


def is_array_like(x: Any) -> bool:
    kinds = jax.Array | Tracer | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, kinds)


@dataclasses.dataclass(frozen=True, slots=True, eq=True)
class Constant:
    """A constant of a trace, equal to all constants that a trace treats alike.

    Attributes:
      key: hashable; see the table of the module.
      value: the constant as the caller passed it.
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
        except RecursionError:  # thousands of nested objects
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
    """The key of x; see the table of the module.

    Args:
      x: a constant, or an object inside of one.
      seen: by id, the number and the object of each object visited so far. Each object
        is visited once, because objects may hold each other.
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
    """A hashable stand-in for x; arrays and unhashable objects compare by identity."""
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
    """Names and values of an object's state; of a dataclass, of its compared fields."""
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

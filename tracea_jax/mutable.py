"""Arguments that a function changes: objects of flax nnx, whose state goes both ways.

A trace sees copies of its arguments. What a function changes in them (running
statistics, counters of random numbers, a whole model and its optimizer) is a further
result of the trace, and goes back into the caller's objects by the means with which
flax lifts JAX's transformations. Who traces is ``transform`` and ``explain``, the
callers; flax is never imported here, as programs without it hold no such objects.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)

_TAG = "tracea_jax"  # by which flax tells nested contexts apart


def is_object(x: Any) -> bool:
    """True if this is an object of flax nnx: a module, an optimizer, a variable, ..."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def holds_objects(tree: Any) -> bool:
    """Returns whether a tree has such objects in it."""
    return "flax.nnx" in sys.modules and bool(_objects(tree))


@contextlib.contextmanager
def opened(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """A function and arguments without such objects, for which a trace can stand.

    If fn is an object itself, or a method of one, that is an argument too.

    Yields:
      fn and the arguments as they are; or, if there are objects, a pure function, whose
      result ``closed`` takes, and its arguments. They may be used while the context
      lasts; the function is the same one for all arguments.
    """
    function, first, keywords = _unbound(fn)
    if not holds_objects((first, keywords, args, kwargs)):
        yield fn, args, kwargs
        return
    nnx: Any = sys.modules["flax.nnx"]
    every = (*first, *args), {**keywords, **kwargs}
    with nnx.update_context(_TAG):
        yield _pure(function), (nnx.to_tree(every, ctxtag=_TAG),), {}


def closed(result: Any, *, caller: str) -> Any:
    """The result of the function that was opened; its objects are changed now.

    Args:
      result: what the function has returned.
      caller: the module that called the transformed function.

    Warns:
      UserWarning: if that is JAX itself, which has made copies of the objects, and the
        changes are not returned.
    """
    nnx: Any = sys.modules["flax.nnx"]
    changed, result = nnx.from_tree(result, ctxtag=_TAG, is_inner=False)
    if caller.partition(".")[0] == "jax" and any(_is_lost(x, result) for x in changed):
        names = ", ".join(sorted({type(x).__name__ for x in changed}))
        warnings.warn(
            f"a transformed function changes objects of flax nnx ({names}) that are "
            "copies made by jax.jit, or another transformation of JAX: the changes are "
            "lost. Use nnx.jit in place of jax.jit, or return the objects.",
            stacklevel=3,
        )
    return result


def _is_lost(x: Any, result: Any) -> bool:
    """Returns whether a result has neither an object nor arrays like those in it."""
    if any(x is other for other in _objects(result)):
        return False
    returned = collections.Counter(_kinds(jax.tree.leaves(result)))
    return not collections.Counter(_kinds(_contents(x)[1])) <= returned


def _kinds(leaves: list[Any]) -> list[tuple[Any, Any]]:
    return [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """From the state of all arguments to that of what was changed, and to the result.

    What was not changed is no result: a module that an enclosing trace has captured may
    be read, but flax lets nobody write into it.
    """
    nnx: Any = sys.modules["flax.nnx"]

    @functools.wraps(fn, updated=())
    def pure(state: Any) -> Any:
        args, kwargs = nnx.from_tree(state, ctxtag=_TAG, is_inner=True)
        objects = _objects((args, kwargs))
        before = [_contents(x) for x in objects]
        result = fn(*args, **kwargs)
        pairs = zip(objects, before, strict=True)
        changed = [x for x, was in pairs if not _same(_contents(x), was)]
        return nnx.to_tree((changed, result), ctxtag=_TAG)

    return pure


def _contents(x: Any) -> tuple[Any, list[Any]]:
    """All that an object is made of: its structure, and its arrays."""
    nnx: Any = sys.modules["flax.nnx"]
    structure, state = nnx.split(x)
    return structure, jax.tree.leaves(state)


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    return one[0] == other[0] and all(map(operator.is_, one[1], other[1]))


def _unbound(fn: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function, and the arguments that were bound to make fn of it."""
    if isinstance(fn, functools.partial):
        function, first, keywords = _unbound(fn.func)
        return function, (*first, *fn.args), {**keywords, **fn.keywords}
    if inspect.ismethod(fn) and is_object(fn.__self__):
        return fn.__func__, (fn.__self__,), {}
    if is_object(fn):
        return type(fn).__call__, (fn,), {}
    return fn, (), {}


def _objects(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_object) if is_object(x)]

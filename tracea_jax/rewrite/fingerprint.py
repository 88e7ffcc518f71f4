"""A hash of a program that is the same for all its traces, in any process.

Equations, shapes, dtypes and literals count. Names of functions and of variables,
captured values and the places in the source do not. Caller: ``verdicts``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from tracea_jax._compat import ClosedJaxpr

_DIGITS = 32
_JAXPRS = (Jaxpr, ClosedJaxpr)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CALLS = ("jit", "pjit")
# Of calls: how they are compiled when they are no part of a larger program.
_NO_MEANING = frozenset({"name", "donated_invars", "inline", "keep_unused", "ctx_mesh"})


def fingerprint(jaxpr: Any) -> str:
    """32 hexadecimal digits of a jaxpr, open or closed.

    A program under ``jit`` has the hash of the program itself.
    """
    return _Reader().hash(_unwrapped(jaxpr))


def _unwrapped(jaxpr: Any) -> Any:
    """The body of a jaxpr that does nothing but call it."""
    while True:
        own = _open(jaxpr)
        if len(own.eqns) != 1 or own.eqns[0].primitive.name not in _CALLS:
            return jaxpr
        (eqn,) = own.eqns
        inputs = (*own.constvars, *own.invars)
        if tuple(eqn.invars) != inputs or tuple(eqn.outvars) != tuple(own.outvars):
            return jaxpr
        jaxpr = eqn.params["jaxpr"]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


class _Reader:
    """Hashes jaxprs; one that occurs again is read once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def hash(self, jaxpr: Any) -> str:
        own = _open(jaxpr)
        if id(own) not in self._known:
            text = "\n".join(self._lines(own))
            self._known[id(own)] = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        return self._known[id(own)]

    def _lines(self, jaxpr: Any) -> Iterator[str]:
        names: dict[Any, int] = {}

        def defined(var: Any) -> str:
            names[var] = len(names)
            return _type(var.aval)

        def used(x: Any) -> str:
            if isinstance(x, Literal):
                return f"{_value(x.val)}:{_type(x.aval)}"
            return str(names[x])

        yield " ".join(map(defined, (*jaxpr.constvars, *jaxpr.invars)))
        for eqn in jaxpr.eqns:
            ignored = _NO_MEANING if eqn.primitive.name in _CALLS else ()
            params = " ".join(
                f"{name}={self._param(value)}"
                for name, value in sorted(eqn.params.items())
                if name not in ignored
            )
            operands = " ".join(map(used, eqn.invars))
            results = " ".join(map(defined, eqn.outvars))
            yield f"{results} = {eqn.primitive.name}[{params}] {operands}"
        yield " ".join(map(used, jaxpr.outvars))

    def _param(self, value: Any) -> str:
        """A parameter, of an object that is no plain data the type alone.

        Such as functions, which differ from process to process, and meshes.
        """
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return repr(value)
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, _JAXPRS):
            return self.hash(value)
        if isinstance(value, tuple | list):
            return f"({','.join(map(self._param, value))})"
        if isinstance(value, frozenset | set):
            return f"{{{','.join(sorted(map(self._param, value)))}}}"
        if isinstance(value, dict | types.MappingProxyType):
            items = (f"{k!r}:{self._param(v)}" for k, v in value.items())
            return f"{{{','.join(sorted(items))}}}"
        if isinstance(value, np.dtype):
            return _dtype(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return f"{value.dtype}{value.shape}"
        if isinstance(value, type):
            return value.__qualname__
        kind = type(value).__qualname__
        if dataclasses.is_dataclass(value):
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return f"{kind}({','.join(map(self._param, fields))})"
        return kind


def _type(aval: Any) -> str:
    shape = getattr(aval, "shape", None)
    if shape is None:  # a token
        return type(aval).__qualname__
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return f"{_dtype(aval.dtype)}{shape}{weak}"


_dtype = functools.cache(str)  # numpy takes longer for it than all else takes here


def _value(x: Any) -> str:
    """A literal: a number, or an array of one."""
    return repr(np.asarray(x).tolist()) if hasattr(x, "dtype") else repr(x)

"""MODULE:FUNCTION on the command line: loads the function and its example arguments.

Arguments are shapes such as ``f32[8,128]``; without shapes, the arguments of ``step``
are the result of ``step_args()`` in the same module. Problems such as ``matmul 64 64
64`` are read in ``cli.problems``. Callers: ``tracea explain`` and ``tracea tune``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tracea_jax.mistakes import shown, similar
from tracea_jax.ops.common.building import array

_SPEC = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")


def load(target: str, specs: Sequence[str]) -> tuple[Callable[..., Any], list[Any]]:
    """The function that ``MODULE:FUNCTION`` names, and its arguments.

    Modules are looked for in the current directory first.

    Args:
      target: "MODULE:FUNCTION".
      specs: shapes of the arguments; none means ``FUNCTION_args()``, if it exists.

    Raises:
      ValueError: if there is no such module or function, or if the function takes
        arguments but there are neither shapes nor ``FUNCTION_args``.
    """
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        path = os.path.normpath(module_name.removesuffix(".py"))
        meant = f"{path.replace(os.sep, '.')}:{name or 'FUNCTION'}"
        raise ValueError(
            f"{target!r} names a file; write MODULE:FUNCTION"
            + (f": {meant}" if re.fullmatch(r"\w[\w.]*:[\w.]+", meant) else "")
        )
    if not (module_name and name):
        raise ValueError(f"{target!r} must be MODULE:FUNCTION, such as model:step")
    module = _module(module_name)
    fn = _function(module, name)
    if specs:
        words = " ".join(specs).replace("],", "] ").split()
        return fn, [parse(spec) for spec in words]
    make = getattr(module, f"{name}_args", None)
    if make is not None:
        made = make()
        return fn, list(made) if isinstance(made, tuple | list) else [made]
    if _takes_arguments(fn):
        raise ValueError(
            f"{target} takes arguments: give their shapes, such as "
            f"--args 'f32[8,128]', or define {name}_args() in {module_name}"
        )
    return fn, []


@contextlib.contextmanager
def tracing(target: str, specs: Sequence[str] = ()) -> Iterator[None]:
    """Prints the traceback of an error in the user's function.

    Where JAX or Python refuses arguments of the shapes that were given, one line says
    so.

    Args:
      target: "MODULE:FUNCTION".
      specs: shapes of the arguments, as given.

    Raises:
      ValueError: in place of any error of the block.
    """
    try:
        yield
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        is_own = (where.line or "").startswith("raise")
        if specs and not is_own and isinstance(e, TypeError | ValueError):
            reason = next(iter(str(e).splitlines()), type(e).__name__)
            raise ValueError(
                f"{target} does not take --args {' '.join(specs)}: {reason}"
            ) from e
        traceback.print_exc()
        raise ValueError(f"{target} cannot be traced") from e


def check_shapes(
    target: str, specs: Sequence[str], fn: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Traces a function once; see ``tracing`` for what it prints and raises."""
    with tracing(target, specs):
        jax.eval_shape(fn, *arguments)


def parse(spec: str) -> jax.ShapeDtypeStruct:
    """An array from text: ``f32[8,128]``, ``bf16[4096]``, ``i32[]``, ``bool[2]``.

    Names of dtypes are those that ``building.array`` takes.

    Raises:
      ValueError: if the text is no dtype with sizes; the message shows an example.
    """
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise ValueError(f"{spec!r} must be a dtype with sizes, such as f32[8,128]")
    dtype, sizes = found.groups()
    return array(dtype, tuple(int(size) for size in sizes.split(",") if size))


def _module(name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and f"{name}.".startswith(f"{e.name}."):
            raise ValueError(
                f"cannot import {name!r} (searched sys.path and {here})"
            ) from e
        raise ValueError(f"module {name!r} cannot be imported: {e}") from e
    except Exception as e:
        traceback.print_exc()
        raise ValueError(f"module {name!r} cannot be imported") from e


def _function(module: Any, name: str) -> Callable[..., Any]:
    try:
        fn = functools.reduce(getattr, name.split("."), module)
    except AttributeError as e:
        hint = similar(name, vars(module))
        raise ValueError(f"module {module.__name__!r} has no {name!r}{hint}") from e
    if not callable(fn):
        raise ValueError(f"{module.__name__}:{name} is no function: {shown(fn)}")
    return fn


def _takes_arguments(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return True
    except ValueError:  # ``fn`` has no signature
        return False
    return False

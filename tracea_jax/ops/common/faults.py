"""Rules that raise: the program runs as it was written, and a warning says what to do.

Callers: ``rewrite.splice`` for rewrite rules, ``choice`` for rules of derivatives and
of vmap. A fault of ours must cost a site, not the program. Errors for the user are not
faults: an implementation that was demanded and cannot run, a problem without a tuned
answer where that is an error, warnings that the user made errors, and what a program
raises while it runs without ``jit``.
"""

from __future__ import annotations

import pathlib
import traceback
import warnings
from importlib import metadata

import jax

from tracea_jax.dispatch import Unsupported
from tracea_jax.ops.common.typed import JaxRuntimeError

_PACKAGE = pathlib.Path(__file__).parents[2]
_FOR_USERS: tuple[type[Exception], ...] = (
    *(Unsupported, Warning),
    *(FloatingPointError, JaxRuntimeError),  # of debug_nans; as out of memory
)
_WARNED: set[tuple[str, str]] = set()  # ops, and names of the kinds of errors


def reported(op: str, error: Exception, failed: str = "rewrite") -> str:
    """Warns of an error in a rule, once for each op and kind of error.

    Args:
      op: the op whose rule failed.
      error: what it raised.
      failed: the verb for what the rule does.

    Returns:
      The reason of the miss.

    Raises:
      Exception: the error, if it is meant for the user.
    """
    if _is_for_user(error):
        raise error
    kind = type(error).__name__
    message = " ".join(str(error).split())
    if (op, kind) not in _WARNED:
        warnings.warn(
            f"tracea_jax failed to {failed} a {op} and leaves it to XLA, so results "
            "are those of plain JAX; please report this line: "
            f"{op}: {kind}: {message} ({_line(error)}; {_versions()})",
            RuntimeWarning,
            stacklevel=2,
        )
        _WARNED.add((op, kind))
    return f"its rule failed with {kind}: {message}"


def _is_for_user(error: Exception) -> bool:
    # Of the kinds of LookupError, on_miss="error" raises none but itself.
    return isinstance(error, _FOR_USERS) or type(error) is LookupError


def _line(error: Exception) -> str:
    """Where in this package an error comes from: "rewrite/spread.py:49"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = pathlib.Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE).as_posix()}:{frame.lineno}"
    return "outside of tracea_jax"


def _versions() -> str:
    return f"tracea_jax {metadata.version('tracea_jax')}, jax {jax.__version__}"

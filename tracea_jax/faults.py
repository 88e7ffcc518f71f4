"""Rules that raise: XLA serves the call, and a warning has a line to report.

A fault of ours must cost a call of a kernel, not the program. Callers: ``serving`` for
plans, ``lowering`` for what is emitted, ``jax_rules`` and ``choice`` for derivatives
and vmap, ``rewrite.splice`` for rewrite rules.

Errors for the user are not faults: an implementation or a config that was demanded and
cannot run, a problem without a tuned answer where that is an error, settings that
cannot be, processes that disagree, derivatives and transposes that do not exist,
warnings that the user made errors, what a program raises while it runs without ``jit``,
and all errors of kernels that users wrote.
"""

from __future__ import annotations

import pathlib
import traceback
import warnings
from importlib import metadata

import jax

from tracea_jax import catalogue
from tracea_jax.dispatch import Unsupported
from tracea_jax.options import current, planned_device
from tracea_jax.tuning.agreement import Disagreement
from tracea_jax.variants.base import Insisting


class NotLinear(ValueError):
    """A transpose with respect to an operand that the result is not linear in."""


class NotDifferentiable(ValueError):
    """A derivative that does not exist, though the reference might have one."""


_PACKAGE = pathlib.Path(__file__).parent
_FOR_USERS: tuple[type[Exception], ...] = (
    *(Unsupported, NotLinear, NotDifferentiable, Disagreement, Warning),
    *(FloatingPointError, jax.errors.JaxRuntimeError),  # debug_nans; out of memory
)
_WARNED: set[tuple[str, str]] = set()  # ops, and names of the kinds of errors


def reported(op: str, error: Exception, failed: str = "rewrite") -> str:
    """Warns of an error in a rule, once for each op and kind of error.

    Args:
      op: the op whose rule failed.
      error: what it raised.
      failed: the verb for what the rule does.

    Returns:
      The reason why XLA serves the call.

    Raises:
      Exception: the error, if it is meant for the user.
    """
    if is_for_user(op, error):
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


def is_for_user(op: str, error: Exception) -> bool:
    """True if an error while a call of an op is traced or compiled is no fault of ours.

    Raises:
      ValueError: if the settings cannot be.
    """
    # Of the kinds of LookupError, on_miss="error" raises none but itself.
    if isinstance(error, _FOR_USERS) or type(error) is LookupError:
        return True
    current()
    planned_device()
    return any(
        isinstance(variant, Insisting)
        for record in catalogue.in_programs()
        if record.name == op
        for variant in record.variants
    )


def _line(error: Exception) -> str:
    """Line of this package that an error comes from: "rewrite/spread.py:49"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = pathlib.Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE).as_posix()}:{frame.lineno}"
    return "outside of tracea_jax"


def _versions() -> str:
    return f"tracea_jax {metadata.version('tracea_jax')}, jax {jax.__version__}"

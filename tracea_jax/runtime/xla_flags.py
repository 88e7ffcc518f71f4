"""Determinism in ``XLA_FLAGS``, read as XLA reads it.

JAX has no public function that tells the flags in force. XLA reads the variable once,
when a backend starts; programs set it before that. Caller: ``options``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shlex
from collections.abc import Mapping

VARIABLE = "XLA_FLAGS"
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def demand_determinism(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a flag forbids XLA all that may differ from run to run."""
    return _demand_determinism(environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=16)
def _demand_determinism(text: str) -> bool:
    values = _values(text)
    return any(_is_true(values.get(name)) for name in _DETERMINISTIC)


def _values(text: str) -> dict[str, str]:
    """Flags and their values; of a flag that occurs again, the last one counts."""
    text = text.strip()
    if text and not text.startswith("-"):  # the name of a file that has the flags
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = pathlib.Path(text).read_text()
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = text.split()
    flags = (word[2:].partition("=") for word in words if word.startswith("--"))
    return {name: value if equals else "true" for name, equals, value in flags}


def _is_true(value: str | None) -> bool:
    return value is not None and (value == "1" or value.lower() == "true")

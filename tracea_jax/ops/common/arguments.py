"""Arguments of problems on the command line that several ops take.

What an op takes is listed in its ``builder.py``, of these and of its own.
"""

from __future__ import annotations

import argparse

from tracea_jax.catalogue import Argument


def positive(text: str) -> int:
    """A positive integer, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def size(name: str, shown: str | None = None) -> Argument:
    """A size in its place, shown in upper case if not otherwise."""
    return Argument(name, {"type": positive, "metavar": shown or name.upper()})


def flag(name: str, **how: str) -> Argument:
    """An option that is given or not; ``how`` is as in ``argparse``."""
    return Argument(name, {"action": "store_true", **how})


def activation(default: str) -> Argument:
    """The activation at the end of an op."""
    return Argument("--activation", {"default": default})


def direction(*names: str) -> Argument:
    """Forward or a gradient; the first name is the default."""
    return Argument("--direction", {"choices": names, "default": names[0]})


PRODUCT = (
    *map(size, "mnk"),
    Argument("--out", {"help": "dtype of the result, if another"}),
    Argument("--batch", {"type": positive, "default": 1}),
    Argument("--layout", {"choices": ("nn", "nt", "tn", "tt"), "default": "nn"}),
    Argument("--precision"),
)  # of a matrix product, without its epilogue

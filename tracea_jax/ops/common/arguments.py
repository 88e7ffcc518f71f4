"""Arguments of problems on the command line that several ops take.

What an op takes is listed in its ``builder.py``, of these and of its own.
"""

from __future__ import annotations

import argparse

from tracea_jax.catalogue import Argument
from tracea_jax.problem import ACTIVATIONS


def positive(text: str) -> int:
    """A positive integer, as a type of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return value


def size(name: str, text: str = "", shown: str | None = None) -> Argument:
    """A size in its place, with its help, shown in upper case if not otherwise."""
    how = {"type": positive, "metavar": shown or name.upper(), "help": text}
    return Argument(name, how)


def flag(name: str, **how: str) -> Argument:
    """An option that is given or not; ``how`` is as in ``argparse``."""
    return Argument(name, {"action": "store_true", **how})


def activation(default: str) -> Argument:
    """The activation at the end of an op."""
    names = ", ".join(ACTIVATIONS)
    return Argument("--activation", {"default": default, "help": f"one of {names}"})


def precision() -> Argument:
    """The precision of a product."""
    return Argument("--precision", {"help": "default, high or highest"})


def direction(*names: str) -> Argument:
    """Forward or a gradient; the first name is the default."""
    how = {"choices": names, "default": names[0], "help": "the op or a gradient of it"}
    return Argument("--direction", how)


PRODUCT = (
    size("m", "rows of the left operand, and of the result"),
    size("n", "columns of the right operand, and of the result"),
    size("k", "columns of the left operand, which are summed over"),
    Argument("--out", {"help": "dtype of the result, if another"}),
    Argument(
        "--batch", {"type": positive, "default": 1, "help": "of independent products"}
    ),
    Argument(
        "--layout",
        {
            "choices": ("nn", "nt", "tn", "tt"),
            "default": "nn",
            "help": "a letter an operand: n as it is, t stored transposed",
        },
    ),
    precision(),
)  # of a matrix product, without its epilogue

"""Numbers that a kernel takes by value, as texts, which are exact keys.

0.0 equals -0.0, 1 equals True, and NaN does not equal itself; their texts do better as
parameters of a primitive. Callers: the modules of ``ops.cuda_kernel``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracea_jax.emit.kernel import SCALAR_BITS, Scalar
from tracea_jax.emit.signature import Parameter
from tracea_jax.mistakes import shown

_TYPED: Any = np.generic
Numbers = tuple[tuple[str, str], ...]  # (name, text)


def text(name: str, value: Any) -> str:
    """The text of a number; that of a NumPy scalar names its type.

    Raises:
      TypeError: if it is no number that is known now.
    """
    if isinstance(value, _TYPED):
        return f"{value.item()!r}:{value.dtype.name}"
    if isinstance(value, bool | int | float):
        return repr(value)
    raise TypeError(
        f"{name}={shown(value)} must be a number that is known while tracing; an array "
        "is an operand, which the kernel takes by a pointer"
    )


def value(text: str) -> int | float:
    """The number of a text."""
    plain = text.partition(":")[0]
    if plain in ("True", "False"):
        return plain == "True"
    try:
        return int(plain)
    except ValueError:
        return float(plain)


def scalar(parameter: Parameter, text: str) -> Scalar:
    """The number as the kernel's parameter takes it.

    Raises:
      ValueError: if the parameter's type has no such number, or is not known.
    """
    dtype = parameter.dtype or text.partition(":")[2]
    if not dtype:
        raise ValueError(
            f"{parameter.text!r} is of a type that is not known here: pass a NumPy "
            "scalar, such as np.float32(2), or a tensor map in maps="
        )
    number = value(text)
    dtype = "uint8" if dtype == "bool" else dtype
    if isinstance(number, bool):
        number = int(number)
    if dtype not in SCALAR_BITS:
        raise ValueError(f"{parameter.text!r}: kernels take no number of {dtype}")
    if "int" in dtype and isinstance(number, float) and math.isfinite(number):
        if number.is_integer():
            number = int(number)
    try:
        return Scalar(value=number, dtype=dtype)
    except ValueError as e:
        raise ValueError(f"{parameter.text!r}: {e}") from e

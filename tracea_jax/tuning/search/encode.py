"""Columns of configs as numbers between 0 and 1, for the surrogate.

Only the conversion is here; ``candidates`` makes the columns of several variants one
matrix. Callers: ``candidates`` and ``batches``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ALIGNMENT = 0.5  # range of a power-of-two feature; a parameter's own range is 1


def encode(columns: Mapping[str, np.ndarray], *, alignment: bool = True) -> np.ndarray:
    """Features of configs that are given as columns.

    | column                                   | features                            |
    |------------------------------------------|-------------------------------------|
    | positive numbers, more than two values   | log2, scaled to [0, 1]              |
    | positive integers, more than two values, | also log2 of the greatest power of  |
    | some of them no powers of two            | two in each, scaled to [0, 0.5]     |
    | other numbers, booleans                  | scaled to [0, 1]                    |
    | anything else, two values                | 0 and 1                             |
    | anything else, more values               | one for each value, 0 or 0.5^0.5    |
    | the same value everywhere                | none                                |

    The power of two is a feature because hardware comes in powers of two: a tile of 96
    is close to one of 112 but behaves like one of 32 where it must fit warps, vectors,
    banks or a problem's size. Features are scaled to the range of the given rows.
    Therefore configs that one model sees together, of a space and of a history, must
    be encoded together.

    Args:
      columns: arrays of equal length n by name; their order is that of the features.
      alignment: whether to add the powers of two.

    Returns:
      Array (n, d) of float64. Two values of an unordered column are at distance 1.

    Raises:
      ValueError: if the columns differ in length, or a number is not finite.
    """
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"columns must be of one length; they have {sorted(lengths)}")
    parts = [_features(n, np.asarray(c), alignment) for n, c in columns.items()]
    return np.concatenate([np.empty((lengths.pop(), 0)), *parts], axis=1)


def codes(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Columns of configs as integers (n, p): equal where the values are equal."""
    parts = [_names(np.asarray(column)) for column in columns.values()]
    return np.stack([np.unique(p, return_inverse=True)[1] for p in parts], axis=1)


def _features(name: str, column: np.ndarray, alignment: bool) -> np.ndarray:
    if column.dtype.kind not in "biuf":
        return _unordered(column)
    values = column.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"column {name!r} must be finite; it has NaN or infinity")
    if len(np.unique(values)) <= 2 or values.min() <= 0:
        return _scaled(values)
    logs = np.log2(values)
    if not alignment or (values % 1).any() or not (logs % 1).any():
        return _scaled(logs)
    whole = column.astype(np.int64)
    power = np.log2((whole & -whole).astype(np.float64))
    return np.concatenate([_scaled(logs), ALIGNMENT * _scaled(power)], axis=1)


def _scaled(values: np.ndarray) -> np.ndarray:
    """The values (n, 1) scaled to [0, 1]; (n, 0) if all values are the same."""
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    if not high > low:
        return np.empty((len(values), 0))
    return ((values - low) / (high - low))[:, None]


def _unordered(column: np.ndarray) -> np.ndarray:
    """One-hot; the order of the values is that of their text."""
    names = _names(column)
    values = np.unique(names)
    hot = (names[:, None] == values).astype(np.float64)
    return hot[:, 1:] if len(values) <= 2 else hot * 0.5**0.5


def _names(column: np.ndarray) -> np.ndarray:
    """The column, or the text of its values if they are no numbers."""
    if column.dtype.kind in "biuf":
        return column
    return np.array([str(value) for value in column])

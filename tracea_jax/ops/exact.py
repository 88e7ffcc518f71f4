"""The activations in float64 on the host: what results are judged by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def _erf(x: np.ndarray) -> np.ndarray:
    from scipy import special  # slow to import, and only verification needs it

    return special.erf(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


ACTIVATIONS_F64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * _sigmoid(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)),
    "gelu_exact": lambda z: z * 0.5 * (1 + _erf(z / np.sqrt(2))),
    "silu": lambda z: z * _sigmoid(z),
}

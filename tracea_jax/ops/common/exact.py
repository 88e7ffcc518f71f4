"""The activations and their derivatives in float64 on the host, for verification.

The activations that programs run are in ``epilogue``. Callers: the workloads of matmul,
gated_matmul and conv2d, and ``rewrite.activation``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np


def _erf(x: np.ndarray) -> np.ndarray:
    # By name, as it has no types; here, as it is slow to import.
    special: Any = importlib.import_module("scipy.special")
    return special.erf(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _gelu_argument(z: np.ndarray) -> np.ndarray:
    """The x of gelu(z) = z sigmoid(x): x = 2u, as (1 + tanh u) / 2 = sigmoid(2u)."""
    return 2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)


ACTIVATIONS_F64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * _sigmoid(_gelu_argument(z)),
    "gelu_exact": lambda z: z * 0.5 * (1 + _erf(z / np.sqrt(2))),
    "silu": lambda z: z * _sigmoid(z),
}


def _gelu_derivative(z: np.ndarray) -> np.ndarray:
    u = _gelu_argument(z)
    slope = 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
    return _sigmoid(u) * (1 + z * slope * _sigmoid(-u))


def _gelu_exact_derivative(z: np.ndarray) -> np.ndarray:
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return 0.5 * (1 + _erf(z / np.sqrt(2))) + z * density


DERIVATIVES_F64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.ones_like,
    "relu": lambda z: np.where(z > 0, 1.0, 0.0),
    "gelu": _gelu_derivative,
    "gelu_exact": _gelu_exact_derivative,
    "silu": lambda z: _sigmoid(z) * (1 + z * _sigmoid(-z)),
}

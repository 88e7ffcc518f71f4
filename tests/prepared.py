"""Products that gemm_sm90 takes only after a relayout, and their expected results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numerics import exact_gemm, f64

from tracea_jax.problem import Epilogue, GemmProblem

LAYOUTS = ("nn", "nt", "tn", "tt")
FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
GATE = Epilogue(
    activation="silu", residual=True, residual_op="multiply", save_preactivation=True
)
OWN_BIAS = dataclasses.replace(FULL, bias="batched_row")
EPILOGUES = (Epilogue(), FULL, GATE)
BATCHED = ((True, True), (True, False), (False, True))


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", **changes) -> GemmProblem:
    """A product; of float32 at highest precision."""
    fields: dict[str, Any] = {"lhs": dtype, "rhs": dtype, "out": dtype}
    fields["precision"] = "highest" if dtype == "float32" else "default"
    return GemmProblem(m=m, n=n, k=k, **{**fields, **changes})


def assert_right(
    problem: GemmProblem, inputs: Sequence[jax.Array], results: Sequence[jax.Array]
) -> None:
    """Asserts that every entry of the results is near the one in float64."""
    expected = exact_gemm(problem.layout, problem.epilogue, *inputs)
    for y, x in zip(expected, results, strict=True):
        y.assert_near(x)


def relative_error(found: Any, lhs: Any, rhs: Any) -> float:
    """Root mean square of the error of a product against |lhs| |rhs|, in float64."""
    error = f64(found) - f64(lhs) @ f64(rhs)
    scale = np.abs(f64(lhs)) @ np.abs(f64(rhs))
    return float(np.sqrt(np.mean((error / scale) ** 2)))


def factors(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 factors of one kind, (120, 333) and (333, 130)."""
    rng = np.random.default_rng(len(kind))
    a, b = rng.standard_normal((120, 333)), rng.standard_normal((333, 130))
    match kind:
        case "positive":
            a, b = np.abs(a), np.abs(b)
        case "large":
            a, b = a * 1e30, b * 1e5
        case "small":
            a, b = a * 1e-30, b * 1e5
        case "mixed":  # rows and columns of very different magnitudes
            a *= 10.0 ** rng.integers(-15, 15, (120, 1))
            b *= 10.0 ** rng.integers(-15, 15, (1, 130))
        case "steep":  # along k
            a *= 10.0 ** rng.integers(-6, 6, (1, 333))
        case "integers":
            a, b = np.round(a * 1000), np.round(b * 1000)
    return a.astype(np.float32), b.astype(np.float32)


KINDS = ("normal", "positive", "large", "small", "mixed", "steep", "integers")


def unlike_numbers() -> np.ndarray:
    """float32 of every exponent, and what is special about them."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 16, np.uint32)
    largest = np.finfo(np.float32).max
    special = [0.0, -0.0, 1 + 2.0**-23, largest, -largest, 3.3895e38, np.inf, -np.inf]
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000], np.uint32)
    known = np.array(special, np.float32)
    return np.concatenate([np.append(bits, nans).view(np.float32), known])


def parts(x: np.ndarray) -> np.ndarray:
    """float32 as the bfloat16 parts that relayout makes of it, in front.

    x0 = x rounded, x1 = x - x0 rounded, x2 = the rest; numbers above the largest
    bfloat16 are cut; what is not finite has the parts (x, 0, 0).
    """
    is_finite = np.isfinite(x)
    known = np.where(is_finite, x, 0)
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    first = _rounded(np.clip(known, -largest, largest))
    second = _rounded(known - first)
    stacked = np.stack([np.where(is_finite, first, x), second, known - first - second])
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return stacked.astype(ml_dtypes.bfloat16)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)

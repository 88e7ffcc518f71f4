"""Which candidates to evaluate together, given a surrogate's posterior.

Predictions are made in ``surrogate``; the caller is ``batches``, which also decides how
many candidates a batch has.

Source: Jones, Schonlau, Welch, Efficient Global Optimization of Expensive Black-Box
Functions, 1998 (expected improvement); Ginsbourger, Le Riche, Carraro, Kriging is
well-suited to parallelize optimization, 2010 (the kriging believer).
"""

from __future__ import annotations

import numpy as np

from tracea_jax.tuning.search.surrogate import Posterior


def improvement(mean: np.ndarray, deviation: np.ndarray, best: float) -> np.ndarray:
    """Expected improvement E[max(best - x, 0)] of normal variables x."""
    from scipy.special import ndtr

    z = (best - mean) / deviation
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    return deviation * (z * ndtr(z) + density)


def batch(
    posterior: Posterior, best: float, free: np.ndarray, count: int
) -> tuple[list[int], float]:
    """The candidates of greatest expected improvement, each given those before it.

    Args:
      best: the value to improve on.
      free: (m,), which candidates may be taken; the flags of taken ones are cleared.

    Returns:
      At most ``count`` candidates, and the expected improvement of the first of them,
      0.0 if there is none.
    """
    picked: list[int] = []
    expected = 0.0
    while len(picked) < count and free.any():
        gain = improvement(posterior.mean, posterior.deviation, best)
        j = int(np.argmax(np.where(free, gain, -1.0)))
        expected = expected if picked else float(gain[j])
        _take(posterior, free, picked, j)
    return picked, expected


def neighbours(
    posterior: Posterior,
    codes: np.ndarray,
    centres: np.ndarray,
    free: np.ndarray,
    count: int,
    random: np.random.Generator,
) -> list[int]:
    """Random candidates that differ from one of the centres in one parameter.

    They find fast configs that the surrogate's smooth prediction misses.

    Args:
      codes: parameters (m, p) of the candidates.
      centres: parameters (c, p).
      free: as for ``batch``.
    """
    near = np.zeros(len(codes), dtype=bool)
    for centre in centres:
        near |= (codes != centre).sum(axis=1) == 1
    picked: list[int] = []
    for j in random.permutation(np.flatnonzero(near & free))[:count]:
        _take(posterior, free, picked, int(j))
    return picked


def _take(posterior: Posterior, free: np.ndarray, picked: list[int], j: int) -> None:
    picked.append(j)
    free[j] = False
    posterior.believe(j)

"""Which configs to try before any times of this problem are known.

Configs known to be good for other problems come from ``history``; once times are known,
``acquisition`` chooses. The caller is ``batches``.
"""

from __future__ import annotations

import numpy as np

TOP = 256  # diverse candidates are picked from this many of the best predictions
SHARPNESS = 1.5  # exponent of the predicted slowdown that is weighed against distance
DESIGNS = 50  # random designs, of which the one with the best spread is taken
REPULSION = 3.0  # of two points of a design, by unit of distance


def diverse(
    features: np.ndarray, log_prior: np.ndarray, count: int, chosen: list[int]
) -> list[int]:
    """Candidates of short predicted time, far from each other and from ``chosen``.

    The first is the best prediction. Each next one is, among the best 256 predictions,
    that of greatest ``distance to the nearest chosen * exp(-1.5 (log_prior - best))``.

    Args:
      features: (n, d) in [0, 1].
      log_prior: logarithm of the predicted times (n,); infinite ones are never taken.
      chosen: candidates that are tried anyway.

    Returns:
      At most ``count`` indices, none of ``chosen``.
    """
    top = np.argsort(log_prior, kind="stable")
    top = top[np.isfinite(log_prior[top]) & ~np.isin(top, chosen)][: max(TOP, count)]
    if not len(top) or count < 1:
        return []
    weight = np.exp(-SHARPNESS * (log_prior[top] - log_prior[top[0]]))
    gap = np.full(len(top), np.inf)
    for other in chosen:
        gap = np.minimum(gap, _distance(features[top], features[other]))
    picked = [0]
    while len(picked) < min(count, len(top)):
        gap = np.minimum(gap, _distance(features[top], features[top[picked[-1]]]))
        score = gap * weight
        score[picked] = -1.0  # below the score 0 of a candidate at distance 0
        picked.append(int(np.argmax(score)))
    return top[picked].tolist()


def spread(
    features: np.ndarray, count: int, chosen: list[int], random: np.random.Generator
) -> list[int]:
    """Random candidates that keep away from each other and from ``chosen``.

    They are the one of 50 random designs with the least ``sum exp(-3 distance)`` over
    all pairs. That is random enough to try the inner values of every parameter, which
    designs of the widest spread leave out, and avoids the gaps and near duplicates of a
    single random draw.

    Returns:
      At most ``count`` indices, none of ``chosen``.
    """
    free = np.setdiff1d(np.arange(len(features)), chosen)
    count = min(count, len(free))
    drawn = [random.choice(free, count, replace=False) for _ in range(DESIGNS)]
    return min(drawn, key=lambda d: _energy(features[[*chosen, *d]])).tolist()


def _energy(points: np.ndarray) -> float:
    away = np.stack([_distance(points, point) for point in points])
    return float(np.exp(-REPULSION * away).sum())


def _distance(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    return np.sqrt(((points - point) ** 2).sum(axis=1))

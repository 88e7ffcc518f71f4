"""The surrogate: an exact Gaussian process over configs, in float64.

    k((c, s), (c', s')) = a^2 matern(c, c') (w + (1 - w) matern(s, s')) + b^2 [same]
    matern(x, y)        = (1 + r + r^2/3) exp(-r),   r^2 = 5 sum_k ((x_k - y_k) / l_k)^2

c are config features and s shape features; without shapes the second factor is 1. The
hyper-parameters are those of greatest posterior density: length scales l, amplitude a,
noise b, and the share w of the variance that all shapes have in common. Everything is
deterministic. Which candidate is tried next is decided in ``acquisition``; the caller
is ``batches``.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapters
2, 4 and 5.
"""

from __future__ import annotations

import dataclasses

import numpy as np

JITTER = 1e-8

# Mean, deviation, lower and upper bound of the normal prior of each hyper-parameter, in
# its logarithm; of w in its logit.
_LENGTH = (np.log(0.7), 1.0, np.log(0.05), np.log(20.0))
_AMPLITUDE = (0.0, 1.0, np.log(0.2), np.log(5.0))
_NOISE = (np.log(0.1), 1.0, np.log(1e-3), 0.0)
_SHARED = (0.0, 1.0, -4.0, 4.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The observations that a surrogate is fitted to.

    Attributes:
      configs: features (n, d), of about unit range.
      values: observations (n,), of about zero mean and unit deviation.
      shapes: features (n, s) of the problem of each observation; s may be 0.
    """

    configs: np.ndarray
    values: np.ndarray
    shapes: np.ndarray

    @property
    def prior(self) -> np.ndarray:
        """Mean, deviation and bounds (4, h) of the hyper-parameters.

        Their order: log l of the configs, log a, log b and, if there are shapes, log l
        of the shapes and the logit of w.
        """
        rows = [_LENGTH] * self.configs.shape[1] + [_AMPLITUDE, _NOISE]
        if self.shapes.shape[1]:
            rows += [_LENGTH] * self.shapes.shape[1] + [_SHARED]
        return np.array(rows).T


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """A fitted process.

    Attributes:
      data: the observations.
      theta: the hyper-parameters, in the order of ``Data.prior``.
      factor: lower Cholesky factor (n, n) of the covariance of the data.
      weights: the inverse of that covariance times the values (n,).
    """

    data: Data
    theta: np.ndarray
    factor: np.ndarray
    weights: np.ndarray

    def posterior(
        self, configs: np.ndarray, shape: np.ndarray, room: int = 0
    ) -> Posterior:
        """Mean and variance of candidates on one problem.

        Args:
          configs: features of the candidates (m, d).
          shape: features of the problem (s,).
          room: how many observations ``Posterior.believe`` will add.
        """
        from scipy.linalg import get_blas_funcs

        (trsm,) = get_blas_funcs(("trsm",), (self.factor,))
        part = _Parts.of(self.data, self.theta)
        scaled = configs / part.lengths
        cross, _ = _matern(self.data.configs / part.lengths, scaled)
        cross *= part.amplitude**2
        cross *= part.mixed(_matern(*part.shapes(self.data.shapes, shape[None]))[0])
        mean = self.weights @ cross
        n = len(cross)
        rows = np.empty((n + room, len(configs)))
        # rows = factor^-1 cross, solved as rows^T factor^T = cross^T to keep C order
        rows[:n] = trsm(1.0, self.factor, cross.T, side=1, lower=1, trans_a=1).T
        variance = part.amplitude**2 - np.einsum("ij,ij->j", rows[:n], rows[:n])
        return Posterior(
            mean, variance, scaled, rows, n, part.amplitude**2, part.noise**2
        )


class Posterior:
    """Mean and variance of m candidates, updated by assumed observations.

    Attributes:
      mean: (m,).
      variance: (m,), of the process without its noise.
    """

    def __init__(self, mean, variance, scaled, rows, count, power, noise) -> None:
        self.mean: np.ndarray = mean
        self.variance: np.ndarray = variance
        self._scaled = scaled
        self._rows = rows  # factor^-1 covariance with the candidates
        self._count = count
        self._power = power
        self._noise = noise

    @property
    def deviation(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.variance, 1e-12))

    def believe(self, candidate: int) -> None:
        """Pretends that a candidate was observed at its mean.

        All means stay the same; variances fall. The update is one more row of the
        Cholesky factor, O(n m).
        """
        known = self._rows[: self._count]
        cross = _matern(self._scaled[candidate][None], self._scaled)[0][0] * self._power
        row = cross - known[:, candidate] @ known
        row /= np.sqrt(max(self.variance[candidate], 0.0) + self._noise + JITTER)
        self._rows[self._count] = row
        self._count += 1
        self.variance = self.variance - row**2


def fit(data: Data, start: np.ndarray | None = None, iterations: int = 40) -> Surrogate:
    """Finds the hyper-parameters and factorises the covariance.

    Args:
      data: the observations.
      start: hyper-parameters to begin with; the prior's mean by default.
      iterations: of L-BFGS-B, at most.
    """
    from scipy.optimize import minimize

    mean, _, low, high = data.prior
    theta = mean if start is None else start
    if iterations:
        found = minimize(
            loss,
            theta,
            args=(data,),
            jac=True,
            method="L-BFGS-B",
            bounds=np.stack([low, high], axis=1),
            options={"maxiter": iterations},
        )
        theta = found.x
    factor = np.linalg.cholesky(_Parts.of(data, theta).covariance(data))
    return Surrogate(
        data=data, theta=theta, factor=factor, weights=_solve(factor, data.values)
    )


def loss(theta: np.ndarray, data: Data) -> tuple[float, np.ndarray]:
    """Negative log posterior density of hyper-parameters, and its gradient.

    Up to a constant, 0.5 y^T K^-1 y + 0.5 log |K| + 0.5 sum ((theta - mean) / sd)^2.
    """
    from scipy.linalg import get_lapack_funcs

    part = _Parts.of(data, theta)
    lengths, shapes = part.lengths, part.shapes(data.shapes, data.shapes)
    config, config_slope = _matern(data.configs / lengths, data.configs / lengths)
    shape, shape_slope = _matern(*shapes)
    mixed, power = part.mixed(shape), part.amplitude**2
    covariance = power * config * mixed
    signal = covariance.copy()
    np.fill_diagonal(covariance, covariance.diagonal() + part.noise**2 + JITTER)
    factor = np.linalg.cholesky(covariance)
    weights = _solve(factor, data.values)
    (potri,) = get_lapack_funcs(("potri",), (factor,))
    inverse = potri(factor, lower=1)[0]
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    outer = inverse - np.outer(weights, weights)

    by_length = _length_gradient(
        0.5 * power * outer * mixed * config_slope, data.configs / lengths
    )
    gradient = [
        *by_length,
        np.vdot(outer, signal),
        part.noise**2 * outer.trace(),
    ]
    if data.shapes.shape[1]:
        slope = 0.5 * power * outer * config
        rest = 1 - part.shared
        gradient += [*_length_gradient(rest * slope * shape_slope, shapes[0])]
        gradient += [part.shared * rest * np.vdot(slope, 1 - shape)]
    mean, deviation, _, _ = data.prior
    off = (theta - mean) / deviation
    value = 0.5 * data.values @ weights + np.log(factor.diagonal()).sum()
    return float(value + 0.5 * off @ off), np.array(gradient) + off / deviation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """The hyper-parameters by name."""

    lengths: np.ndarray
    amplitude: float
    noise: float
    shape_lengths: np.ndarray
    shared: float

    @classmethod
    def of(cls, data: Data, theta: np.ndarray) -> _Parts:
        d, s = data.configs.shape[1], data.shapes.shape[1]
        return cls(
            lengths=np.exp(theta[:d]),
            amplitude=float(np.exp(theta[d])),
            noise=float(np.exp(theta[d + 1])),
            shape_lengths=np.exp(theta[d + 2 : d + 2 + s]),
            shared=float(1 / (1 + np.exp(-theta[-1]))) if s else 1.0,
        )

    def shapes(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return a / self.shape_lengths, b / self.shape_lengths

    def mixed(self, shape: np.ndarray) -> np.ndarray:
        return self.shared + (1 - self.shared) * shape

    def covariance(self, data: Data) -> np.ndarray:
        scaled = data.configs / self.lengths
        result = self.amplitude**2 * _matern(scaled, scaled)[0]
        result *= self.mixed(_matern(*self.shapes(data.shapes, data.shapes))[0])
        np.fill_diagonal(result, result.diagonal() + self.noise**2 + JITTER)
        return result


def _matern(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matern-5/2 correlation of scaled points (n, d), (m, d), and its slope (n, m).

    The slope is -2 d/d(squared distance). The slope times the squared difference of
    coordinate k is the derivative by log l_k.
    """
    square = a @ (-2.0 * b.T)
    square += np.einsum("ij,ij->i", a, a)[:, None]
    square += np.einsum("ij,ij->i", b, b)
    np.maximum(square, 0.0, out=square)
    square *= 5.0
    r = np.sqrt(square)
    decay = np.exp(-r)
    slope = (1.0 + r) * decay
    square *= decay
    return slope + square / 3.0, slope * (5.0 / 3.0)


def _length_gradient(slope: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    """sum_ij slope_ij (x_ik - x_jk)^2 for each k, for a symmetric slope."""
    total = slope.sum(axis=1) @ scaled**2
    return 2.0 * (total - np.einsum("ik,ik->k", scaled, slope @ scaled))


def _solve(factor: np.ndarray, values: np.ndarray) -> np.ndarray:
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), values)

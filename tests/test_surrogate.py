"""The Gaussian process against textbook formulas in their plainest form."""

from __future__ import annotations

import numpy as np
import pytest

from tracea_jax.tuning.search import surrogate
from tracea_jax.tuning.search.surrogate import Data

pytestmark = pytest.mark.once


def data(n=30, d=3, s=0, seed=0):
    rng = np.random.default_rng(seed)
    configs, shapes = rng.random((n, d)), rng.random((n, s))
    values = np.sin(4 * configs[:, 0]) + 0.3 * rng.standard_normal(n)
    return Data(configs=configs, values=values, shapes=shapes)


def theta(given, seed=1):
    mean, deviation, _, _ = given.prior
    rng = np.random.default_rng(seed)
    return mean + 0.3 * deviation * rng.standard_normal(len(mean))


def kernel(a, b, shape_a, shape_b, theta):
    """One entry of the covariance, without noise."""

    def matern(x, y, lengths):
        r = np.sqrt(5 * sum(((x - y) / lengths) ** 2))
        return (1 + r + r * r / 3) * np.exp(-r)

    d, s = len(a), len(shape_a)
    value = np.exp(2 * theta[d]) * matern(a, b, np.exp(theta[:d]))
    if s:
        shared = 1 / (1 + np.exp(-theta[-1]))
        other = matern(shape_a, shape_b, np.exp(theta[d + 2 : d + 2 + s]))
        value *= shared + (1 - shared) * other
    return value


def gram(rows, row_shapes, columns, column_shapes, theta):
    return np.array(
        [
            [
                kernel(a, b, p, q, theta)
                for b, q in zip(columns, column_shapes, strict=True)
            ]
            for a, p in zip(rows, row_shapes, strict=True)
        ]
    )


def exact(given, theta, points, shape):
    """Posterior mean and variance by inverting the covariance."""
    shapes = np.tile(shape, (len(points), 1))
    noise = np.exp(2 * theta[given.configs.shape[1] + 1]) + surrogate.JITTER
    inside = gram(given.configs, given.shapes, given.configs, given.shapes, theta)
    inverse = np.linalg.inv(inside + noise * np.eye(len(inside)))
    cross = gram(given.configs, given.shapes, points, shapes, theta)
    own = gram(points, shapes, points, shapes, theta).diagonal()
    return cross.T @ inverse @ given.values, own - ((inverse @ cross) * cross).sum(0)


@pytest.mark.parametrize("s", [0, 2])
def test_the_gradient_is_that_of_the_loss(s):
    given = data(s=s)
    at = theta(given)
    _, gradient = surrogate.loss(at, given)
    step = 1e-5
    for i, unit in enumerate(np.eye(len(at))):
        up = surrogate.loss(at + step * unit, given)[0]
        down = surrogate.loss(at - step * unit, given)[0]
        assert gradient[i] == pytest.approx(
            (up - down) / (2 * step), rel=1e-5, abs=1e-5
        )


@pytest.mark.parametrize("s", [0, 2])
def test_the_posterior_is_the_textbooks(s):
    given = data(s=s)
    rng = np.random.default_rng(2)
    points, shape = rng.random((7, 3)), rng.random(s)
    model = surrogate.fit(given, theta(given), iterations=0)
    posterior = model.posterior(points, shape)
    mean, variance = exact(given, model.theta, points, shape)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(posterior.variance, variance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("s", [0, 2])
def test_believing_is_observing_the_mean(s):
    given = data(s=s)
    rng = np.random.default_rng(3)
    points, shape = rng.random((6, 3)), rng.random(s)
    model = surrogate.fit(given, theta(given), iterations=0)
    posterior = model.posterior(points, shape, room=2)
    mean = posterior.mean.copy()
    for candidate in (4, 1):
        posterior.believe(candidate)
    more = Data(
        configs=np.concatenate([given.configs, points[[4, 1]]]),
        values=np.concatenate([given.values, mean[[4, 1]]]),
        shapes=np.concatenate([given.shapes, np.tile(shape, (2, 1))]),
    )
    expected_mean, expected_variance = exact(more, model.theta, points, shape)
    np.testing.assert_allclose(posterior.mean, expected_mean, rtol=1e-7)
    np.testing.assert_allclose(
        posterior.variance, expected_variance, rtol=1e-6, atol=1e-9
    )


def test_fitting_lowers_the_loss_within_the_bounds_and_repeats():
    given = data(60)
    model = surrogate.fit(given)
    mean, _, low, high = given.prior
    assert surrogate.loss(model.theta, given)[0] < surrogate.loss(mean, given)[0]
    assert ((low <= model.theta) & (model.theta <= high)).all()
    np.testing.assert_array_equal(surrogate.fit(given).theta, model.theta)


def test_features_without_influence_get_long_length_scales():
    rng = np.random.default_rng(4)
    configs = rng.random((80, 3))
    values = np.sin(6 * configs[:, 1])
    values = (values - values.mean()) / values.std()
    given = Data(configs=configs, values=values, shapes=np.empty((80, 0)))
    lengths = np.exp(surrogate.fit(given).theta[:3])
    assert lengths[0] > 2 * lengths[1] and lengths[2] > 2 * lengths[1]


def test_other_shapes_inform_as_far_as_they_are_alike():
    """On alike problems the transfer is near total, on unlike ones it is refused."""
    rng = np.random.default_rng(5)
    configs = rng.random((80, 2))
    shapes = np.repeat([[0.0], [1.0]], 40, axis=0)
    points = rng.random((50, 2))

    def error(sign, start):
        wave = np.sin(5 * configs.sum(1))
        values = np.where(shapes[:, 0] == 0, wave, sign * wave)
        # of the first problem what is after start, of the second one eight
        seen = Data(
            configs=configs[start:48],
            values=values[start:48],
            shapes=shapes[start:48],
        )
        mean = surrogate.fit(seen).posterior(points, np.ones(1)).mean
        return np.abs(mean - sign * np.sin(5 * points.sum(1))).mean()

    cold = error(1.0, 40)
    assert error(1.0, 0) < 0.5 * cold
    assert error(-1.0, 0) < 1.5 * cold

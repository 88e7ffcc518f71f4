"""Evaluation of boosted trees: the leaves that scikit-learn reaches, in NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tracea_jax.model import trees
from tracea_jax.model.trees import Ensemble, Tree

pytestmark = pytest.mark.once

ensembles: Any = importlib.import_module("sklearn.ensemble")
threads: Any = importlib.import_module("threadpoolctl")
FEATURES, MEMBERS = 7, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads.threadpool_limits(1):
        yield


def fitted(steps: np.ndarray, target: np.ndarray, seed: int) -> Any:
    model = ensembles.HistGradientBoostingRegressor(
        max_iter=25,
        max_leaf_nodes=trees.MOST_LEAVES,
        min_samples_leaf=3,
        random_state=seed,
    )
    weight = np.random.default_rng(seed).integers(0, 3, len(target))
    return model.fit(steps, target, sample_weight=weight)


def trees_of(model: Any) -> list[Tree]:
    nodes = [own[0].nodes for own in model._predictors]
    return [
        Tree(
            feature=n["feature_idx"],
            step=np.floor(n["num_threshold"]).clip(0),
            left=n["left"],
            right=n["right"],
            value=n["value"],
            is_leaf=n["is_leaf"].astype(bool),
        )
        for n in nodes
    ]


def drawn(seed: int) -> tuple[Ensemble, list[Any]]:
    random = np.random.default_rng(seed)
    edges = [np.unique(random.normal(size=n)) for n in (0, 1, 2, 9, 40, 200, 255)]
    rows = random.normal(size=(600, FEATURES))
    steps = np.stack(
        [np.searchsorted(e, rows[:, i]) for i, e in enumerate(edges)], axis=1
    )
    target = rows[:, 5] * rows[:, 6] + np.sin(3 * rows[:, 4]) + random.normal(size=600)
    models = [fitted(steps, target, seed + m) for m in range(MEMBERS)]
    names = [f"x{i}" for i in range(FEATURES)]
    bases = [float(np.ravel(m._baseline_prediction)[0]) for m in models]
    return trees.ensemble([trees_of(m) for m in models], bases, names, edges), models


def mapping(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {f"x{i}": rows[:, i] for i in range(FEATURES)}


def awkward(made: Ensemble, seed: int, count: int) -> np.ndarray:
    """Rows with values on edges, next to edges, infinite and NaN."""
    random = np.random.default_rng(seed)
    special = np.concatenate([made.edges, made.edges + 1e-12, [np.inf, -np.inf, 0.0]])
    rows = random.normal(size=(count, FEATURES))
    taken = random.random(rows.shape) < 0.4
    rows[taken] = random.choice(special, taken.sum())
    rows[random.random(rows.shape) < 0.05] = np.nan
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_an_ensemble_reaches_the_leaves_of_scikit_learn(seed):
    made, models = drawn(10 * seed)
    for count in (1, 2, 97):
        rows = awkward(made, seed, count)
        steps = np.stack([made.steps(i, rows[:, i]) for i in range(FEATURES)], axis=1)
        predicted = made.predict(mapping(rows), count)
        assert predicted.shape == (MEMBERS, count)
        for own, model in zip(predicted, models, strict=True):
            rounding = made.scale / 2 * len(model._predictors)
            np.testing.assert_allclose(
                own, model.predict(steps), rtol=0, atol=rounding + 1e-12
            )


def test_units_of_leaves_are_exact_where_values_are_multiples_of_them():
    """One comparison and two leaves: what is on the edge goes left."""
    tree = Tree(
        feature=np.array([0, 0, 0]),
        step=np.array([0, 0, 0]),
        left=np.array([1, 0, 0]),
        right=np.array([2, 0, 0]),
        value=np.array([0.0, -1.0, 1.0]),
        is_leaf=np.array([False, True, True]),
    )
    made = trees.ensemble([[tree]], [3.0], ["x"], [np.array([5.0])])
    x = np.array([4.0, 5.0, np.nextafter(5.0, 6), np.nan])
    np.testing.assert_array_equal(made.predict({"x": x}, 4), [[2.0, 2.0, 4.0, 4.0]])


def test_features_that_all_rows_share_are_numbers():
    made, _ = drawn(5)
    rows = awkward(made, 1, 33)
    rows[:, :4] = rows[0, :4]
    rows[:, 6] = np.nan
    mixed = {name: values for name, values in mapping(rows).items() if name != "x6"}
    for name in ("x0", "x1", "x2", "x3"):
        mixed[name] = mixed[name][0]
    np.testing.assert_array_equal(
        made.predict(mixed, 33), made.predict(mapping(rows), 33)
    )


def test_what_does_not_fit_is_an_error():
    edges = [np.arange(256.0)]
    with pytest.raises(ValueError, match="at most 255 edges"):
        trees.ensemble([[]], [0.0], ["x"], edges)
    chain = np.arange(33)
    deep = Tree(
        feature=np.zeros(33, int),
        step=chain,
        left=chain + 1,
        right=chain + 2,
        value=np.zeros(33),
        is_leaf=(chain % 2 == 1) | (chain == 32),
    )
    with pytest.raises(ValueError, match="17 leaves"):
        trees.ensemble([[deep]], [0.0], ["x"], [np.arange(40.0)])

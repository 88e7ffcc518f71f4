"""Boosted regression trees in NumPy: whole ensembles of them as a few flat arrays.

A feature is compared as its step, the number of edges below it. All comparisons of a
tree are evaluated at once (QuickScorer, Lucchese et al. 2015): each one that fails
rules out the leaves on its left, and the leaf reached is the first that is left over.
Leaf values are integers in units of a scale, so that sums do not depend on their order.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Features = Mapping[str, Any]  # a number, or one for each row, by the feature's name

MOST_LEAVES = 16  # of a tree: a bit each in the masks
MOST_STEPS = 255
_UNUSED = 255  # feature number of places for comparisons that a tree does not use
_ALL = np.uint16(0xFFFF)
_FIRST_BIT = np.zeros(1 << MOST_LEAVES, np.uint8)
for _bit in range(MOST_LEAVES):
    _FIRST_BIT[1 << _bit] = _bit
ARRAYS = ("edges", "counts", "feature", "step", "first", "last", "leaves", "base")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ensemble:
    """Members that each sum the leaves of their trees; m members of t trees.

    Attributes:
      names: of the features, in the order of their numbers.
      edges: of all features one after another, ascending for each.
      counts: number of edges of each feature.
      feature, step: (m, t, 15) what each comparison compares: it holds where the
        feature's step is at most ``step``. Feature 255 marks unused places.
      first, last: (m, t, 15) leaves on the comparison's left, from the left.
      leaves: (m, t, 16) values in units of ``scale``.
      base: (m,) start of each sum.
      scale: unit of the leaves' values.
    """

    names: tuple[str, ...]
    edges: np.ndarray
    counts: np.ndarray
    feature: np.ndarray
    step: np.ndarray
    first: np.ndarray
    last: np.ndarray
    leaves: np.ndarray
    base: np.ndarray
    scale: float

    def predict(self, features: Features, count: int) -> np.ndarray:
        """(m, count) predictions of each member for each row; NaN is above all edges.

        Args:
          features: see ``Features``; a missing one is NaN.
          count: number of rows.
        """
        members, trees, _ = self.leaves.shape
        # What all rows share; comparisons of columns all hold here.
        shared = np.zeros(_UNUSED + 1, np.int64)
        columns: dict[int, np.ndarray] = {}
        for number, name in enumerate(self.names):
            value = features.get(name, np.nan)
            if np.ndim(value) == 0:
                shared[number] = bisect.bisect_left(self._edges[number], _key(value))
            else:
                columns[number] = np.asarray(value, np.float64)
        fails = shared[self.feature] > self.step
        left = np.where(fails, self._kept, _ALL)
        alive = np.bitwise_and.reduce(left, axis=2).reshape(1, -1)
        for number, values in columns.items():
            if (comparisons := self._comparisons(number)) is not None:
                alive = alive & comparisons.left_over(self.steps(number, values))
        reached = _FIRST_BIT[alive & (~alive + np.uint16(1))]
        values = self.leaves.reshape(members * trees, MOST_LEAVES)
        found = values[np.arange(members * trees), reached]
        sums = found.reshape(-1, members, trees).sum(axis=2, dtype=np.int64)
        predicted = (self.base + self.scale * sums).T
        return np.broadcast_to(predicted, (members, count))

    def steps(self, number: int, values: np.ndarray) -> np.ndarray:
        """The steps of values of the feature of this number."""
        return np.searchsorted(np.array(self._edges[number]), values, side="left")

    @functools.cached_property
    def _edges(self) -> list[list[float]]:
        """The edges of each feature."""
        ends = np.cumsum(self.counts, dtype=np.int64)[:-1]
        return [own.tolist() for own in np.split(self.edges, ends)]

    @functools.cached_property
    def _kept(self) -> np.ndarray:
        """(m, t, 15) leaves that are left over where a comparison fails, as bits."""
        one = np.int64(1)
        left = (one << (self.last + one)) - (one << self.first.astype(np.int64))
        return ~left.astype(np.uint16)

    @functools.cached_property
    def _grouped(self) -> dict[int, _Comparisons | None]:
        return {}

    def _comparisons(self, number: int) -> _Comparisons | None:
        """The comparisons of one feature; None if there are none."""
        if number not in self._grouped:
            places = np.flatnonzero(self.feature.reshape(-1) == number)
            self._grouped[number] = (
                None
                if not len(places)
                else _Comparisons.of(
                    places // self.feature.shape[2],
                    self.step.reshape(-1)[places],
                    self._kept.reshape(-1)[places],
                    self.leaves.shape[0] * self.leaves.shape[1],
                )
            )
        return self._grouped[number]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Comparisons:
    """Those of one feature, by tree.

    Attributes:
      step: of each comparison.
      kept: the leaves that are left over where it fails, as bits.
      trees: that have any.
      starts: the first comparison of each of these trees.
      count: number of all trees.
    """

    step: np.ndarray
    kept: np.ndarray
    trees: np.ndarray
    starts: np.ndarray
    count: int

    @classmethod
    def of(
        cls, tree: np.ndarray, step: np.ndarray, kept: np.ndarray, count: int
    ) -> _Comparisons:
        trees, starts = np.unique(tree, return_index=True)
        return cls(step=step, kept=kept, trees=trees, starts=starts, count=count)

    def left_over(self, steps: np.ndarray) -> np.ndarray:
        """(rows, trees) leaves that the comparisons leave over for the row's step."""
        distinct, row = np.unique(steps, return_inverse=True)
        kept = np.where(distinct[:, None] > self.step, self.kept, _ALL)
        masks = np.full((len(distinct), self.count), _ALL)
        masks[:, self.trees] = np.bitwise_and.reduceat(kept, self.starts, axis=1)
        return masks[row]


def _key(value: Any) -> float:
    """A number that bisection takes: NaN is above all edges."""
    return math.inf if math.isnan(value) else float(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """A tree as scikit-learn has it: nodes that refer to each other by index.

    Attributes:
      feature, step: of each node; a leaf's have no meaning.
      left, right: children; where ``is_leaf``, none.
      value: of each leaf.
      is_leaf: for each node.
    """

    feature: np.ndarray
    step: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    is_leaf: np.ndarray


def ensemble(
    members: Sequence[Sequence[Tree]],
    bases: Sequence[float],
    names: Sequence[str],
    edges: Sequence[np.ndarray],
) -> Ensemble:
    """The ensemble of these trees; all members have equally many.

    Args:
      members: the trees of each member.
      bases: start of each member's sum.
      names: of the features.
      edges: of each feature.

    Raises:
      ValueError: if a tree has too many leaves or a feature too many edges.
    """
    if any(len(own) > MOST_STEPS for own in edges) or len(names) > _UNUSED:
        raise ValueError(f"a feature has at most {MOST_STEPS} edges")
    shape = (len(members), len(members[0]))
    places = (*shape, MOST_LEAVES - 1)
    feature = np.full(places, _UNUSED, np.uint8)
    step, first, last = (np.zeros(places, np.uint8) for _ in range(3))
    values = np.zeros((*shape, MOST_LEAVES))
    for m, trees in enumerate(members):
        for t, tree in enumerate(trees):
            found, splits = _flat(tree)
            values[m, t, : len(found)] = found
            for place, split in enumerate(splits):
                arrays = (feature, step, first, last)
                for array, number in zip(arrays, split, strict=True):
                    array[m, t, place] = number
    scale = float(np.abs(values).max()) / np.iinfo(np.int16).max or 1.0
    return Ensemble(
        names=tuple(names),
        edges=np.concatenate([*edges, np.empty(0)]).astype(np.float64),
        counts=np.array([len(own) for own in edges], np.uint8),
        feature=feature,
        step=step,
        first=first,
        last=last,
        leaves=np.rint(values / scale).astype(np.int16),
        base=np.array(bases, np.float64),
        scale=scale,
    )


def _flat(tree: Tree) -> tuple[list[float], list[tuple[int, int, int, int]]]:
    """Values of the leaves from the left; feature, step, first, last of each split."""
    values: list[float] = []
    splits: list[tuple[int, int, int, int]] = []

    def visit(node: int) -> None:
        if tree.is_leaf[node]:
            values.append(float(tree.value[node]))
            return
        begin = len(values)
        visit(int(tree.left[node]))
        end = len(values) - 1
        splits.append((int(tree.feature[node]), int(tree.step[node]), begin, end))
        visit(int(tree.right[node]))

    visit(0)
    if len(values) > MOST_LEAVES:
        raise ValueError(f"a tree has {len(values)} leaves; at most {MOST_LEAVES}")
    return values, splits

"""The search: asks for batches of candidates, is told their times, finds the best.

    first -> seeds -> (fit the surrogate -> batch of greatest expected improvement)*

A search knows candidates only by index and features; ``candidates`` makes these from
configs, and ``tuning.tuner`` measures. With the same seed and the same times told in
the same order, a search asks for the same batches. Callers: ``tuning.tuner``, and
benchmarks/replay, which answers from recorded times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tracea_jax.tuning.search import acquisition, seeding, surrogate
from tracea_jax.tuning.search.encode import codes, encode
from tracea_jax.tuning.search.surrogate import Data, Surrogate

SWEPT = 200  # spaces of at most this many candidates are swept if the budget allows
CANDIDATES = 20_000  # scored for one batch, at most
CENTRES = 3  # fastest candidates whose neighbours are tried
CAP = 512  # observations that the surrogate is fitted to, at most
CALM = 12  # evaluations in a row without expected gain that end a search
FIRST_ITERATIONS, WARM_ITERATIONS = 40, 15  # of fitting the surrogate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of the search's parts; changed only to measure a part's worth.

    Attributes:
      design: evaluations before the first fit, ``first`` included, where there is
        neither an analytic model nor a history.
      diverse: evaluations before the first fit, ``first`` included, where there is an
        analytic model; as many observations of a history make them unnecessary.
      others: random candidates tried besides, whatever model and history predict.
      feature: whether the surrogate sees the analytic model's prediction.
      per_pick: a batch may have one candidate for each ``per_pick`` evaluations told.
        While few are told, every candidate of a batch but the first is chosen by
        little more than the surrogate's own guesses.
      singles: number of evaluations told until which a batch has one candidate, where
        there is neither a model nor a history: each time then teaches the most.
      smallest: candidates of a batch in spite of ``per_pick``.
      local: share of a batch that goes to neighbours of the fastest candidates.
      local_from: evaluations told after which neighbours are tried.
      failed: percentile of the observed times that a failure counts as.
    """

    design: int = 5
    diverse: int = 12
    others: int = 2
    feature: bool = True
    per_pick: int = 8
    singles: int = 16
    smallest: int = 4
    local: float = 0.25
    local_from: int = 64
    failed: float = 90.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Observations of the same kernel on other problems.

    Attributes:
      features: configs (h, d), encoded together with the candidates.
      shapes: features (h, s) of the problems, of about unit range.
      values: logarithm of time divided by the bound of its problem (h,). The times
        told to the search must then be divided by the bound of its problem, too.
      shape: features (s,) of the problem at hand.
      log_prior: logarithm of the modelled time divided by the same bounds (h,); if
        None, the surrogate does not see the analytic model.
    """

    features: np.ndarray
    shapes: np.ndarray
    values: np.ndarray
    shape: np.ndarray
    log_prior: np.ndarray | None = None


class Search:
    """Minimises the time over candidates by ask and tell.

    Args:
      features: candidates (n, d) in [0, 1], see ``encode``.
      codes: parameters (n, p), see ``codes``; candidates that differ in one parameter
        are neighbours. By default the features serve as parameters.
      log_prior: logarithm of the predicted time of each candidate (n,); infinite for a
        candidate that cannot be fast.
      first: candidates to evaluate before anything else.
      budget: evaluations at most, failures included.
      batch: candidates asked for at a time, at most.
      seed: of everything random.
      gain: expected gain (0.01: 1 % of the time) below which the search ends, if no fit
        has expected more during the last 12 evaluations told.
      floor: evaluations told before the search may end for want of expected gain.
      history: observations of other problems.
      recipe: settings of the search's parts.

    Attributes:
      stop: why the search is over, or None: "complete" (every candidate was tried),
        "converged" (no gain is expected) or "budget".
      expected_gain: largest expected improvement at the last fit, in log units. Before
        the first fit, the gain expected of a batch in random order; infinite before two
        times are known.
    """

    def __init__(
        self,
        features: np.ndarray,
        *,
        codes: np.ndarray | None = None,
        log_prior: np.ndarray | None = None,
        first: Sequence[int] = (),
        budget: int = 64,
        batch: int = 8,
        seed: int = 0,
        gain: float = 0.01,
        floor: int = 32,
        history: History | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.stop: str | None = None
        self.expected_gain = np.inf
        self._features = np.asarray(features, dtype=np.float64)
        self._codes = self._features if codes is None else codes
        self._log_prior = log_prior
        self._budget = min(budget, len(self._features))
        self._batch = batch
        self._gain = gain
        self._floor = floor
        self._history = history if history is not None and len(history.values) else None
        self._recipe = recipe or Recipe()
        self._random = np.random.default_rng(seed)
        self._values: dict[int, float | None] = {}  # log times; None for a failure
        self._pending: dict[int, None] = {}  # asked for and not told, in order
        self._theta: np.ndarray | None = None
        self._calm: int | None = None  # evaluations told when no gain was expected
        self._inputs, self._known = self._make_inputs()
        self._design = self._make_design(self._checked(first))

    @property
    def evals(self) -> int:
        """Candidates whose time or failure was told."""
        return len(self._values)

    def ask(self) -> tuple[int, ...]:
        """The next candidates to evaluate; () when the search is over.

        The method may be called while earlier batches are pending.
        """
        room = self._budget - len(self._values) - len(self._pending)
        if self.stop is None and room <= 0:
            whole = self._budget == len(self._features)
            self.stop = "complete" if whole else "budget"
            self.expected_gain = 0.0 if whole else self.expected_gain
        if self.stop is not None:
            return ()
        count = min(self._batch, room)
        picked, self._design = self._design[:count], self._design[count:]
        self._pending.update(dict.fromkeys(picked))
        self.expected_gain = self._gain_by_chance() if picked else self.expected_gain
        if not picked:
            picked = self._improving(min(count, self._most))
            self._pending.update(dict.fromkeys(picked))
        return tuple(picked)

    def tell(self, index: int, time: float | None) -> None:
        """Takes the time of a candidate, asked for or not; None if it failed."""
        (index,) = self._checked([index])
        if time is not None and not 0 < time < np.inf:
            raise ValueError(f"{time=} must be positive and finite, or None: failed")
        self._pending.pop(index, None)
        self._design = [i for i in self._design if i != index]
        self._values[index] = None if time is None else float(np.log(time))

    @property
    def _most(self) -> int:
        """Candidates, at most, of a batch that the surrogate chooses."""
        told, recipe = len(self._values), self._recipe
        is_blind = self._log_prior is None and self._history is None
        if is_blind and told < recipe.singles:
            return 1
        return max(told // recipe.per_pick, recipe.smallest)

    def _checked(self, indices: Sequence[int]) -> list[int]:
        """The indices without repetitions."""
        n = len(self._features)
        for index in indices:
            if not 0 <= index < n:
                raise IndexError(f"candidate {index} must be from 0 to {n - 1}")
        return [int(i) for i in dict.fromkeys(indices)]

    def _make_inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """The surrogate's features of the candidates and of the history.

        The analytic model's prediction is one of them, scaled so that its minimum is 0
        and its 99th percentile is 1.
        """
        p, history = self._log_prior, self._history
        d = self._features.shape[1]
        known = np.empty((0, d)) if history is None else history.features
        others = np.empty(0) if history is None else history.log_prior
        if p is None or others is None or not self._recipe.feature:
            return self._features, known
        finite = p[np.isfinite(p)]
        low, high = np.quantile(finite, [0.0, 0.99]) if len(finite) else (0.0, 0.0)

        def scaled(p: np.ndarray) -> np.ndarray:
            return np.clip((p - low) / max(high - low, 1e-9), 0.0, 1.2)

        return (
            np.column_stack([self._features, scaled(p)]),
            np.column_stack([known, scaled(others)]),
        )

    def _make_design(self, first: list[int]) -> list[int]:
        """The candidates to evaluate before the surrogate chooses."""
        n, recipe, prior = len(self._features), self._recipe, self._log_prior
        if n <= min(self._budget, SWEPT):
            order = range(n) if prior is None else np.argsort(prior, kind="stable")
            return first + [int(i) for i in order if i not in first]
        count, past = recipe.others, self._history
        if past is not None and len(past.values) >= recipe.diverse:
            pass  # the surrogate can choose
        elif prior is not None:
            more = max(recipe.diverse - len(first), recipe.diverse // 2)
            first += seeding.diverse(self._features, prior, more, first)
        else:
            count = max(recipe.design - len(first), count)
        return first + seeding.spread(self._features, count, first, self._random)

    def _improving(self, count: int) -> list[int]:
        """Candidates of great expected improvement; [] once the search converged."""
        observed = [v for v in self._values.values() if v is not None]
        unseen = self._unseen()
        if len(observed) < 2 and self._history is None:
            return self._random.permutation(unseen)[:count].tolist()
        model, mean, scale = self._fit()
        pending = list(self._pending)
        rows = np.array([*pending, *unseen])
        shape = np.empty(0) if self._history is None else self._history.shape
        posterior = model.posterior(self._inputs[rows], shape, len(pending) + count)
        free = np.ones(len(rows), dtype=bool)
        for i in range(len(pending)):
            posterior.believe(i)
            free[i] = False
        lowest = posterior.mean.min()
        best = (min(observed) - mean) / scale if observed else lowest
        local = self._local(count)
        picked, gain = acquisition.batch(posterior, best, free, count - local)
        if self._judge(gain * scale):
            return []
        picked += acquisition.neighbours(
            posterior,
            self._codes[rows],
            self._codes[self._incumbents()],
            free,
            local,
            self._random,
        )
        picked += acquisition.batch(posterior, best, free, count - len(picked))[0]
        return rows[picked].tolist()

    def _gain_by_chance(self) -> float:
        """The gain expected of a batch of random candidates over the known ones.

        The best candidate of all is in the batch with probability batch / (known +
        batch); it is then better by about one standard deviation of the log times.
        """
        known = [v for v in self._values.values() if v is not None]
        if len(known) < 2:
            return np.inf
        return self._batch / (len(known) + self._batch) * float(np.std(known))

    def _local(self, count: int) -> int:
        started = len(self._values) >= self._recipe.local_from
        return round(count * self._recipe.local) if started else 0

    def _incumbents(self) -> list[int]:
        found = [(v, i) for i, v in self._values.items() if v is not None]
        return [i for _, i in sorted(found)[:CENTRES]]

    def _unseen(self) -> np.ndarray:
        """Untried candidates, in order; of a large space, a random part.

        That part includes all neighbours of the fastest candidates.
        """
        free = np.ones(len(self._features), dtype=bool)
        free[[*self._values, *self._pending]] = False
        unseen = np.flatnonzero(free)
        if len(unseen) <= CANDIDATES:
            return unseen
        near = np.zeros(len(free), dtype=bool)
        for i in self._incumbents():
            near |= (self._codes != self._codes[i]).sum(axis=1) == 1
        some = self._random.choice(unseen, CANDIDATES, replace=False)
        return np.union1d(some, np.flatnonzero(near & free))

    def _fit(self) -> tuple[Surrogate, float, float]:
        """The surrogate of standardised log times, and their mean and deviation."""
        told = np.array(list(self._values), dtype=int)
        values = np.array([np.nan if v is None else v for v in self._values.values()])
        configs, shapes = self._inputs[told], np.empty((len(told), 0))
        if self._history is not None:
            near = self._relevant(CAP - len(told))
            configs = np.concatenate([configs, self._known[near]])
            own = np.tile(self._history.shape, (len(told), 1))
            shapes = np.concatenate([own, self._history.shapes[near]])
            values = np.concatenate([values, self._history.values[near]])
        failed = np.isnan(values)
        values[failed] = np.percentile(values[~failed], self._recipe.failed)
        mean, scale = float(values.mean()), max(float(values.std()), 1e-6)
        data = Data(configs=configs, values=(values - mean) / scale, shapes=shapes)
        iterations = FIRST_ITERATIONS if self._theta is None else WARM_ITERATIONS
        model = surrogate.fit(data, self._theta, iterations)
        self._theta = model.theta
        return model, mean, scale

    def _relevant(self, count: int) -> np.ndarray:
        """At most ``count`` rows of the history: nearest problems, fastest configs."""
        assert self._history is not None
        away = ((self._history.shapes - self._history.shape) ** 2).sum(axis=1)
        return np.lexsort((self._history.values, away))[: max(count, 0)]

    def _judge(self, gain: float) -> bool:
        """Records the expected gain and returns whether the search is over."""
        self.expected_gain = gain
        told = len(self._values)
        if gain >= self._gain:
            self._calm = None
        elif self._calm is None:
            self._calm = told
        if self._calm is not None and told >= max(self._floor, self._calm + CALM):
            self.stop = "converged"
        return self.stop is not None


__all__ = ["History", "Recipe", "Search", "codes", "encode"]

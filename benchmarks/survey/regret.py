"""Regret: the cost of decisions on problems that a model never saw, and the margins.

The ratio of a decision is the time of the best peer over that of what it runs; where
these are the same, it is 1. A ratio counts as under a bar only if its 95 % confidence
interval is.

The margin of a kind of problem is the least one at which losses are expected to keep
within the bars. Of ``n`` held-out problems, ``l`` of them under the bar, a further one
is expected to be under it with probability (l + 1) / (n + 1), as in conformal risk
control. So much is said of an op. To what a kind has seen for itself, the op's share is
added as if it came from one more kind of average size, so that a kind of few problems
follows the op, and outliers of one kind hardly matter for another that has many. Where
no margin keeps within the bars, as one peer was chosen over another, the best one is
taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from cases import Case

from tracea_jax import policy, variants
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model import features
from tracea_jax.model.decision import Guess, beats, chosen
from tracea_jax.model.model import BARS, PEERS, SHARES

_NAMES = 44  # columns
_CONFIDENCE = 1.96  # standard errors to either side

Guesses = Mapping[tuple[int, int], tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The time of the best peer over that of a choice.

    Attributes:
      log: its logarithm.
      error: standard error of that.
    """

    log: float
    error: float

    def is_under(self, bar: float) -> bool:
        return is_under(self.log, self.error, bar)


SAME = Ratio(log=0.0, error=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What decisions about a case come to.

    Attributes:
      case: it.
      kind: of the problem.
      steps: (from which margin on, the ratio of what the model chooses), from 0 on.
      today: of the policy without a model.
      oracle: of the fastest choice measured.
    """

    case: Case
    kind: str
    steps: tuple[tuple[float, Ratio], ...]
    today: Ratio
    oracle: Ratio

    @classmethod
    def of(cls, case: Case, number: int, guesses: Guesses) -> Outcome | None:
        """None unless peers, ours and today's choice were measured and predicted.

        Args:
          case, number: the case and its number.
          guesses: (number of the case, place) -> logarithm of the time, and its sigma.
        """
        known = [i for i in range(len(case.measured)) if (number, i) in guesses]
        names = {case.measured[i].choice.variant for i in known}
        if not names & {*PEERS} or names <= {*PEERS}:
            return None
        choice = _today(case)
        today = next((i for i in known if case.measured[i].choice == choice), None)
        if today is None:
            return None
        ratios = _ratios(case, known)
        own = {i: guesses[number, i] for i in known}
        return cls(
            case=case,
            kind=features.kind(case.problem),
            steps=tuple(_steps(case, own, ratios, today)),
            today=ratios[today],
            oracle=max((SAME, *ratios.values()), key=lambda r: r.log),
        )

    def at(self, margin: float) -> Ratio:
        """The ratio of what the model chooses at a margin."""
        return [ratio for z, ratio in self.steps if z <= margin][-1]


def outcomes_of(cases: Sequence[Case], guesses: Guesses) -> list[Outcome]:
    """The outcomes of the cases that have any."""
    found = (Outcome.of(case, i, guesses) for i, case in enumerate(cases))
    return [outcome for outcome in found if outcome is not None]


def is_under(log_ratio: float, error: float, bar: float) -> bool:
    """Whether the 95 % confidence interval of a ratio is under a bar."""
    return log_ratio + _CONFIDENCE * error < math.log(bar)


def _ratios(case: Case, places: Sequence[int]) -> dict[int, Ratio]:
    """The ratio of each choice."""
    measured = case.measured
    peers = [i for i in places if measured[i].choice.variant in PEERS]
    fastest = min(peers, key=lambda i: measured[i].time_us)
    return {
        i: SAME
        if i == fastest
        else Ratio(
            log=math.log(measured[fastest].time_us / measured[i].time_us),
            error=math.hypot(measured[fastest].error, measured[i].error),
        )
        for i in places
    }


def _steps(
    case: Case,
    guesses: Mapping[int, tuple[float, float]],
    ratios: Mapping[int, Ratio],
    today: int,
) -> list[tuple[float, Ratio]]:
    every = {
        i: Guess(
            variant=case.measured[i].choice.variant,
            index=i,
            log_us=log_us,
            sigma=sigma,
            varies=_varies(case, i),
        )
        for i, (log_us, sigma) in guesses.items()
    }
    changes = {
        beats(one.log_us, one.sigma, other.log_us, other.sigma)
        for one in every.values()
        for other in every.values()
    }
    found: list[tuple[float, Ratio]] = []
    for margin in (0.0, *sorted(z for z in changes if z > 0)):
        ratio = ratios[chosen(every.values(), every[today], margin).index]
        if not found or ratio != found[-1][1]:
            found.append((margin, ratio))
    return found


def _varies(case: Case, place: int) -> bool:
    choice = case.measured[place].choice
    variant = variants.get(case.problem.op, choice.variant)
    why = variants.may_vary(variant, case.problem, choice.config, case.device)
    return why is not None


def _today(case: Case) -> policy.Choice:
    with compiled_elsewhere():
        return policy.unmodelled(diagnose(case.problem, case.device)).choice


# ---- margins -------------------------------------------------------------------------


def margins(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The margin of each kind; see the module's text."""
    places = {0.0, *(_above(z) for o in outcomes for z, _ in o.steps if z > 0)}
    tried = [*sorted(places), math.inf]
    ratios = [[o.at(margin) for margin in tried] for o in outcomes]
    # A margin at which nothing of ours ran says nothing of what runs beyond it.
    differs = np.array([[r != own[-1] for r in own] for own in ratios]).any(axis=0)
    runs = differs | np.isinf(tried)
    kept = [tried[i] for i in np.flatnonzero(runs)]
    lost = [
        np.array([[r.is_under(bar) for r in own] for own in ratios])[:, runs]
        for bar in BARS
    ]
    kinds = np.array([o.kind for o in outcomes])
    further = np.array([1.0] * (len(kept) - 1) + [0.0])  # without ours, no risk
    weight = len(outcomes) / max(len({*kinds.tolist()}), 1)
    found: dict[str, float] = {}
    for kind in sorted({*kinds.tolist()}):
        own = kinds == kind
        each = zip(lost, SHARES, strict=True)
        seen = np.array([_expected(of, own, weight) / share for of, share in each])
        # Of the second bar as seen: most surveys are too small to expect so little.
        within = _expected(lost[0], own, weight, further) <= SHARES[0]
        within, total = within & (seen[1] <= 1), seen.sum(axis=0)
        best = within if within.any() else total <= total.min()
        found[kind] = kept[int(best.argmax())]
    return found


def _expected(
    lost: np.ndarray, own: np.ndarray, weight: float, further: Any = 0.0
) -> np.ndarray:
    """The expected share of losses of a kind at each margin.

    Args:
      lost: (outcomes, margins) whether the ratio is under a bar.
      own: which outcomes are of the kind.
      weight: problems for which the share of the whole op counts.
      further: losses of a further problem of the op that are expected besides.
    """
    of_op = (lost.sum(axis=0) + further) / (len(lost) + further)
    return (lost[own].sum(axis=0) + weight * of_op) / (own.sum() + weight)


def _above(z: float) -> float:
    """The margin that just excludes what beats its peer by so much, in few digits."""
    return math.ceil(z * 1e4) / 1e4


def nested(outcomes: Sequence[Outcome], folds: Sequence[int]) -> list[Ratio]:
    """The ratio of each outcome at the margin that other folds led to."""
    found = [SAME] * len(outcomes)
    for fold in sorted({*folds}):
        known = margins([o for o, f in zip(outcomes, folds, strict=True) if f != fold])
        for i, outcome in enumerate(outcomes):
            if folds[i] == fold:  # a kind that is in no other fold is as today
                found[i] = outcome.at(known.get(outcome.kind, math.inf))
    return found


def covered(outcomes: Sequence[Outcome], ratios: Sequence[Ratio]) -> set[str]:
    """The kinds for which the model is better than the policy without one.

    It gains on held-out problems, and loses on no more of them than the first bar
    allows or than that policy does.

    Args:
      outcomes: of held-out problems.
      ratios: of the model's choices, see ``nested``.
    """
    found: set[str] = set()
    for kind in {o.kind for o in outcomes}:
        own = [
            (ratio, o.today)
            for o, ratio in zip(outcomes, ratios, strict=True)
            if o.kind == kind
        ]
        gain = math.fsum(ratio.log - today.log for ratio, today in own)
        lost, before = (
            sum(r.is_under(BARS[0]) for r in of) for of in zip(*own, strict=True)
        )
        if gain > 0 and lost <= max(SHARES[0] * len(own), before):
            found.add(kind)
    return found


# ---- tables --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A line of a table.

    Attributes:
      problems: how many.
      ours: share of those that do not run as the best peer.
      geomean: of the ratios.
      under: share of ratios under each bar.
      worst: ratio.
    """

    problems: int
    ours: float
    geomean: float
    under: tuple[float, ...]
    worst: float

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> Summary | None:
        """None without any."""
        if not ratios:
            return None
        logs = [r.log for r in ratios]
        count = len(ratios)
        return cls(
            problems=count,
            ours=_digits(sum(r != SAME for r in ratios) / count),
            geomean=_digits(math.exp(math.fsum(logs) / count)),
            under=tuple(
                _digits(sum(r.is_under(bar) for r in ratios) / count) for bar in BARS
            ),
            worst=_digits(math.exp(min(logs))),
        )

    def __str__(self) -> str:
        under = " ".join(f"{share:6.1%}" for share in self.under)
        return (
            f"{self.problems:5d} {self.ours:5.0%} {self.geomean:8.3f} {under} "
            f"{self.worst:6.2f}"
        )


def _digits(value: float) -> float:
    return round(value, 4)


def summaries(
    outcomes: Sequence[Outcome], ratios: Sequence[Ratio], kinds: Collection[str]
) -> dict[str, dict[str, Summary]]:
    """By kind, and "" for what ships: the model, today's rule, and the oracle.

    Args:
      outcomes, ratios: see ``covered``.
      kinds: that the model decides; the others are as today.
    """
    each = list(zip(outcomes, ratios, strict=True))
    shipped = [r if o.kind in kinds else o.today for o, r in each]
    found: dict[str, dict[str, Summary]] = {}
    for kind in ("", *sorted({o.kind for o in outcomes})):
        own = [i for i, (o, _) in enumerate(each) if kind in ("", o.kind)]
        every = {
            "model": [ratios[i] if kind else shipped[i] for i in own],
            "today": [outcomes[i].today for i in own],
            "oracle": [outcomes[i].oracle for i in own],
        }
        made = {name: Summary.of(of) for name, of in every.items()}
        found[kind] = {name: of for name, of in made.items() if of is not None}
    return found


def lines(
    found: Mapping[str, Mapping[str, Summary]], describe: Callable[[str], str]
) -> list[str]:
    """Summaries as a table; ``describe`` says how a kind is decided."""
    text = [f"{'':{_NAMES}} cases  ours  geomean  <0.97  <0.90  worst"]
    for kind, of in found.items():
        for name, summary in of.items():
            title = f"{kind or 'as it ships'}" if name == "model" else ""
            title = f"  {describe(kind)}" if kind and name == "today" else title
            text.append(f"{title[:_NAMES]:{_NAMES}} {summary}  {name}")
    return text

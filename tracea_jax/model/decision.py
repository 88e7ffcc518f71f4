"""The rule by which predictions become a choice: the fastest, if it is certain enough.

Without a model the policy's rules choose. What is predicted fastest runs in place of
their choice if it is faster by more than ``margin`` standard deviations of the
difference. The margin comes from the problems that were held out when the model was
fitted, see ``benchmarks/survey/fit.py``. A choice whose bits may differ from run to run
must also be worth that, see ``variants.steady``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tracea_jax.model.model import PEERS, Prediction
from tracea_jax.variants.steady import steadiest

_LEAST_SIGMA = 1e-9  # of two guesses without any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The config of one variant that is predicted fastest.

    Attributes:
      variant: its name.
      index: of the config in its space.
      log_us, sigma: see ``Prediction``.
      varies: whether bits of its results may differ from run to run.
    """

    variant: str
    index: int
    log_us: float
    sigma: float
    varies: bool = False

    @property
    def us(self) -> float:
        return math.exp(self.log_us)

    @property
    def interval_us(self) -> tuple[float, float]:
        """One standard deviation to either side."""
        return math.exp(self.log_us - self.sigma), math.exp(self.log_us + self.sigma)


def beats(
    log_us: float, sigma: float, other_log_us: float, other_sigma: float
) -> float:
    """By how many standard deviations one time is below another."""
    return (other_log_us - log_us) / max(math.hypot(sigma, other_sigma), _LEAST_SIGMA)


def best(
    predictions: Mapping[str, Prediction], varies: Mapping[str, Sequence[bool]]
) -> tuple[Guess, ...]:
    """The fastest config of each variant, and of those with equal bits, if another.

    Args:
      predictions: by variant.
      varies: for each config whether its bits may differ from run to run.
    """
    found: list[Guess] = []
    for name, seen in predictions.items():
        order: list[int] = np.argsort(seen.log_us, kind="stable").tolist()
        equal = [i for i in order if not varies[name][i]]
        found += [
            guess(name, index, seen, varies[name])
            for index in dict.fromkeys((*order[:1], *equal[:1]))
        ]
    return tuple(found)


def guess(variant: str, index: int, seen: Prediction, varies: Sequence[bool]) -> Guess:
    """The guess of one config of a variant's predictions."""
    return Guess(
        variant=variant,
        index=index,
        log_us=float(seen.log_us[index]),
        sigma=float(seen.sigma[index]),
        varies=bool(varies[index]),
    )


def chosen(
    guesses: Iterable[Guess],
    incumbent: Guess,
    margin: float,
    deterministic: bool | None = None,
) -> Guess:
    """The guess that runs.

    Args:
      guesses: see ``best``.
      incumbent: of what the rules choose.
      margin: standard deviations by which another must be faster.
      deterministic: as ``Options.determinism``.
    """
    known = (incumbent, *guesses)
    equal = [g for g in known if not g.varies]
    if deterministic and equal:
        known = equal
    first = _chosen(known, incumbent, margin)
    if not first.varies or not equal or deterministic is False:
        return first
    # Among equal bits XLA stands in for an incumbent without them.
    others = (g for g in equal if g.variant in PEERS)
    base = incumbent if not incumbent.varies else next(others, equal[0])
    second = _chosen(equal, base, margin)
    return steadiest((first, second), lambda g: g.us, lambda g: g.varies)


def _chosen(guesses: Sequence[Guess], incumbent: Guess, margin: float) -> Guess:
    fastest = min(guesses, key=lambda g: g.log_us)
    far = beats(fastest.log_us, fastest.sigma, incumbent.log_us, incumbent.sigma)
    return fastest if far > margin else incumbent

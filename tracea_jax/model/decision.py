"""The rule by which predictions become a choice: the fastest, with a margin for peers.

A kernel of ours runs where it is predicted faster than every peer by more than
``margin`` standard deviations of the difference. The margin comes from the problems
that were held out when the model was fitted, see ``benchmarks/survey/fit.py``. A choice
whose bits may differ from run to run must also be worth that, see ``variants.steady``.
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
            Guess(
                variant=name,
                index=index,
                log_us=float(seen.log_us[index]),
                sigma=float(seen.sigma[index]),
                varies=bool(varies[name][index]),
            )
            for index in dict.fromkeys((*order[:1], *equal[:1]))
        ]
    return tuple(found)


def chosen(
    guesses: Iterable[Guess], margin: float, deterministic: bool | None = None
) -> Guess | None:
    """The guess that runs; None if nothing is predicted that may run.

    Args:
      guesses: see ``best``.
      margin: standard deviations by which ours must beat peers.
      deterministic: as ``Options.determinism``.
    """
    known = tuple(guesses)
    if deterministic:
        known = tuple(g for g in known if not g.varies)
    fastest = _chosen(known, margin)
    equal = _chosen([g for g in known if not g.varies], margin)
    if fastest is None or equal is None or deterministic is False:
        return fastest
    return steadiest((fastest, equal), lambda g: g.us, lambda g: g.varies)


def _chosen(guesses: Sequence[Guess], margin: float) -> Guess | None:
    peers = [g for g in guesses if g.variant in PEERS]
    ours = [g for g in guesses if g.variant not in PEERS]
    peer = min(peers, key=lambda g: g.log_us, default=None)
    own = min(ours, key=lambda g: g.log_us, default=None)
    if own is None or peer is None:
        return own or peer
    far = beats(own.log_us, own.sigma, peer.log_us, peer.sigma)
    return own if far > margin else peer

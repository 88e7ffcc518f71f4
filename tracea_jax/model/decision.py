"""The rule by which predictions become a choice: the fastest, with a margin for peers.

A kernel of ours runs where it is predicted faster than every peer by more than
``margin`` standard deviations of the difference. The margin comes from the problems
that were held out when the model was fitted, see ``benchmarks/survey/fit.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tracea_jax.model.model import PEERS, Prediction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The config of one variant that is predicted fastest.

    Attributes:
      variant: its name.
      index: of the config in its space.
      log_us, sigma: see ``Prediction``.
    """

    variant: str
    index: int
    log_us: float
    sigma: float

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
    return (other_log_us - log_us) / math.hypot(sigma, other_sigma)


def best(predictions: Mapping[str, Prediction]) -> dict[str, Guess]:
    """The fastest config of each variant."""
    found: dict[str, Guess] = {}
    for name, seen in predictions.items():
        index = int(np.argmin(seen.log_us))
        found[name] = Guess(
            variant=name,
            index=index,
            log_us=float(seen.log_us[index]),
            sigma=float(seen.sigma[index]),
        )
    return found


def chosen(guesses: Mapping[str, Guess], margin: float) -> Guess | None:
    """The guess that runs; None if nothing is predicted that may run."""
    peers = [g for g in guesses.values() if g.variant in PEERS]
    ours = [g for g in guesses.values() if g.variant not in PEERS]
    peer = min(peers, key=lambda g: g.log_us, default=None)
    own = min(ours, key=lambda g: g.log_us, default=None)
    if own is None or peer is None:
        return own or peer
    far = beats(own.log_us, own.sigma, peer.log_us, peer.sigma)
    return own if far > margin else peer

"""Tables of regret: the cost of decisions on problems that a model never saw.

The ratio of a decision is the time of the best peer over that of what it runs; where
that is XLA on a device without another peer, it is 1. A ratio counts as under a bar
only if its 95 % confidence interval is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cases import Case

from tracea_jax import policy
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model import features
from tracea_jax.model.decision import beats
from tracea_jax.model.model import PEERS

SHARE = 0.01  # of decisions that may be under the first bar
BARS = (0.97, 0.90)
_NAMES = 44  # columns
_CONFIDENCE = 1.96  # standard errors to either side


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The prediction of a case, and the times of its choices.

    Attributes:
      case: it.
      z: standard deviations by which the best guess of ours beats the best of peers.
      ours, peer: log ratios of what these guesses chose; 0 is the best peer.
      oracle: of the fastest choice measured.
      today: of the policy's; None if its choice was not measured.
      error: of a ratio of ours.
    """

    case: Case
    z: float
    ours: float
    peer: float
    oracle: float
    today: float | None
    error: float

    @classmethod
    def of(
        cls,
        case: Case,
        number: int,
        guesses: Mapping[tuple[int, int], tuple[float, float]],
    ) -> Outcome | None:
        """None unless a peer and a choice of ours were measured and predicted.

        Args:
          case, number: the case and its number.
          guesses: (number of the case, place) -> logarithm of the time, and its sigma.
        """
        known = [i for i in range(len(case.measured)) if (number, i) in guesses]
        peers = [i for i in known if case.measured[i].choice.variant in PEERS]
        ours = [i for i in known if i not in peers]
        if not peers or not ours:
            return None
        times = [math.log(m.time_us) for m in case.measured]
        best = min(times[i] for i in peers)
        chosen = min(ours, key=lambda i: guesses[number, i][0])
        peer = min(peers, key=lambda i: guesses[number, i][0])
        fastest = min(peers, key=lambda i: times[i])
        errors = [case.measured[i].error for i in (chosen, fastest)]
        return cls(
            case=case,
            z=beats(*guesses[number, chosen], *guesses[number, peer]),
            ours=best - times[chosen],
            peer=best - times[peer],
            oracle=max(best - min(times[i] for i in ours), 0.0),
            today=_today(case, best),
            error=math.hypot(*errors),
        )

    def ratio(self, margin: float) -> float:
        """Log ratio of what the model chooses at a margin."""
        return self.ours if self.z > margin else self.peer

    def is_under(self, log_ratio: float, bar: float) -> bool:
        return is_under(log_ratio, self.error, bar)


def is_under(log_ratio: float, error: float, bar: float) -> bool:
    """Whether the 95 % confidence interval of a ratio is under a bar."""
    return log_ratio + _CONFIDENCE * error < math.log(bar)


def _today(case: Case, best: float) -> float | None:
    with compiled_elsewhere():
        choice = policy.unmodelled(diagnose(case.problem, case.device)).choice
    found = [m.time_us for m in case.measured if m.choice == choice]
    return best - math.log(found[0]) if found else None


def margin_of(outcomes: Sequence[Outcome]) -> float:
    """The least margin at which the decisions keep within the bars."""
    places = {0.0, *(math.ceil(max(o.z, 0.0) * 1e4) / 1e4 for o in outcomes)}
    return next((m for m in sorted(places) if _is_within(outcomes, m)), math.inf)


def _is_within(outcomes: Sequence[Outcome], margin: float) -> bool:
    taken = [o for o in outcomes if o.z > margin]
    few, none = ([o.is_under(o.ours, bar) for o in taken] for bar in BARS)
    return sum(few) <= SHARE * len(outcomes) and not any(none)


def lines(outcomes: Sequence[Outcome], margin: float) -> list[str]:
    """A table: the model at its margin and at others, today's policy, the oracle."""
    judged = [o for o in outcomes if o.today is not None]
    rules: list[tuple[str, Sequence[Outcome], Callable[[Outcome], float]]] = [
        (f"model, margin {margin:.2f}", outcomes, lambda o: o.ratio(margin)),
        ("model, margin 0", outcomes, lambda o: o.ratio(0.0)),
        ("model where today is known", judged, lambda o: o.ratio(margin)),
        ("today", judged, lambda o: o.today or 0.0),
        ("oracle", outcomes, lambda o: o.oracle),
    ]
    head = f"{'':{_NAMES}} cases  ours  geomean  <0.97  <0.90  worst  (as measured)"
    kinds = sorted({features.kind(o.case.problem) for o in judged})
    for kind in kinds if len(kinds) > 1 else ():
        own = [o for o in judged if features.kind(o.case.problem) == kind]
        rules += [
            (f"  {kind}", own, lambda o: o.ratio(margin)),
            ("    today", own, lambda o: o.today or 0.0),
            ("    oracle", own, lambda o: o.oracle),
        ]
    return [head, *(_line(name, own, rule) for name, own, rule in rules)]


def _line(
    name: str, outcomes: Sequence[Outcome], rule: Callable[[Outcome], float]
) -> str:
    if not outcomes:
        return f"{name:{_NAMES}} {0:5d}"
    ratios = np.array([rule(o) for o in outcomes])
    under = [
        np.mean([o.is_under(r, bar) for o, r in zip(outcomes, ratios, strict=True)])
        for bar in BARS
    ]
    return (
        f"{name:{_NAMES}} {len(ratios):5d} {np.mean(ratios != 0):5.0%} "
        f"{math.exp(ratios.mean()):8.3f} {under[0]:6.1%} {under[1]:6.1%} "
        f"{math.exp(ratios.min()):6.2f}  "
        + ", ".join(f"{np.mean(ratios < math.log(bar)):.1%}" for bar in BARS)
    )

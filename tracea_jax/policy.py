"""The policy: what to run unmeasured, and what is worth measuring at all."""

from __future__ import annotations

import dataclasses

from tracea_jax import variants
from tracea_jax.doctor import Diagnosis
from tracea_jax.variants import Config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A variant with one of its configs."""

    variant: str
    config: Config

    def __str__(self) -> str:
        return f"{self.variant} [{self.config}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the policy makes of a diagnosis.

    Attributes:
      choice: what runs when nothing was measured.
      heroes: the default config of every candidate; always in the final race.
      space: every choice worth measuring, heroes first.
      reason: why ``choice`` was chosen.
    """

    choice: Choice
    heroes: tuple[Choice, ...]
    space: tuple[Choice, ...]
    reason: str


def decide(diagnosis: Diagnosis) -> Decision:
    """Turns a diagnosis into a default and a search space.

    The default is the first candidate, in catalogue order, that expects to beat XLA on
    this problem; XLA if none does.
    """
    problem, device = diagnosis.problem, diagnosis.device
    candidates = [variants.get(problem.op, name) for name in diagnosis.candidates]
    heroes = tuple(
        Choice(variant=v.name, config=v.heuristic(problem, device)) for v in candidates
    )
    rest = (
        Choice(variant=v.name, config=config)
        for v in candidates
        for config in v.space(problem, device)
    )
    winners = [v.name for v in candidates if v.expects_to_win(problem, device)]
    name = winners[0] if winners else "xla"
    reason = (
        f"{name} usually wins on such problems"
        if winners
        else "no kernel of ours is known to beat XLA here unmeasured"
    )
    return Decision(
        choice=next(h for h in heroes if h.variant == name),
        heroes=heroes,
        space=(*heroes, *(c for c in rest if c not in heroes)),
        reason=reason,
    )

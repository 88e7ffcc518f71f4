"""Questions and answers: a choice that is legal for the problem, and its reasons.

The kinds of answers have modules of their own (``recorded``, ``kindred``,
``interpolate``); they propose, and ``accepted`` alone decides whether a proposal may
run. ``knowledge`` and ``dispatch`` ask.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import Device
from tracea_jax.diagnosis import Diagnosis, diagnose, forbidden
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.answers.legality import read_choice
from tracea_jax.tuning.store.code import code_of
from tracea_jax.tuning.store.environment import Environment, environment


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem on a device, and which variants an answer may name.

    Attributes:
      diagnosis: of the problem, which says what can run at all.
      allowed: candidates that the caller permits.
      implementation: what the caller asked for; None for whatever is best.
    """

    diagnosis: Diagnosis
    allowed: tuple[str, ...]
    implementation: str | None = None

    @classmethod
    def about(
        cls,
        problem: Problem,
        device: Device,
        allowed: tuple[str, ...] | None = None,
        deterministic: bool | None = None,
    ) -> Question:
        """About a problem that was not diagnosed yet; any candidate by default."""
        found = diagnose(problem, device, deterministic)
        return cls(diagnosis=found, allowed=allowed or found.candidates)

    @property
    def problem(self) -> Problem:
        return self.diagnosis.problem

    @property
    def device(self) -> Device:
        return self.diagnosis.device

    @property
    def environment(self) -> Environment:
        """The environment whose times are comparable with those of the answer."""
        return environment(self.device)

    @property
    def deterministic(self) -> bool | None:
        """As ``Options.determinism``."""
        return self.diagnosis.deterministic

    def varies(self, choice: Choice) -> str | None:
        """Why bits of a legal choice's results may differ from run to run, or None."""
        return self.diagnosis.may_vary(choice.variant, choice.config)

    @property
    def is_open(self) -> bool:
        """Returns whether any candidate may be the answer."""
        return self.allowed == self.diagnosis.candidates

    @property
    def allows_xla(self) -> bool:
        """Tests whether a kernel of ours has to be better than XLA to be the answer."""
        return "xla" in self.allowed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A choice and how it is known; a proposal until ``accepted`` has read it.

    Attributes:
      choice: variant and config; a proposal's config may be plain data.
      origin: "tuned" on this machine, "shared" by a cache that is only read, "shipped"
        with the package, "inherited" from a kindred device, "interpolated" from other
        shapes, or "policy" if nothing is known.
      time_us, xla_us: the times that decided its race, see ``Best.decisive``; predicted
        if the answer is interpolated.
      ratio: as in ``Best``, or predicted.
      neighbours: how many tuned problems an interpolated answer was predicted from.
      measured_in: the environment that all this is known from, if it is another one.
      code: what the choice compiled when it was measured; None if it was not.
      decision: the reason, where it is neither a measurement nor a prediction alone.
      tried: how many configs were measured, as text; "" if that is unknown.
    """

    choice: Choice
    origin: str
    time_us: float | None = None
    xla_us: float | None = None
    ratio: float | None = None
    neighbours: int = 0
    measured_in: Environment | None = None
    code: str | None = None
    decision: str = ""
    tried: str = ""

    @property
    def is_exact(self) -> bool:
        """Returns whether this very problem was measured in this environment."""
        return self.origin in ("tuned", "shared", "shipped")

    @property
    def reason(self) -> str:
        """Why it was chosen, as a phrase."""
        if self.decision:
            return self.decision
        place = f" on {self.measured_in}" if self.measured_in else ""
        if self.origin == "interpolated":
            plural = "s" if self.neighbours > 1 else ""
            start = f"scored best by the model from {self.neighbours} tuned neighbour"
            return start + plural + place + self._predicted
        if self.measured_in and self.choice.variant == "xla":
            return f"nothing was clearly faster{place}"
        tried = f", {self.tried}" if self.tried else ""
        return f"it won its race{place}{tried}"

    @property
    def _predicted(self) -> str:
        if self.time_us is None:
            return ""
        xla = f", XLA {self.xla_us:.1f} us" if self.xla_us is not None else ""
        if self.choice.variant == "xla":
            xla = ""
        return f" (predicted: {self.time_us:.1f} us{xla})"


def accepted(proposal: Answer, question: Question) -> Answer | str:
    """The proposal with its config read, or why it may not run, as a phrase.

    It may run if its variant is a candidate that the question allows, its config is
    legal for the problem, its kernels are still those that were measured, and its bits
    may differ from run to run only where that is allowed.
    """
    variant = proposal.choice.variant
    subject = f"the {proposal.origin} answer {variant}"
    if (reason := question.diagnosis.reason(variant)) is not None:
        return f"{subject} cannot run: {reason}"
    problem, device = question.problem, question.device
    choice = read_choice(variant, proposal.choice.config, problem, device)
    if isinstance(choice, str):
        return f"{subject} {choice}"
    if variant not in question.allowed:
        return f"{subject} is not allowed"
    if question.deterministic and (reason := question.varies(choice)) is not None:
        return f"{subject} cannot run: {forbidden(reason)}"
    if proposal.code not in (None, code_of(problem, choice, device)):
        return f"{subject} was measured with other kernels than those of today"
    return dataclasses.replace(proposal, choice=choice)

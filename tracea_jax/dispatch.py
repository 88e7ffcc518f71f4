"""From a problem to a plan.

    problem, device -> diagnose -> decide
      -> (user > tuned > shipped > inherited > interpolated > policy) -> Plan

The plan is a pure function of the problem, the device and an immutable snapshot of the
tuning database, so all processes of a program lower the same HLO. Whether a plan
can be carried out for an equation is ``serving``'s question, which calls ``plan``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tracea_jax import knowledge, policy, variants
from tracea_jax.device import Device, OtherDevice
from tracea_jax.diagnosis import Diagnosis, Rejection, by_reason, diagnose
from tracea_jax.options import Options, current
from tracea_jax.problem import Problem
from tracea_jax.tuning.answers import cache


class Unsupported(ValueError):
    """No variant that the caller allows can serve the problem."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run for one problem.

    Attributes:
      problem, device: what was asked.
      variant, config: what runs.
      origin: "user", "tuned", "shipped", "inherited", "interpolated" or "policy".
      reason: why, as a sentence.
      rejected: the variants that could not, with their reasons.
      time_us, xla_us: measured times of this choice and of XLA, if any; predictions are
        in ``reason``.
    """

    problem: Problem
    device: Device
    variant: str
    config: variants.Config
    origin: str
    reason: str
    rejected: tuple[Rejection, ...]
    time_us: float | None = None
    xla_us: float | None = None

    @property
    def call(self) -> variants.Call:
        """What the lowering emits."""
        variant = variants.get(self.problem.op, self.variant)
        return variant.call(self.problem, self.config, self.device)

    def __str__(self) -> str:
        config = str(self.config)
        choice = self.variant if config == "-" else f"{self.variant} [{config}]"
        lines = [f"{self.problem}: {choice}, {self.origin}: {self.reason}"]
        lines += [f"  not {r}" for r in by_reason(self.rejected)]
        return "\n".join(lines)


def plan(
    problem: Problem,
    device: Device,
    *,
    implementation: str | None = None,
    config: Any = None,
    settings: Options | None = None,
) -> Plan:
    """Chooses variant and config for a problem.

    | given                       | chosen                                         |
    |-----------------------------|------------------------------------------------|
    | ``config``                  | that config of the variant it fits ("user")    |
    | ``implementation`` a name   | that variant, its config as below              |
    | ``implementation="tracea"`` | the same among our own variants                |
    | nothing                     | tuned, else shipped, else inherited from a     |
    |                             | kindred GPU, else interpolated from other      |
    |                             | shapes, else the policy's default              |

    Raises:
      Unsupported: if what was asked for cannot run, with every reason.
      LookupError: if nothing was measured and ``on_miss="error"``.
      ValueError: if the config is not legal.
    """
    settings = settings or current()
    implementation = implementation or default_implementation(problem.op, settings)
    variants.check_implementation(problem.op, implementation)
    diagnosis = diagnose(problem, device)
    allowed = _allowed(diagnosis, implementation)
    make = functools.partial(
        Plan, problem=problem, device=device, rejected=diagnosis.rejected
    )
    if config is not None:
        choice = _explicit(diagnosis, allowed, config)
        reason = "the config was given"
        return make(**_fields(choice), origin="user", reason=reason)
    if allowed == ("xla",):
        choice = policy.Choice(variant="xla", config=variants.XLA.config_type())
        asked = implementation == "xla"
        reason = "XLA was asked for" if asked else _why_only_xla(device)
        return make(
            **_fields(choice), origin="user" if asked else "policy", reason=reason
        )
    answer = _answer(problem, device, allowed, settings)
    if answer is not None:
        measured: Any = {"time_us": answer.time_us, "xla_us": answer.xla_us}
        return make(
            **_fields(answer.choice),
            origin=answer.origin,
            reason=_why(answer),
            **(measured if answer.is_exact else {}),
        )
    decision = policy.decide(diagnosis)
    if decision.choice.variant in allowed:
        choice, reason = decision.choice, decision.reason
    else:
        choice = next(h for h in decision.heroes if h.variant == allowed[0])
        reason = f"implementation={implementation!r} was asked for"
    return make(**_fields(choice), origin="policy", reason=reason)


def default_implementation(op: str, settings: Options | None = None) -> str | None:
    """What the settings say about an op; variants of other ops are none of its own."""
    name = (settings or current()).implementation
    ours = {"tracea", *(v.name for v in variants.of(op))}
    return name if name in ours else None


def _why_only_xla(device: Device) -> str:
    if isinstance(device, OtherDevice):
        return f"there are no kernels for {device}"
    return "no other variant can run it"


def _fields(choice: policy.Choice) -> dict[str, Any]:
    return {"variant": choice.variant, "config": choice.config}


def _why(answer: cache.Answer) -> str:
    place = f" on {answer.measured_in}" if answer.measured_in else ""
    if answer.is_exact or answer.origin == "inherited":
        if answer.measured_in and answer.choice.variant == "xla":
            return f"nothing was clearly faster{place}"
        return f"it was the fastest measured{place}"
    count = answer.neighbours
    reason = f"scored best by the model from {count} tuned neighbour"
    reason += ("s" if count > 1 else "") + place
    if answer.time_us is not None:
        predicted = f"{answer.time_us:.1f} us"
        if answer.xla_us is not None and answer.choice.variant != "xla":
            predicted += f", XLA {answer.xla_us:.1f} us"
        reason += f" (predicted: {predicted})"
    return reason


def _answer(
    problem: Problem, device: Device, allowed: tuple[str, ...], settings: Options
) -> cache.Answer | None:
    """What is known of the problem, measured now if the settings say so.

    Raises:
      LookupError: if it was not measured itself and ``on_miss="error"``.
    """
    answer = knowledge.agreed(settings, device).fastest(problem, device, allowed)
    is_missed = answer is None or not answer.is_exact
    if is_missed and settings.on_miss == "tune" and knowledge.may_tune(problem, device):
        knowledge.tune(problem, device, settings=settings)
        return knowledge.agreed(settings, device).fastest(problem, device, allowed)
    if is_missed and settings.on_miss == "error":
        raise LookupError(
            f"{problem} on {device.name} has no tuned answer and on_miss='error'; "
            "run `tracea tune` for it or allow on_miss='heuristic'"
        )
    return answer


def _allowed(diagnosis: Diagnosis, implementation: str | None) -> tuple[str, ...]:
    """The candidates that ``implementation`` permits, or an error with all reasons."""
    ours = tuple(c for c in diagnosis.candidates if c != "xla")
    wanted = {None: diagnosis.candidates, "tracea": ours}.get(
        implementation, tuple(c for c in diagnosis.candidates if c == implementation)
    )
    if not wanted:
        reasons = [str(r) for r in diagnosis.rejected]
        if implementation != "tracea":
            reasons = [r for r in reasons if r.startswith(f"{implementation}:")]
        raise Unsupported(
            f"implementation={implementation!r} cannot run {diagnosis.problem} on "
            f"{diagnosis.device.name}: " + "; ".join(reasons)
        )
    return wanted


def _explicit(
    diagnosis: Diagnosis, allowed: tuple[str, ...], config: Any
) -> policy.Choice:
    """The caller's config, with the first allowed variant that it fits."""
    problem, device = diagnosis.problem, diagnosis.device
    errors = []
    for name in allowed:
        variant = variants.get(problem.op, name)
        try:
            value = variants.config_from_json(variant, config)
            variant.check(problem, value, device)
        except ValueError as e:
            errors.append(f"{name}: {e}")
        else:
            return policy.Choice(variant=name, config=value)
    raise ValueError(f"config={config!r} fits no allowed variant: " + "; ".join(errors))

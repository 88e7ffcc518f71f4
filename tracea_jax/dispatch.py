"""From a problem to a plan.

    problem, device -> diagnose -> allowed
      -> user's config, else tuned > shipped > inherited > interpolated > policy -> Plan

The plan is a pure function of the problem, the device and ``Knowledge`` that does not
change, so all processes of a program lower the same HLO. Whether a plan can be carried
out for an equation is ``serving``'s question, which calls ``plan``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax import knowledge, variants
from tracea_jax.device import CudaDevice, Device, OtherDevice
from tracea_jax.diagnosis import (
    Diagnosis,
    Rejection,
    by_reason,
    diagnose,
    forbidden,
)
from tracea_jax.mistakes import shown
from tracea_jax.options import Options, current
from tracea_jax.page import Column, Page, Printable, Row, Table
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import Problem
from tracea_jax.runtime import launch
from tracea_jax.schema import check_types
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.variants.base import Insisting


class Unsupported(ValueError):
    """No variant that the caller allows can serve the problem."""


_COLUMNS = (
    Column("problem"),
    Column("runs", ": "),
    Column("config", " "),
    Column("origin", ", "),
    Column("", ": ", is_folded=True),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Printable):
    """The choice for one problem, with its reason.

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
        """The call that lowering emits."""
        variant = variants.get(self.problem.op, self.variant)
        return variant.call(self.problem, self.config, self.device)

    @property
    def may_vary(self) -> str | None:
        """Why bits of the results may differ from run to run, or None."""
        variant = variants.get(self.problem.op, self.variant)
        return variants.may_vary(variant, self.problem, self.config, self.device)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the choice, one line each."""
        reason = self.may_vary
        return () if reason is None else (f"bits may differ from run to run: {reason}",)

    @property
    def config_text(self) -> str:
        """The config in brackets; "" of a variant that has none."""
        config = str(self.config)
        return "" if config == "-" else f"[{config}]"

    @property
    def page(self) -> Page:
        config, origin = self.config_text, self.origin
        row = Row(
            (str(self.problem), self.variant, config, origin, self.reason),
            notes=(*self.warnings, *(f"not {r}" for r in by_reason(self.rejected))),
        )
        return Page((Table(columns=_COLUMNS, rows=(row,)),))


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
    diagnosis = diagnose(problem, device, settings.determinism)
    answer = _answered(diagnosis, implementation, config, settings)
    while (why := _broken_limit(problem, answer.choice, device)) is not None:
        refused = Rejection(variant=answer.choice.variant, reason=why)
        diagnosis = diagnosis.without(refused)
        answer = _answered(diagnosis, implementation, config, settings)
    return Plan(
        problem=problem,
        device=device,
        variant=answer.choice.variant,
        config=answer.choice.config,
        origin=answer.origin,
        reason=answer.reason,
        rejected=diagnosis.rejected,
        time_us=answer.time_us if answer.is_exact else None,
        xla_us=answer.xla_us if answer.is_exact else None,
    )


def _answered(
    diagnosis: Diagnosis, implementation: str | None, config: Any, settings: Options
) -> Answer:
    """The choice among the candidates; arguments and errors are those of ``plan``."""
    problem, device = diagnosis.problem, diagnosis.device
    default = default_implementation(problem.op, settings)
    if default == "xla" and "xla" not in diagnosis.candidates:
        default = None  # a kernel without a reference is all that there is
    implementation = implementation or default
    variants.check_implementation(problem.op, implementation)
    allowed = _allowed(diagnosis, implementation)
    if config is not None:
        return _explicit(diagnosis, allowed, config)
    if allowed == ("xla",):
        return _only_xla(implementation, device)
    if "xla" not in diagnosis.candidates:
        choice = decide(diagnosis).choice
        why = "without a reference there is nothing to compare it with"
        return Answer(choice=choice, origin="policy", decision=why)
    question = Question(
        diagnosis=diagnosis, allowed=allowed, implementation=implementation
    )
    return _answer(question, settings)


def _broken_limit(problem: Problem, choice: Choice, device: Device) -> str | None:
    """Why the device cannot launch what the choice stands for.

    Variants refuse problems by their sizes; what they missed is refused here, before it
    is lowered. The limits that kernels of users break are errors of the lowering.
    """
    variant = variants.get(problem.op, choice.variant)
    if not isinstance(device, CudaDevice) or isinstance(variant, Insisting):
        return None
    try:
        call = variant.call(problem, choice.config, device)
    except ValueError as e:  # of a size that no parameter of a kernel holds
        return str(e)
    broken = (
        launch.broken_limit(kernel, device) for kernel in variants.kernels_in(call)
    )
    return next((why for why in broken if why is not None), None)


def default_implementation(op: str, settings: Options | None = None) -> str | None:
    """The op's implementation in the settings; variants of other ops are ignored."""
    name = (settings or current()).implementation
    ours = {"tracea", *(v.name for v in variants.of(op))}
    return name if name in ours else None


def _answer(question: Question, settings: Options) -> Answer:
    """The answer for the problem, measured now if the settings say so.

    Raises:
      LookupError: if it was not measured itself and ``on_miss="error"``.
    """
    problem, device = question.problem, question.device
    answer = knowledge.agreed(settings, device).answer(question)
    if answer.is_exact:
        return answer
    if settings.on_miss == "tune" and knowledge.may_tune(problem, device):
        knowledge.tune(problem, device, settings=settings)
        return knowledge.agreed(settings, device).answer(question)
    if settings.on_miss == "error":
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
        if implementation not in (None, "tracea"):
            reasons = [r for r in reasons if r.startswith(f"{implementation}:")]
        what = f"{implementation=} cannot" if implementation else "no variant can"
        raise Unsupported(
            f"{what} run {diagnosis.problem} on {diagnosis.device.name}: "
            + "; ".join(reasons)
        )
    return wanted


def _explicit(diagnosis: Diagnosis, allowed: tuple[str, ...], config: Any) -> Answer:
    """The caller's config, with the first allowed variant that it fits."""
    problem, device = diagnosis.problem, diagnosis.device
    errors = []
    for name in allowed:
        variant = variants.get(problem.op, name)
        try:
            value = _checked(variant, config, problem, device)
        except ValueError as e:
            errors.append(f"{name}: {e}")
            continue
        reason = diagnosis.may_vary(name, value) if diagnosis.deterministic else None
        if reason is None:
            choice = Choice(variant=name, config=value)
            return Answer(choice=choice, origin="user", decision="the config was given")
        errors.append(f"{name}: {forbidden(reason)}")
    errors += by_reason(r for r in diagnosis.rejected if _fits(problem, r, config))
    given = repr(config) if isinstance(config, dict) else shown(config)
    raise Unsupported(f"config={given} fits no allowed variant: " + "; ".join(errors))


def _checked(variant: Any, config: Any, problem: Problem, device: Device) -> Any:
    value = variants.config_from_json(variant, config)
    try:
        variant.check(problem, value, device)
    except TypeError:  # it compares what cannot be compared
        check_types(value)
        raise
    check_types(value)
    choice = Choice(variant=variant.name, config=value)
    if (why := _broken_limit(problem, choice, device)) is not None:
        raise ValueError(why)
    return value


def _fits(problem: Problem, rejection: Rejection, config: Any) -> bool:
    """Returns whether the config may be meant for a variant that cannot run here."""
    kind = variants.get(problem.op, rejection.variant).config_type
    if not isinstance(config, dict):
        return isinstance(config, kind)
    return bool(config) and {*config} <= {f.name for f in dataclasses.fields(kind)}


def _only_xla(implementation: str | None, device: Device) -> Answer:
    choice = Choice(variant="xla", config=variants.XLA.config_type())
    if implementation == "xla":
        return Answer(choice=choice, origin="user", decision="XLA was asked for")
    why = "no other variant can run it"
    if isinstance(device, OtherDevice):
        why = f"there are no kernels for {device}"
    return Answer(choice=choice, origin="policy", decision=why)

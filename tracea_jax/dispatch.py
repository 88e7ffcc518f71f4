"""From a problem to a plan: the only place where choosing meets JAX.

    problem, device -> diagnose -> decide -> (user > tuned > shipped > policy) -> Plan

The plan is a pure function of the problem, the device and an immutable snapshot of the
tuning database, so all processes of a program lower the same HLO.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax

from tracea_jax import device as devices
from tracea_jax import policy, variants
from tracea_jax.device import Device
from tracea_jax.doctor import Diagnosis, Rejection, diagnose
from tracea_jax.options import Options, current, publish_epoch
from tracea_jax.problem import Problem
from tracea_jax.runtime import launch, nvrtc, store
from tracea_jax.tuning import cache, measure, tuner

SHIPPED = pathlib.Path(__file__).parent / "data" / "tuned"


class Unsupported(ValueError):
    """No variant that the caller allows can serve the problem."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run for one problem.

    Attributes:
      problem, device: what was asked.
      variant, config: what runs.
      origin: "user", "tuned", "shipped" or "policy".
      reason: why, as a sentence.
      rejected: the variants that could not, with their reasons.
      time_us, xla_us: measured times of this choice and of XLA, if any.
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
        lines += [f"  not {r}" for r in self.rejected]
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
    | ``implementation`` a name   | that variant; config tuned, shipped or policy  |
    | ``implementation="tracea"`` | the same among our own variants                |
    | nothing                     | tuned, else shipped, else the policy's default |

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
        reason = "XLA was asked for" if asked else "no other variant can run it"
        return make(
            **_fields(choice), origin="user" if asked else "policy", reason=reason
        )
    answer = _answer(problem, device, allowed, settings)
    if answer is not None:
        return make(
            **_fields(answer.choice),
            origin=answer.origin,
            reason="it was the fastest measured",
            time_us=answer.time_us,
            xla_us=answer.xla_us,
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


def _fields(choice: policy.Choice) -> dict[str, Any]:
    return {"variant": choice.variant, "config": choice.config}


def _answer(
    problem: Problem, device: Device, allowed: tuple[str, ...], settings: Options
) -> cache.Answer | None:
    """What was measured for the problem, measured now if the settings say so.

    Raises:
      LookupError: if nothing was measured and ``on_miss="error"``.
    """
    answer = database(settings).fastest(problem, device, allowed)
    if answer is None and settings.on_miss == "tune" and _may_tune(problem, device):
        tune(problem, device, settings=settings)
        answer = database(settings).fastest(problem, device, allowed)
    if answer is None and settings.on_miss == "error":
        raise LookupError(
            f"{problem} on {device.name} has no tuned answer and on_miss='error'; "
            "run `tracea tune` for it or allow on_miss='heuristic'"
        )
    return answer


def tune(
    problem: Problem,
    device: Device,
    *,
    settings: Options | None = None,
    publish: bool = False,
    **search: Any,
) -> cache.Entry:
    """Measures the problem's candidates on this machine and keeps the best.

    Args:
      problem, device: what to tune; the device must be the local one. Problems that
        its variants are made of are tuned first, each by the same search, unless they
        were.
      settings: where the cache is.
      publish: whether functions that are already jitted shall see the result.
      **search: effort, budget_s, seed, goal, progress of ``tuner.tune``.

    Raises:
      ValueError: if the device is not the local one.
    """
    settings = settings or current()
    if device != (local := device_for(device.platform, Options())):
        raise ValueError(f"only the local device can be tuned, {local}; not {device}")
    diagnosis = diagnose(problem, device)
    for part in variants.parts(problem):
        if database(settings).lookup(part, device) is None:
            tune(part, device, settings=settings, **search)
    entry = tuner.tune(
        problem,
        diagnosis,
        policy.decide(diagnosis),
        BENCHES[problem.op](problem, device),
        database(settings),
        device,
        **search,
    )
    refresh(settings)
    if publish:
        publish_epoch()
    return entry


# How each op measures a problem; ops register themselves.
BENCHES: dict[str, Callable[[Any, Device], measure.Bench]] = {}


_snapshots: dict[pathlib.Path, cache.Database] = {}


def database(settings: Options) -> cache.Database:
    """The snapshot of the tuning database that answers now."""
    directory = settings.directory
    if directory not in _snapshots:
        # setdefault: threads that come here at once get the same snapshot.
        snapshot = cache.Database(directory, shipped=(SHIPPED,))
        return _snapshots.setdefault(directory, snapshot)
    return _snapshots[directory]


def refresh(settings: Options) -> None:
    """Takes a new snapshot of the database for problems lowered from here on."""
    _snapshots.pop(settings.directory, None)


def device_for(platform: str, settings: Options | None = None) -> Device:
    """The profile of the device that a lowering for this platform targets."""
    settings = settings or current()
    if platform == "cpu":
        return devices.local_cpu()
    if platform == "cuda":
        if settings.device:
            return devices.named(settings.device)
        try:
            return devices.local_cuda(_cuda_ordinal())
        except RuntimeError as e:
            return devices.OtherDevice(platform="cuda", name=f"unknown GPU: {e}")
    return devices.OtherDevice(platform=platform, name=platform)


def _cuda_ordinal() -> int:
    """The CUDA ordinal of the GPU that JAX puts this computation on."""
    default: Any = getattr(jax.config, "jax_default_device", None)
    if isinstance(default, jax.Device) and default.platform == "gpu":
        return default.local_hardware_id or 0
    gpus = [d for d in jax.local_devices() if d.platform == "gpu"]
    return (gpus[0].local_hardware_id or 0) if gpus else 0


def lower(ctx: Any, operands: tuple[Any, ...], plan: Plan) -> Any | None:
    """Emits the plan's custom call; None if its kernel cannot be compiled."""
    call = plan.call
    assert not isinstance(call, variants.Inline)
    if isinstance(call, variants.CpuCall):
        return launch.cpu_lowering(ctx, operands, call.target, dict(call.attributes))
    try:
        cubin = store.get_or_compile(call, current().directory)
    except nvrtc.CompileError as e:
        if plan.origin == "user":
            raise
        warnings.warn(f"{plan.problem} is left to XLA: {e}", stacklevel=2)
        return None
    embed = ctx.module_context.lowering_parameters.for_export
    return launch.cuda_lowering(ctx, operands, call, cubin, embed=embed)


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


def _may_tune(problem: Problem, device: Device) -> bool:
    """Whether measuring now is safe: one process, the local device, and a bench."""
    if jax.process_count() > 1 or problem.op not in BENCHES:
        return False
    return device == device_for(device.platform, Options())

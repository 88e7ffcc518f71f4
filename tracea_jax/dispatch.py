"""From a problem to a plan: the only place where choosing meets JAX.

    problem, device -> diagnose -> decide
      -> (user > tuned > shipped > interpolated > policy) -> Plan

The plan is a pure function of the problem, the device and an immutable snapshot of the
tuning database, so all processes of a program lower the same HLO.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.interpreters import mlir

from tracea_jax import device as devices
from tracea_jax import policy, variants
from tracea_jax._compat import KeyValueStore, key_value_store
from tracea_jax.device import CudaDevice, Device
from tracea_jax.doctor import Diagnosis, Rejection, by_reason, diagnose
from tracea_jax.emit.kernel import Kernel
from tracea_jax.options import Options, current, publish_epoch
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.runtime import launch, nvrtc, store
from tracea_jax.tuning import answers, cache, exchange, measure, tuner
from tracea_jax.tuning.agreement import Agreement
from tracea_jax.tuning.ahead import kernels_of
from tracea_jax.tuning.child import FACTORY as CHILD_FACTORY
from tracea_jax.tuning.child import ChildLab
from tracea_jax.tuning.lab import Lab, LabError, LocalLab

SHIPPED = pathlib.Path(__file__).parent / "data" / "tuned"


class Unsupported(ValueError):
    """No variant that the caller allows can serve the problem."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run for one problem.

    Attributes:
      problem, device: what was asked.
      variant, config: what runs.
      origin: "user", "tuned", "shipped", "interpolated" or "policy".
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
    | nothing                     | tuned, else shipped, else interpolated from    |
    |                             | other shapes, else the policy's default        |

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


def _fields(choice: policy.Choice) -> dict[str, Any]:
    return {"variant": choice.variant, "config": choice.config}


def _why(answer: cache.Answer) -> str:
    if answer.is_exact:
        return "it was the fastest measured"
    count = answer.neighbours
    reason = f"scored best by the model from {count} tuned neighbour"
    reason += "s" if count > 1 else ""
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
    answer = _agreed(settings, device).fastest(problem, device, allowed)
    is_missed = answer is None or not answer.is_exact
    if is_missed and settings.on_miss == "tune" and _may_tune(problem, device):
        tune(problem, device, settings=settings)
        return _agreed(settings, device).fastest(problem, device, allowed)
    if is_missed and settings.on_miss == "error":
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

    In a program of several processes all must call this; process 0 tunes for them.

    Raises:
      ValueError: if the device is not the local one.
    """
    settings = settings or current()
    check_local(device)
    entries = by_process_0(
        lambda: _tuned(problem, device, settings, search),
        settings,
        search.get("progress"),
    )
    refresh(settings)
    if publish:
        publish_epoch()
    return entries[-1]


def check_local(device: Device) -> None:
    """Raises ValueError unless the device is one of this machine's."""
    if device != (local := device_for(device.platform, Options())):
        raise ValueError(f"only the local device can be tuned, {local}; not {device}")


def _tuned(
    problem: Problem, device: Device, settings: Options, search: dict[str, Any]
) -> list[cache.Entry]:
    """Tunes the parts that are not tuned yet, then the problem."""
    entries = []
    for part in variants.parts(problem):
        known = database(settings).lookup(part, device)
        if known is None or not known.is_exact:
            entries += _tuned(part, device, settings, search)
    with contextlib.closing(open_lab(device, problem, settings=settings)) as lab:
        entry = tuner.finished(
            tuning(problem, device, settings=settings, lab=lab, **search)
        )
    tidy([entry], device, settings)
    refresh(settings)
    return [*entries, entry]


def tidy(entries: Iterable[cache.Entry], device: Device, settings: Options) -> None:
    """Removes compiled kernels beyond the limit, the answers of these entries last."""
    for entry in entries:
        choice = answers.legal_choice(
            entry.best.variant,
            entry.best.config,
            problem_from_json(entry.problem),
            device,
        )
        if isinstance(choice, policy.Choice):
            for kernel in kernels_of(problem_from_json(entry.problem), choice, device):
                store.mark_winner(settings.directory, kernel)
    store.collect(settings.directory, settings.cubin_limit)


def tuning(
    problem: Problem,
    device: Device,
    *,
    lab: Lab,
    settings: Options | None = None,
    **search: Any,
) -> tuner.Tuning:
    """A problem ready to be tuned; ``search`` is the rest of ``tuner.Tuning``'s."""
    diagnosis = diagnose(problem, device)
    return tuner.Tuning(
        problem,
        diagnosis,
        policy.decide(diagnosis),
        lab,
        database(settings or current()),
        device,
        **search,
    )


def open_lab(
    device: Device,
    problem: Problem,
    *,
    settings: Options | None = None,
    timing: measure.Timing | None = None,
) -> Lab:
    """Where choices are measured; the caller closes it.

    On a GPU that is a child process, as an illegal access ends a process's use of it;
    or this process, if the GPU admits no second one.

    Args:
      device: the local device.
      problem: one of those to be measured, to try the child with.
      settings: where the cache is.
      timing: the measuring protocol.
    """
    directory = (settings or current()).directory
    exclusive = functools.partial(measure.exclusive, directory, device)
    if isinstance(device, CudaDevice):
        x64 = str(int(jax.config.read("jax_enable_x64")))
        child = ChildLab(
            CHILD_FACTORY,
            device,
            timing,
            directory=directory,
            environment={"JAX_ENABLE_X64": x64},
            exclusive=exclusive,
        )
        try:
            child.start(problem)
            return child
        except LabError as e:
            child.close()
            message = f"measuring in this process, where a crash would end it: {e}"
            warnings.warn(message, stacklevel=2)
    return LocalLab(bench_of, device, timing, exclusive=exclusive)


def bench_of(problem: Problem, device: Device) -> measure.Bench:
    """What measures and verifies the choices of a problem."""
    return BENCHES[problem.op](problem, device)


def by_process_0(
    tune: Callable[[], list[cache.Entry]],
    settings: Options,
    progress: tuner.Progress | None = None,
) -> list[cache.Entry]:
    """The entries that ``tune`` returns in process 0, which alone calls it.

    The other processes wait and keep the entries in memory, so that all answer alike.
    A program of one process just tunes.

    Raises:
      agreement.Disagreement: in the others, if the tuning failed.
    """
    if (agreement := _agreement()) is None:
        return tune()

    def on_wait() -> None:
        if progress is not None:
            message = "process 0 is tuning"
            progress(phase="wait", done=0, total=1, best_us=None, message=message)

    data = agreement.share(lambda: exchange.pack(tune()), on_wait)
    entries = exchange.unpack(data)
    if jax.process_index() != 0:
        for entry in entries:
            database(settings).hold(entry)
    return list(entries)


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


def _agreed(settings: Options, device: Device) -> cache.Database:
    """The snapshot, once it is known that all processes have the same.

    Raises:
      agreement.Disagreement: if they have not.
    """
    snapshot = database(settings)
    compared = _compared.setdefault(snapshot, set())
    if device not in compared:
        if (agreement := _agreement()) is not None:
            agreement.check(device.platform, snapshot.digest(device))
        compared.add(device)
    return snapshot


# Devices whose answers were compared with those of the other processes.
_compared: weakref.WeakKeyDictionary[cache.Database, set[Device]] = (
    weakref.WeakKeyDictionary()
)


def _agreement() -> Agreement | None:
    """How this process agrees with the others; None if there are none."""
    if jax.process_count() == 1:
        return None
    store = key_value_store()
    return None if store is None else _agreement_over(store)


@functools.cache  # one for each coordinator: it counts what was agreed on
def _agreement_over(store: KeyValueStore) -> Agreement:
    return Agreement(store, jax.process_index())


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
    """Emits the plan's custom calls; None if a kernel of them cannot be compiled."""
    call = plan.call
    if isinstance(call, variants.CpuCall):
        return launch.cpu_lowering(ctx, operands, call.target, dict(call.attributes))
    kernels = variants.kernels_in(call)
    assert kernels
    try:
        cubins = {k: store.get_or_compile(k, current().directory) for k in kernels}
    except nvrtc.CompileError as e:
        if plan.origin == "user":
            raise
        warnings.warn(f"{plan.problem} is left to XLA: {e}", stacklevel=2)
        return None
    embed = ctx.module_context.lowering_parameters.for_export
    if not isinstance(call, variants.Prepared):
        return launch.cuda_lowering(
            ctx, operands, kernels[0], cubins[kernels[0]], embed=embed
        )

    def run(kernel: Kernel, *operands: Any, results: Any) -> Any:
        cubin = cubins[kernel]
        return launch.cuda_call(
            *operands, results=results, kernel=kernel, cubin=cubin, embed=embed
        )

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
    code = functools.partial(_prepared, run, call, results)
    return mlir.lower_fun(code, multiple_results=True)(ctx, *operands)


def _prepared(
    run: Callable[..., Any], call: variants.Prepared, results: Any, *operands: Any
) -> Any:
    """The kernels of a call one after another, in JAX."""
    relaid = []
    for x, how in itertools.zip_longest(operands, call.operands):
        if how is not None:
            (x,) = run(
                how.kernel, x, results=[jax.ShapeDtypeStruct(how.shape, how.dtype)]
            )
        relaid.append(x)
    return run(call.kernel, *relaid, results=results)


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

"""Kernels where the compiler splits arrays over several devices by itself.

An equation is lowered to a custom call that stands for it (``emit``), with the op's
sharding rule, by which Shardy propagates shardings through it. When XLA has partitioned
the program around it, it asks for the call's program on one device: ``decide`` splits
the op, and the primitive is bound with local shapes, so that the plan is the one of the
local problem.

The call's text is a hash of what it means, which is the same in every process, so that
all lower the same program and JAX's persistent cache finds it again. It covers the
primitive with its parameters and types, settings, device, tuned answers, and the code
of this package; neither paths nor identities are in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import pathlib
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracea_jax import _compat_partition, faults, knowledge
from tracea_jax.device import Device as Profile
from tracea_jax.emit import sources
from tracea_jax.ops.common import meshes, sharding
from tracea_jax.ops.common.moves import moves
from tracea_jax.ops.common.sharding import Axes, Decision, Device, Refusal, Rule, Spec
from tracea_jax.ops.common.typed import Params, Primitive, config
from tracea_jax.options import Options, current, options, planning
from tracea_jax.problem import Problem
from tracea_jax.serving import Served

TARGET = "tracea_spmd_v1"

# (abstract operands, **params) -> the op's rule for them
Sharding = Callable[..., Rule]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Meaning:
    """The meaning of a call.

    Attributes:
      primitive, params: of the equation.
      rule: how it may be split.
      platform: it is lowered for.
      device: that plans are made for.
      settings: in force where it was lowered.
      axes: of the program's mesh, as far as they are known, for messages.
    """

    primitive: Primitive
    params: Params
    rule: Rule
    platform: str
    device: Profile
    settings: Options
    axes: Mapping[str, int]

    def __reduce__(self) -> tuple[Any, ...]:
        # Executables pickle what their programs kept alive; compiled ones need none.
        return type(None), ()


# Programs keep the meanings of their calls alive until they are compiled.
_meanings: weakref.WeakValueDictionary[str, Meaning] = weakref.WeakValueDictionary()


# --- lowering -------------------------------------------------------------------------


def is_possible(ctx: Any) -> bool:
    """Whether an equation that is being lowered can be partitioned by a rule."""
    many = _compat_partition.devices_of(ctx) > 1
    return many and len(ctx.module_context.platforms) == 1


def is_supported() -> bool:
    """Whether this JAX and its settings have what rules need."""
    return _compat_partition.why_not() is None and _compat_partition.is_enabled()


def emit(
    ctx: Any,
    operands: Sequence[Any],
    primitive: Primitive,
    params: Params,
    rule: Rule,
    device: Profile,
) -> list[Any]:
    """The call that stands for an equation: MLIR values of its results.

    Args:
      ctx: the lowering rule's context.
      operands: MLIR values.
      primitive, params: of the equation.
      rule: for its operands.
      device: that plans are made for.
    """
    settings = unmeasured()
    (platform,) = ctx.module_context.platforms
    made = Meaning(
        primitive=primitive,
        params=params,
        rule=rule,
        platform=platform,
        device=device,
        settings=settings,
        axes=_compat_partition.axis_names(ctx),
    )
    key = key_of(primitive, params, ctx.avals_in, platform, device)
    meaning = _meanings.setdefault(key, made)
    _compat_partition.keep_alive(ctx, meaning)
    _compat_partition.register(TARGET, _partition)
    shapes = [[x.shape for x in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    text = sharding.text(rule, *shapes)
    return _compat_partition.custom_call(TARGET, key, text, operands, ctx.avals_out)


def key_of(
    primitive: Primitive,
    params: Params,
    avals: Sequence[Any],
    platform: str,
    device: Profile,
) -> str:
    """The primitive's name, and a hash of all that its program depends on.

    Args:
      primitive, params: of an equation.
      avals: its operands.
      platform: that it is lowered for.
      device: that plans are made for.
    """
    settings = unmeasured()
    parts: tuple[Any, ...] = (
        _texts(params),
        [f"{x.dtype}{x.shape}" for x in avals],
        platform,
        device,
        settings.implementation,
        settings.on_miss,
        settings.determinism,
        config.read("jax_enable_x64"),
        knowledge.agreed(settings, device).digest(device),
        _code(),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"{primitive.name}:{digest}"


def unmeasured() -> Options:
    """The settings in force; on a miss nothing is measured while XLA compiles."""
    settings = current()
    if settings.on_miss != "tune":
        return settings
    return dataclasses.replace(settings, on_miss="heuristic")


def has_text(params: Params) -> bool:
    """Whether parameters are what their text says: an object may show its address."""
    return all(
        text is not None and re.search(r"\bat 0x[0-9a-f]+", text) is None
        for _, text in _texts(params)
    )


def _texts(params: Params) -> list[tuple[str, str | None]]:
    """Names and texts of parameters; one may have a ``program_text``, or None of it."""
    return [
        (name, value.program_text if hasattr(value, "program_text") else repr(value))
        for name, value in sorted(params.items())
    ]


@functools.cache
def _code() -> str:
    """Hash of this package's Python code and kernels."""
    root = pathlib.Path(__file__).parents[2]
    kernels = sources.directory().parent
    files = [(p.relative_to(root), p) for p in root.rglob("*.py")]
    files += [
        (pathlib.Path("kernels") / p.relative_to(kernels), p)
        for p in kernels.rglob("*")
        if p.is_file()
    ]
    digest = hashlib.sha256()
    for name, path in sorted({str(name): path for name, path in files}.items()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


# --- what XLA asks --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partitioned:
    """A call as it was partitioned, for tests and those who look into it.

    Attributes:
      key: of the call.
      name: of the primitive.
      operands, results: their shapes and specs before.
      decision: made for them.
      axes: names and sizes of the program's mesh, as far as they are known.
      plans: the problems that a device solves, and what serves them.
      moves: between devices around it, in words.
    """

    key: str
    name: str
    operands: tuple[tuple[tuple[int, ...], Spec], ...]
    results: tuple[tuple[tuple[int, ...], Spec], ...]
    decision: Decision
    axes: tuple[tuple[str, int], ...]
    plans: tuple[tuple[Problem, Served], ...]
    moves: tuple[str, ...]

    def __str__(self) -> str:
        split = {f: axes for f, axes in self.decision.split.items() if axes}
        return f"{self.name} {self.operands} -> {self.results}: {split}"


_recordings: list[list[Partitioned]] = []
_local = threading.local()  # ``plans`` of the call that a thread lowers


def note(problem: Problem | None, served: Served) -> None:
    """Tells what serves a problem, where one device's program is lowered."""
    plans = getattr(_local, "plans", None)
    if plans is not None and problem is not None:
        plans.append((problem, served))


@contextlib.contextmanager
def _noting() -> Generator[list[tuple[Problem, Served]]]:
    plans: list[tuple[Problem, Served]] = []
    outer = getattr(_local, "plans", None)
    _local.plans = plans
    try:
        yield plans
    finally:
        _local.plans = outer


@contextlib.contextmanager
def recording() -> Generator[list[Partitioned]]:
    """Records calls partitioned inside a ``with`` block, in any thread."""
    found: list[Partitioned] = []
    _recordings.append(found)
    try:
        yield found
    finally:
        _recordings[:] = [one for one in _recordings if one is not found]


def _partition(
    key: str,
    operands: Sequence[jax.ShapeDtypeStruct],
    operand_tilings: Sequence[np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    result_tilings: Sequence[np.ndarray],
) -> Any:
    """The call's program on one device, see ``_compat_partition.register``."""
    meaning = _meanings.get(key)
    if meaning is None:
        raise ValueError(
            f"{key.partition(':')[0]} was lowered by another process, or long ago; "
            "lower the program again before it is compiled"
        )
    try:
        return _split(key, meaning, operands, operand_tilings, results, result_tilings)
    except Exception as e:
        faults.reported(meaning.primitive.name.removeprefix("tracea_"), e, "split")
    return _whole(meaning, operands, results, operand_tilings, result_tilings)


def _whole(
    meaning: Meaning,
    operands: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[jax.ShapeDtypeStruct],
    *tilings: Sequence[np.ndarray],
) -> Any:
    """The program of a call that XLA computes on each device, from whole operands."""
    count = max((of.shape[1] for some in tilings for of in some), default=1)
    ins, outs = (tuple(((),) * len(x.shape) for x in xs) for xs in (operands, results))
    program = functools.partial(meaning.primitive.bind, **meaning.params)
    settings = dataclasses.replace(meaning.settings, implementation="xla")
    with options(**dataclasses.asdict(settings)), planning(meaning.device):
        made = _compat_partition.module(
            program, operands, {"all": count}, meaning.platform
        )
    return made, {"all": count}, ins, outs


def _split(
    key: str,
    meaning: Meaning,
    operands: Sequence[jax.ShapeDtypeStruct],
    operand_tilings: Sequence[np.ndarray],
    results: Sequence[jax.ShapeDtypeStruct],
    result_tilings: Sequence[np.ndarray],
) -> Any:
    """The program of a call that its rule splits."""
    rule = meaning.rule
    mesh, specs = meshes.axes_of([*operand_tilings, *result_tilings])
    arrays = list(zip((*rule.operands, *rule.results), specs, strict=True))
    mesh, specs = meshes.joined(mesh, arrays, rule.sizes)
    given, wanted = specs[: len(operands)], specs[len(operands) :]
    nbytes = [math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)]
    decision = sharding.decide(rule, given, wanted, mesh, nbytes)
    for refusal in sharding.refusals(rule, decision, given):
        _warn(meaning, refusal, mesh)
    ins, outs = decision.operands(rule), decision.results(rule)
    local = [_part(x, spec, mesh) for x, spec in zip(operands, ins, strict=True)]
    program = functools.partial(_program, meaning, Device(decision=decision, rule=rule))
    # Planned with the settings of the whole program, wherever it is compiled.
    settings = dataclasses.asdict(meaning.settings)
    with options(**settings), planning(meaning.device), _noting() as plans:
        made = _compat_partition.module(program, local, mesh, meaning.platform)
    done = Partitioned(
        key=key,
        name=meaning.primitive.name,
        operands=_described(operands, given),
        results=_described(results, wanted),
        decision=decision,
        axes=tuple(meaning.axes.items()),
        plans=tuple(dict(plans).items()),
        moves=moves(
            rule, decision, given, wanted, lambda axes: _named(axes, mesh, meaning.axes)
        ),
    )
    for found in _recordings:
        found.append(done)
    return made, mesh, ins, outs


def _described(
    arrays: Sequence[jax.ShapeDtypeStruct], specs: Sequence[Spec]
) -> tuple[tuple[tuple[int, ...], Spec], ...]:
    return tuple((x.shape, spec) for x, spec in zip(arrays, specs, strict=True))


def _part(x: jax.ShapeDtypeStruct, spec: Spec, mesh: sharding.Mesh) -> Any:
    counts = [math.prod(mesh[a] for a in axes) for axes in spec]
    shape = [n // count for n, count in zip(x.shape, counts, strict=True)]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _program(meaning: Meaning, device: Device, *operands: jax.Array) -> list[jax.Array]:
    """The results of one device."""
    if meaning.rule.local is not None:
        return meaning.rule.local(operands, device)
    results = meaning.primitive.bind(*operands, **meaning.params)
    return [device.complete(y, i) for i, y in enumerate(results)]


def _warn(meaning: Meaning, refusal: Refusal, mesh: sharding.Mesh) -> None:
    axes = _named(refusal.axes, mesh, meaning.axes)
    warnings.warn(
        f"{meaning.primitive.name.removeprefix('tracea_')} gathers an operand that is "
        f"split over {axes}: {refusal.reason}",
        stacklevel=2,
    )


def _named(axes: Axes, mesh: sharding.Mesh, known: Mapping[str, int]) -> str:
    """Axes of a mesh by the program's names, or else by their size."""
    strides, names = _strides(mesh), _strides(known)
    found = [
        name
        for axis in axes
        for name, stride in names.items()
        if stride < strides[axis] * mesh[axis] and strides[axis] < stride * known[name]
    ]
    if math.prod(known.values()) != math.prod(mesh.values()) or not found:
        count = math.prod(mesh[axis] for axis in axes)
        return f"{count} devices"
    return f"mesh axis {', '.join(repr(name) for name in dict.fromkeys(found))}"


def _strides(mesh: Mapping[str, int]) -> dict[str, int]:
    sizes = list(mesh.values())
    return {name: math.prod(sizes[i + 1 :]) for i, name in enumerate(mesh)}

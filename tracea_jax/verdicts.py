"""Verdicts: what was found when whole programs were raced against plain JAX.

    what transform makes of a program -> its fingerprint -> the recorded race -> Verdict

``transform`` leaves the sites that a verdict leaves, and ``explain`` shows it. The race
itself is in ``campaign``, which writes with ``record``.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import jax

from tracea_jax import knowledge
from tracea_jax.device import Device
from tracea_jax.options import Options, current
from tracea_jax.page import Page, Printable, times
from tracea_jax.policy import Choice
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.rewrite.fingerprint import fingerprint
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import Environment, environment
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.program import SPLICED, ProgramConfig

# The classes of sites to leave, in place of what any verdict says; None: ask verdicts.
leaving = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict(Printable):
    """The outcome of a race of a whole program.

    Attributes:
      ops: that the program might use.
      without: classes of sites that run as they are written; see ``rewrite.fewer``.
      ratio: the quotient of ``plain_us`` and ``time_us``: above 1, the program as it is
        kept is faster than plain.
      time_us, plain_us: wall-clock time of one execution among many in a row.
      environment: where it was measured.
      written: when, UTC, ISO 8601.
    """

    ops: tuple[str, ...]
    without: tuple[str, ...]
    ratio: float
    time_us: float
    plain_us: float
    environment: Environment
    written: str = ""

    @classmethod
    def of_entry(cls, entry: Entry) -> Verdict | None:
        """The verdict of a cache entry; None if it lacks a time."""
        best = entry.best
        if not (best.time_us and best.xla_us):
            return None
        return cls(
            ops=tuple(entry.problem.get("ops", ())),
            without=tuple(best.config.get("without", ())),
            ratio=best.xla_us / best.time_us,
            time_us=best.time_us,
            plain_us=best.xla_us,
            environment=entry.environment,
            written=entry.written,
        )

    @property
    def leaves_all(self) -> bool:
        """Returns whether the program runs as it is written."""
        return set(self.ops) <= set(self.without)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**data, "environment": self.environment.to_json()}

    @property
    def page(self) -> Page:
        if self.leaves_all:
            plain = times.microseconds(self.plain_us)
            return Page((f"plain is fastest, {plain} wall clock",))
        ours, plain = map(times.microseconds, (self.time_us, self.plain_us))
        ratio = times.ratio(self.plain_us, self.time_us)
        left = f"without {', '.join(self.without)}" if self.without else "every site"
        return Page(
            (f"{ratio} as fast as plain ({ours}, plain {plain}, wall clock), {left}",)
        )


def problem_of(jaxpr: Any, ops: tuple[str, ...], after_grad: bool) -> ProgramProblem:
    """The key of a program, under the settings in force.

    Args:
      jaxpr: what ``transform`` makes of it when every site is taken.
      ops, after_grad: as given to ``transform``.
    """
    return ProgramProblem(
        jaxpr=fingerprint(jaxpr),
        ops=ops,
        after_grad=after_grad,
        jax=jax.__version__,
        deterministic=current().determinism is True,
    )


def verdict(
    jaxpr: Any, ops: tuple[str, ...], after_grad: bool, device: Device
) -> Verdict | None:
    """The verdict on a program on a device.

    Nothing is, where an implementation is asked for in the settings: that was not what
    raced.

    Args:
      jaxpr, ops, after_grad: as for ``problem_of``.
      device: that the program is compiled for.
    """
    # Hashing a program takes time, and other processes may not trace this one.
    if not _any_raced(device):
        return None
    settings = current()
    known = knowledge.agreed(settings, device)
    entry = known.entry(problem_of(jaxpr, ops, after_grad), device)
    return None if entry is None else Verdict.of_entry(entry)


def are_known(device: Device) -> bool:
    """True if any program may have a verdict on a device, or is told what to leave."""
    return leaving.value is not None or _any_raced(device)


def _any_raced(device: Device) -> bool:
    settings = current()
    if settings.implementation is not None:
        return False
    return knowledge.known(settings).has_any(ProgramProblem.op, device)


def left_of(
    jaxpr: Any, ops: tuple[str, ...], after_grad: bool, device: Device
) -> tuple[str, ...]:
    """The classes of sites to leave, as ``leaving`` or a verdict says.

    Arguments are those of ``verdict``.
    """
    if leaving.value is not None:
        return leaving.value
    found = verdict(jaxpr, ops, after_grad, device)
    return () if found is None else found.without


def record(
    problem: ProgramProblem,
    device: Device,
    settings: Options,
    best: Best,
    observations: tuple[Observation, ...],
    about: dict[str, Any],
) -> Entry:
    """Keeps the outcome of a race.

    Args:
      problem: the program.
      device: it raced on.
      settings: where the cache is.
      best: what is kept.
      observations: everything that raced.
      about: remarks of the tuning, plain data.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    entry = Entry(
        problem=problem.to_json(),
        environment=environment(device),
        best=best,
        observations=observations,
        tuner=about,
        written=now,
    )
    return knowledge.known(settings).own.record(entry)


def name_of(
    problem: ProgramProblem, without: tuple[str, ...], device: Device
) -> dict[str, Any]:
    """The fields by which records tell a program that leaves these classes."""
    choice = Choice(variant=SPLICED.name, config=ProgramConfig(without=without))
    return named(problem, choice, device)

"""Records of a problem: observations and the best of the last race.

An entry is one JSON file. Its first line holds schema and checksum (of all that comes
after that line), its second the answer, the rest one observation a line, so that a
lookup need not parse what only a tuner reads.

Readers carry along fields and kinds of failure that they do not know, so a new one
needs no new schema; the schema is raised when an older reader would misunderstand the
fields that it knows.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Iterable
from typing import Any

from tracea_jax import schema
from tracea_jax.page import times
from tracea_jax.tuning.store.environment import Environment, canonical
from tracea_jax.tuning.store.formats import UNREADABLE, Damaged, checked, signed
from tracea_jax.tuning.store.protocols import UNTUNED, by_protocol, deciding

FAILURES = (
    "compile_error",
    "timeout",
    "unlaunchable",
    "launch_error",
    "wrong_result",
    "nan",
    "too_slow",
)
UNKNOWN = "unknown"  # a kind that a newer version wrote; it may be any
# No later measurement can outweigh these.
DISQUALIFYING = ("wrong_result", "nan", UNKNOWN)

# What files may say, wherever they come from.
_TIME_US = schema.optional(schema.number(1e-6, 1e15))
_RATIO = schema.optional(schema.number(1e-12, 1e12))
_OF_CONFIG = {"variant": schema.line, "config": schema.mapping}
_NAMED = {**_OF_CONFIG, "code": schema.line}
OBSERVATION = schema.Table(
    name="observation",
    fields={
        **_NAMED,
        **dict.fromkeys(("time_us", "cold_us"), _TIME_US),
        "failure": schema.optional(schema.word),
        "message": schema.anything,
        "repeats": schema.integer(0, 1 << 53),
        "extra": schema.Table(
            name="extra",
            fields={
                "drift": schema.number(1e-6, 1e6),
                "protocol": schema.line,
                "abandoned": schema.flag,
            },
        ),
    },
    required=frozenset(_OF_CONFIG),
)
BEST = schema.Table(
    name="best",
    fields={
        **_NAMED,
        **dict.fromkeys(("time_us", "xla_us", "cold_us", "xla_cold_us"), _TIME_US),
        **dict.fromkeys(("kernel_us", "xla_kernel_us"), _TIME_US),
        "ratio": _RATIO,
        "runner_up": schema.Table(
            name="runner_up", fields={**_NAMED, "time_us": _TIME_US}
        ),
        **dict.fromkeys(("origin", "goal"), schema.line),
    },
    required=frozenset(_OF_CONFIG),
)
ENTRY = schema.Table(
    name="entry",
    fields={
        "problem": schema.Table(
            name="problem", fields={"op": schema.line}, required=frozenset({"op"})
        ),
        # These have tables of their own.
        **dict.fromkeys(("environment", "best", "observations"), lambda value: None),
        "verified": schema.mapping,
        "tuner": schema.Table(
            name="tuner", fields={"merged": schema.sequence(schema.mapping, 10_000)}
        ),
        "written": schema.line,
    },
    required=frozenset({"problem", "environment", "best"}),
)
_OBSERVATIONS = 1 << 20  # of one entry


def _unknown() -> Any:
    """A field that keeps what a newer version wrote; no part of the value."""
    return dataclasses.field(default_factory=dict, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One config, measured or failed.

    Attributes:
      variant, config: what was measured, the config as plain data.
      code: hash of what it compiled, see ``store.code``; "" if nothing of ours.
      time_us: median time of one execution among many in a row; None if it failed.
      cold_us: median time of a single execution on cold caches; None if not measured.
      failure: one of ``FAILURES``, or None; ``UNKNOWN`` if ``unknown`` has a kind that
        only a newer version knows.
      message: what the failure said.
      repeats: executions behind ``time_us``; 0 for a failure.
      extra: protocol and other remarks, plain data.
      unknown: fields of a newer version, which a rewrite keeps.
    """

    variant: str
    config: dict[str, Any]
    code: str = ""
    time_us: float | None = None
    failure: str | None = None
    message: str = ""
    repeats: int = 0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    cold_us: float | None = None
    unknown: dict[str, Any] = _unknown()

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", schema.visible(self.message))
        known = FAILURES if "failure" not in self.unknown else (UNKNOWN,)
        if self.failure is not None and self.failure not in known:
            raise ValueError(
                f"failure={self.failure!r} is unknown; it must be one of "
                + ", ".join(FAILURES)
            )
        measured = self.time_us is not None and 0 < self.time_us < math.inf
        if measured == (self.failure is not None):
            raise ValueError(
                f"an observation has a positive time or a failure, not {self.time_us=} "
                f"with {self.failure=}"
            )
        if self.cold_us is not None and not (measured and 0 < self.cold_us < math.inf):
            raise ValueError(f"{self.cold_us=} must be a positive time beside time_us")

    @classmethod
    def from_json(cls, data: Any) -> Observation:
        """The inverse of ``observation_json``.

        Raises:
          ValueError: if it is no observation.
        """
        known, unknown = OBSERVATION.split(data)
        kind = known.get("failure")
        if kind is not None and kind not in FAILURES:
            known["failure"], unknown["failure"] = UNKNOWN, kind
        return cls(**known, unknown=unknown)

    @property
    def identity(self) -> str:
        """Equal for observations of the same config."""
        return identity(self.variant, self.config)

    @property
    def compiled(self) -> tuple[str, str]:
        """Equal for observations of the same config made with the same kernels."""
        return self.identity, self.code

    @property
    def is_disqualified(self) -> bool:
        """Returns whether no later measurement can outweigh the failure."""
        return self.failure in DISQUALIFYING


def identity(variant: str, config: dict[str, Any]) -> str:
    return f"{variant} {canonical(config)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The answer: the winner of the last race.

    Attributes:
      variant, config: what to run, the config as plain data.
      code: hash of what it compiled when it raced, as of an observation.
      time_us, xla_us: times in the race; None if there was none.
      cold_us, xla_cold_us: the same of single executions on cold caches.
      ratio: median over the rounds of XLA's time by ours, of executions in a row; it is
        near the quotient of both times.
      runner_up: variant, config, code and time_us of the next best; empty if there is
        none.
      origin: how the winner came into the race, as the tuner names it.
      goal: what the winner was chosen for, as the tuner names it.
      kernel_us, xla_kernel_us: kernel times, which decide where they are known; None if
        they were not measured.
      unknown: fields of a newer version, which a rewrite keeps.
    """

    variant: str
    config: dict[str, Any]
    code: str = ""
    time_us: float | None = None
    xla_us: float | None = None
    ratio: float | None = None
    runner_up: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: str = "xla"
    cold_us: float | None = None
    xla_cold_us: float | None = None
    goal: str = "latency"
    kernel_us: float | None = None
    xla_kernel_us: float | None = None
    unknown: dict[str, Any] = _unknown()

    def __str__(self) -> str:
        config = ", ".join(f"{name} {value}" for name, value in self.config.items())
        parts = [f"{self.variant} [{config}]" if config else self.variant]
        ours, xla = self.decisive
        if ours is not None:
            parts.append(times.microseconds(ours))
        if xla is not None and ours is not None and self.variant != "xla":
            parts.append(f"XLA {times.microseconds(xla)}, {times.ratio(xla, ours)}")
        return schema.one_line(", ".join(parts))

    @property
    def compiled(self) -> tuple[str, str]:
        """As of an observation."""
        return identity(self.variant, self.config), self.code

    @property
    def protocol(self) -> str:
        """The deciding protocol: "kernels", or the goal's "steady", "cold", ..."""
        if self.kernel_us is not None and self.xla_kernel_us is not None:
            return "kernels"
        return deciding(self.goal, has_cold=self.cold_us is not None)

    @property
    def decisive(self) -> tuple[float | None, float | None]:
        """The times that decided, ours and XLA's, in microseconds."""
        if self.protocol == "kernels":
            return self.kernel_us, self.xla_kernel_us
        ours = by_protocol(self.protocol, self.time_us, self.cold_us)
        return ours, by_protocol(self.protocol, self.xla_us, self.xla_cold_us)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        return _plain(self)

    @classmethod
    def from_json(cls, data: Any) -> Best:
        """The inverse of ``to_json``.

        Raises:
          schema.Mistyped: if it is no answer.
        """
        known, unknown = BEST.split(data)
        return cls(**known, unknown=unknown)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Everything known about one problem in one environment.

    Attributes:
      problem: ``Problem.to_json()``.
      environment: where it was measured.
      best: the answer.
      observations: one for each config tried, sorted by identity.
      verified: what the correctness check of the winner said; empty if XLA won.
      tuner: version, seed, effort, evals, wall_s, stop of the last tuning.
      written: UTC time, ISO 8601 with microseconds.
      unknown: fields of a newer version, which a rewrite keeps.
    """

    problem: dict[str, Any]
    environment: Environment
    best: Best
    observations: tuple[Observation, ...] = ()
    verified: dict[str, Any] = dataclasses.field(default_factory=dict)
    tuner: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: str = ""
    unknown: dict[str, Any] = _unknown()

    def to_json(self) -> dict[str, Any]:
        """The entry as plain data."""
        data = _plain(self)
        data["environment"] = self.environment.to_json()
        data["best"] = self.best.to_json()
        data["observations"] = [observation_json(o) for o in self.observations]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Entry:
        """The inverse of ``to_json``.

        Raises:
          ValueError: if it is no entry.
        """
        known, unknown = ENTRY.split(data)
        observations = known.get("observations", [])
        if not isinstance(observations, list) or len(observations) > _OBSERVATIONS:
            raise schema.Mistyped(f"an entry has at most {_OBSERVATIONS} observations")
        fields = {
            **known,
            "environment": Environment.from_json(known["environment"]),
            "best": Best.from_json(known["best"]),
            "observations": tuple(map(Observation.from_json, observations)),
        }
        return cls(**fields, unknown=unknown)

    def to_bytes(self) -> bytes:
        """The content of the entry's file."""
        head = self.to_json()
        del head["observations"]
        lines = ",\n".join(observation_line(o) for o in self.observations)
        return signed(f'"head": {canonical(head)},\n"observations": [\n{lines}\n]}}\n')

    @classmethod
    def from_bytes(cls, data: bytes, *, complete: bool = True) -> Entry:
        """The inverse of ``to_bytes``; without observations unless ``complete``.

        Raises:
          NewerSchema: if only a newer version can read it.
          Damaged: if it is not what was written.
        """
        body = checked(data)
        try:
            end = body.index(b"\n")
            head = json.loads(body[len(b'"head": ') : end - 1])
            if complete:
                rest = json.loads(b"{" + body[end + 1 :])
                head["observations"] = rest["observations"]
            return cls.from_json(head)
        except UNREADABLE as e:
            raise Damaged(str(e) or type(e).__name__) from e


def _plain(record: Best | Entry) -> dict[str, Any]:
    """The fields of a record with those of a newer version in their places."""
    names = (f.name for f in dataclasses.fields(record) if f.name != "unknown")
    return {**{name: getattr(record, name) for name in names}, **record.unknown}


def observation_json(observation: Observation) -> dict[str, Any]:
    """The observation as plain data, without what has its default."""
    data = {"variant": observation.variant, "config": observation.config}
    optional = ("code", "time_us", "failure", "message", "repeats", "extra", "cold_us")
    for name in optional:
        if value := getattr(observation, name):
            data[name] = value
    return data | observation.unknown


def observation_line(observation: Observation) -> str:
    """The observation as one line of JSON."""
    return canonical(observation_json(observation))


def parse_observation(line: bytes | str) -> Observation | None:
    """The observation of one line; None if the line is torn or foreign."""
    try:
        return Observation.from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None


def union(*groups: Iterable[Observation]) -> tuple[Observation, ...]:
    """All observations, the better-measured one of each config, sorted by identity.

    Those of the same config that was compiled from other kernels are kept beside it.
    """
    kept: dict[tuple[str, str], Observation] = {}
    for observation in (o for group in groups for o in group):
        name = observation.compiled
        if name not in kept or _weight(observation) > _weight(kept[name]):
            kept[name] = observation
    return tuple(kept[name] for name in sorted(kept))


def _weight(observation: Observation) -> tuple[bool, int, bool, float, bool, str]:
    """A total order, so that a union does not depend on the order of its parts."""
    return (
        observation.is_disqualified,
        observation.repeats,
        observation.failure is None,
        -(observation.time_us or 0.0),
        observation.cold_us is not None,
        observation_line(observation),
    )


def after(written: str, now: str, stored: str) -> str:
    """When an entry that is recorded now was written, given what is stored.

    What is recorded later must count as later, also when a clock was wrong: a stored
    time in the future is one that the clock had before it was set back.
    """
    if stored <= max(written, now):
        return written
    try:
        moment = datetime.datetime.fromisoformat(stored)
        moment += datetime.timedelta(microseconds=1)
    except (ValueError, OverflowError):
        return f"{stored}+"
    return max(moment.isoformat(timespec="microseconds"), f"{stored}+")


def merge(one: Entry, other: Entry) -> Entry:
    """Both entries' observations with the best of the more recent race.

    If the union says that this best is wrong, the older best is taken, else XLA.
    """
    newer, older = sorted((one, other), key=lambda e: (e.written, e.to_bytes()))[::-1]
    observations = union(newer.observations, older.observations)
    failed = {o.compiled for o in observations if o.failure is not None}
    for entry in (newer, older):
        if entry.best.compiled not in failed:
            best, verified = entry.best, entry.verified
            untuned = entry.tuner.get(UNTUNED)  # in the race of this best
            break
    else:
        best, verified = Best(variant="xla", config={}, xla_us=newer.best.xla_us), {}
        untuned = None
    tuner = {k: v for k, v in newer.tuner.items() if k != UNTUNED}
    return dataclasses.replace(
        newer,
        best=best,
        verified=verified,
        observations=observations,
        tuner=tuner if untuned is None else {**tuner, UNTUNED: untuned},
        unknown={**older.unknown, **newer.unknown},
    )

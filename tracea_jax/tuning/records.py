"""What is remembered about a problem: observations and the best of the last race.

An entry is one JSON file. Its first line holds schema and checksum (of all that comes
after that line), its second the answer, the rest one observation a line, so that a
lookup need not parse what only a tuner reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

from tracea_jax.tuning.environment import SCHEMA, Environment, canonical

FAILURES = (
    "compile_error",
    "timeout",
    "unlaunchable",
    "launch_error",
    "wrong_result",
    "nan",
    "too_slow",
)
DISQUALIFYING = ("wrong_result", "nan")  # no later measurement can outweigh these


class Damaged(ValueError):
    """The bytes are not an entry as it was written."""


class NewerSchema(ValueError):
    """The file was written by a newer version of the package."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One config, measured or failed.

    Attributes:
      variant, config: what was measured, the config as plain data.
      time_us: median time of one execution; None if it failed.
      failure: one of ``FAILURES``, or None.
      message: what the failure said.
      repeats: executions behind ``time_us``; 0 for a failure.
      extra: protocol and other remarks, plain data.
    """

    variant: str
    config: dict[str, Any]
    time_us: float | None = None
    failure: str | None = None
    message: str = ""
    repeats: int = 0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.failure is not None and self.failure not in FAILURES:
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

    @property
    def identity(self) -> str:
        """Equal for observations of the same config."""
        return identity(self.variant, self.config)


def identity(variant: str, config: dict[str, Any]) -> str:
    return f"{variant} {canonical(config)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The answer: the winner of the last race.

    Attributes:
      variant, config: what to run, the config as plain data.
      time_us, xla_us: medians in the race; None if there was none.
      ratio: median over the rounds of XLA's time by ours; above 1, ours is faster.
      runner_up: variant, config and time_us of the next best; empty if there is none.
      origin: how the winner came into the race: "sweep", "hero" or "xla".
    """

    variant: str
    config: dict[str, Any]
    time_us: float | None = None
    xla_us: float | None = None
    ratio: float | None = None
    runner_up: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: str = "xla"


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
    """

    problem: dict[str, Any]
    environment: Environment
    best: Best
    observations: tuple[Observation, ...] = ()
    verified: dict[str, Any] = dataclasses.field(default_factory=dict)
    tuner: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: str = ""

    def to_bytes(self) -> bytes:
        """The content of the entry's file."""
        head = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "observations"
        }
        head["environment"] = dataclasses.asdict(self.environment)
        head["best"] = dataclasses.asdict(self.best)
        lines = ",\n".join(observation_line(o) for o in self.observations)
        body = f'"head": {canonical(head)},\n"observations": [\n{lines}\n]}}\n'.encode()
        checksum = f"sha256:{hashlib.sha256(body).hexdigest()}"
        first = f'{{"schema": {SCHEMA}, "checksum": "{checksum}",\n'
        return first.encode() + body

    @classmethod
    def from_bytes(cls, data: bytes, *, complete: bool = True) -> Entry:
        """The inverse of ``to_bytes``; without observations unless ``complete``.

        Raises:
          NewerSchema: if only a newer version can read it.
          Damaged: if it is not what was written.
        """
        first, _, body = data.partition(b"\n")
        try:
            header = json.loads(first.rstrip(b",") + b"}")
            if header["schema"] != SCHEMA:
                raise Damaged(f"schema {header['schema']!r}")
            if header["checksum"] != f"sha256:{hashlib.sha256(body).hexdigest()}":
                raise Damaged("its checksum is wrong")
            head = json.loads(body[len(b'"head": ') : body.index(b"\n") - 1])
            head["environment"] = Environment(**head["environment"])
            head["best"] = Best(**head["best"])
            if complete:
                observations = json.loads(b"{" + body[body.index(b"\n") + 1 :])
                head["observations"] = tuple(
                    Observation(**o) for o in observations["observations"]
                )
            return cls(**head)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            if (newer := _schema(data)) is not None and newer > SCHEMA:
                raise NewerSchema(f"schema {newer} is newer than {SCHEMA}") from None
            raise Damaged(str(e) or type(e).__name__) from e


def _schema(data: bytes) -> int | None:
    """The schema number of any JSON object that has one, whatever its layout."""
    for text in (data, data.partition(b"\n")[0].rstrip(b",") + b"}"):
        try:
            schema = json.loads(text).get("schema")
        except (ValueError, AttributeError, RecursionError):
            continue
        if isinstance(schema, int):
            return schema
    return None


def observation_line(observation: Observation) -> str:
    """The observation as one line of JSON, without what has its default."""
    line = {"variant": observation.variant, "config": observation.config}
    for name in ("time_us", "failure", "message", "repeats", "extra"):
        if value := getattr(observation, name):
            line[name] = value
    return canonical(line)


def parse_observation(line: bytes | str) -> Observation | None:
    """The observation of one line; None if the line is torn or foreign."""
    try:
        return Observation(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None


def union(*groups: Iterable[Observation]) -> tuple[Observation, ...]:
    """All observations, the better-measured one of each config, sorted by identity."""
    kept: dict[str, Observation] = {}
    for observation in (o for group in groups for o in group):
        name = observation.identity
        if name not in kept or _weight(observation) > _weight(kept[name]):
            kept[name] = observation
    return tuple(kept[name] for name in sorted(kept))


def _weight(observation: Observation) -> tuple[bool, int, bool, float, str]:
    """A total order, so that a union does not depend on the order of its parts."""
    return (
        observation.failure in DISQUALIFYING,
        observation.repeats,
        observation.failure is None,
        -(observation.time_us or 0.0),
        observation_line(observation),
    )


def merge(one: Entry, other: Entry) -> Entry:
    """Both entries' observations with the best of the more recent race.

    If the union says that this best is wrong, the older best is taken, else XLA.
    """
    newer, older = sorted((one, other), key=lambda e: (e.written, e.to_bytes()))[::-1]
    observations = union(newer.observations, older.observations)
    failed = {o.identity for o in observations if o.failure is not None}
    for source in (newer, older):
        if identity(source.best.variant, source.best.config) not in failed:
            best, verified = source.best, source.verified
            break
    else:
        best, verified = Best(variant="xla", config={}, xla_us=newer.best.xla_us), {}
    return dataclasses.replace(
        newer, best=best, verified=verified, observations=observations
    )

"""The tuning cache as the rest of the package sees it: answers that do not change."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.environment import (
    Environment,
    canonical,
    environment,
    environment_key,
    problem_key,
)
from tracea_jax.tuning.files import Journal
from tracea_jax.tuning.records import (
    Best,
    Damaged,
    Entry,
    NewerSchema,
    Observation,
    merge,
    union,
)
from tracea_jax.tuning.store import Name, Store, warn_once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A remembered choice, legal for the problem that was asked.

    Attributes:
      choice: variant and config.
      origin: "tuned" on this machine, or "shipped" with the package.
      time_us, xla_us, ratio: as in ``Best``.
    """

    choice: Choice
    origin: str
    time_us: float | None
    xla_us: float | None
    ratio: float | None


# What a directory could not take, by directory, for the life of the process: the next
# snapshot of a read-only cache still has what was tuned.
_unwritten: dict[pathlib.Path, dict[Name, Entry]] = {}


class Database:
    """A snapshot of the tuning cache in ``<directory>/tuned``.

    The first lookup of a problem reads the disk and settles the answer, also if there
    is none: a program lowers the same problem the same way from start to end. What is
    recorded later is seen by the next ``Database``.
    """

    def __init__(
        self, directory: pathlib.Path | None, shipped: tuple[pathlib.Path, ...] = ()
    ) -> None:
        """Reads and creates nothing yet.

        Args:
          directory: the user's cache, created by the first write; None keeps everything
            in memory, in this instance.
          shipped: read-only directories with the layout of ``<directory>/tuned``, asked
            in this order when the user's has no answer.
        """
        self.directory = directory
        self._store: Store | None = None
        self._memory: dict[Name, Entry] = {}
        if directory is not None:
            self._store = Store(directory / "tuned")
            self._memory = _unwritten.setdefault(directory.absolute(), {})
        self._shipped = tuple(Store(path, read_only=True) for path in shipped)
        self._answers: dict[Device, dict[Problem, Answer | str]] = {}
        self._fastest: dict[tuple[Problem, Device, tuple[str, ...]], Answer | None] = {}

    def lookup(self, problem: Problem, device: Device) -> Answer | None:
        """The remembered answer or None; always the same for one instance.

        An entry that is damaged, written by a newer version, or no longer legal on the
        device is passed over; ``why_missed`` tells.
        """
        try:
            answer = self._answers[device][problem]
        except KeyError:
            answer = self._settle(problem, device)
        return None if isinstance(answer, str) else answer

    def fastest(
        self, problem: Problem, device: Device, allowed: tuple[str, ...]
    ) -> Answer | None:
        """The fastest measured choice among some variants; settled like ``lookup``.

        Where the answer is another variant's, that is the best observation of these.
        """
        answer = self.lookup(problem, device)
        if answer is None or answer.choice.variant in allowed:
            return answer
        key = (problem, device, allowed)
        if key not in self._fastest:
            self._fastest[key] = self._best_observed(*key, xla_us=answer.xla_us)
        return self._fastest[key]

    def _best_observed(
        self,
        problem: Problem,
        device: Device,
        allowed: tuple[str, ...],
        xla_us: float | None,
    ) -> Answer | None:
        observed = self.observations(problem, device)
        timed = [(o.time_us, o) for o in observed if o.time_us and o.variant in allowed]
        if not timed:
            return None
        time_us, best = min(timed, key=lambda pair: (pair[0], pair[1].identity))
        best = Best(
            variant=best.variant, config=best.config, time_us=time_us, xla_us=xla_us
        )
        answer = _legal(best, "tuned", problem, device)
        return answer if isinstance(answer, Answer) else None

    def why_missed(self, problem: Problem, device: Device) -> str | None:
        """Why ``lookup`` has no answer, as a phrase; None if it has one."""
        self.lookup(problem, device)
        answer = self._answers[device][problem]
        return answer if isinstance(answer, str) else None

    def observations(self, problem: Problem, device: Device) -> tuple[Observation, ...]:
        """All that was measured on this machine, finished or not; read at each call."""
        name = _name(problem.to_json(), environment_key(problem.op, device))
        memory = self._memory.get(name)
        stored = self._store.observations(name) if self._store else ()
        return union(memory.observations if memory else (), stored)

    def journal(self, problem: Problem, device: Device) -> Journal:
        """A new journal for one tuning; it keeps nothing if it cannot be written."""
        if self._store is not None:
            place = environment(problem.op, device)
            try:
                return self._store.journal(_name(problem.to_json(), place.key), place)
            except OSError as e:
                self._warn_unwritten(e)
        return Journal(None)

    def append(self, journal: Journal, observations: tuple[Observation, ...]) -> None:
        """Appends to a journal; a full disk costs a warning, not the tuning."""
        try:
            journal.append(observations)
        except OSError as e:
            self._warn_unwritten(e)

    def record(self, entry: Entry, journal: Journal | None = None) -> Entry:
        """Stores an entry, united with what is stored already; returns the union.

        Journals whose writers are gone are folded in and removed, as is ``journal``,
        the caller's own. If the directory cannot be written, the entry is kept for the
        life of the process, and a warning says so once.
        """
        name = _name(entry.problem, entry.environment.key)
        if name in self._memory:
            entry = merge(entry, self._memory[name])
        if self._store is not None:
            try:
                entry = self._store.write(name, entry, journal)
            except (OSError, NewerSchema) as e:
                self._warn_unwritten(e)
            else:
                self._memory.pop(name, None)
                return entry
        self._memory[name] = entry
        return entry

    def entries(self, *, complete: bool = False) -> Iterator[Entry]:
        """The user's entries of all environments and ops.

        Without their observations unless ``complete``: listing thousands is quick.
        """
        yield from tuple(self._memory.values())
        if self._store is None:
            return
        for name in self._store.names():
            if name in self._memory:
                continue
            try:
                entry = self._store.read(name, complete=complete)
            except (Damaged, NewerSchema):
                continue
            if entry is not None:
                yield entry

    def remove(self, entry: Entry) -> bool:
        """Forgets an entry of the user's; whether it was there."""
        name = _name(entry.problem, entry.environment.key)
        in_memory = self._memory.pop(name, None) is not None
        return (self._store is not None and self._store.remove(name)) or in_memory

    def _settle(self, problem: Problem, device: Device) -> Answer | str:
        """Finds the answer, or the reason for having none, and fixes it."""
        asked = problem.to_json()
        name = _name(asked, environment_key(problem.op, device))
        memory = self._memory.get(name)
        answer: Answer | str = "it was never tuned in this environment"
        if memory is not None:
            answer = _legal(memory.best, "tuned", problem, device)
        stores = [("tuned", self._store)] if self._store else []
        for origin, store in (*stores, *(("shipped", s) for s in self._shipped)):
            if isinstance(answer, Answer):
                break
            try:
                entry = store.read(name, complete=False)
            except (Damaged, NewerSchema) as e:
                answer = f"the {origin} entry cannot be read: {e}"
                continue
            if entry is not None and canonical(entry.problem) != canonical(asked):
                answer = f"the {origin} entry is about another problem"
            elif entry is not None:
                answer = _legal(entry.best, origin, problem, device)
        # setdefault: if two threads come here at once, both get the first one's answer.
        return self._answers.setdefault(device, {}).setdefault(problem, answer)

    def _warn_unwritten(self, error: Exception) -> None:
        warn_once(
            f"the tuning cache {self.directory} cannot be written ({_brief(error)}); "
            "results are kept in memory until this process ends"
        )


def _brief(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _name(problem: dict[str, Any], environment_key: str) -> Name:
    return Name(
        environment=environment_key, op=problem["op"], problem=problem_key(problem)
    )


def _legal(best: Best, origin: str, problem: Problem, device: Device) -> Answer | str:
    """The answer that ``best`` stands for, or why it may not be used any more."""
    try:
        variant = variants.get(problem.op, best.variant)
        config = variants.config_from_json(variant, _hashable(best.config))
        if (reason := variant.why_not(problem, device)) is not None:
            return f"the {origin} answer {best.variant} cannot run: {reason}"
        variant.check(problem, config, device)
    except (ValueError, TypeError) as e:
        return f"the {origin} answer {best.variant} is not legal: {e}"
    return Answer(
        choice=Choice(variant=best.variant, config=config),
        origin=origin,
        time_us=best.time_us,
        xla_us=best.xla_us,
        ratio=best.ratio,
    )


def _hashable(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where configs have tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}


__all__ = [
    "Answer",
    "Best",
    "Database",
    "Entry",
    "Environment",
    "Observation",
    "environment",
]

"""The tuning cache as the rest of the package sees it: answers that do not change."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator

from tracea_jax import catalogue
from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.runtime.trust import Trust, Untrusted, warn_once
from tracea_jax.tuning.answers import interpolate, kindred
from tracea_jax.tuning.answers.answer import Answer, legal, timed
from tracea_jax.tuning.answers.neighbours import NEAREST, Nearby, Neighbour
from tracea_jax.tuning.store.entries import Name, Store, recorded
from tracea_jax.tuning.store.environment import (
    Environment,
    canonical,
    digest,
    environment,
    environment_key,
)
from tracea_jax.tuning.store.files import Journal
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.records import Best, Entry, Observation, union
from tracea_jax.tuning.store.sources import Memory, Sources, freeze

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
        self,
        directory: pathlib.Path | None,
        shipped: tuple[pathlib.Path, ...] = (),
        shared: tuple[pathlib.Path, ...] = (),
    ) -> None:
        """Reads and creates nothing yet.

        Args:
          directory: the user's cache, created by the first write; None keeps everything
            in memory, in this instance.
          shipped: read-only directories with the layout of ``<directory>/tuned``, asked
            in this order when the user's has no answer.
          shared: more caches, only read, asked before what was shipped.
        """
        self.directory = directory
        self._store: Store | None = None
        self._memory: dict[Name, Entry] = {}
        if directory is not None:
            self._store = Store.of_cache(directory)
            self._memory = _unwritten.setdefault(directory.absolute(), {})
        # Asked in this order; the first one that has an entry counts.
        self._sources: Sources = (
            ("tuned", Memory(self._memory)),
            *([("tuned", self._store)] if self._store else []),
            *(("shared", Store.of_cache(path, Trust.SHARED)) for path in shared),
            *(("shipped", Store(path, True, Trust.PACKAGE)) for path in shipped),
        )
        self._answers: dict[Device, dict[Problem, Answer | str]] = {}
        self._fastest: dict[tuple[Problem, Device, tuple[str, ...]], Answer | None] = {}
        self._nearby: dict[tuple[str, str], Nearby] = {}
        self._digests: dict[Device, str] = {}
        self._kindred: dict[tuple[str, Environment], tuple[Environment, ...]] = {}
        # By environment, in place of the sources that they were copied from.
        self._fixed: dict[str, Sources] = {}

    def lookup(self, problem: Problem, device: Device) -> Answer | None:
        """The remembered answer or None; always the same for one instance.

        What was tuned here comes first, then what was shipped, then what was measured
        on a kindred device ("inherited"; see ``kindred``), then what other shapes of
        the same problem let expect ("interpolated"; see ``interpolate``). An entry that
        is damaged, written by a newer version, or no longer legal on the device is
        passed over; ``why_missed`` tells.
        """
        try:
            answer = self._answers[device][problem]
        except KeyError:
            answer = self._settle(problem, device)
        return None if isinstance(answer, str) else answer

    def fastest(
        self, problem: Problem, device: Device, allowed: tuple[str, ...]
    ) -> Answer | None:
        """The fastest choice known among some variants; settled like ``lookup``.

        Where the answer is another variant's, that is the best observation of these, or
        what is expected of these.
        """
        answer = self.lookup(problem, device)
        if answer is None or answer.choice.variant in allowed:
            return answer
        key = (problem, device, allowed)
        if key not in self._fastest:
            if answer.is_exact:
                here = environment_key(problem.op, device)
                found = self._best_observed(problem, device, here, allowed)
            else:
                found = self._expected(*key)
            self._fastest[key] = found
        return self._fastest[key]

    def _best_observed(
        self, problem: Problem, device: Device, key: str, allowed: tuple[str, ...]
    ) -> Answer | None:
        """The fastest of what raced for this very problem in one environment."""
        for origin, entry in self._entries(problem, key, complete=True):
            if not isinstance(entry, Entry):
                continue
            for t in timed(entry.best, entry.observations):
                if t.is_verified and t.variant in allowed:
                    best = Best(
                        variant=t.variant,
                        config=t.config,
                        time_us=t.time_us,
                        xla_us=entry.best.xla_us,
                    )
                    answer = legal(best, origin, problem, device)
                    if isinstance(answer, Answer):
                        return answer
        return None

    def why_missed(self, problem: Problem, device: Device) -> str | None:
        """Why ``lookup`` has no answer, as a phrase; None if it has one."""
        self.lookup(problem, device)
        answer = self._answers[device][problem]
        return answer if isinstance(answer, str) else None

    def observations(self, problem: Problem, device: Device) -> tuple[Observation, ...]:
        """All that was measured on this machine, finished or not; read at each call."""
        name = Name.of(problem.to_json(), environment_key(problem.op, device))
        memory = self._memory.get(name)
        stored = self._store.observations(name) if self._store else ()
        return union(memory.observations if memory else (), stored)

    def neighbours(
        self, problem: Problem, device: Device, limit: int = NEAREST
    ) -> tuple[Neighbour, ...]:
        """The nearest problems that something is known about; read at each call.

        They differ from the problem in their extents only. Tunings that were not
        finished count.
        """
        key = environment_key(problem.op, device)
        nearby = Nearby(self._sources, key, problem.op, journals=True)
        return nearby.of(problem, limit)

    def elsewhere(self, problem: Problem, device: Device) -> tuple[Best, ...]:
        """The problem's answers in other environments; read at each call.

        Those of the same device come first, as of kernels or a driver before they
        changed, then the latest. Their times tell nothing here, their configs may.
        """
        asked, here = problem.to_json(), environment(problem.op, device)
        found: dict[str, Entry] = {}
        for _, source in self._sources:
            for key in source.environments():
                try:
                    entry = source.read(Name.of(asked, key), complete=False)
                except (Damaged, NewerSchema):
                    continue
                if entry is not None and key != here.key:
                    found.setdefault(key, entry)
        latest = sorted(found.values(), key=lambda e: e.written, reverse=True)
        latest.sort(key=lambda e: e.environment.device != here.device)
        return tuple(entry.best for entry in latest)

    def digest(self, device: Device) -> str:
        """Hash of every answer that this snapshot can give for a device.

        The first call fixes them: from then on nothing is read from directories, so
        that processes with equal digests give equal answers.
        """
        if device not in self._digests:
            keys = {
                op: [e.key for e in (environment(op, device), *self._kin(op, device))]
                for op in catalogue.names()
            }
            held = freeze(self._sources, keys)
            self._fixed |= dict.fromkeys(itertools.chain(*keys.values()), held)
            text = canonical([keys, [(o, source.digest()) for o, source in held]])
            self._digests[device] = digest(text, 64)
        return self._digests[device]

    def journal(self, problem: Problem, device: Device) -> Journal:
        """A new journal for one tuning; it keeps nothing if it cannot be written."""
        if self._store is not None:
            place, asked = environment(problem.op, device), problem.to_json()
            try:
                return self._store.journal(Name.of(asked, place.key), place, asked)
            except OSError as e:
                self._warn_unwritten(e)
        return Journal(None)

    def append(self, journal: Journal, observations: tuple[Observation, ...]) -> None:
        """Appends to a journal; a full disk costs a warning, not the tuning."""
        try:
            journal.append(observations)
        except OSError as e:
            self._warn_unwritten(e)

    def record(
        self,
        entry: Entry,
        journal: Journal | None = None,
        combine: Callable[[Entry, Entry], Entry] = recorded,
    ) -> Entry:
        """Stores an entry, united with what is stored already; returns the union.

        Journals whose writers are gone are folded in and removed, as is ``journal``,
        the caller's own. If the directory cannot be written, the entry is kept for the
        life of the process, and a warning says so once.

        Args:
          entry: what to store.
          journal: holds what the entry has.
          combine: makes one entry of (the new, the stored); by default the best of the
            new one counts, unless the stored one is more recent.
        """
        name = Name.of(entry.problem, entry.environment.key)
        if name in self._memory:
            entry = combine(entry, self._memory[name])
        if self._store is not None:
            try:
                entry = self._store.write(name, entry, journal, combine)
            except (OSError, NewerSchema) as e:
                self._warn_unwritten(e)
            else:
                self._memory.pop(name, None)
                return entry
        self._memory[name] = entry
        return entry

    def hold(self, entry: Entry) -> None:
        """Keeps an entry that another process stored, for the life of this one."""
        self._memory[Name.of(entry.problem, entry.environment.key)] = entry

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
        name = Name.of(entry.problem, entry.environment.key)
        in_memory = self._memory.pop(name, None) is not None
        return (self._store is not None and self._store.remove(name)) or in_memory

    def _settle(self, problem: Problem, device: Device) -> Answer | str:
        """Finds the answer, or the reason for having none, and fixes it."""
        answer = self._exact(problem, device, environment_key(problem.op, device))
        if isinstance(answer, str):
            answer = self._expected(problem, device) or answer
        # setdefault: if two threads come here at once, both get the first one's answer.
        return self._answers.setdefault(device, {}).setdefault(problem, answer)

    def _exact(self, problem: Problem, device: Device, key: str) -> Answer | str:
        """What one environment measured for the problem, or why it is of no use."""
        answer: Answer | str = "it was never tuned in this environment"
        for origin, entry in self._entries(problem, key, complete=False):
            if isinstance(entry, str):
                answer = entry
            else:
                answer = legal(entry.best, origin, problem, device)
            if isinstance(answer, Answer):
                break
        return answer

    def _expected(
        self, problem: Problem, device: Device, allowed: tuple[str, ...] | None = None
    ) -> Answer | None:
        """What kindred devices or other shapes let expect, of some variants or any."""
        kin = self._kin(problem.op, device)
        for there in kin:
            found = self._inherited(problem, device, there, allowed)
            if found is not None:
                return found if allowed else kindred.cautious(found)
        near = self._near(problem, environment_key(problem.op, device))
        found = interpolate.answer(problem, device, near, allowed)
        if found is not None:
            return found
        for there in kin:
            near = self._near(problem, there.key)
            found = interpolate.answer(problem, device, near, allowed)
            if found is not None:
                found = kindred.adopted(found, there, found.origin)
                return found if allowed else kindred.cautious(found)
        return None

    def _inherited(
        self,
        problem: Problem,
        device: Device,
        there: Environment,
        allowed: tuple[str, ...] | None,
    ) -> Answer | None:
        """What a kindred environment measured for this very problem."""
        if allowed is None:
            found = self._exact(problem, device, there.key)
        else:
            found = self._best_observed(problem, device, there.key, allowed)
        if not isinstance(found, Answer):
            return None
        return kindred.adopted(found, there, "inherited")

    def _kin(self, op: str, device: Device) -> tuple[Environment, ...]:
        """The kindred environments that something is known in, of one moment."""
        here = environment(op, device)
        if (op, here) not in self._kindred:
            found = kindred.kin(self._sources, op, here)
            self._kindred.setdefault((op, here), found)
        return self._kindred[op, here]

    def _entries(
        self, problem: Problem, key: str, *, complete: bool
    ) -> Iterator[tuple[str, Entry | str]]:
        """Origin and entry of each source that has one, or why it is of no use."""
        name = Name.of(problem.to_json(), key)
        for origin, source in self._fixed.get(key, self._sources):
            try:
                entry = source.read(name, complete=complete)
            except (Damaged, NewerSchema) as e:
                yield origin, f"the {origin} entry cannot be read: {e}"
                continue
            if entry is not None:
                yield origin, entry

    def _near(self, problem: Problem, key: str) -> tuple[Neighbour, ...]:
        """The neighbours that an answer may be made from: tuned to the end."""
        if (key, problem.op) not in self._nearby:
            sources = self._fixed.get(key, self._sources)
            nearby = Nearby(sources, key, problem.op)
            self._nearby.setdefault((key, problem.op), nearby)
        return self._nearby[key, problem.op].of(problem)

    def _warn_unwritten(self, error: Exception) -> None:
        if isinstance(error, Untrusted):
            error.warn()
            return
        warn_once(
            f"the tuning cache {self.directory} cannot be written ({_brief(error)}); "
            "results are kept in memory until this process ends"
        )


def _brief(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


__all__ = [
    "Answer",
    "Best",
    "Database",
    "Entry",
    "Environment",
    "Observation",
    "environment",
]

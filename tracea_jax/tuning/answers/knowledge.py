"""Answers to problems, which do not change during a process.

    question -> measured, else inherited, else interpolated -> accepted -> Answer
             -> else the policy's default

``tracea_jax.knowledge`` holds the one of this process, and ``dispatch`` asks it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

from tracea_jax import policy
from tracea_jax.device import Device
from tracea_jax.problem import Problem
from tracea_jax.runtime.trust import Trust
from tracea_jax.tuning.answers.answer import Answer, Question, accepted
from tracea_jax.tuning.answers.evidence import Evidence
from tracea_jax.tuning.answers.interpolate import interpolated
from tracea_jax.tuning.answers.kindred import cautious
from tracea_jax.tuning.answers.legality import current, current_best
from tracea_jax.tuning.answers.neighbours import NEAREST, Nearby, Neighbour
from tracea_jax.tuning.answers.recorded import inherited, measured
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment, environment_key
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.own import Own
from tracea_jax.tuning.store.records import Best, Entry, Observation

# Each proposes answers, or says why it has none; the first accepted one counts.
Source = Callable[[Question, Evidence], Iterator[Answer | str]]
SOURCES: tuple[Source, ...] = (measured, inherited, interpolated)


class Knowledge:
    """Answers from a user's cache, shared caches and what was shipped.

    The first question about a problem reads the disk and settles the answer, also if
    there is none: a program lowers the same problem the same way from start to end.
    What is recorded later is known to the next instance.

    Attributes:
      own: the user's entries; tunings write there.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        shipped: tuple[pathlib.Path, ...] = (),
        shared: tuple[pathlib.Path, ...] = (),
    ) -> None:
        """Reads and creates nothing yet.

        Args:
          directory: the user's cache, see ``Own``.
          shipped: read-only directories with the layout of ``<directory>/tuned``, asked
            in this order when the user's has no answer.
          shared: more caches, only read, asked before what was shipped.
        """
        self.own = Own(directory)
        self._evidence = Evidence(
            (
                *self.own.readers,
                *(("shared", Store.of_cache(path, Trust.SHARED)) for path in shared),
                *(("shipped", Store(path, True, Trust.PACKAGE)) for path in shipped),
            )
        )
        self._settled: dict[_Key, Answer | str] = {}

    def lookup(
        self,
        problem: Problem,
        device: Device,
        allowed: tuple[str, ...] | None = None,
        deterministic: bool | None = None,
    ) -> Answer | None:
        """The recorded answer to a problem, or None; always the same for one instance.

        Entries tuned here come first, then shared and shipped ones, then what was
        measured on a kindred device ("inherited"; see ``kindred``), then what other
        shapes let expect ("interpolated"; see ``interpolate``). An entry that is
        damaged, written by a newer version, no longer legal on the device or measured
        with other kernels is passed over; ``why_missed`` tells.

        Args:
          problem, device: what is asked.
          allowed: variants that may be the answer; any that can run by default.
          deterministic: as ``Options.determinism``.
        """
        answer = self._settled.get((problem, device, allowed, deterministic))
        if answer is None:
            question = Question.about(problem, device, allowed, deterministic)
            answer = self._settle(question)
        return None if isinstance(answer, str) else answer

    def answer(self, question: Question) -> Answer:
        """The answer of ``lookup``, or else the policy's default."""
        found = self._settled.get(_key(question)) or self._settle(question)
        return default(question) if isinstance(found, str) else found

    def why_missed(self, problem: Problem, device: Device) -> str | None:
        """Why ``lookup`` has no answer, as a phrase; None if it has one."""
        self.lookup(problem, device)
        answer = self._settled[problem, device, None, None]
        return answer if isinstance(answer, str) else None

    def entry(self, problem: Problem, device: Device) -> Entry | None:
        """The entry measured for this very problem with today's kernels.

        Like answers, it is settled by the first question. There are no observations.
        """
        return self._evidence.measured(problem, device)

    def has_any(self, op: str, device: Device) -> bool:
        """True if anything was measured of an op on the device; settled likewise."""
        return self._evidence.has_any(op, environment_key(device))

    def digest(self, device: Device) -> str:
        """Hash of all that answers for a device are made from, which it fixes."""
        return self._evidence.digest(device)

    def neighbours(
        self, problem: Problem, device: Device, limit: int = NEAREST
    ) -> tuple[Neighbour, ...]:
        """The nearest problems that something is known about; read at each call.

        They differ from the problem in their extents only. Tunings that were not
        finished count.
        """
        key, readers = environment_key(device), self._evidence.readers
        nearby = Nearby(readers, key, problem.op, device, journals=True)
        return nearby.of(problem, limit)

    def observations(self, problem: Problem, device: Device) -> tuple[Observation, ...]:
        """This machine's observations of today's kernels; read at each call."""
        return current(self.own.observations(problem, device), problem, device)

    def elsewhere(self, problem: Problem, device: Device) -> tuple[Best, ...]:
        """The problem's answers that do not hold here; read at each call.

        They are of other environments, or of kernels before these changed. Those of the
        same device come first, then the latest. Their times tell nothing here, their
        configs may.
        """
        asked, here = problem.to_json(), environment(device)
        found: dict[str, Entry] = {}
        for _, reader in self._evidence.readers:
            for key in reader.environments():
                try:
                    entry = reader.read(Name.of(asked, key), complete=False)
                except (Damaged, NewerSchema):
                    continue
                if entry is not None:
                    found.setdefault(key, entry)
        here_now = found.get(here.key)
        if here_now and current_best(here_now.best, problem, device):
            del found[here.key]
        latest = sorted(found.values(), key=lambda e: e.written, reverse=True)
        latest.sort(key=lambda e: e.environment.device != here.device)
        return tuple(entry.best for entry in latest)

    def _settle(self, question: Question) -> Answer | str:
        """Finds the answer, or the reason for having none, and fixes it."""
        found = _found(question, self._evidence)
        # setdefault: if two threads come here at once, both get the first one's answer.
        return self._settled.setdefault(_key(question), found)


_Key = tuple[Problem, Device, tuple[str, ...] | None, bool | None]


def _key(question: Question) -> _Key:
    allowed = None if question.is_open else question.allowed
    return question.problem, question.device, allowed, question.deterministic


def _found(question: Question, evidence: Evidence) -> Answer | str:
    """The first proposal that may run, or why the last entry asked is of no use."""
    why = "it was never tuned in this environment"
    for source in SOURCES:
        for proposal in source(question, evidence):
            if isinstance(proposal, str):
                why = proposal
                continue
            answer = accepted(proposal, question)
            if isinstance(answer, Answer):
                return cautious(answer, question)
            if proposal.measured_in is None:
                why = answer
    return why


def default(question: Question) -> Answer:
    """The policy's default, or the default of the variant that is asked for."""
    decision = policy.decide(question.diagnosis)
    choice, why = decision.choice, decision.reason
    if choice.variant not in question.allowed:
        choice = next(h for h in decision.heroes if h.variant == question.allowed[0])
        why = f"implementation={question.implementation!r} was asked for"
    return Answer(choice=choice, origin="policy", decision=why)

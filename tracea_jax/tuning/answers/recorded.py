"""Answers that were measured for the very problem, here or on a kindred device.

``measured`` and ``inherited`` are sources of ``knowledge.Knowledge``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tracea_jax.policy import Choice
from tracea_jax.tuning.answers import kindred
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.tuning.answers.evidence import Evidence
from tracea_jax.tuning.answers.legality import current, current_best, varies
from tracea_jax.tuning.answers.times import timed
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.variants.steady import steadiest


def measured(question: Question, evidence: Evidence) -> Iterator[Answer | str]:
    """Tuned on this machine, else shared by a cache that is only read, else shipped."""
    return _known(question, evidence, question.environment.key)


def inherited(question: Question, evidence: Evidence) -> Iterator[Answer | str]:
    """Measured in kindred environments; without reasons why not."""
    for there in evidence.kin(question.problem.op, question.environment):
        for found in _known(question, evidence, there.key):
            if isinstance(found, Answer):
                yield kindred.adopted(found, there)


def _known(question: Question, evidence: Evidence, key: str) -> Iterator[Answer | str]:
    """Answers recorded in the environment of this key, or reasons why not.

    An entry's answer comes alone, unless the caller does not allow its variant, or its
    bits may differ from run to run: then others that were measured of the allowed
    variants come too, the fastest first.
    """
    wanted = functools.partial(_are_others_wanted, question=question)
    for origin, entry in evidence.entries(question.problem, key, complete=wanted):
        if isinstance(entry, str):
            yield entry
            continue
        found = []
        if not _is_excluded(entry, question):
            found.append(_answer(entry.best, origin, entry.tuner))
        if wanted(entry):
            found += _observed(entry, origin, question)
        yield from _in_order(found, question)


def _are_others_wanted(entry: Entry, question: Question) -> bool:
    """Returns whether other choices than an entry's best one may be the answer."""
    if _is_excluded(entry, question):
        return True
    best = _answer(entry.best, "", {})
    return question.deterministic is not False and _varies(best, question)


def _is_excluded(entry: Entry, question: Question) -> bool:
    """True if the best choice could run and is of a variant that is not allowed."""
    variant = entry.best.variant
    return variant not in question.allowed and variant in question.diagnosis.candidates


def _in_order(found: list[Answer], question: Question) -> Iterator[Answer]:
    """The answers found; by default one of equal bits goes first if hardly slower."""
    may_vary = functools.partial(_varies, question=question)
    if not found or question.deterministic is False or not may_vary(found[0]):
        yield from found
        return
    fastest, *others = found
    if question.deterministic:
        why = "it was the fastest measured of those with the same bits from run to run"
        yield fastest  # to be refused, with the reason
        yield from (dataclasses.replace(other, decision=why) for other in others)
        return
    first = steadiest(found, lambda answer: answer.time_us, may_vary)
    if first is not fastest:
        why = (
            "its bits are the same from run to run, and "
            f"{fastest.choice.variant} was hardly faster"
        )
        yield dataclasses.replace(first, decision=why)
    yield from found


def _varies(answer: Answer, question: Question) -> bool:
    choice = answer.choice
    return varies(choice.variant, choice.config, question.problem, question.device)


def _observed(entry: Entry, origin: str, question: Question) -> Iterator[Answer]:
    """Answers from observations that were verified, the fastest first."""
    problem, device = question.problem, question.device
    best, xla_us = current_best(entry.best, problem, device), entry.best.xla_us
    for t in timed(best, current(entry.observations, problem, device)):
        if t.is_verified and t.variant in question.allowed:
            found = Best(
                variant=t.variant,
                config=t.config,
                code=t.code,
                time_us=t.time_us,
                xla_us=xla_us,
                ratio=xla_us / t.time_us if xla_us else None,
            )
            yield _answer(found, origin, {})


def _answer(best: Best, origin: str, tuner: Mapping[str, Any]) -> Answer:
    time_us, xla_us = best.decisive
    tried, legal = map(tuner.get, ("tried", "legal"))
    is_known = isinstance(tried, int) and isinstance(legal, int)
    return Answer(
        choice=Choice(variant=best.variant, config=best.config),
        origin=origin,
        time_us=time_us,
        xla_us=xla_us,
        ratio=best.ratio,
        code=best.code,
        tried=f"{tried} of {legal} configs tried" if is_known else "",
    )

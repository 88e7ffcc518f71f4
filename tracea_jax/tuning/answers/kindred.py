"""Answers of GPUs that differ from this one in nothing that a kernel sees.

An H100 and an H200 run the same kernels on as many multiprocessors; another driver or
compiler changes little. A kernel that won clearly there wins here. One that won
narrowly may not, so XLA takes its place.

``kin`` finds such environments, ``adopted`` and ``cautious`` make their answers ours.
"""

from __future__ import annotations

import contextlib
import dataclasses

from tracea_jax import variants
from tracea_jax.policy import Choice
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.tuning.store.environment import Environment
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.readers import Reader, Readers

# By how much a kernel of ours must have won elsewhere, and by how much it must be
# expected to win from other shapes elsewhere. On an H100 (benchmarks/bench_untuned.py)
# an H200's answers above the first lost in 7 of 82 products, by 3 % at most; without it
# 5 of 30 did, by up to 11 %. Predictions above the first alone lost in 24 of 74, by up
# to 23 %; of the 17 above the second in one.
MEASURED = 1.04
PREDICTED = 1.15


def kin(readers: Readers, op: str, here: Environment) -> tuple[Environment, ...]:
    """Other environments whose answers may hold here, those of this device first.

    Args:
      readers: of the answers.
      op: which the answers are about.
      here: the environment that has none.
    """
    found = {
        there
        for _, reader in readers
        for key in reader.environments()
        if key != here.key and (there := _described(reader, key, op))
    }
    alike = [there for there in found if here.is_kindred(there)]
    return tuple(sorted(alike, key=lambda e: (e.device != here.device, e.key)))


def _described(reader: Reader, key: str, op: str) -> Environment | None:
    """The environment of a key; None if no entry of the op describes it."""
    for name, _ in reader.problems(key, op, journals=False):
        with contextlib.suppress(Damaged, NewerSchema):
            entry = reader.read(name, complete=False)
            if entry is not None and entry.environment.key == key:
                return entry.environment
    return None


def adopted(answer: Answer, there: Environment) -> Answer:
    """An answer of a kindred environment, as one of this environment."""
    origin = "inherited" if answer.is_exact else answer.origin
    return dataclasses.replace(answer, origin=origin, measured_in=there)


def cautious(answer: Answer, question: Question) -> Answer:
    """An adopted answer if it is XLA, beats XLA clearly or has to do; else XLA.

    It has to do where XLA did not race, as its scores of long sequences do not fit.
    """
    if answer.measured_in is None or not question.allows_xla:
        return answer
    clear = MEASURED if answer.origin == "inherited" else PREDICTED
    if answer.choice.variant == "xla" or answer.xla_us is None:
        return answer
    if (answer.ratio or 0.0) >= clear:
        return answer
    return dataclasses.replace(
        answer,
        choice=Choice(variant="xla", config=variants.XLA.config_type()),
        time_us=answer.xla_us,
        ratio=1.0,
        code=None,
        decision="",
    )

"""Which choices of a problem a survey measures.

Every peer, the default of every kernel of ours that can run, the next few by models of
their times, and some at random from each space, so that the fit also sees what no model
would choose. A pure function of the problem, the device, the seed and what is compiled.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax import policy, variants
from tracea_jax.device import Device
from tracea_jax.diagnosis import Diagnosis, diagnose
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.variants import Space
from tracea_jax.variants.kernel_variant import KernelVariant

PEERS = ("xla", "cudnn")  # variants that run no kernel of ours
COUNT = 12  # choices of a problem, the peers included
_LIKELY = 2  # of each kernel that has a model, besides its default
_CHANCES = 8  # configs drawn for one that is compiled already

Ranked = Callable[[Problem, Device, Sequence[Choice]], Sequence[float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """What a survey would rather measure.

    Attributes:
      ranked: (problem, device, choices) -> predicted times; None without a model. Its
        favourites are then measured, too.
      is_compiled: (problem, choice) -> whether its kernels exist already. Of several
        random configs, one that is compiled is preferred.
      count: choices of a problem.
    """

    ranked: Ranked | None = None
    is_compiled: Callable[[Problem, Choice], bool] | None = None
    count: int = COUNT


def candidates(
    problem: Problem, device: Device, seed: object, wishes: Preferences
) -> tuple[Choice, ...]:
    """The choices to measure, peers first; at least XLA."""
    diagnosis = diagnose(problem, device)
    decision = policy.decide(diagnosis)
    peers = [c for c in decision.heroes if c.variant in PEERS]
    ours = [c for c in decision.heroes if c.variant not in PEERS]
    known = [*peers, *ours, *_likely(diagnosis, decision, wishes)]
    found = list(dict.fromkeys(known))[: wishes.count]
    rng = random.Random(f"{seed} {problem}")
    spaces = {c.variant: decision.spaces[c.variant] for c in ours}
    for choice in _random(rng, problem, spaces, wishes):
        if len(found) >= wishes.count:
            break
        if choice not in found:
            found.append(choice)
    return tuple(found)


def _likely(
    diagnosis: Diagnosis, decision: policy.Decision, wishes: Preferences
) -> Iterator[Choice]:
    """The favourites of the model, else of the variants' own ones."""
    problem, device = diagnosis.problem, diagnosis.device
    if wishes.ranked is not None:
        every = [c for c in decision.choices if c.variant not in PEERS]
        times = np.asarray(wishes.ranked(problem, device, every), float)
        best = np.argsort(times, kind="stable")[: wishes.count // 3]
        yield from (every[i] for i in best)
        return
    for name in diagnosis.candidates:
        variant: Any = variants.get(problem.op, name)
        if isinstance(variant, KernelVariant):
            configs = variant.likely(problem, device, 1 + _LIKELY)
        elif (us := decision.spaces[name].modelled_us) is not None:
            best = np.argsort(us, kind="stable")[: 1 + _LIKELY]
            configs = [decision.spaces[name].config(int(i)) for i in best]
        else:
            configs = ()
        yield from (Choice(variant=name, config=config) for config in configs)


def _random(
    rng: random.Random,
    problem: Problem,
    spaces: dict[str, Space],
    wishes: Preferences,
) -> Iterator[Choice]:
    """Configs of each space in turns, each once, until all spaces are empty."""
    left = {name: _shuffled(rng, len(space)) for name, space in spaces.items()}
    while left:
        for name in list(left):
            if not left[name]:
                del left[name]
                continue
            some = left[name][-_CHANCES:]
            choices = [
                Choice(variant=name, config=spaces[name].config(i)) for i in some
            ]
            best = _preferred(problem, choices, wishes)
            del left[name][len(left[name]) - len(some) + best]
            yield choices[best]


def _preferred(problem: Problem, choices: Sequence[Choice], wishes: Preferences) -> int:
    """The number of a choice that is compiled already; the last one's, if none is."""
    if wishes.is_compiled is not None:
        for i, choice in enumerate(choices):
            if wishes.is_compiled(problem, choice):
                return i
    return len(choices) - 1


def _shuffled(rng: random.Random, count: int) -> list[int]:
    numbers = list(range(count))
    rng.shuffle(numbers)
    return numbers

"""Which choices of a problem a survey measures.

Every peer, the default of every kernel of ours that can run, the next few by models of
their times, and some at random from each space, so that the fit also sees what no model
would choose. A pure function of the problem, the device, the seed and what is compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax import policy, variants
from tracea_jax.device import Device
from tracea_jax.diagnosis import Diagnosis, diagnose
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.variants import Space
from tracea_jax.variants.base import Ranking

PEERS = ("xla", "cudnn")  # variants that run no kernel of ours
COUNT = 12  # choices of a problem, the peers included
_LIKELY = 2  # of each kernel that has a model, besides its default
_NEAR = 12  # configs that a model finds fastest, of which compiled ones are preferred

Ranked = Callable[[Problem, Device, Sequence[Choice]], Sequence[float]]
Compiled = Callable[[Problem, str, Space], Iterable[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Preferences among the choices to measure.

    Attributes:
      ranked: (problem, device, choices) -> predicted times; None without a model. Its
        favourites are then measured, too.
      compiled: (problem, variant, space) -> configs of the space whose kernels exist
        already; None if compiling costs nothing. All random choices but ``fresh`` are
        of these, and there may be fewer of them.
      fresh: random choices whose kernels need not exist.
      count: choices of a problem.
    """

    ranked: Ranked | None = None
    compiled: Compiled | None = None
    fresh: int = 1
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
        count = 1 + _LIKELY if wishes.compiled is None else _NEAR
        configs: Sequence[Any] = ()
        if isinstance(variant, Ranking):
            configs = variant.likely(problem, device, count)
        elif (us := decision.spaces[name].modelled_us) is not None:
            best = np.argsort(us, kind="stable")[:count]
            configs = [decision.spaces[name].config(int(i)) for i in best]
        if configs and wishes.compiled is not None:
            near = Space.of(*configs)
            configs = [configs[0], *wishes.compiled(problem, name, near)]
        for config in configs[: 1 + _LIKELY]:
            yield Choice(variant=name, config=config)


def _random(
    rng: random.Random, problem: Problem, spaces: dict[str, Space], wishes: Preferences
) -> Iterator[Choice]:
    """Random configs of each space in turns; see ``Preferences``."""
    anything = _in_turns({name: _shuffled(rng, s) for name, s in spaces.items()})
    if wishes.compiled is None:
        yield from anything
        return
    yield from itertools.islice(anything, wishes.fresh)
    yield from _in_turns(
        {n: iter(wishes.compiled(problem, n, s)) for n, s in spaces.items()}
    )


def _in_turns(configs: dict[str, Iterator[Any]]) -> Iterator[Choice]:
    """A choice of each variant in turns, until all are exhausted."""
    while configs:
        for name in tuple(configs):
            for config in itertools.islice(configs[name], 1):
                yield Choice(variant=name, config=config)
                break
            else:
                del configs[name]


def _shuffled(rng: random.Random, space: Space) -> Iterator[Any]:
    numbers = list(range(len(space)))
    rng.shuffle(numbers)
    return map(space.config, numbers)

"""The policy: which choice runs without measurements, and which are worth measuring.

Which variants can run at all is in ``diagnosis``; how fast choices are is measured in
``tuning``; which stored answer goes before the policy is decided in ``dispatch``.
Callers: dispatch, knowledge, campaign/run, cli/cache, tuning and the ops' workloads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from tracea_jax import variants
from tracea_jax.device import CudaDevice, Device
from tracea_jax.diagnosis import Diagnosis
from tracea_jax.model.decision import Guess, best, chosen, guess
from tracea_jax.model.model import PEERS, Model
from tracea_jax.model.shipped import covering
from tracea_jax.page import times
from tracea_jax.problem import Problem
from tracea_jax.runtime.trust import warn_once
from tracea_jax.variants import Config, Space, Variant
from tracea_jax.variants.base import Doubting, Varying


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A variant with one of its configs."""

    variant: str
    config: Config

    def __str__(self) -> str:
        return f"{self.variant} [{self.config}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A default choice and a search space for one problem on one device.

    Attributes:
      choice: the choice that runs when nothing was measured.
      heroes: the default config of every candidate; always in the final race.
      spaces: the legal configs of every candidate, by variant, in catalogue order.
      reason: why ``choice`` was chosen.
    """

    choice: Choice
    heroes: Sequence[Choice]
    spaces: Mapping[str, Space]
    reason: str

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every choice of the spaces in canonical order, heroes first."""
        rest = (
            Choice(variant=name, config=config)
            for name, space in self.spaces.items()
            for config in space.configs()
        )
        return tuple(dict.fromkeys((*self.heroes, *rest)))


@dataclasses.dataclass(frozen=True, slots=True)
class Defaults(Sequence[Choice]):
    """The default choices of some variants, each made when it is first asked for.

    A plan runs one of them; finding a default config may take longer than the decision.
    """

    problem: Problem
    device: Device
    names: tuple[str, ...]
    known: tuple[Choice, ...] = ()  # in place of the variants' own defaults

    @overload
    def __getitem__(self, place: int) -> Choice: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Choice, ...]: ...

    def __getitem__(self, place: int | slice) -> Choice | tuple[Choice, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        name = self.names[place]
        known = (choice for choice in self.known if choice.variant == name)
        return next(known, None) or _default(name, self.problem, self.device)

    def __len__(self) -> int:
        return len(self.names)


@dataclasses.dataclass(frozen=True, slots=True)
class Spaces(Mapping[str, Space]):
    """The spaces of some variants, each made when it is first asked for.

    Most decisions only need the default choice and never look at a space.
    """

    problem: Problem
    device: Device
    names: tuple[str, ...]
    deterministic: bool = False  # whether configs whose bits may vary are left out
    own: bool = False  # whether times are those of the variants' own models

    def __getitem__(self, name: str) -> Space:
        if name not in self.names:
            raise KeyError(name)
        variant = variants.get(self.problem.op, name)
        made = _own_space if self.own else space_of
        space = made(variant, self.problem, self.device)
        if not (self.deterministic and isinstance(variant, Varying)):
            return space
        equal = [
            variant.may_vary(self.problem, config, self.device) is None
            for config in space.configs()
        ]
        return space.only(np.array(equal), "deterministic")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@functools.lru_cache(maxsize=64)
def space_of(variant: Variant, problem: Problem, device: Device) -> Space:
    """The legal configs of a variant; the spaces used last are kept.

    Their times are predicted by the model that covers the problem, if there is one.
    """
    space = _own_space(variant, problem, device)
    if (model := covering(problem, device)) is None:
        return space
    seen = model.predict(problem, device, {variant.name: space}).get(variant.name)
    if seen is None:
        return space
    return dataclasses.replace(space, modelled_us=np.exp(seen.log_us))


@functools.lru_cache(maxsize=64)
def _own_space(variant: Variant, problem: Problem, device: Device) -> Space:
    return variant.space(problem, device)


def decide(diagnosis: Diagnosis, model: Model | None = None) -> Decision:
    """Turns a diagnosis into a default choice and a search space.

    A model decides where it covers the problem, but for what XLA on GPUs fuses with its
    operands; elsewhere ``unmodelled`` does.

    Args:
      diagnosis: of the problem.
      model: by default the one that ships for the device.
    """
    problem, device = diagnosis.problem, diagnosis.device
    try:
        if model is None:
            model = covering(problem, device)
        elif not model.covers(problem, device):
            model = None
        if model is not None and not _fused(problem, device):
            return modelled(diagnosis, model)
    except Exception as e:  # a default is no reason for a program to fail
        warn_once(
            f"the model of {device} failed for {problem}; please report: "
            f"{type(e).__name__}: {e}",
            f"model {problem.op}",
        )
    return unmodelled(diagnosis)


@functools.lru_cache(maxsize=4096)
def modelled(diagnosis: Diagnosis, model: Model) -> Decision:
    """A decision with a model that covers the problem.

    What is predicted fastest runs, by a margin over what would run without a model; of
    a few configs of each variant, see ``Model.considered``. The default of a variant is
    the one of them that is predicted fastest.
    """
    problem, device = diagnosis.problem, diagnosis.device
    name, _ = _ruled(diagnosis)
    incumbent = _default(name, problem, device)
    considered = {n: _considered(diagnosis, model, n) for n in diagnosis.candidates}
    if not considered[name]:
        return unmodelled(diagnosis)
    considered[name] = [*dict.fromkeys((*considered[name], incumbent.config))]
    spaces = {
        n: variants.described(variants.get(problem.op, n), problem, own, device)
        for n, own in considered.items()
        if own
    }
    varies = {
        n: [diagnosis.may_vary(n, config) is not None for config in own]
        for n, own in considered.items()
    }
    predicted = model.predict(problem, device, spaces)
    guesses = best(predicted, varies)
    place = considered[name].index(incumbent.config)
    base = guess(name, place, predicted[name], varies[name])
    found = chosen(guesses, base, model.margin(problem), diagnosis.deterministic)
    firsts = {g.variant: g for g in reversed(guesses)} | {found.variant: found}
    choices = {
        n: Choice(variant=n, config=considered[n][first.index])
        for n, first in firsts.items()
    }
    return Decision(
        choice=choices[found.variant],
        heroes=Defaults(problem, device, diagnosis.candidates, tuple(choices.values())),
        spaces=_spaces(diagnosis),
        reason=_prediction(found, firsts),
    )


def _considered(diagnosis: Diagnosis, model: Model, name: str) -> list[Config]:
    """The configs of a variant that are predicted: those that may run, or its default.

    There are none of variants that the model does not know.
    """
    problem, device = diagnosis.problem, diagnosis.device
    variant = variants.get(problem.op, name)
    if not model.knows(problem.op, name):
        return []
    known = model.considered(problem, name)
    given = [config for config in known if config is not None]
    legal = [c for c in given if variants.is_legal(variant, problem, c, device)]
    if diagnosis.deterministic:
        legal = [c for c in legal if diagnosis.may_vary(name, c) is None]
    if len(given) < len(known) or not legal:  # the default's bits are equal if any are
        legal.append(variant.heuristic(problem, device))
    return list(dict.fromkeys(legal))


def _prediction(found: Guess, guesses: Mapping[str, Guess]) -> str:
    """The prediction of what was chosen, and of what it was compared with."""
    peers = [g for g in guesses.values() if g.variant in PEERS and g != found]
    ours = [g for g in guesses.values() if g.variant not in PEERS and g != found]
    text = [f"model: {_predicted(found)}"]
    for other in sorted(peers or ours, key=lambda g: g.log_us):
        name = "XLA" if other.variant == "xla" else other.variant
        text.append(f"{name} {_predicted(other)}")
    return ", ".join(text)


def _predicted(guess: Guess) -> str:
    if not guess.sigma:
        return times.microseconds(guess.us)
    low, high = map(times.number, guess.interval_us)
    return f"{times.microseconds(guess.us)} ({low} to {high})"


def unmodelled(diagnosis: Diagnosis) -> Decision:
    """A decision without a model.

    The default is the first candidate, in catalogue order, that is expected to beat XLA
    on this problem; XLA if no candidate is. Where such a one was rejected for its bits
    alone, the first candidate stands in for it. On GPUs XLA also keeps what it fuses
    with its operands (``Problem.fused_operands``).
    """
    problem, device = diagnosis.problem, diagnosis.device
    name, reason = _ruled(diagnosis)
    return Decision(
        choice=_default(name, problem, device),
        heroes=Defaults(problem, device, diagnosis.candidates),
        spaces=_spaces(diagnosis),
        reason=reason,
    )


def _ruled(diagnosis: Diagnosis) -> tuple[str, str]:
    """The variant that runs without a model, and why; see ``unmodelled``."""
    problem, device = diagnosis.problem, diagnosis.device
    if fused := _fused(problem, device):
        why = f"XLA {fused} while it reads them; no kernel of ours was measured so"
        return "xla", why
    candidates = [variants.get(problem.op, name) for name in diagnosis.candidates]
    winners = (v.name for v in candidates if v.expects_to_win(problem, device))
    if name := next(winners, None):
        return name, f"{name} usually wins on such problems"
    if missed := _missed_winner(diagnosis):
        return candidates[0].name, (
            f"it stands in for {missed}, which usually wins on such problems, but "
            "whose bits may differ from run to run"
        )
    return "xla", _why_xla(candidates, problem, device)


def _default(name: str, problem: Problem, device: Device) -> Choice:
    """A variant with its own default config."""
    config = variants.get(problem.op, name).heuristic(problem, device)
    return Choice(variant=name, config=config)


def _spaces(diagnosis: Diagnosis) -> Spaces:
    return Spaces(
        diagnosis.problem,
        diagnosis.device,
        diagnosis.candidates,
        diagnosis.deterministic is True,
    )


def _fused(problem: Problem, device: Device) -> str | None:
    """What XLA fuses with operands, so that no measurement tells, as a phrase."""
    return problem.fused_operands if isinstance(device, CudaDevice) else None


def _missed_winner(diagnosis: Diagnosis) -> str | None:
    """The variant that would run if its bits did not differ from run to run."""
    problem, device = diagnosis.problem, diagnosis.device
    varying = (variants.get(problem.op, name) for name in diagnosis.varying)
    winners = (v.name for v in varying if v.expects_to_win(problem, device))
    return next(winners, None)


def _why_xla(candidates: list[Variant], problem: Problem, device: Device) -> str:
    """The reason of the first candidate, in catalogue order, that gives one."""
    asked = (v for v in candidates if isinstance(v, Doubting))
    doubts = (v.doubt(problem, device) for v in asked)
    general = "no kernel of ours is known to beat XLA here unmeasured"
    return next(filter(None, doubts), general)

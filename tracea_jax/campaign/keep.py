"""Which sites of a program are kept: decided by races of whole programs, greedily.

    plain and every site -> without each op -> without each class of sites -> Kept

Wall-clock time of executions in a row decides: it is what users pay. The times of
kernels have less noise, but miss copies between kernels, gaps, and the host. How
programs are made and run is in ``campaign.executions``; the caller,
``campaign.program``, holds the races.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from tracea_jax.tuning.measure import Race

SURE = 3  # standard errors that count as more than noise
LOSS = 0.015  # a program that is slower than plain by this is not kept, noise or not
GAIN = 0.005  # that leaving a class must bring at least
MOST = 8  # classes of sites that are left in turn, the most frequent of each op

# The classes of sites that a program leaves; None is the program without our package.
Without = tuple[str, ...] | None
Field = Callable[[Sequence[Without]], Race]


class Undecided(RuntimeError):
    """No race of the program could be held; the message says why, as a phrase."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A program compared with plain.

    Attributes:
      without: the classes of sites that it leaves.
      time_us, plain_us: times of one execution, in the same race.
      error: standard error of their quotient, as a fraction of it.
    """

    without: tuple[str, ...]
    time_us: float
    plain_us: float
    error: float

    @classmethod
    def of(cls, race: Race, without: tuple[str, ...]) -> Kept | None:
        """Its times in a race; None if it failed there."""
        if without not in race.times_us:
            return None
        return cls(
            without=without,
            time_us=race.level_us(without),
            plain_us=race.level_us(None),
            error=race.error(None, without),
        )

    @property
    def ratio(self) -> float:
        """Plain time by its time: above 1, it is faster."""
        return self.plain_us / self.time_us

    @property
    def loses(self) -> bool:
        """Returns whether plain is surely faster, or faster by more than may be."""
        return self.ratio < 1 - min(SURE * self.error, LOSS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The program that is kept, and the one with every site.

    Attributes:
      kept: the fastest that was found; it leaves every op if that is plain.
      every: the program with every site, in the same race; None if it failed.
      leaves_all: whether plain is kept.
    """

    kept: Kept
    every: Kept | None
    leaves_all: bool = False

    @classmethod
    def of(
        cls, best: Kept | None, every: Kept | None, race: Race, ops: Iterable[str]
    ) -> Decision:
        """The best, or plain if that loses or failed.

        Args:
          best, every: as in ``race``; None if they failed.
          race: with plain, whose times are taken if that is kept.
          ops: that are left if plain is kept.
        """
        if best is not None and not best.loses:
            return cls(kept=best, every=every)
        plain_us = race.level_us(None)
        left = tuple(sorted(ops))
        plain = Kept(without=left, time_us=plain_us, plain_us=plain_us, error=0.0)
        return cls(kept=plain, every=every, leaves_all=True)


def first_decision(first: Race, ops: Iterable[str]) -> Decision:
    """The decision of a race of plain and the program with every site.

    Raises:
      Undecided: if plain itself fails.
    """
    if None not in first.times_us:
        raise Undecided(f"plain JAX fails: {first.failures.get(None)}")
    every = Kept.of(first, ())
    return Decision.of(every, every, first, ops)


def decide(
    race: Field,
    classes: Mapping[str, Sequence[str]],
    ops: Iterable[str],
    first: Race | None = None,
) -> Decision:
    """Races a program with every site, then with fewer and fewer of them.

    Without each op in turn it races always, as a loss may hide behind a gain. Without
    each class of sites it races only if it still loses to plain then. What leaves sites
    races against plain and the program with every site once more, as the fastest of
    many may have been that by chance.

    Args:
      race: holds a race; may raise ``TimeoutError``, which ends the search.
      classes: by op, those of its sites in the program, the most frequent first; see
        ``rewrite.fewer``.
      ops: that are left if plain is kept.
      first: the race of plain and the program with every site, if it was held.

    Raises:
      Undecided: if plain itself fails, or there was no time for the first race.
    """
    try:
        first = first or race([None, ()])
    except TimeoutError as e:
        raise Undecided(str(e)) from e
    decision = first_decision(first, ops)
    every = best = Kept.of(first, ())
    try:
        best = _with_fewer(race, best, list(classes))
        if best is None or best.loses:
            best = _with_fewer(race, best, _within_ops(classes, best)[:MOST])
    except TimeoutError:  # what is known by then decides
        pass
    if best is None or best == every or best.loses:
        return decision
    racers: list[Without] = [None, best.without, *([()] if every else [])]
    last = race(racers)
    if None not in last.times_us:
        return decision
    return Decision.of(Kept.of(last, best.without), Kept.of(last, ()), last, ops)


def _within_ops(classes: Mapping[str, Sequence[str]], best: Kept | None) -> list[str]:
    """The classes of the ops that are not left, one of each op in turn.

    The only class of an op is the op, which was left in its turn before.
    """
    left = () if best is None else best.without
    rest = [names for op, names in classes.items() if op not in left and len(names) > 1]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*rest))
    return [name for name in turns if name is not None]


def _with_fewer(race: Field, best: Kept | None, parts: Sequence[str]) -> Kept | None:
    """Leaves one part after another, as long as the program gets surely faster.

    One part stays: a program without any is plain, or was raced before.
    """
    left = list(parts)
    while len(left) > 1:
        known = () if best is None else best.without
        fewer = {tuple(sorted({*known, part})): part for part in left}
        held = race([None, *([] if best is None else [known]), *fewer])
        found = [kept for without in fewer if (kept := Kept.of(held, without))]
        if None not in held.times_us or not found:
            return best
        fastest = min(found, key=lambda kept: kept.time_us)
        if best is not None and not _gains(held, known, fastest.without):
            return best
        best = fastest
        left.remove(fewer[fastest.without])
    return best


def _gains(race: Race, known: tuple[str, ...], fewer: tuple[str, ...]) -> bool:
    """Returns whether the program is surely faster with fewer sites."""
    if known not in race.times_us:  # it failed this time
        return True
    noise = SURE * race.error(known, fewer)
    return race.ratio(known, fewer) > 1 + max(GAIN, noise)

"""Which sites of a program are kept: decided by races of whole programs, greedily.

    plain and every site -> without each op -> without each class of sites -> Kept

Wall-clock time of executions in a row decides: it is what users pay. The times of
kernels have less noise, but miss copies between kernels, gaps, and the host. How
programs are made and run is in ``campaign.executions``, and held races are given to
``decide`` by its caller, ``campaign.program``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

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
    """A program beside plain.

    Attributes:
      without: the classes of sites that it leaves.
      ratio, error: plain time by its time, and the standard error as a fraction of it.
      time_us, plain_us: medians of one execution.
    """

    without: tuple[str, ...]
    ratio: float
    error: float
    time_us: float
    plain_us: float

    @classmethod
    def of(cls, race: Race, without: tuple[str, ...]) -> Kept | None:
        """Its times in a race; None if it failed there."""
        if without not in race.times_us:
            return None
        return cls(
            without=without,
            ratio=race.ratio(None, without),
            error=race.error(None, without),
            time_us=race.median_us(without),
            plain_us=race.median_us(None),
        )

    @property
    def loses(self) -> bool:
        """Whether plain is surely faster, or faster by more than may be."""
        return self.ratio < 1 - min(SURE * self.error, LOSS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is kept of a program.

    Attributes:
      kept: the fastest that was found; it leaves every op if that is plain.
      every: the program with every site; None if it failed.
    """

    kept: Kept
    every: Kept | None


def decide(race: Field, classes: Mapping[str, Sequence[str]]) -> Decision:
    """Races a program with every site, then with fewer and fewer of them.

    Without each op in turn it races always, as a loss may hide behind a gain. Without
    each class of sites it races only if it still loses to plain then.

    Args:
      race: holds a race; may raise ``TimeoutError``, which ends the search.
      classes: by op, those of its sites in the program, the most frequent first; see
        ``rewrite.fewer``.

    Raises:
      Undecided: if plain itself fails, or there was no time for the first race.
    """
    try:
        first = race([None, ()])
    except TimeoutError as e:
        raise Undecided(str(e)) from e
    if None not in first.times_us:
        raise Undecided(f"plain fails: {first.failures.get(None)}")
    every = best = Kept.of(first, ())
    plain_us = first.median_us(None)
    try:
        best = _with_fewer(race, best, list(classes))
        if best is None or best.loses:
            best = _with_fewer(race, best, _within_ops(classes, best)[:MOST])
    except TimeoutError:  # what is known by now decides
        pass
    if best is None or best.loses:
        left = tuple(sorted(classes))
        best = Kept(
            without=left, ratio=1.0, error=0.0, time_us=plain_us, plain_us=plain_us
        )
    return Decision(kept=best, every=every)


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
    """Whether the program is surely faster with fewer sites."""
    if known not in race.times_us:  # it failed this time
        return True
    noise = SURE * race.error(known, fewer)
    return race.ratio(known, fewer) > 1 + max(GAIN, noise)

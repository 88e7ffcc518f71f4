"""A survey: problems are drawn, measured and appended until the time is over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tracea_jax import knowledge
from tracea_jax.device import Device
from tracea_jax.options import current
from tracea_jax.survey import rows
from tracea_jax.survey.candidates import Preferences, candidates
from tracea_jax.survey.measure import measured
from tracea_jax.survey.problems import Numbered
from tracea_jax.tuning import measure

# Of four problems, one is of each op; gated products are like plain ones.
SHARES = {"matmul": 3, "conv2d": 3, "attention": 3, "gated_matmul": 1}
OPS = tuple(SHARES)

Measure = Callable[[Numbered], rows.Row]
Tell = Callable[["Progress"], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a survey is.

    Attributes:
      op: of the problem that was measured last.
      problem: that problem, in words.
      done: problems measured so far.
      used, left_s: share of the time that is over, and seconds that are left.
    """

    op: str
    problem: str
    done: int
    used: float
    left_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a survey measured.

    Attributes:
      directory: where the rows are.
      device: what was measured.
      counts: new rows of each op.
      spent_s: seconds that it took.
      interrupted: whether Ctrl-C ended it.
    """

    directory: pathlib.Path
    device: Device
    counts: dict[str, int]
    spent_s: float
    interrupted: bool = False

    def __str__(self) -> str:
        total = sum(self.counts.values())
        each = ", ".join(f"{op} {count}" for op, count in self.counts.items())
        rate = f"{self.spent_s / max(total, 1):.2f} s each"
        end = " (interrupted; what was measured is kept)" if self.interrupted else ""
        place = self.directory / rows.slug(self.device)
        return f"{total} problems measured, {rate}: {each}; {place}{end}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Every ``of``-th problem, so that machines of one kind share a survey."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"part {self.index} of {self.of}: count from 0")


def survey(
    directory: pathlib.Path,
    device: Device,
    *,
    budget_s: float,
    ops: Sequence[str] = OPS,
    seed: int = 0,
    part: Part = Part(),
    most: int | None = None,
    measure_one: Measure | None = None,
    tell: Tell = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Measures problems that have no row yet until the time is over.

    Args:
      directory: where rows are kept; see ``rows``.
      device: the local device.
      budget_s: seconds for everything. A problem that was begun is finished.
      ops: to draw problems of.
      seed: of the draw and of random candidates.
      part: which of the problems.
      most: problems to measure at most.
      measure_one: makes the row of a problem; by default ``measurer``'s.
      tell: called after each row.
      clock: seconds.
    """
    start = clock()
    measure_one = measure_one or measurer(device)
    counts = dict.fromkeys(ops, 0)
    interrupted = False
    with contextlib.ExitStack() as stack:
        writers = {
            op: stack.enter_context(
                contextlib.closing(rows.Writer(rows.path(directory, device, op)))
            )
            for op in ops
        }
        try:
            for numbered in itertools.islice(
                wanted(writers, seed, device.platform, part), most
            ):
                if clock() - start >= budget_s:
                    break
                op = numbered.problem.op
                writers[op].append(measure_one(numbered))
                counts[op] += 1
                spent_s = clock() - start
                tell(
                    Progress(
                        op=op,
                        problem=str(numbered.problem),
                        done=sum(counts.values()),
                        used=min(spent_s / budget_s, 1.0),
                        left_s=max(budget_s - spent_s, 0.0),
                    )
                )
        except KeyboardInterrupt:
            interrupted = True
    return Survey(
        directory=directory,
        device=device,
        counts=counts,
        spent_s=clock() - start,
        interrupted=interrupted,
    )


def wanted(
    writers: dict[str, rows.Writer], seed: int, platform: str, part: Part
) -> Iterator[Numbered]:
    """The problems without a row, of all ops by their shares, without an end."""

    def left(op: str) -> Iterator[Numbered]:
        done = {row.key for row in writers[op].rows}
        for i in itertools.count(part.index, part.of):
            if (seed, i) not in done:
                yield Numbered.of(op, seed, platform, i)

    drawn = {op: left(op) for op in writers}
    for op in itertools.cycle(_in_turns(tuple(writers))):
        yield next(drawn[op])


def _in_turns(ops: Sequence[str]) -> list[str]:
    """Each op as often as its share says, spread evenly."""
    places = [((i + 0.5) / SHARES[op], op) for op in ops for i in range(SHARES[op])]
    return [op for _, op in sorted(places)]


def measurer(device: Device, wishes: Preferences | None = None) -> Measure:
    """Measures problems in this process, one after another."""
    settings = current()
    exclusive = functools.partial(measure.exclusive, settings.directory, device)
    chosen = wishes or Preferences()

    def measure_one(numbered: Numbered) -> rows.Row:
        with knowledge.undisturbed():
            choices = candidates(numbered.problem, device, numbered.name, chosen)
            return measured(numbered, choices, device, exclusive=exclusive)

    return measure_one


__all__: list[Any] = ["OPS", "Part", "Progress", "Survey", "measurer", "survey"]

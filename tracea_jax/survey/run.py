"""A survey: problems are drawn, measured and appended until the time is over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

from tracea_jax import knowledge
from tracea_jax.device import CudaDevice, Device
from tracea_jax.options import current
from tracea_jax.survey import gpu, rows
from tracea_jax.survey.ahead import Planned, Planner
from tracea_jax.survey.candidates import Preferences, candidates
from tracea_jax.survey.measure import measured
from tracea_jax.survey.problems import Numbered
from tracea_jax.tuning import measure

# Of four problems, one is of each op; gated products are like plain ones.
SHARES = {"matmul": 3, "conv2d": 3, "attention": 3, "gated_matmul": 1}
OPS = tuple(SHARES)

Measure = Callable[[Iterator[Numbered]], Iterator[rows.Row]]
Tell = Callable[["Progress"], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a survey.

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
    """The outcome of a survey.

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

    def has(self, numbered: Numbered) -> bool:
        """Whether a problem belongs to this part."""
        return numbered.index % self.of == self.index


def survey(
    directory: pathlib.Path,
    device: Device,
    *,
    budget_s: float,
    ops: Sequence[str] = OPS,
    seed: int = 0,
    part: Part = Part(),
    most: int | None = None,
    plan: Sequence[Planned] = (),
    measure_all: Measure | None = None,
    tell: Tell = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Survey:
    """Measures problems that have no row yet until the time is over.

    Args:
      directory: where rows are kept; see ``rows``.
      device: the local device.
      budget_s: seconds for everything. Problems that were begun are finished.
      ops: to draw problems of.
      seed: of the draw and of random candidates.
      part: which of the problems.
      most: problems to measure at most.
      plan: what to measure first; see ``ahead``.
      measure_all: makes the rows of problems; by default ``measurer``'s.
      tell: called after each row.
      clock: seconds.
    """
    start = clock()
    measure_all = measure_all or measurer(device, plan)
    counts = dict.fromkeys(ops, 0)
    interrupted = False
    with contextlib.ExitStack() as stack:
        writers = {
            op: stack.enter_context(
                contextlib.closing(rows.Writer(rows.path(directory, device, op)))
            )
            for op in ops
        }
        first = (planned.numbered for planned in plan)
        drawn = itertools.chain(first, wanted(ops, seed, device.platform, part))
        left = itertools.islice(_left(drawn, writers), most)
        made = stack.enter_context(contextlib.closing(_closable(measure_all(left))))
        try:
            while clock() - start < budget_s and (row := next(made, None)) is not None:
                op = row.problem["op"]
                writers[op].append(row)
                counts[op] += 1
                spent_s = clock() - start
                tell(
                    Progress(
                        op=op,
                        problem=str(row.asked),
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


def _closable(found: Iterator[rows.Row]) -> Generator[rows.Row, None, None]:
    yield from found


def _left(
    drawn: Iterable[Numbered], writers: Mapping[str, rows.Writer]
) -> Iterator[Numbered]:
    """The problems without a row, each once."""
    done = {(op, *row.key) for op, writer in writers.items() for row in writer.rows}
    for numbered in drawn:
        key = (numbered.problem.op, numbered.seed, numbered.index)
        if key not in done and key[0] in writers:
            done.add(key)
            yield numbered


def wanted(
    ops: Sequence[str], seed: int, platform: str, part: Part = Part()
) -> Iterator[Numbered]:
    """The problems of all ops by their shares, without an end."""
    numbers = {op: itertools.count(part.index, part.of) for op in ops}
    for op in itertools.cycle(_in_turns(ops)):
        yield Numbered.of(op, seed, platform, next(numbers[op]))


def _in_turns(ops: Sequence[str]) -> list[str]:
    """Each op as often as its share says, spread evenly."""
    places = [((i + 0.5) / SHARES[op], op) for op in ops for i in range(SHARES[op])]
    return [op for _, op in sorted(places)]


def measurer(device: Device, plan: Sequence[Planned] = ()) -> Measure:
    """Measures in this process on a CPU, and in others on a GPU."""
    if isinstance(device, CudaDevice):
        return functools.partial(_on_gpu, device=device, plan=plan)
    exclusive = functools.partial(measure.exclusive, current().directory, device)
    known = {planned.numbered: planned.choices for planned in plan}

    def one(numbered: Numbered) -> rows.Row:
        with knowledge.undisturbed():
            choices = known.get(numbered) or candidates(
                numbered.problem, device, numbered.name, Preferences()
            )
            return measured(numbered, choices, device, exclusive=exclusive)

    return functools.partial(map, one)


def _on_gpu(
    left: Iterator[Numbered], device: CudaDevice, plan: Sequence[Planned]
) -> Iterator[rows.Row]:
    known = {planned.numbered: planned for planned in plan}
    planner = Planner(device)
    place = gpu.Place(
        cache=current().directory, programs=current().directory / "programs"
    )
    planned = (known.get(n) or planner.planned(n) for n in left)
    compilers = max(1, min(gpu.MOST_COMPILERS, (os.cpu_count() or 1) - 3))
    return gpu.measured(planned, device, place, compilers=compilers, on_failure=_show)


def _show(why: str) -> None:
    print(f"survey: {why}", file=sys.stderr, flush=True)

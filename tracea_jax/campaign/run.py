"""One campaign: opens the lab, tunes problems in two stages, and makes the report.

The second stage tunes problems whose kernels are made of parts, which are problems of
the first stage. Time is divided in ``tuning.schedule``; what a report says is in
``campaign.report``. Caller: ``campaign.tune``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tracea_jax import knowledge, policy, variants
from tracea_jax.campaign.executions import Program
from tracea_jax.campaign.program import hold
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.rows import Row, Times
from tracea_jax.campaign.watch import Watch
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.graph import Graph, Node
from tracea_jax.options import Options, publish_epoch
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.tuning import roofline, schedule, tuner
from tracea_jax.tuning.lab.local import Lab, LabError
from tracea_jax.tuning.sharing import Portfolio, Sharing
from tracea_jax.tuning.store.records import Entry

# Part of the budget that is kept back for racing the whole program.
_RACE_SHARE = 0.25
# Part of their fair share of the budget that problems made of parts get: they have few
# choices.
_LATER_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of ``tune``.

    Attributes:
      device: the local device to measure on.
      settings: the user's options.
      search: the keywords goal, effort and seed of ``tuner.Tuning``.
      budget_s: seconds for everything; infinite without a budget.
      watch: passes on progress and observations.
      program: to race as a whole at the end; None if there is none.
    """

    device: Device
    settings: Options
    search: dict[str, Any]
    budget_s: float
    watch: Watch
    program: Program | None = None

    @property
    def has_budget(self) -> bool:
        return not math.isinf(self.budget_s)

    @property
    def left_s(self) -> float:
        return self.budget_s - self.watch.elapsed_s

    @property
    def search_left_s(self) -> float:
        """Seconds left of the budget but for those of the last race."""
        is_raced = self.has_budget and self.program is not None
        return self.left_s - (_RACE_SHARE * self.budget_s if is_raced else 0.0)

    def report(self, graph: Graph, fraction: float | None) -> TuneReport:
        """Tunes the graph, in process 0 for all processes of a program."""
        rows: dict[Problem, Row] = {}
        shared: list[Portfolio] = []
        wholes: list[Whole] = []

        def entries() -> list[Entry]:
            rows.update(self._rows(graph, fraction, shared))
            found = [row.entry for row in rows.values() if row.entry is not None]
            knowledge.tidy(found, self.device, self.settings)
            return [*found, *self._raced(wholes, _interrupted(rows))]

        with self._publishing():
            told = knowledge.by_process_0(entries, self.settings, self.watch.waiting())
        for entry in told:
            problem = problem_from_json(entry.problem)
            if isinstance(problem, ProgramProblem):
                wholes.append(Whole.of_entry(entry))
            else:
                rows.setdefault(problem, _told(entry))
        wanted = [rows.get(node.problem) or _unreached(node.problem) for node in graph]
        return TuneReport(
            device=self.device,
            **self.search,
            rows=tuple(
                dataclasses.replace(row, count=node.count)
                for row, node in zip(wanted, graph, strict=True)
            ),
            parts=tuple(row for p, row in rows.items() if p not in graph),
            seconds=self.watch.elapsed_s,
            portfolio=next(iter(shared), None),
            whole=next(iter(wholes), None),
        )

    def _raced(self, wholes: list[Whole], is_interrupted: bool) -> list[Entry]:
        """Races the whole program, and tells of it in ``wholes``."""
        if self.program is None:
            return []
        if is_interrupted:
            wholes.append(Whole(reason="interrupted"))
            return []
        tell = self.watch.whole()
        entry, whole = hold(
            self.program,
            device=self.device,
            settings=self.settings,
            left_s=lambda: self.left_s,
            tell=tell,
        )
        wholes.append(whole)
        kept = whole.verdict
        tell(
            phase="done",
            done=1,
            total=1,
            best_us=kept and kept.time_us,
            message=whole.reason,
            ratio=kept and kept.ratio,
        )
        return [] if entry is None else [entry]

    def _rows(
        self, graph: Graph, fraction: float | None, shared: list[Portfolio]
    ) -> dict[Problem, Row]:
        """Tunes the parts of problems first, then the problems made of parts."""
        first, later = self._stages(graph)
        self.watch.expect([*first, *later])
        if not (first or later):
            return {}
        with self._lab([*first, *later]) as lab:
            fair = len(later) / max(len(first) + len(later), 1)
            kept_s = _LATER_SHARE * fair * self.budget_s if self.has_budget else 0.0
            rows = self._tuned(first, lab, self.search_left_s - kept_s)
            if later and not _interrupted(rows):
                knowledge.refresh(self.settings)  # to see the new answers of the parts
                rows |= self._tuned(later, lab, self.search_left_s)
            if fraction is not None and not _interrupted(rows):
                try:
                    found, rows = self._shared(rows, lab, fraction)
                    shared.append(found)
                except (KeyboardInterrupt, LabError) as e:  # own answers stay
                    why = str(e) or "interrupted"
                    warnings.warn(f"no portfolio was made: {why}", stacklevel=2)
        return rows

    def _stages(self, graph: Graph) -> tuple[list[Node], list[Node]]:
        """The problems of the first and of the second stage.

        First come problems without parts, and parts that have no answer yet. A part
        counts as often as the problems made of it. Second come problems with parts.
        """
        counts: dict[Problem, int] = {}
        later: list[Node] = []
        for node in graph:
            parts = variants.parts(node.problem)
            if parts:
                later.append(node)
            else:
                counts[node.problem] = counts.get(node.problem, 0) + node.count
            for part in parts:
                if part in graph or not self._is_answered(part):
                    counts[part] = counts.get(part, 0) + node.count
        return [Node(problem=p, count=n) for p, n in counts.items()], later

    def _is_answered(self, problem: Problem) -> bool:
        answer = knowledge.known(self.settings).lookup(
            problem, self.device, deterministic=self.settings.determinism
        )
        return answer is not None and answer.is_exact

    def _tuned(
        self, nodes: Sequence[Node], lab: Lab, budget_s: float
    ) -> dict[Problem, Row]:
        alone = len(nodes) == 1
        tasks = [
            knowledge.tuning(
                node.problem,
                self.device,
                settings=self.settings,
                lab=lab,
                budget_s=max(budget_s, 1e-3) if self.has_budget else None,
                progress=self.watch.progress(node.problem),
                observe=self.watch.observe(node.problem),
                **self.search,
            )
            for node in nodes
        ]
        jobs = [
            schedule.Job(
                task=task,
                count=node.count,
                floor_us=roofline.floor_us(node.problem, self.device),
            )
            for task, node in zip(tasks, nodes, strict=True)
        ]
        # A single tuning divides its time itself.
        outcomes = schedule.run(jobs, budget_s=math.inf if alone else budget_s)
        return {
            node.problem: self._row(node, task, outcome)
            for node, task, outcome in zip(nodes, tasks, outcomes, strict=True)
        }

    def _row(self, node: Node, task: tuner.Tuning, outcome: schedule.Outcome) -> Row:
        entry = outcome.entry
        stop = outcome.failure or outcome.stop
        if entry is not None:
            stop = stop or str(entry.tuner.get("stop", ""))
        return Row(
            problem=node.problem,
            count=node.count,
            entry=entry,
            **self._times(entry),
            evals=task.evals,
            compiles=task.compiles,
            seconds=outcome.seconds,
            stop=stop,
            trials=self.watch.trials(node.problem),
        )

    def _times(self, entry: Entry | None) -> dict[str, Times]:
        """The times of the race, and of the untuned choice if it was measured."""
        if entry is None:
            return {}
        problem, best = problem_from_json(entry.problem), entry.best
        diagnosis = diagnose(problem, self.device, self.settings.determinism)
        untuned = policy.decide(diagnosis).choice
        config = dataclasses.asdict(untuned.config)
        before = self.watch.latest(problem, untuned.variant, config)
        steady = before and before.time_us
        cold = before and before.cold_us
        return {
            "steady": Times(before=steady, after=best.time_us, xla=best.xla_us),
            "cold": Times(before=cold, after=best.cold_us, xla=best.xla_cold_us),
        }

    def _shared(
        self, rows: Mapping[Problem, Row], lab: Lab, fraction: float
    ) -> tuple[Portfolio, dict[Problem, Row]]:
        sharing = Sharing(
            lab=lab,
            knowledge=knowledge.known(self.settings),
            device=self.device,
            goal=self.search["goal"],
            fraction=fraction,
            left_s=lambda: self.left_s,
            observe=lambda problem, seen: self.watch.observe(problem)(seen),
        )
        entries = [row.entry for row in rows.values() if row.entry is not None]
        found, changed = sharing.share(entries)
        updated = dict(rows)
        for problem, (entry, slowness) in changed.items():
            row = rows[problem]
            # The ratio makes the new time comparable with the row's earlier race.
            updated[problem] = dataclasses.replace(
                row,
                entry=entry,
                steady=_slowed(row.steady, slowness.steady),
                cold=_slowed(row.cold, slowness.cold),
                trials=self.watch.trials(problem),
            )
        return found, updated

    @contextlib.contextmanager
    def _lab(self, nodes: Sequence[Node]) -> Iterator[Lab]:
        """The lab that measures all of these problems.

        Raises:
          ValueError: if the device is not a local one, or cannot run one of the
            problems.
        """
        knowledge.check_local(self.device)
        for node in nodes:
            knowledge.bench_of(node.problem, self.device)
        first = nodes[0].problem
        with (
            knowledge.undisturbed(),
            contextlib.closing(
                knowledge.open_lab(self.device, first, settings=self.settings)
            ) as lab,
        ):
            yield lab

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Makes new answers usable when the block ends, even by an error."""
        try:
            yield
        finally:
            knowledge.refresh(self.settings)
            publish_epoch()


def _interrupted(rows: Mapping[Problem, Row]) -> bool:
    return any(row.stop == "interrupted" for row in rows.values())


def _slowed(times: Times, factor: float) -> Times:
    after = None if times.after is None else times.after * factor
    return dataclasses.replace(times, after=after)


def _told(entry: Entry) -> Row:
    """The row of an entry that another process recorded."""
    best, done = entry.best, entry.tuner
    return Row(
        problem=problem_from_json(entry.problem),
        count=1,
        entry=entry,
        steady=Times(after=best.time_us, xla=best.xla_us),
        cold=Times(after=best.cold_us, xla=best.xla_cold_us),
        evals=int(done.get("evals", 0)),
        compiles=int(done.get("compiles", 0)),
        seconds=float(done.get("wall_s", 0.0)),
        stop=str(done.get("stop", "")),
    )


def _unreached(problem: Problem) -> Row:
    """The row of a problem whose tuning had not begun before an interrupt."""
    return Row(problem=problem, count=1, entry=None, stop="interrupted")

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

from tracea_jax import knowledge, roofline, variants
from tracea_jax.campaign.executions import Program
from tracea_jax.campaign.races import Races
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.rows import Row
from tracea_jax.campaign.watch import Watch
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.graph import Graph, Node
from tracea_jax.options import Options, publish_epoch
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.tuning import schedule, tuner
from tracea_jax.tuning.answers.answer import Question
from tracea_jax.tuning.lab.local import Lab, LabError
from tracea_jax.tuning.sharing import Portfolio, Sharing
from tracea_jax.tuning.store.records import Entry

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

    def report(self, graph: Graph, fraction: float | None) -> TuneReport:
        """Tunes the graph, in process 0 for all processes of a program."""
        rows: dict[Problem, Row] = {}
        shared: list[Portfolio] = []
        wholes: list[Whole] = []

        def entries() -> list[Entry]:
            with self._races() as races:
                rows.update(self._searched(graph, fraction, shared, races))
            found = [row.entry for row in rows.values() if row.entry is not None]
            if races is None:
                return found
            wholes.append(races.whole)
            return found if races.entry is None else [*found, races.entry]

        with self._publishing():
            told = knowledge.by_process_0(entries, self.settings, self.watch.waiting())
        for entry in told:
            problem = problem_from_json(entry.problem)
            if isinstance(problem, ProgramProblem):
                wholes.append(Whole.of_entry(entry))
            else:
                rows.setdefault(problem, _row_of(entry))
        wanted = [
            rows.get(n.problem) or _unreached(n.problem, "interrupted") for n in graph
        ]
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

    @contextlib.contextmanager
    def _races(self) -> Iterator[Races | None]:
        """The races of the whole program around the search; None without one."""
        if self.program is None:
            yield None
            return
        with Races(
            program=self.program,
            device=self.device,
            settings=self.settings,
            budget_s=self.budget_s,
            clock=lambda: self.watch.elapsed_s,
            tell=self.watch.whole(),
        ) as races:
            yield races

    def _searched(
        self,
        graph: Graph,
        fraction: float | None,
        shared: list[Portfolio],
        races: Races | None,
    ) -> dict[Problem, Row]:
        """Races the program, tunes the graph, and races the program again.

        Problems are left out if all the time that is left is needed for the last race.
        """
        if races is None:
            return self._rows(graph, fraction, shared, 0.0)
        races.before_search()
        before, rows = self._choices(graph), dict[Problem, Row]()
        if not races.is_interrupted:
            if races.search_s > 0:
                reserve_s = self.left_s - races.search_s if self.has_budget else 0.0
                rows = self._rows(graph, fraction, shared, reserve_s)
            else:
                rows = {n.problem: _unreached(n.problem, "budget") for n in graph}
        knowledge.refresh(self.settings)
        races.after_search(
            is_changed=self._choices(graph) != before,
            is_interrupted=races.is_interrupted or _interrupted(rows),
        )
        return rows

    def _choices(self, graph: Graph) -> dict[Problem, Choice]:
        """The choices that run the problems of a graph and their parts by now."""
        known = knowledge.known(self.settings)
        problems = [node.problem for node in graph]
        problems += [part for p in problems for part in variants.parts(p)]
        bits = self.settings.determinism
        asked = [Question.about(p, self.device, deterministic=bits) for p in problems]
        return {question.problem: known.answer(question).choice for question in asked}

    def _rows(
        self,
        graph: Graph,
        fraction: float | None,
        shared: list[Portfolio],
        reserve_s: float,
    ) -> dict[Problem, Row]:
        """Tunes the parts of problems first, then the problems made of parts.

        Args:
          graph: what to tune.
          fraction, shared: of the portfolio, and where to put it.
          reserve_s: seconds to leave.
        """
        first, later = self._stages(graph)
        self.watch.expect([*first, *later])
        if not (first or later):
            return {}
        with contextlib.ExitStack() as stack:
            try:
                lab = stack.enter_context(self._lab([*first, *later]))
            except KeyboardInterrupt:  # nothing is measured yet
                return {n.problem: _unreached(n.problem, "interrupted") for n in graph}
            fair = len(later) / max(len(first) + len(later), 1)
            kept_s = _LATER_SHARE * fair * self.budget_s if self.has_budget else 0.0
            rows = self._tuned(first, lab, self.left_s - reserve_s - kept_s)
            if later and not _interrupted(rows):
                knowledge.refresh(self.settings)  # to see the new answers of the parts
                rows |= self._tuned(later, lab, self.left_s - reserve_s)
            if fraction is not None and not _interrupted(rows):
                try:
                    portfolio, rows = self._shared(rows, lab, fraction)
                    shared.append(portfolio)
                except (KeyboardInterrupt, LabError) as e:  # own answers stay
                    why = str(e) or "interrupted"
                    warnings.warn(f"no portfolio was made: {why}", stacklevel=2)
            found = [row.entry for row in rows.values() if row.entry is not None]
            knowledge.tidy(found, self.device, self.settings)
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
            legal=task.legal,
            tried=task.tried,
            evals=task.evals,
            compiles=task.compiles,
            seconds=outcome.seconds,
            stop=stop,
            trials=self.watch.trials(node.problem),
        )

    def _shared(
        self, rows: Mapping[Problem, Row], lab: Lab, fraction: float
    ) -> tuple[Portfolio, dict[Problem, Row]]:
        sharing = Sharing(
            lab=lab,
            knowledge=knowledge.known(self.settings),
            device=self.device,
            determinism=self.settings.determinism,
            goal=self.search["goal"],
            fraction=fraction,
            left_s=lambda: self.left_s,
            observe=lambda problem, seen: self.watch.observe(problem)(seen),
        )
        entries = [row.entry for row in rows.values() if row.entry is not None]
        found, changed = sharing.share(entries)
        updated = dict(rows)
        for problem, entry in changed.items():
            updated[problem] = dataclasses.replace(
                rows[problem], entry=entry, trials=self.watch.trials(problem)
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


def _row_of(entry: Entry) -> Row:
    """The row of an entry that another process recorded."""
    done = entry.tuner
    return Row(
        problem=problem_from_json(entry.problem),
        count=1,
        entry=entry,
        legal=int(done.get("legal", 0)),
        tried=int(done.get("tried", 0)),
        evals=int(done.get("evals", 0)),
        compiles=int(done.get("compiles", 0)),
        seconds=float(done.get("wall_s", 0.0)),
        stop=str(done.get("stop", "")),
    )


def _unreached(problem: Problem, stop: str) -> Row:
    """The row of a problem whose tuning did not begin."""
    return Row(problem=problem, count=1, entry=None, stop=stop)

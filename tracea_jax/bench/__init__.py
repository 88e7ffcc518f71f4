"""bench: a function as it is written against ``transform`` of it, whole and by site.

    function, arguments -> Subject -> measured -> BenchReport

Nothing is tuned: the plans are those that ``transform`` would take now. The values are
in ``bench.report`` and ``bench.timed``, the drawing in ``bench.plot``. Callers: users
(``tracea.bench``) and the command line. Benchmarks of this package, with peers and
records, are in benchmarks/.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from tracea_jax import knowledge, variants
from tracea_jax.bench.report import IDENTICAL, BenchReport, SiteTime, WholeTime
from tracea_jax.bench.timed import Load, Timed
from tracea_jax.campaign.executions import Program, difference
from tracea_jax.doctor import versions
from tracea_jax.explain import Explanation, explain
from tracea_jax.explain.rows import grouped, place, places
from tracea_jax.explain.sites import Site
from tracea_jax.mistakes import check_function, check_kind
from tracea_jax.options import current, local_device
from tracea_jax.policy import Choice
from tracea_jax.schema import one_line
from tracea_jax.tuning import measure
from tracea_jax.tuning.measure import Run

# Races of whole programs, and of sites: 31 rounds tell a few percent apart, in about a
# second if executions are short. By chance, equal programs differ in all of five rounds
# by more than plain from itself in one race of a hundred.
TIMING = measure.Timing(min_rounds=5)
SITE_TIMING = measure.Timing(rounds=31, min_rounds=5)
_WHOLE_SHARE = 0.5  # of the time that is left when the whole program races
_XLA = Choice(variant="xla", config=variants.XLA.config_type())
Tell = Callable[[str, int, int], None]


def bench(
    fn: Callable[..., Any],
    *args: Any,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
    budget_s: float = 30.0,
    progress: Tell | None = None,
) -> BenchReport:
    """Times a function as it is written against ``transform(fn)``, whole and by site.

        tracea.bench(loss, params, batch)
        tracea.bench(jax.grad(loss), params, batch).to_json()

    Both programs are compiled by ``jax.jit`` and run in turns in this process, by
    wall-clock time of executions in a row. Then each problem that ``transform`` meets
    is run alone on random operands, its plan against XLA, also in turns; on a GPU by
    the time of kernels. XLA cannot fuse a site that runs alone with its neighbours, so
    the sites explain the ratio of the whole only in part.

    The plain program is in each race twice. A ratio is reported only if it differs from
    1 by more than plain differs from itself in the same rounds. Where the transformed
    program is the plain one, because XLA serves every site, nothing is raced.

    Nothing is tuned or kept. Results that differ by more than rounding are reported
    instead of times.

    Args:
      fn: a function, also one that is transformed or jitted. It is run many times, on
        its arguments or on random ones in place of ``jax.ShapeDtypeStruct``. Nothing is
        donated.
      *args: its arguments; bind keyword arguments with ``functools.partial``.
      ops, after_grad: as in ``transform``.
      budget_s: seconds for measuring. Compiling comes on top; sites that the time does
        not suffice for are named.
      progress: called at each step with the name of what is measured, the number of
        steps done, and that of all steps.

    Returns:
      A report: ``report.whole.ratio`` is plain time by transformed time, and
      ``report.whole.timed.difference`` is "faster", "slower" or "none".

    Raises:
      ValueError: on an unknown op, or a budget that is not positive.
      TypeError: if fn is no function.
    """
    check_function(fn, "bench takes a function", "bench(f, *args)")
    check_budget(budget_s)
    subject = Subject.of(fn, args, ops, after_grad)
    return measured(subject, budget_s=budget_s, tell=progress)


def check_budget(budget_s: float) -> None:
    """Raises ValueError or TypeError if it is no time to measure in."""
    check_kind("budget_s", budget_s, Real, "a number of seconds")
    if not budget_s > 0:
        raise ValueError(f"{budget_s=} must be positive seconds")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A traced function, and the explanation of what ``transform`` makes of it."""

    program: Program
    explanation: Explanation

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Any,
        ops: str | Iterable[str] | None = None,
        after_grad: bool = False,
    ) -> Subject:
        """Traces a function. Arguments and errors are those of ``bench``."""
        program = Program.of(fn, args, ops, after_grad)
        explained = explain(program.fn, ops=program.ops, after_grad=program.after_grad)
        return cls(program=program, explanation=explained(*args))

    @property
    def without(self) -> tuple[str, ...]:
        """The classes of sites that ``transform`` leaves to XLA."""
        verdict = self.explanation.verdict
        return () if verdict is None else verdict.without


def measured(
    subject: Subject, *, budget_s: float, tell: Tell | None = None
) -> BenchReport:
    """Races the whole program, then its problems, the largest first."""
    load, explanation = Load.now(), subject.explanation
    alike = grouped(explanation.sites, lambda site: (site.problem, _chosen(site)))
    race = _Races(budget_s=budget_s, steps=1 + len(alike), tell=tell)
    whole = race.whole(subject)
    order = sorted(range(len(alike)), key=lambda i: -sum(s.flops for s in alike[i]))
    times = {i: race.sites(alike[i], later=len(order) - n) for n, i in enumerate(order)}
    return BenchReport(
        function=explanation.function,
        device=explanation.device,
        versions=versions(),
        whole=whole,
        sites=tuple(times[i] for i in range(len(alike))),
        load=load,
    )


def _chosen(site: Site) -> Choice | None:
    """The choice that is measured of a site; None where none can run alone."""
    if site.problem is None or site.plan is None or site.variant is None:
        return None
    if site.variant == site.plan.variant:
        return Choice(variant=site.variant, config=site.plan.config)
    return _XLA if site.variant == "xla" else None


class _Races:
    """The races of one report, which share its time."""

    def __init__(self, *, budget_s: float, steps: int, tell: Tell | None) -> None:
        self._end_s = time.monotonic() + budget_s
        self._steps, self._done, self._tell = steps, 0, tell
        self._device, self._directory = local_device(), current().directory
        self._exclusive = functools.partial(
            measure.exclusive, self._directory, self._device
        )

    @property
    def _left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0)

    def _next(self, what: str) -> None:
        if self._tell is not None:
            self._tell(what, self._done, self._steps)
        self._done += 1

    def whole(self, subject: Subject) -> WholeTime:
        """The program as it is written against what ``transform`` makes of it."""
        self._next("whole program")
        with subject.program.opened() as executions:
            if why := executions.why_not():
                return WholeTime(reason=why)
            if executions.is_as_written(subject.without):
                reason = "XLA serves every site" if subject.explanation.sites else ""
                return WholeTime(is_identical=True, reason=reason or "it has no sites")
            executions = executions.filled()
            plain = executions.prepare(None)
            expected = plain.results()
            try:
                ours = executions.prepare(subject.without)
                wrong = difference(ours.results(), expected)
            except Exception as e:  # whatever a kernel does, plain runs
                wrong = one_line(f"transformed, it fails: {type(e).__name__}: {e}")
            if wrong is not None:
                return WholeTime(reason=wrong)
            limit_s = _WHOLE_SHARE * self._left_s
            race = self._race(plain, ours, TIMING.final, limit_s)
        return WholeTime(timed=_timed(race))

    def _race(
        self, plain: Run, ours: Run, timing: measure.Timing, limit_s: float
    ) -> measure.Race:
        """Plain twice and ours in turns; raises what they raise."""
        with self._exclusive():
            measure.settle(plain, timing)
            held = measure.race(
                {"plain": plain, "again": plain, "ours": ours},
                timing,
                limit_s=limit_s,
                is_even=True,
            )
        for error in held.failures.values():
            raise error
        return held

    def sites(self, alike: list[Site], later: int) -> SiteTime:
        """Times the plan of a problem against XLA.

        Args:
          alike: sites of the same problem and choice.
          later: how many problems share the time that is left, this one included.
        """
        site, counts = alike[0], [site.count for site in alike]
        self._next(str(site.problem or site.op))
        chosen = _chosen(site)
        timed, by, reason = None, "", site.reason
        is_identical = chosen is not None and chosen.variant == "xla"
        if is_identical:
            reason = IDENTICAL
        elif chosen is not None:
            with knowledge.undisturbed():
                timed, by, reason = self._site(site, chosen, later)
        return SiteTime(
            where=places([place(s) for s in alike]),
            op=site.op,
            problem=site.problem,
            count=None if None in counts else sum(filter(None, counts)),
            variant=site.variant,
            plan=site.plan,
            timed=timed,
            is_identical=is_identical,
            by=by,
            reason=reason,
        )

    def _site(
        self, site: Site, chosen: Choice, later: int
    ) -> tuple[Timed | None, str, str]:
        """The times, how they were taken, and why there are none."""
        assert site.problem is not None
        if not self._left_s:
            return None, "", "the time was used up"
        try:
            bench = knowledge.bench_of(site.problem, self._device)
            plain, ours = bench.prepare(_XLA), bench.prepare(chosen)
            limit_s = self._left_s / later
            by, race = "wall clock", self._race(plain, ours, SITE_TIMING.heat, limit_s)
            kernels = self._kernel_race(bench, plain, ours)
        except Exception as e:  # a site that cannot run alone says nothing of others
            return None, "", one_line(f"{type(e).__name__}: {e}")
        if kernels.times_us:
            by, race = "kernels", kernels
        return _timed(race), by, ""

    def _kernel_race(self, bench: Any, plain: Run, ours: Run) -> measure.Race:
        """Kernel times, likewise; none where the device does not report them."""
        runs = {"plain": plain, "again": plain, "ours": ours}
        with self._exclusive():
            times = measure.kernel_times_of(bench)(runs, SITE_TIMING.kernel_rounds)
        return measure.Race(
            times_us={racer: tuple(us) for racer, us in times.items()},
            repeats=dict.fromkeys(times, 1),
            failures={},
        )


def _timed(race: measure.Race) -> Timed:
    return Timed.of(race, plain="plain", again="again", ours="ours")

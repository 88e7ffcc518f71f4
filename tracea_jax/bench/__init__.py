"""bench: a function as it is written against ``transform`` of it, whole and by site.

    function, arguments -> Subject -> measured -> BenchReport

Nothing is tuned: what runs is what ``transform`` would run now. The values are in
``bench.report``, the drawing in ``bench.plot``. Callers: users (``tracea.bench``) and
the command line. Benchmarks of this package, with peers and records, are in
benchmarks/.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from tracea_jax import knowledge, variants
from tracea_jax.bench.report import BenchReport, SiteTime, Timed, WholeTime
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
from tracea_jax.tuning.lab.local import LocalLab

# Races of whole programs, and of sites: 31 rounds tell a few percent apart, in less
# than a second if executions are short.
TIMING = measure.Timing()
SITE_TIMING = measure.Timing(rounds=31)
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
    is run alone on random operands, its plan against XLA, also in turns; on a GPU that
    is the time of kernels. What runs alone has no neighbours to be fused with, so the
    sites explain the ratio of the whole only in part.

    Nothing is tuned or kept. Results that differ by more than rounding are told in
    place of times.

    Args:
      fn: a function, also one that is transformed or jitted. It is run many times, on
        its arguments or on random ones in place of ``jax.ShapeDtypeStruct``. Nothing is
        donated.
      *args: its arguments; bind keyword arguments with ``functools.partial``.
      ops, after_grad: as in ``transform``.
      budget_s: seconds for measuring. Compiling comes on top; sites that the time does
        not suffice for are named.
      progress: called with what is measured next, how many steps are done, and how many
        there are.

    Returns:
      A report: ``report.whole.ratio`` is plain time by transformed time.

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
    """A function that was traced: what it is, and what ``transform`` makes of it."""

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
        """The classes of sites that ``transform`` leaves."""
        verdict = self.explanation.verdict
        return () if verdict is None else verdict.without


def measured(
    subject: Subject, *, budget_s: float, tell: Tell | None = None
) -> BenchReport:
    """Races the whole program, then its problems, the largest first."""
    explanation = subject.explanation
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
    )


def _chosen(site: Site) -> Choice | None:
    """What is measured of a site; None where nothing can be, alone."""
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
            with self._exclusive():
                measure.settle(plain, TIMING)
                held = measure.race(
                    {"plain": plain, "ours": ours},
                    TIMING.final,
                    limit_s=_WHOLE_SHARE * self._left_s,
                )
        for error in held.failures.values():
            raise error
        return WholeTime(timed=Timed.of(held, plain="plain", ours="ours"))

    def sites(self, alike: list[Site], later: int) -> SiteTime:
        """What runs a problem against XLA.

        Args:
          alike: sites of the same problem and choice.
          later: how many problems share the time that is left, this one included.
        """
        site, counts = alike[0], [site.count for site in alike]
        self._next(str(site.problem or site.op))
        chosen = _chosen(site)
        timed, by, reason = None, "", site.reason
        if chosen is not None:
            with knowledge.undisturbed():
                timed, by, reason = self._timed(site, chosen, later)
        return SiteTime(
            where=places([place(s) for s in alike]),
            op=site.op,
            problem=site.problem,
            count=None if None in counts else sum(filter(None, counts)),
            variant=site.variant,
            plan=site.plan,
            timed=timed,
            by=by,
            reason=reason,
        )

    def _timed(
        self, site: Site, chosen: Choice, later: int
    ) -> tuple[Timed | None, str, str]:
        """The times, what they are of, and why there are none."""
        problem, racers = site.problem, list(dict.fromkeys([_XLA, chosen]))
        assert problem is not None
        if not self._left_s:
            return None, "", "the time was used up"
        lab = LocalLab(
            knowledge.bench_of, self._device, SITE_TIMING, exclusive=self._exclusive
        )
        try:
            # The first of a lab's races warms the device up.
            held = lab.race(problem, racers, limit_s=self._left_s / later, is_heat=True)
            for error in held.failures.values():
                return None, "", one_line(f"{type(error).__name__}: {error}")
            kernels = lab.kernel_race(problem, racers)
        except Exception as e:  # a site that cannot run alone says nothing of others
            return None, "", one_line(f"{type(e).__name__}: {e}")
        finally:
            lab.close()
        by = "kernels" if kernels.times_us else "wall clock"
        race = kernels if kernels.times_us else held
        return Timed.of(race, plain=_XLA, ours=chosen), by, ""

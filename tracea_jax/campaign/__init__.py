"""A campaign: ``tracea.tune``, which tunes all problems of a function or graph.

``run`` does the work, ``watch`` passes on progress, ``report`` and ``text`` are the
result and its text, ``plot`` draws a report. The tuning of one problem is in
``tracea_jax.tuning``. Callers: users (``tracea.tune``), the command line, the demo and
the benchmarks.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tracea_jax import catalogue
from tracea_jax import ops as ops  # the import registers how each op is measured
from tracea_jax.campaign import plot as drawing
from tracea_jax.campaign.executions import Program
from tracea_jax.campaign.progress import Told, showing
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.run import Run
from tracea_jax.campaign.watch import Log, Watch
from tracea_jax.device import Device
from tracea_jax.graph import Graph, Node
from tracea_jax.mistakes import check_function, shown, similar
from tracea_jax.options import current, device_called, planned_device, planning
from tracea_jax.options import local_device as local_device
from tracea_jax.outputs import check_drawing
from tracea_jax.problem import Problem
from tracea_jax.transform import op_names
from tracea_jax.typing import Effort, Goal


def tune(
    what: Problem | Graph | Callable[..., Any],
    *args: Any,
    goal: Goal = "latency",
    effort: Effort = "default",
    budget_s: float | None = None,
    seed: int = 0,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
    device: str | Device | None = None,
    portfolio: float | None = None,
    race: bool = True,
    progress: bool | Told = True,
    log: str | os.PathLike[str] | Log | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> TuneReport:
    """Measures candidates on this machine and caches the fastest correct ones.

        tracea.tune(tracea.GemmProblem(m=4096, n=4096, k=4096))
        print(tracea.tune(loss, params, batch, budget_s=60))

    The best configs race against the default config and XLA, and no answer is slower
    than these in its race, by the times that the report prints. Functions that are
    already jitted are traced again and use the results.

    Of several problems, the one that promises to save most of the graph's time is
    searched next. All searches end when together they promise to save less than 1 %.
    Configs measured before, here or by other processes, are not measured again.

    A function also races as a whole, ``transform(what)`` against plain JAX by
    wall-clock time: before the search, with what runs untuned, and after it if other
    configs run then. It races without each op in turn, and while it loses without each
    class of sites. Sites without which it is faster are left as written from then on,
    wherever the same function is transformed at the same shapes; so a program that was
    raced is at most 1.5 % slower than plain in its race. If the budget does not suffice
    for compiling the program, ``tune`` says before the search how many seconds it
    needs, and the report says what was not raced.

    Ctrl-C ends the search: what was measured until then is verified and raced for two
    seconds, and the report is returned. A second Ctrl-C ends at once; the measurements
    are kept.

    Args:
      what: a problem such as ``tracea.GemmProblem(...)``, a ``tracea.Graph``, or a
        function, of which all problems that ``transform(what)(*args)`` meets are tuned.
      *args: arguments of the function: arrays, ``jax.ShapeDtypeStruct``, pytrees of
        them.
      goal: the time to minimise: "latency" (of single executions on cold caches),
        "throughput" (of executions in a row) or "balanced" (the geometric mean of
        both). It decides and is printed; where the device reports kernel times, these
        have the last word.
      effort: "none", "quick", "default" or "max": how many configs of each problem are
        measured.
      budget_s: seconds for everything. Problems that it does not reach stay untuned.
      seed: of the random inputs and of every random choice.
      ops: which ops to tune, as in ``transform``; all by default.
      after_grad: as in ``transform``.
      device: "cpu" or the profile of a local GPU; by default what JAX computes on.
      portfolio: a fraction such as 0.02. If given, the fewest configs of each op are
        found that serve every problem at most this much slower than its own best
        config, and not slower than its default or XLA; they become the answers.
      race: whether a function races as a whole; for that it is run, on its arguments
        or on random ones in place of ``jax.ShapeDtypeStruct``. Nothing is donated.
      progress: True shows a bar in a terminal or a notebook, and nothing elsewhere;
        False shows nothing. A function is called in place of the bar, at every step,
        with the fields of ``watch.Step`` as keywords.
      log: a file that every observation is appended to as a line of JSON, or a function
        that is called with every observation as a dict.
      plot: a file that ends in .png, .svg or .pdf, for a drawing of the searches; needs
        matplotlib.

    Returns:
      A report; print it. ``report.entries`` has the stored entry of each problem,
      ``report.entry`` the only one if one problem was tuned.

    Raises:
      ValueError: on an unknown goal, effort or op, or a value out of range.
      TypeError: if ``what`` is neither a problem, nor a graph, nor a function.
      OSError: before anything is measured, if the log or the plot cannot be written.

    Warns:
      UserWarning: if there was nothing to draw, or no more room for it.
    """
    if plot is not None:
        check_drawing(plot)  # an error must not come after hours of work
    target = planned_device() if device is None else device_called(device)
    with planning(target):
        graph = graph_of(what, args, ops=ops, after_grad=after_grad)
    _check(budget_s, portfolio, seed)
    program = _program(what, args, ops, after_grad) if race else None
    with showing(progress) as told:
        watch = Watch(
            progress=told, log=log, budget_s=budget_s, is_raced=program is not None
        )
        run = Run(
            device=target,
            settings=current(),
            search={"goal": goal, "effort": effort, "seed": seed},
            budget_s=math.inf if budget_s is None else budget_s,
            watch=watch,
            program=program,
        )
        with watch:
            report = run.report(graph, portfolio)
    if plot is not None:
        drawing.save_or_warn(report, plot)
    return report


def graph_of(
    what: Any,
    args: Sequence[Any] = (),
    *,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
) -> Graph:
    """The problems that ``tune(what, *args)`` tunes, as a graph.

    Raises:
      ValueError: on an unknown op.
      TypeError: if ``what`` is neither a problem, nor a graph, nor a function, or if
        it takes no arguments but ``args`` are given.
    """
    if not isinstance(what, Graph | Problem):
        takes = "tune takes a function, a problem or a graph"
        check_function(what, takes, _meant(what))
    ops = None if ops is None else op_names(ops)
    if not isinstance(what, Graph | Problem) and callable(what):
        return Graph.from_function(what, *args, ops=ops, after_grad=after_grad)
    if args:
        raise TypeError(
            f"only functions have arguments; {type(what).__name__} has none"
        )
    if unknown := sorted({*(ops or ())} - {*catalogue.names()}):
        valid = catalogue.names()
        raise ValueError(
            f"ops={unknown} must be some of {', '.join(valid)}"
            + similar(unknown[0], valid)
        )
    graph = Graph()
    for node in what if isinstance(what, Graph) else [Node(problem=what)]:
        if ops is None or node.problem.op in ops:
            graph.add(node.problem, node.count)
    return graph


def _meant(what: Any) -> str:
    """Suggests a call in place of one that cannot be tuned."""
    if isinstance(what, str) and what in catalogue.names():
        return f"graph = tracea.Graph(); graph.add_{what}(...); tune(graph)"
    if isinstance(what, list | tuple) and all(isinstance(x, Problem) for x in what):
        return "tune(tracea.Graph(problems))"
    return "tune(f, *args)"


def _program(
    what: Any, args: Sequence[Any], ops: str | Iterable[str] | None, after_grad: bool
) -> Program | None:
    """The function to race as a whole; None of problems and graphs."""
    if isinstance(what, Graph | Problem) or not callable(what):
        return None
    return Program.of(what, args, ops, after_grad)


def _check(budget_s: float | None, portfolio: float | None, seed: Any) -> None:
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an integer, not {shown(seed)}")
    for name, value in (("budget_s", budget_s), ("portfolio", portfolio)):
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number or None, not {shown(value)}")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"{budget_s=} must be positive seconds, or None for no limit")
    if portfolio is not None and not 0 <= portfolio < 1:
        raise ValueError(f"{portfolio=} must be a fraction such as 0.02, or None")

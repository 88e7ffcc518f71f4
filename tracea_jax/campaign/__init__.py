"""tune: measure the candidates of problems now and remember the best."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from tracea_jax import ops as ops  # ops register how they are measured
from tracea_jax.campaign.report import TuneReport
from tracea_jax.campaign.run import Run
from tracea_jax.campaign.watch import Log, Watch
from tracea_jax.device import Device
from tracea_jax.explain import local_device as local_device
from tracea_jax.graph import Graph, Node
from tracea_jax.options import current
from tracea_jax.problem import Problem
from tracea_jax.transform import op_names


def tune(
    what: Any,
    *args: Any,
    goal: str = "latency",
    effort: str = "default",
    budget_s: float | None = None,
    seed: int = 0,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
    device: Device | None = None,
    portfolio: float | None = None,
    progress: Any = None,
    log: str | os.PathLike[str] | Log | None = None,
) -> TuneReport:
    """Measures candidates on this machine and caches the fastest correct ones.

        tracea.tune(tracea.GemmProblem(m=4096, n=4096, k=4096))
        print(tracea.tune(loss, params, batch, budget_s=60))

    XLA is one of the candidates, so an answer is never slower than not using the
    package. Functions that are already jitted are traced again and use the results.

    Of several problems the one that promises to save most of the graph's time is
    searched next, and all end when together they promise less than 1 %. What was
    measured before, here or by other processes, is not measured again.

    Ctrl-C ends the search: what was measured until then is verified and raced shortly,
    and the report returned. A second one ends at once; the measurements are kept.

    Args:
      what: a problem such as ``tracea.GemmProblem(...)``, a ``tracea.Graph``, or a
        function: then what ``transform(what)(*args)`` asks is tuned.
      *args: the function's: arrays, ``jax.ShapeDtypeStruct``, pytrees of them.
      goal: what to minimise; one of ``tuning.tuner.GOALS``.
      effort: "none", "quick", "default" or "max": how many configs of each problem are
        measured.
      budget_s: seconds for everything. Problems that it does not reach stay untuned.
      seed: of the random inputs and of every random choice.
      ops: which ops to tune, as in ``transform``; all by default.
      after_grad: as in ``transform``.
      device: by default that of JAX's default backend; it must be a local one.
      portfolio: for each op find the fewest configs that serve every problem within
        this fraction of its own best, such as 0.02, and make them the answers.
      progress: called with keywords as the tuning goes on; see ``watch.Step``.
      log: a file that every observation is appended to as a line of JSON, or a function
        that is given each as a dict.

    Returns:
      A report; print it. ``report.entries`` has what is remembered about each problem,
      ``report.entry`` that of a single one.

    Raises:
      ValueError: on an unknown goal, effort or op, or a value out of range.
      TypeError: if ``what`` is nothing that can be tuned.
    """
    graph = graph_of(what, args, ops=ops, after_grad=after_grad)
    _check(budget_s, portfolio)
    run = Run(
        device=device or local_device(),
        settings=current(),
        search={"goal": goal, "effort": effort, "seed": seed},
        budget_s=math.inf if budget_s is None else budget_s,
        watch=Watch(progress=progress, log=log, budget_s=budget_s, effort=effort),
    )
    with run.watch:
        return run.report(graph, portfolio)


def graph_of(
    what: Any,
    args: Sequence[Any] = (),
    *,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
) -> Graph:
    """The problems that ``tune(what, *args)`` means.

    Raises:
      TypeError: if ``what`` is no problem, graph or function, or takes no arguments.
    """
    ops = None if ops is None else op_names(ops)
    if not isinstance(what, Graph | Problem) and callable(what):
        return Graph.from_function(what, *args, ops=ops, after_grad=after_grad)
    if args:
        raise TypeError(
            f"only functions have arguments; {type(what).__name__} has none"
        )
    graph = Graph()
    for node in what if isinstance(what, Graph) else [Node(problem=what)]:
        if ops is None or node.problem.op in ops:
            graph.add(node.problem, node.count)
    return graph


def _check(budget_s: float | None, portfolio: float | None) -> None:
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"{budget_s=} must be positive seconds, or None for no limit")
    if portfolio is not None and not 0 <= portfolio < 1:
        raise ValueError(f"{portfolio=} must be a fraction such as 0.02, or None")

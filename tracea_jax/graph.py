"""Graph: the problems of a program, each with how often it runs.

How problems are made from plain values is in the records of the ops; what is done with
a graph, ``campaign`` says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tracea_jax import catalogue
from tracea_jax.explain import explain
from tracea_jax.explain.sites import Site
from tracea_jax.options import options
from tracea_jax.problem import Problem
from tracea_jax.transform import op_names
from tracea_jax.verdicts import leaving

if TYPE_CHECKING:
    from tracea_jax.graph_adds import Adds
else:
    Adds = object  # ``Graph.__getattr__`` makes the methods


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A problem, and how often it runs."""

    problem: Problem
    count: int = 1

    @property
    def flops(self) -> int:
        """Of all runs."""
        return self.count * self.problem.flops

    def __str__(self) -> str:
        return f"{self.count} x {self.problem}"


class Graph(Adds):
    """What a program asks of the ops, for tuning it as a whole.

        graph = tracea.Graph()
        graph.add_matmul(4096, 4096, 4096, dtype="bfloat16", count=32)
        graph.add_attention(2, 4096, 4096, 32, 128, dtype="bfloat16", is_causal=True)
        print(tracea.tune(graph, goal="throughput"))

    There is a method ``add_<op>`` for every op; ``help(graph.add_matmul)`` names its
    arguments, to which ``count`` adds how often the problem runs.

    Equal problems are one node whose count is their sum. Iterating gives the nodes in
    the order in which they were added first.
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._counts: dict[Problem, int] = {}
        for problem in problems:
            self.add(problem)

    @classmethod
    def from_function(
        cls,
        fn: Callable[..., Any],
        *args: Any,
        ops: str | Iterable[str] | None = None,
        after_grad: bool = False,
    ) -> Graph:
        """What ``transform(fn)`` asks when it is called with these arguments.

        Sites that it leaves because the whole program was faster so are included.

        Calls of our ops that fn makes itself are included. What tuning cannot change
        is left out: calls with a config of their own, those that ask for XLA, symbolic
        shapes, arrays that are partitioned automatically. A problem in a scan counts as
        often as the scan is long; one in a loop of unknown length counts once.

        Args:
          fn: traced, never run. Bind keyword arguments with ``functools.partial``.
          *args: arrays, ``jax.ShapeDtypeStruct``, or pytrees of them.
          ops: which ops to take, of "matmul", "gated_matmul", "conv2d", "attention";
            all by default.
          after_grad: as in ``transform``.

        Raises:
          ValueError: on an unknown op.
        """
        ops = None if ops is None else op_names(ops)
        explained = explain(fn, ops=ops, after_grad=after_grad)
        # What was never tuned is wanted above all, and what a race left may win by now.
        with options(on_miss="heuristic"), leaving(()):
            found = explained(*args)
        graph = cls()
        for site in found.sites:
            if _is_tunable(site) and (ops is None or site.op in ops):
                graph.add(site.problem, 1 if site.count is None else site.count)
        return graph

    def add(self, problem: Problem | None, count: int = 1) -> None:
        """Adds a problem that runs so many times.

        Raises:
          TypeError: if it is no problem.
          ValueError: if the count is negative.
        """
        if not isinstance(problem, Problem):
            raise TypeError(f"{problem!r} is no problem, such as tracea.GemmProblem")
        if not (isinstance(count, int) and count >= 0):
            raise ValueError(f"{count=} must be a number of runs, 0 or more")
        if count:
            self._counts[problem] = self._counts.get(problem, 0) + count

    def __getattr__(self, name: str) -> Callable[..., None]:
        """``add_<op>``: adds what the builder in the record of the op makes.

        It takes the builder's arguments and ``count``, how often the problem runs; its
        docstring is the builder's.
        """
        op = name.removeprefix("add_")
        if op == name or op not in catalogue.names():
            raise AttributeError(f"a Graph has no attribute {name!r}")
        build = catalogue.get(op).build

        @functools.wraps(build)
        def add(*sizes: Any, count: int = 1, **how: Any) -> None:
            self.add(build(*sizes, **how), count)

        return add

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(f"add_{op}" for op in catalogue.names())]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(problem=p, count=n) for p, n in self._counts.items())

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, problem: object) -> bool:
        return problem in self._counts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self._counts == other._counts

    __hash__ = None  # pyright: ignore[reportAssignmentType]  it changes

    def __str__(self) -> str:
        runs = sum(self._counts.values())
        title = f"{_counted(len(self), 'problem')}, {_counted(runs, 'run')}"
        width = max((len(str(n)) for n in self._counts.values()), default=0)
        lines = [f"  {n:{width}} x {p}" for p, n in self._counts.items()]
        return "\n".join([title, *lines])

    def __repr__(self) -> str:
        return f"<Graph of {self}>"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _is_tunable(site: Site) -> bool:
    """Whether another answer for its problem would change what the site runs."""
    if site.problem is None or site.plan is None:
        return False
    return site.plan.origin != "user"

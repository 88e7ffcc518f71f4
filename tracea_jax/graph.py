"""Graph: the problems of a program, each with how often it runs.

How problems are made from plain values is in the records of the ops; what is done with
a graph, ``campaign`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tracea_jax import catalogue, schema
from tracea_jax.explain import explain
from tracea_jax.explain.sites import Site
from tracea_jax.mistakes import check_function, shown, similar
from tracea_jax.options import options
from tracea_jax.page import Column, Page, Printable, Row, Table
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
        """Floating-point operations of all runs."""
        return self.count * self.problem.flops

    def __str__(self) -> str:
        return f"{self.count} x {self.problem}"


class Graph(Printable, Adds):
    """The problems of a program, for tuning it as a whole.

        graph = tracea.Graph()
        graph.add_matmul(4096, 4096, 4096, dtype="bfloat16", count=32)
        graph.add_attention(2, 4096, 4096, 32, 128, dtype="bfloat16", is_causal=True)
        tracea.tune(graph, goal="throughput")

    There is a method ``add_<op>`` for every op; ``help(graph.add_matmul)`` names its
    arguments, to which ``count`` adds how often the problem runs.

    Equal problems are one node whose count is their sum. Iterating gives the nodes in
    the order in which they were added first.
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._counts: dict[Problem, int] = {}
        if not isinstance(problems, Iterable):
            is_one = isinstance(problems, Problem)
            meant = "Graph([problem])" if is_one else "Graph.from_function(f, *args)"
            raise TypeError(
                f"Graph takes a list of problems, not {shown(problems)}; write {meant}"
            )
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
        """The graph of ``transform(fn)`` called with these arguments.

        Sites that it leaves because the whole program was faster so are included.

        Calls of our ops that fn makes itself are included. What tuning cannot change
        is left out: calls with a config of their own, those that ask for XLA, symbolic
        shapes, arrays that the compiler splits and no rule of ours does. Where a rule
        splits them, the problems are those of one device, for which the function is
        compiled. A problem in a scan counts as often as the scan is long; one in a loop
        of unknown length counts once.

        Args:
          fn: traced, never run. Bind keyword arguments with ``functools.partial``.
          *args: arrays, ``jax.ShapeDtypeStruct``, or pytrees of them.
          ops: which ops to take, of "matmul", "gated_matmul", "conv2d", "attention";
            all by default.
          after_grad: as in ``transform``.

        Raises:
          ValueError: on an unknown op.
          TypeError: if fn is no function.
        """
        takes = "from_function takes a function"
        check_function(fn, takes, "Graph.from_function(f, *args)")
        ops = None if ops is None else op_names(ops)
        explained = explain(fn, ops=ops, after_grad=after_grad)
        # What was never tuned is wanted above all, and what a race left may win by now.
        with options(on_miss="heuristic"), leaving(()):
            found = explained(*args)
        graph = cls()
        for site in found.sites:
            if _is_tunable(site) and (ops is None or site.op in ops):
                for problem in site.problems:
                    graph.add(problem, 1 if site.count is None else site.count)
        return graph

    def add(self, problem: Problem | None, count: int = 1) -> None:
        """Adds a problem that runs so many times.

        Raises:
          TypeError: if it is no problem.
          ValueError: if a field is of a wrong type, or the count is negative.
        """
        if not isinstance(problem, Problem):
            raise TypeError(
                f"a graph has problems, such as tracea.GemmProblem, not "
                f"{shown(problem)}; Graph.from_function(f, *args) takes those of a "
                "function"
            )
        schema.check_types(problem)
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
            hint = "" if name.startswith("__") else similar(name, dir(self))
            raise AttributeError(f"a Graph has no attribute {name!r}{hint}")
        build = catalogue.get(op).build
        signature = _with_count(inspect.signature(build))

        @functools.wraps(build)
        def add(*sizes: Any, **how: Any) -> None:
            try:
                signature.bind(*sizes, **how)
            except TypeError as e:
                raise TypeError(f"{name}: {e}; it is {name}{_plain(signature)}") from e
            count = how.pop("count", 1)
            self.add(build(*sizes, **how), count)

        add.__name__, add.__qualname__ = name, f"Graph.{name}"
        add.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
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

    @property
    def page(self) -> Page:
        runs = sum(self._counts.values())
        width = max((len(str(n)) for n in self._counts.values()), default=0)
        table = Table(
            columns=(Column("runs", is_number=True), Column("problem", " x ")),
            rows=tuple(Row((f"{n:{width}}", str(p))) for p, n in self._counts.items()),
            title=f"{_counted(len(self), 'problem')}, {_counted(runs, 'run')}",
        )
        return Page((table,))


def _with_count(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a builder that also takes how often the problem runs."""
    kinds = inspect.Parameter
    count = kinds("count", kinds.KEYWORD_ONLY, default=1, annotation=int)
    *others, last = signature.parameters.values()
    ends = [last, count] if last.kind is not kinds.VAR_KEYWORD else [count, last]
    return signature.replace(parameters=[*others, *ends], return_annotation=None)


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """The same without types, for an error."""
    none = inspect.Signature.empty
    bare = [p.replace(annotation=none) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=none)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _is_tunable(site: Site) -> bool:
    """Tests whether another answer for its problem would change what the site runs."""
    if site.problem is None or site.plan is None:
        return False
    return site.plan.origin != "user"

"""tracea tune: problems from the command line, a file or a function.

Problems are read in ``cli.problems``, functions in ``cli.functions``; the tuning itself
is ``campaign.tune``. Caller: ``cli``.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracea_jax.cli import problems
from tracea_jax.cli.parser import INTERRUPTED
from tracea_jax.outputs import check_drawing

if TYPE_CHECKING:
    from tracea_jax.campaign.report import TuneReport

_FUNCTION = re.compile(r"[\w./-]+:[\w.]+")  # also a file in place of a module

_EXAMPLES = """\
  tracea tune matmul 4096 4096 4096 --dtype bfloat16
  tracea tune model:step --args 'f32[8,128]' 'f32[128,64]' --budget-s 60
  tracea tune --file problems.txt --portfolio 0.02 --log tuning.jsonl
"""


def add(commands: Any, argv: Sequence[str]) -> None:
    """Adds the command.

    The ops are imported only for a command line that names this command.

    Args:
      commands: the subparsers to add to.
      argv: the command line; each op, and each word MODULE:FUNCTION in it, becomes a
        subcommand.
    """
    text = "measure the candidates of problems and keep the best"
    tune = commands.add_parser(
        "tune",
        help=text,
        description=text,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.set_defaults(command=_run, op=None, called=None, parser=tune)
    _add_options(tune, {})
    tune.add_argument("--file", metavar="FILE", help="file with one problem per line")
    # The same options after OP: absent ones keep the values given before OP.
    search = argparse.ArgumentParser(add_help=False)
    _add_options(search, {"default": argparse.SUPPRESS})
    whats = tune.add_subparsers(metavar="OP or MODULE:FUNCTION")
    if "tune" not in argv:
        return
    problems.add_ops(whats, parents=[search])
    for name in dict.fromkeys(word for word in argv if _FUNCTION.fullmatch(word)):
        function = whats.add_parser(name, parents=[search])
        function.set_defaults(called=name)
        add_function_options(function)


def add_function_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a function: its arguments, and which of its ops count."""
    parser.add_argument(
        "--args",
        nargs="+",
        action="extend",
        default=[],
        metavar="SHAPE",
        help="its arguments, such as 'f32[8,128]'; else what FUNCTION_args() returns",
    )
    parser.add_argument("--ops", nargs="+", help="which to use; all by default")
    parser.add_argument(
        "--after-grad",
        action="store_true",
        help="take only single products, after JAX differentiated",
    )


def _add_options(parser: argparse.ArgumentParser, default: dict[str, Any]) -> None:
    def option(name: str, **how: Any) -> None:
        parser.add_argument(name, **{**problems.with_default(how), **default})

    option(
        "--goal",
        default="latency",
        help="latency (cold caches), throughput (in a row) or balanced",
    )
    option("--effort", default="default", help="none, quick, default or max")
    option("--budget-s", type=float, help="seconds for everything")
    option("--seed", type=int, default=0, help="of random inputs and choices")
    option(
        "--portfolio",
        type=float,
        metavar="FRACTION",
        help="few configs for all problems, each within this of its best, such as 0.02",
    )
    option(
        "--no-race",
        action="store_true",
        help="do not race the whole function, plain against transformed",
    )
    option("--log", metavar="FILE", help="appends every observation as a line of JSON")
    option("--plot", metavar="FILE", help="draws the search; needs matplotlib")
    option("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    from tracea_jax.campaign import plot
    from tracea_jax.tuning.progress import TuningError

    if args.plot:
        check_drawing(args.plot)  # before the user's function is even imported
    tune = _tuning(args)
    try:
        report = tune(
            goal=args.goal,
            effort=args.effort,
            budget_s=args.budget_s,
            seed=args.seed,
            portfolio=args.portfolio,
            race=not args.no_race,
            log=args.log,
        )
    except TuningError as e:
        raise ValueError(str(e)) from e
    print(json.dumps(report.to_json(), indent=1) if args.json else report)
    if args.plot:
        plot.save(report, args.plot)
        print(f"drawn: {args.plot}", file=sys.stderr)
    # What was measured until then is kept, and printed.
    return INTERRUPTED if _is_interrupted(report) else 0


def _is_interrupted(report: TuneReport) -> bool:
    whole = report.whole
    reasons = [row.stop for row in report.rows]
    return "interrupted" in [*reasons, whole and whole.reason]


def _tuning(args: argparse.Namespace) -> Callable[..., Any]:
    """``tune`` with what to tune: a graph, or a function with its arguments.

    Raises:
      ValueError: if there is nothing to tune.
    """
    given = [args.op, args.called, args.file]
    if sum(x is not None for x in given) != 1:
        args.parser.error("give one of OP, MODULE:FUNCTION and --file FILE")
    if args.called is not None:
        return _of_function(args)
    from tracea_jax.campaign import tune
    from tracea_jax.graph import Graph

    graph = Graph()
    if args.op is not None:
        graph.add(problems.problem_of(args))
    else:
        for problem, count in problems.read(args.file):
            graph.add(problem, count)
    if not graph:
        raise ValueError(f"{args.file} has nothing to tune")
    return functools.partial(tune, graph)


def _of_function(args: argparse.Namespace) -> Callable[..., Any]:
    from tracea_jax.campaign import tune
    from tracea_jax.cli.functions import load, tracing
    from tracea_jax.graph import Graph
    from tracea_jax.transform import check_ops

    check_ops(args.ops, args.after_grad)
    fn, arguments = load(args.called, args.args)
    how = {"ops": args.ops, "after_grad": args.after_grad}
    with tracing(args.called, args.args):
        graph = Graph.from_function(fn, *arguments, **how)
    if not graph:
        raise ValueError(f"{args.called} has nothing to tune")
    return functools.partial(tune, fn, *arguments, **how)

"""tracea bench: a function plain against transformed, as text, data and picture.

What is measured is in ``tracea_jax.bench``; functions are loaded in ``cli.functions``.
Caller: ``cli``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from tracea_jax.cli.tuning import add_function_options
from tracea_jax.outputs import check_drawing, check_writable


def add(commands: Any) -> None:
    """Adds the command."""
    text = "time a function as it is written against transform of it"
    bench = commands.add_parser("bench", help=text, description=text)
    bench.set_defaults(command=_run)
    bench.add_argument("function", metavar="MODULE:FUNCTION")
    add_function_options(bench)
    bench.add_argument(
        "--budget-s", type=float, default=30.0, help="seconds for measuring"
    )
    bench.add_argument("--json", metavar="FILE", help="write the report as JSON")
    bench.add_argument(
        "--plot",
        metavar="FILE",
        help="draws it, as .png, .svg or .pdf; needs matplotlib",
    )


def _run(args: argparse.Namespace) -> int:
    from tracea_jax.bench import Subject, check_budget, measured, plot
    from tracea_jax.cli.functions import load, tracing
    from tracea_jax.transform import check_ops

    if args.plot:
        check_drawing(args.plot)  # before minutes of measuring
    if args.json:
        check_writable(args.json)
    check_budget(args.budget_s)
    check_ops(args.ops, args.after_grad)
    fn, arguments = load(args.function, args.args)
    with tracing(args.function, args.args):
        subject = Subject.of(fn, arguments, args.ops, args.after_grad)
    report = measured(subject, budget_s=args.budget_s, tell=_tell)
    print(report)
    if args.json:
        text = json.dumps(report.to_json(), indent=1)
        pathlib.Path(args.json).write_text(f"{text}\n", encoding="utf-8")
        print(f"written: {args.json}", file=sys.stderr)
    if args.plot:
        plot.save(report, args.plot)
        print(f"drawn: {args.plot}", file=sys.stderr)
    return 0


def _tell(what: str, done: int, total: int) -> None:
    print(f"{done + 1}/{total} {what}", file=sys.stderr, flush=True)

"""The ``tracea`` command, with a subcommand for each thing that users do."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import tracea_jax as tracea
from tracea_jax import schema
from tracea_jax.cli import bench, bundle, cache, emit, survey, tuning
from tracea_jax.cli.parser import INTERRUPTED, Parser

_DESCRIPTION = "Faster matmul, convolution and attention for JAX, with reasons."

# Each command imports its modules when it runs: help and errors must not wait for JAX.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, 0 unless the command failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    try:
        status = args.command(args)
        print(end="", flush=True)  # what fails here must not fail as Python ends
        return status
    except BrokenPipeError:  # whoever reads it has enough, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, LookupError, OSError) as e:
        print(f"tracea: {schema.visible(str(e))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tracea: interrupted", file=sys.stderr)
        return INTERRUPTED


def _doctor(args: argparse.Namespace) -> int:
    from tracea_jax.doctor import doctor

    report = doctor()
    print(json.dumps(report.to_json(), indent=1) if args.json else report)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from tracea_jax.demo import demo

    outcome = demo(budget_s=args.budget_s)
    print(outcome)
    return 0 if outcome.ok else 1


def _explain(args: argparse.Namespace) -> int:
    from tracea_jax.cli.functions import load, tracing
    from tracea_jax.explain import explain

    fn, arguments = load(args.function, args.args)
    explained = explain(
        fn, ops=args.ops, device=args.device, after_grad=args.after_grad
    )
    with tracing(args.function, args.args):
        explanation = explained(*arguments)
    if args.json:
        print(json.dumps(explanation.to_json(), indent=1))
    else:
        print(explanation)
    return 0


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = Parser(prog="tracea", description=_DESCRIPTION)
    parser.add_argument(
        "--version", action="version", version=f"tracea_jax {tracea.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    doctor = add(
        "doctor",
        _doctor,
        "what this machine can do, and why each kernel may be refused",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    demo = add("demo", _demo, "transform, tune, check and time plain JAX models")
    demo.add_argument(
        "--budget-s",
        type=float,
        default=20.0,
        help="seconds of tuning for a model (default %(default)g)",
    )

    tuning.add(commands, argv)

    explain = add("explain", _explain, "what a function would run on, and why")
    explain.add_argument(
        "function", metavar="MODULE:FUNCTION", help="such as model:step, of model.py"
    )
    tuning.add_function_options(explain)
    explain.add_argument("--device", help="cpu, or a GPU that need not be there: H200")
    explain.add_argument("--json", action="store_true", help="print JSON")

    bench.add(commands)
    survey.add(commands)
    cache.add(commands)
    emit.add(commands, argv)
    bundle.add(commands)
    return parser

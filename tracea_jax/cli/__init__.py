"""The ``tracea`` command: doctor, demo, tune, explain and cache."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from tracea_jax.cli import problems

# Each command imports what it runs: help and errors must not wait for JAX.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 0 unless it failed."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except (ValueError, LookupError, OSError) as e:
        print(f"tracea: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class Progress:
    """Prints what goes on: one line that changes on a terminal, else one a second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last_s = 0.0
        self._width = 0

    def __call__(
        self, *, phase: str, done: int, total: int, best_us: float | None, message: str
    ) -> None:
        """See ``tuning.tuner.Progress``."""
        now = time.monotonic()
        pause = 0.1 if self._stream.isatty() else 1.0
        if now - self._last_s < pause and phase != "done":
            return
        self._last_s = now
        best = "" if best_us is None else f"best {best_us:.1f} us"
        parts = (f"{phase} {done}/{total}" if total > 1 else phase, best, message)
        self._write(", ".join(p for p in parts if p))

    def _write(self, line: str) -> None:
        if self._stream.isatty():
            print(f"\r{line.ljust(self._width)}", end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the changing line."""
        if self._width:
            print(file=self._stream)
            self._width = 0


def _doctor(args: argparse.Namespace) -> int:
    from tracea_jax.report import doctor

    print(doctor())
    return 0


def _demo(args: argparse.Namespace) -> int:
    from tracea_jax.demo import demo

    progress = Progress()
    outcome = demo(progress, budget_s=args.budget_s)
    progress.close()
    print(outcome)
    return 0 if outcome.ok else 1


def _tune(args: argparse.Namespace) -> int:
    from tracea_jax.tune import tune

    problem = problems.problem_of(args)
    progress = Progress()
    entry = tune(
        problem,
        effort=args.effort,
        budget_s=args.budget_s,
        seed=args.seed,
        progress=progress,
    )
    progress.close()
    print(_entry_line(entry))
    return 0


def _explain(args: argparse.Namespace) -> int:
    from tracea_jax.cli.functions import load
    from tracea_jax.explain import explain

    fn, arguments = load(args.function, args.args)
    explained = explain(
        fn, ops=args.ops, device=args.device, after_grad=args.after_grad
    )
    try:
        explanation = explained(*arguments)
    except Exception:  # of the user's function: where it is matters
        traceback.print_exc()
        print(f"tracea: {args.function} cannot be traced", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(explanation.to_json(), indent=1))
    else:
        print(explanation)
    return 0


def _cache_list(args: argparse.Namespace) -> int:
    from tracea_jax.dispatch import database
    from tracea_jax.options import current

    settings = current()
    entries = list(database(settings).entries())
    for entry in sorted(entries, key=lambda e: (e.environment.device, str(e.problem))):
        print(f"{entry.environment.device}: {_entry_line(entry)}")
    print(f"{len(entries)} tuned problems in {settings.directory}", file=sys.stderr)
    return 0


def _entry_line(entry: Any) -> str:
    from tracea_jax import variants
    from tracea_jax.problem import problem_from_json

    best = entry.best
    problem = problem_from_json(entry.problem)
    config = ", ".join(f"{k} {v}" for k, v in best.config.items())
    known = best.variant in {v.name for v in variants.of(problem.op)}
    times = f"{best.time_us:.1f} us" if best.time_us else "not timed"
    if best.xla_us and best.variant != "xla":
        times += f", XLA {best.xla_us:.1f} us, {best.ratio:.2f}x"
    choice = best.variant + (f" [{config}]" if config else "")
    return f"{problem}: {choice}{'' if known else ' (unknown variant)'}, {times}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tracea", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    add(
        "doctor",
        _doctor,
        "what this machine can do, and why each kernel may be refused",
    )
    demo = add("demo", _demo, "transform, tune, check and time plain JAX models")
    demo.add_argument(
        "--budget-s", type=float, default=20.0, help="seconds of tuning for a model"
    )

    tune = add("tune", _tune, "measure the candidates of a problem and keep the best")
    search = argparse.ArgumentParser(add_help=False)
    search.add_argument("--effort", default="default")
    search.add_argument("--budget-s", type=float)
    search.add_argument("--seed", type=int, default=0)
    problems.add_ops(tune, search)

    explain = add("explain", _explain, "what a function would run on, and why")
    explain.add_argument("function", metavar="MODULE:FUNCTION")
    explain.add_argument(
        "--args",
        nargs="+",
        action="extend",
        default=[],
        metavar="SHAPE",
        help="its arguments, such as 'f32[8,128]'; else what FUNCTION_args() returns",
    )
    explain.add_argument("--device", help="cpu, or a GPU that need not be there: H200")
    explain.add_argument("--ops", nargs="+", help="which to use; all by default")
    explain.add_argument(
        "--after-grad", action="store_true", help="the function differentiates inside"
    )
    explain.add_argument("--json", action="store_true", help="for tools")

    cache = add("cache", _cache_list, "what was tuned")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="one line for each tuned problem")
    return parser

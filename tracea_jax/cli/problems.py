"""Problems on the command line: for each op its arguments, and the problem they ask.

Which arguments an op takes, its record says; ``tracea tune`` reads problems from its
own arguments and from files.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from tracea_jax import catalogue
from tracea_jax.catalogue import Argument
from tracea_jax.cli.parser import with_suggestion
from tracea_jax.problem import Problem, problem_from_json

_DTYPE = Argument(
    "--dtype",
    {"default": "float32", "help": "of the operands: bfloat16, or bf16, f16, fp8, ..."},
)


def with_default(how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``add_argument`` whose help names the default, if there is one."""
    default = how.get("default")
    if default is None or isinstance(default, bool):
        return dict(how)
    shown = "x".join(map(str, default)) if isinstance(default, tuple) else default
    return {**how, "help": f"{how.get('help', '')} (default {shown})".strip()}


def add_ops(ops: Any, only: Collection[str] = (), **options: Any) -> None:
    """Adds one sub-command for each op; ``problem_of`` reads the result.

    Args:
      ops: what ``add_subparsers`` gave.
      only: names of ops; none are all.
      **options: of ``add_parser``.
    """
    for op in catalogue.ops():
        if only and op.name not in only:
            continue
        texts = {"help": op.summary, "description": op.summary}
        parser = ops.add_parser(op.name, **texts, **options)
        given = [_DTYPE, *op.arguments]
        names = [parser.add_argument(a.flag, **with_default(a.how)).dest for a in given]
        parser.set_defaults(op=op.name, names=names)


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the parsed arguments of an op describe.

    Raises:
      ValueError: on values that make no problem.
    """
    values = {name: getattr(args, name) for name in args.names}
    return catalogue.get(args.op).build(**values)


def read(path: str) -> Iterator[tuple[Problem, int]]:
    """The problems of a file, one a line, with how often each runs.

    A line is what may follow ``tracea tune``, such as ``matmul 64 64 64 --count 3``, or
    a problem as JSON, such as ``Problem.to_json()`` with or without a "count". What
    follows a # is a comment.

    Raises:
      OSError: if the file cannot be read.
      ValueError: naming the line that is no problem.
    """
    from tracea_jax.ops.common.arguments import positive

    parser = _LineParser(prog="", add_help=False)
    common = _LineParser(add_help=False)
    common.add_argument("--count", type=positive, default=1)
    add_ops(parser.add_subparsers(required=True, metavar="OP"), parents=[common])
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            if line.lstrip().startswith("{"):
                yield _from_json(line)
            elif words := shlex.split(line, comments=True):
                args = parser.parse_args(words)
                yield problem_of(args), args.count
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise ValueError(f"{path}, line {number}: {e}") from e


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no text in UTF-8: {e}") from e


def _from_json(line: str) -> tuple[Problem, int]:
    data = json.loads(line)
    count = data.pop("count", 1)
    return problem_from_json(data), count


class _LineParser(argparse.ArgumentParser):
    """Raises what it would end the program for."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(with_suggestion(message))

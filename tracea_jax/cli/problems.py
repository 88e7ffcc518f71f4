"""Problems on the command line: for each op its arguments, and the problem they ask.

Nothing here imports JAX before a problem is built.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tracea_jax.problem import Problem, problem_from_json

Parser = argparse.ArgumentParser


def add_ops(ops: Any, **options: Any) -> None:
    """Adds one sub-command for each op; ``problem_of`` reads the result.

    Args:
      ops: what ``add_subparsers`` gave.
      **options: of ``add_parser``.
    """
    for name, (add, text) in _OPS.items():
        op = ops.add_parser(name, help=text, description=text, **options)
        op.add_argument("--dtype", default="float32", help="of the operands")
        op.set_defaults(op=name)
        add(op)


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the parsed arguments of an op describe.

    Raises:
      ValueError: on values that make no problem.
    """
    from tracea_jax.graph.builders import BUILDERS

    names = (*_SIZES[args.op], *_NAMES[args.op])
    return BUILDERS[args.op](**{name: getattr(args, name) for name in names})


def read(path: str) -> Iterator[tuple[Problem, int]]:
    """The problems of a file, one a line, with how often each runs.

    A line is what may follow ``tracea tune``, such as ``matmul 64 64 64 --count 3``, or
    a problem as JSON, such as ``Problem.to_json()`` with or without a "count". What
    follows a # is a comment.

    Raises:
      OSError: if the file cannot be read.
      ValueError: naming the line that is no problem.
    """
    parser = _LineParser(prog="", add_help=False)
    common = _LineParser(add_help=False)
    common.add_argument("--count", type=positive, default=1)
    add_ops(parser.add_subparsers(required=True, metavar="OP"), parents=[common])
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        try:
            if line.lstrip().startswith("{"):
                yield _from_json(line)
            elif words := shlex.split(line, comments=True):
                args = parser.parse_args(words)
                yield problem_of(args), args.count
        except (ValueError, TypeError, KeyError) as e:
            raise ValueError(f"{path}, line {number}: {e}") from e


def _from_json(line: str) -> tuple[Problem, int]:
    data = json.loads(line)
    count = data.pop("count", 1)
    return problem_from_json(data), count


class _LineParser(argparse.ArgumentParser):
    """Raises what it would end the program for."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def positive(text: str) -> int:
    """A positive integer, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


# --- matrix products ------------------------------------------------------------------


def _add_product(parser: Parser, activation: str) -> None:
    for name in "mnk":
        parser.add_argument(name, type=positive, metavar=name.upper())
    parser.add_argument("--out", help="dtype of the result, if another")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--layout", choices=["nn", "nt", "tn", "tt"], default="nn")
    parser.add_argument("--precision")
    parser.add_argument("--activation", default=activation)


def _add_matmul(parser: Parser) -> None:
    _add_product(parser, "none")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--residual", action="store_true")


def _add_gated_matmul(parser: Parser) -> None:
    _add_product(parser, "silu")


# --- attention ------------------------------------------------------------------------


def _add_attention(parser: Parser) -> None:
    for name in _SIZES["attention"]:
        parser.add_argument(name, type=positive, metavar=name.upper())
    parser.add_argument("--kv-heads", type=positive, help="if fewer than HEADS")
    parser.add_argument("--causal", action="store_true", dest="is_causal")
    _add_direction(parser, "forward", "backward")


# --- convolutions ---------------------------------------------------------------------


def _add_conv2d(parser: Parser) -> None:
    letters = ("BATCH", *"HWCRSK")
    for name, letter in zip(_SIZES["conv2d"], letters, strict=True):
        parser.add_argument(name, type=positive, metavar=letter)
    pairs: dict[str, Any] = {"type": _pair, "default": (1, 1), "metavar": "N[xN]"}
    parser.add_argument("--stride", dest="strides", **pairs)
    parser.add_argument("--dilation", **pairs)
    parser.add_argument(
        "--padding", type=_padding, default="SAME", help="SAME, VALID or a number"
    )
    parser.add_argument("--groups", type=positive, default=1)
    parser.add_argument("--layout", choices=["NHWC", "NCHW"], default="NHWC")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--residual", action="store_true")
    _add_direction(parser, "forward", "input_grad", "weight_grad")


def _pair(text: str) -> tuple[int, int]:
    """ "2" or "2x1", for height and width."""
    first, *rest = map(positive, text.split("x"))
    if len(rest) > 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number or two, such as 2x1")
    return first, rest[0] if rest else first


def _padding(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _add_direction(parser: Parser, *directions: str) -> None:
    parser.add_argument("--direction", choices=directions, default=directions[0])


# What the builders of ``graph.builders`` call the arguments.

_OPS: dict[str, tuple[Callable[[Parser], None], str]] = {
    "matmul": (_add_matmul, "activation(a @ b + bias) + residual"),
    "gated_matmul": (_add_gated_matmul, "activation(x @ w_gate) * (x @ w_up)"),
    "attention": (_add_attention, "softmax(q k') v, for each head"),
    "conv2d": (
        _add_conv2d,
        "a convolution of (BATCH, H, W, C) with (R, S, C / groups, K)",
    ),
}

_SIZES = {
    "matmul": ("m", "n", "k"),
    "gated_matmul": ("m", "n", "k"),
    "attention": ("batch", "q_len", "kv_len", "heads", "head_dim"),
    "conv2d": ("batch", "height", "width", "in_channels")
    + ("kernel_height", "kernel_width", "out_channels"),
}

_PRODUCT = ("dtype", "out", "batch", "layout", "precision", "activation")
_NAMES = {
    "matmul": (*_PRODUCT, "bias", "residual"),
    "gated_matmul": _PRODUCT,
    "attention": ("dtype", "kv_heads", "is_causal", "direction"),
    "conv2d": ("dtype", "strides", "dilation", "padding", "groups", "layout")
    + ("bias", "activation", "residual", "direction"),
}

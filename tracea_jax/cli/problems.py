"""Problems on the command line: for each op its arguments, and the problem they ask.

Nothing here imports JAX before a problem is built.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tracea_jax.problem import (
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)

Parser = argparse.ArgumentParser


def add_ops(parser: Parser, common: Parser) -> None:
    """Gives a command one sub-command for each op; ``problem_of`` reads the result.

    Args:
      parser: of the command.
      common: options that all of them take.
    """
    ops = parser.add_subparsers(required=True, metavar="OP", dest="op")
    for name, (add, _, text) in _OPS.items():
        op = ops.add_parser(name, help=text, description=text, parents=[common])
        op.add_argument("--dtype", default="float32", help="of the operands")
        add(op)


def problem_of(args: argparse.Namespace) -> Problem:
    """The problem that the parsed arguments of an op describe.

    Raises:
      ValueError: on values that make no problem.
    """
    return _OPS[args.op][1](args)


def _positive(text: str) -> int:
    """A positive integer, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


# --- matrix products ------------------------------------------------------------------


def _add_product(parser: Parser, activation: str) -> None:
    for name in "mnk":
        parser.add_argument(name, type=_positive, metavar=name.upper())
    parser.add_argument("--out", help="dtype of the result, if another")
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--layout", choices=["nn", "nt", "tn", "tt"], default="nn")
    parser.add_argument("--precision", default="default")
    parser.add_argument("--activation", default=activation)


def _add_matmul(parser: Parser) -> None:
    _add_product(parser, "none")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--residual", action="store_true")


def _product(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": args.batch,
        "m": args.m,
        "n": args.n,
        "k": args.k,
        "lhs": args.dtype,
        "rhs": args.dtype,
        "out": args.out or args.dtype,
        "layout": args.layout,
        "lhs_batched": args.batch > 1,
        "rhs_batched": args.batch > 1,
        "precision": args.precision,
    }


def _matmul(args: argparse.Namespace) -> Problem:
    epilogue = Epilogue(
        bias="row" if args.bias else "none",
        activation=args.activation,
        residual=args.residual,
    )
    return GemmProblem(**_product(args), epilogue=epilogue)


def _gated_matmul(args: argparse.Namespace) -> Problem:
    return GatedMatmulProblem(**_product(args), activation=args.activation)


# --- attention ------------------------------------------------------------------------


def _add_attention(parser: Parser) -> None:
    for name in ("batch", "q_len", "kv_len", "heads", "head_dim"):
        parser.add_argument(name, type=_positive, metavar=name.upper())
    parser.add_argument("--kv-heads", type=_positive, help="if fewer than HEADS")
    parser.add_argument("--causal", action="store_true")
    _add_direction(parser, "forward", "backward")


def _attention(args: argparse.Namespace) -> Problem:
    from tracea_jax import ops

    kv = (args.batch, args.kv_len, args.kv_heads or args.heads, args.head_dim)
    q = (args.batch, args.q_len, args.heads, args.head_dim)
    attend = functools.partial(ops.attention, is_causal=args.causal)
    problem = _asked(attend, args.dtype, q, kv, kv)
    return dataclasses.replace(problem, direction=args.direction)


# --- convolutions ---------------------------------------------------------------------


def _add_conv2d(parser: Parser) -> None:
    names = ("batch", "height", "width", "in_channels", "rows", "columns", "channels")
    for name, letter in zip(names, ("BATCH", *"HWCRSK"), strict=True):
        parser.add_argument(name, type=_positive, metavar=letter)
    parser.add_argument("--stride", type=_pair, default=(1, 1), metavar="N[xN]")
    parser.add_argument("--dilation", type=_pair, default=(1, 1), metavar="N[xN]")
    parser.add_argument("--padding", default="SAME", help="SAME, VALID or a number")
    parser.add_argument("--groups", type=_positive, default=1)
    parser.add_argument("--layout", choices=["NHWC", "NCHW"], default="NHWC")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--residual", action="store_true")
    _add_direction(parser, "forward", "input_grad", "weight_grad")


def _conv2d(args: argparse.Namespace) -> Problem:
    from tracea_jax import ops

    x = (args.batch, args.height, args.width, args.in_channels)
    w = (args.rows, args.columns, args.in_channels // args.groups, args.channels)
    if args.layout == "NCHW":
        x, w = (x[0], x[3], x[1], x[2]), (w[3], w[2], w[0], w[1])
    padding = int(args.padding) if args.padding.isdecimal() else args.padding
    convolve = functools.partial(
        ops.conv2d,
        strides=args.stride,
        padding=padding,
        dilation=args.dilation,
        groups=args.groups,
        layout=args.layout,
    )
    problem = _asked(convolve, args.dtype, x, w)
    epilogue = Epilogue(
        bias="row" if args.bias else "none",
        activation=args.activation,
        residual=args.residual,
    )
    if args.direction != "forward" and not epilogue.is_identity:
        raise ValueError("a gradient takes no --bias, --activation or --residual")
    return dataclasses.replace(problem, direction=args.direction, epilogue=epilogue)


def _pair(text: str) -> tuple[int, int]:
    """ "2" or "2x1", for height and width."""
    first, *rest = map(_positive, text.split("x"))
    if len(rest) > 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number or two, such as 2x1")
    return first, rest[0] if rest else first


# --- shared ---------------------------------------------------------------------------


def _add_direction(parser: Parser, *directions: str) -> None:
    parser.add_argument("--direction", choices=directions, default=directions[0])


def _asked(op: Callable[..., Any], dtype: str, *shapes: tuple[int, ...]) -> Any:
    """The problem that a call of an op asks, as the op itself describes it."""
    from tracea_jax.cli.functions import array
    from tracea_jax.explain import explain

    (site,) = explain(op, ops=())(*(array(dtype, shape) for shape in shapes)).sites
    return site.problem


_OPS: dict[str, tuple[Callable[[Parser], None], Callable[..., Problem], str]] = {
    "matmul": (_add_matmul, _matmul, "activation(a @ b + bias) + residual"),
    "gated_matmul": (
        functools.partial(_add_product, activation="silu"),
        _gated_matmul,
        "activation(x @ w_gate) * (x @ w_up)",
    ),
    "attention": (_add_attention, _attention, "softmax(q k') v, for each head"),
    "conv2d": (
        _add_conv2d,
        _conv2d,
        "a convolution of (BATCH, H, W, C) with (R, S, C / groups, K)",
    ),
}

"""tracea emit: the text of a kernel for a GPU that the package launches nothing on.

The kernels are in ``variants.gemm_targets``. Caller: ``cli``.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracea_jax.cli import problems
from tracea_jax.outputs import check_writable

if TYPE_CHECKING:
    from tracea_jax.emit.kernel import Kernel

_OPS = ("matmul",)


def add(commands: Any, argv: Sequence[str]) -> None:
    """Adds the command, with its ops if ``argv`` asks for it."""
    text = "a kernel as HIP or Metal text, or as a code object, to launch elsewhere"
    emit = commands.add_parser("emit", help=text, description=text)
    emit.set_defaults(command=_run)
    ops = emit.add_subparsers(required=True, metavar="OP")
    if "emit" not in argv:
        return  # the ops need JAX, for which help and errors do not wait
    from tracea_jax.emit import targets

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--target", required=True, help=f"one of {', '.join(targets.TARGETS)}"
    )
    common.add_argument(
        "--text", metavar="FILE", help="where the text goes (default: it is printed)"
    )
    common.add_argument(
        "--object",
        metavar="FILE",
        help="compiles the text with clang, for an AMD GPU, into a code object",
    )
    problems.add_ops(ops, only=_OPS, parents=[common])


def _run(args: argparse.Namespace) -> int:
    from tracea_jax.emit import sources, targets
    from tracea_jax.problem import GemmProblem
    from tracea_jax.variants import gemm_targets

    target = targets.named(args.target)
    if args.object and target.dialect != "hip":
        raise ValueError(f"--object: no compiler for {target.dialect} runs here")
    for path in filter(None, (args.text, args.object)):
        check_writable(path)
    problem = problems.problem_of(args)
    assert isinstance(problem, GemmProblem)
    kernel = gemm_targets.kernel(problem, target)
    text = sources.inlined(kernel.source, kernel.headers)
    if args.object:
        _compile(kernel, pathlib.Path(args.object))
    if args.text:
        pathlib.Path(args.text).write_text(text, encoding="utf-8")
    elif not args.object:
        print(text, end="")
    print(_launch(kernel), file=sys.stderr)
    return 0


def _compile(kernel: Kernel, path: pathlib.Path) -> None:
    from tracea_jax.runtime import clang

    try:
        made = clang.compile(kernel)
    except clang.ToolchainMissing as e:
        raise ValueError(str(e)) from e
    path.write_bytes(made.image)
    print(f"{path}: {made.usage}", file=sys.stderr)


def _launch(kernel: Kernel) -> str:
    """Launch of the kernel; nobody ran it on such a GPU."""
    return (
        f"{kernel.entry}: {kernel.grid[0]} blocks of {kernel.block[0]} threads, "
        f"{kernel.smem_bytes} bytes of dynamic shared memory; never run on such a GPU"
    )

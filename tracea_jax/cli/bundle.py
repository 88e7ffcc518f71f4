"""tracea bundle, tracea config: programs without Python.

What is written is in ``tracea_jax.bundle``; functions are loaded in ``cli.functions``.
Caller: ``cli``.
"""

from __future__ import annotations

import argparse
from typing import Any

_SHOWN = {
    "cflags": "flags of a compiler",
    "libs": "flags of a linker",
    "cmakedir": "the directory that CMake's tracea_DIR is set to",
    "pkgconfigdir": "the directory that PKG_CONFIG_PATH has to contain",
    "includedir": "the directory of tracea.h and tracea.hpp",
    "libdir": "the directory of libtracea.so",
}


def add(commands: Any) -> None:
    """Adds both commands."""
    text = "write a function as files for programs without Python"
    bundle = commands.add_parser("bundle", help=text, description=text)
    bundle.set_defaults(command=_bundle)
    bundle.add_argument(
        "function", metavar="MODULE:FUNCTION", help="such as model:step, of model.py"
    )
    bundle.add_argument(
        "--args",
        nargs="+",
        default=(),
        metavar="SHAPE",
        help="the inputs, such as f32[8,128]; by default those that the function "
        "FUNCTION_args in the module returns",
    )
    bundle.add_argument("--out", required=True, metavar="PATH", help="the directory")
    bundle.add_argument("--device", help="cpu, or a GPU that need not be there: H200")
    text = "print compiler flags for libtracea, which runs bundles from C and C++"
    config = commands.add_parser("config", help=text, description=text)
    config.set_defaults(command=_config)
    for name, what in _SHOWN.items():
        config.add_argument(f"--{name}", action="store_true", help=what)


def _bundle(args: argparse.Namespace) -> int:
    from tracea_jax.bundle import bundle
    from tracea_jax.cli.functions import check_shapes, load

    fn, arguments = load(args.function, args.args)
    check_shapes(args.function, args.args, fn, arguments)
    print(bundle(fn, *arguments, path=args.out, device=args.device))
    return 0


def _config(args: argparse.Namespace) -> int:
    from tracea_jax.bundle.installation import Library

    library = Library.installed()
    values = {
        "cflags": library.cflags,
        "libs": library.libs,
        "cmakedir": library.cmake,
        "pkgconfigdir": library.pkgconfig,
        "includedir": library.include,
        "libdir": library.lib,
    }
    wanted = [name for name in _SHOWN if getattr(args, name)]
    if wanted:
        print(" ".join(str(values[name]) for name in wanted))
    else:
        for name, value in values.items():
            print(f"--{name}: {value}")
    return 0

"""Which files a prebuilt CPU handler is built from: its units and all they include.

The units of a handler lie in the folder of ``kernels/cpu`` that has its name.
``store.code`` hashes what is found.
"""

from __future__ import annotations

import os
import pathlib
import re

from tracea_jax.emit import sources

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def texts(handler: str) -> tuple[tuple[str, str], ...]:
    """(path below ``kernels/cpu``, text) of each file, sorted by path.

    A header stands for the unit of its name as well: who includes "isa.h" runs what
    "isa.cc" defines. "micro_kernels.h" stands for the units in ``tile``.

    Args:
      handler: what its files are named after, such as "gemm".

    Raises:
      FileNotFoundError: there are no such files, or one includes a file that is not
        there.
    """
    root = sources.directory().parent / "cpu"
    units = sorted((root / handler).glob("*.cc"))
    if not units:
        raise FileNotFoundError(
            f"{root} has no sources of {handler}; install tracea_jax again"
        )
    # Through "parallel.h" the XLA handlers in ffi/ run the tasks of every kernel.
    pending = [*units, *root.rglob("parallel.h")]
    found: dict[pathlib.Path, str] = {}
    while pending:
        path = pending.pop()
        if path not in found:
            found[path] = path.read_text(encoding="utf-8")
            for name in _INCLUDE.findall(found[path]):
                header = _included(name, path, root)
                unit = header.with_suffix(".cc")
                pending += [header, *([unit] if unit.is_file() else [])]
                if header.name == "micro_kernels.h":
                    pending += (root / "tile").glob("*.cc")
    return tuple(sorted((p.relative_to(root).as_posix(), found[p]) for p in found))


def _included(name: str, path: pathlib.Path, root: pathlib.Path) -> pathlib.Path:
    """The file that a unit or header means, beside it or below ``kernels/cpu``."""
    for directory in (path.parent, root):
        if (directory / name).is_file():
            # Not ``resolve``: files of an installed package may be links.
            return pathlib.Path(os.path.normpath(directory / name))
    raise FileNotFoundError(f"{path} includes {name!r}, which is not below {root}")

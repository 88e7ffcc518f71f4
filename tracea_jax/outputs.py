"""Files in which results are asked: whether they will be written, before long work.

What is written, and how it is drawn, its makers know. Callers: ``campaign`` and the
command line.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import tempfile

DRAWINGS = (".pdf", ".png", ".svg")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Tries to write a file, without leaving a trace: work that is killed writes none.

    Raises:
      OSError: if it cannot be written; it names the file.
    """
    path = pathlib.Path(path)
    if path.exists():
        path.open("r+b").close()
        return
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        why = f"no file can be written there: {e.strerror}"
        raise type(e)(e.errno, why, str(path)) from e


def check_drawing(path: str | os.PathLike[str]) -> None:
    """Makes sure that matplotlib will be able to draw into a file.

    Raises:
      ValueError: if matplotlib is missing, or the suffix is none of ``DRAWINGS``.
      OSError: if the file cannot be written; it names the file.
    """
    if pathlib.Path(path).suffix.lower() not in DRAWINGS:
        raise ValueError(f"{str(path)!r} must end in one of {', '.join(DRAWINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "drawing needs matplotlib, which is not installed; "
            "pip install 'tracea_jax[bench]'"
        )
    check_writable(path)

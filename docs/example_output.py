"""Runs the README's example and writes its output below it.

Use it after a change of messages or choices: ``python docs/example_output.py``. The
example runs as a file of its own, in an empty directory and with an empty cache.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
_EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


def main() -> None:
    page = README.read_text()
    found = _EXAMPLE.search(page)
    if found is None:
        sys.exit("the README has no example with an output below it")
    README.write_text(page[: found.start(2)] + output(found[1]) + page[found.end(2) :])


def output(example: str) -> str:
    """The standard output of a program."""
    with tempfile.TemporaryDirectory() as empty:
        (pathlib.Path(empty) / "example.py").write_text(example)
        return subprocess.run(
            [sys.executable, "example.py"],
            cwd=empty,
            env={**os.environ, "TRACEA_CACHE_DIR": empty},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


if __name__ == "__main__":
    main()

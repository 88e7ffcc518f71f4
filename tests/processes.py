"""Python programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(program: str, *arguments: str, **environment: str) -> str:
    """What a program prints; it runs with the installed package, warnings as errors.

    Raises:
      AssertionError: with its error output, if it fails.
    """
    result = subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            "error",
            "-c",
            textwrap.dedent(program),
            *arguments,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

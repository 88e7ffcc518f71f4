"""Python programs in a process of their own, and in forks of one that knows JAX."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import time

_HERE = pathlib.Path(__file__).resolve().parent


def run_python(program: str, *arguments: str, **environment: str) -> str:
    """The output of a program, run with the installed package and warnings as errors.

    Raises:
      AssertionError: with its error output, if it fails.
    """
    command = [sys.executable, "-P", "-W", "error", "-c", textwrap.dedent(program)]
    return _printed([*command, *arguments], environment)


def run_forked(program: str, *arguments: str, **environment: str) -> str:
    """The same in a fork: of programs to which hashes and settings of JAX are nothing.

    Raises:
      AssertionError: with its error output, if it fails, or sets what JAX reads.
    """
    read_before = [
        name for name in environment if name.startswith(("JAX", "XLA", "PY"))
    ]
    assert not read_before, f"{read_before} need run_python"
    return _printed(forked(textwrap.dedent(program), *arguments), environment)


def forked(source: str, *arguments: str, strict: bool = True) -> list[str]:
    """The command that runs Python code, or ``tracea`` without code, in a fork."""
    request = {
        "source": source,
        "argv": ["-c" if source else "tracea", *arguments],
        "strict": strict,
    }
    asker = [sys.executable, "-I", "-S", str(_HERE / "fork_asker.py")]
    return [*asker, _server(), json.dumps(request)]


@functools.cache
def _server() -> str:
    """The socket of this process's server, which ends with this process."""
    path = os.path.join(tempfile.mkdtemp(), "socket")  # the server removes it
    command = [sys.executable, "-P", str(_HERE / "forks.py"), path]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
    )
    _running.append(server)
    while not os.path.exists(path):
        assert server.poll() is None, "the server of forks has ended"
        time.sleep(0.01)
    return path


_running: list[subprocess.Popen[bytes]] = []


def _printed(command: list[str], environment: dict[str, str]) -> str:
    result = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

"""Forks of a process that has imported JAX, for programs that tests run.

    python -P forks.py DIRECTORY/SOCKET    # until its input ends; see ``processes``

Importing JAX takes longer than most of what tests do in a process of their own. What is
asked for runs in a fork of this one, which has imported JAX and SciPy, initialised
nothing of JAX, and has nothing of ours. It has the asker's environment, directory,
input and outputs. All forks have one seed of hashes, and read what JAX reads of the
environment when this process starts: ``processes`` gives a process of its own to whom
that matters.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import socket
import sys
import types
import warnings
from typing import Any

import jax
import jax.export
import jax.extend
import jax.numpy
import jax.scipy.special  # noqa: F401  (what our package imports of JAX)
import scipy.linalg
import scipy.special  # noqa: F401  (and of SciPy)


def asked(path: str) -> dict[str, Any]:
    """Serves; returns in each fork, with what it is to run."""
    gc.collect()
    gc.freeze()  # forks that looked at what JAX made would copy all of it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:  # whoever started this has ended
                shutil.rmtree(os.path.dirname(path))
                os._exit(0)
            connection, _ = listener.accept()
            if (keeper := os.fork()) == 0:
                listener.close()
                return _kept(connection)
            connection.close()
            _reap(keeper)


_keepers: list[int] = []


def _reap(keeper: int) -> None:
    """Remembers a child, and forgets those that have ended."""
    _keepers.append(keeper)
    _keepers[:] = [k for k in _keepers if os.waitpid(k, os.WNOHANG)[0] == 0]


def _kept(connection: socket.socket) -> dict[str, Any]:
    """Returns in a fork; the process above it tells the asker how that ended."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    program = os.fork()
    if program:
        _, status = os.waitpid(program, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return json.loads(data)


def run(
    *, source: str, argv: list[str], cwd: str, environment: dict[str, str], strict: bool
) -> None:
    """Runs a program, or our command if there is no source; warnings may be errors."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if strict:
        sys.warnoptions.append("error")
        warnings.simplefilter("error")
    sys.argv = argv
    if not source:
        runpy.run_module("tracea_jax", run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    run(**asked(sys.argv[1]))

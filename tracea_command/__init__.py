"""The ``tracea`` script: answers ``--version`` at once, and runs ``tracea_jax.cli``.

It is a package by itself, as importing any part of ``tracea_jax`` imports JAX: programs
that only load what another process compiled need its kernels, too.
"""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> int:
    """Runs the command line; returns the exit status."""
    if sys.argv[1:] == ["--version"]:
        print(f"tracea_jax {importlib.metadata.version('tracea_jax')}")
        return 0
    from tracea_jax import cli

    return cli.main()

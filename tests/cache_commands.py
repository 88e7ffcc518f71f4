"""The command `tracea cache`, and entries for it to find."""

from __future__ import annotations

import dataclasses
import pathlib

from synthetic_bench import PROBLEM

from tracea_jax import cli
from tracea_jax.device import local_cpu
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment


def run(capsys, *arguments) -> tuple[int, str, str]:
    """(exit status, output, error output) of ``tracea cache``."""
    try:
        status = cli.main(["cache", *map(str, arguments)])
    except SystemExit as e:  # argparse
        assert isinstance(e.code, int)
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def store_in(directory: pathlib.Path) -> Store:
    return Store(directory / "tuned")


def shaped(m):
    return dataclasses.replace(PROBLEM, m=m)


def local(entry):
    """The entry as if it was made on this machine."""
    return dataclasses.replace(entry, environment=environment(local_cpu()))


def record(directory, *entries):
    for e in entries:
        Knowledge(directory).own.record(e)

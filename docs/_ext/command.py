"""The command's parser with every op, for the page that documents it."""

from __future__ import annotations

import argparse

from tracea_jax import cli


def parser() -> argparse.ArgumentParser:
    """The parser of ``tracea``, as if ``tune`` and ``emit`` had been called."""
    return cli._parser(["tune", "emit"])

"""The command's parser with every op, for the page that documents it."""

from __future__ import annotations

import argparse

from tracea_jax import cli


def parser() -> argparse.ArgumentParser:
    """What ``tracea`` parses with, as if ``tune`` and ``emit`` had been asked."""
    return cli._parser(["tune", "emit"])

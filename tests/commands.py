"""Runs of the command `tracea`, and what they would tune."""

from __future__ import annotations

from tracea_jax import cli


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit status, output, error output) of the command."""
    try:
        status = cli.main(arguments)
    except SystemExit as e:  # argparse
        assert isinstance(e.code, int)
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def nodes(graph):
    return [(node.count, str(node.problem)) for node in graph]

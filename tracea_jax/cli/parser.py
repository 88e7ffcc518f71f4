"""The parser of the command line, whose errors name the nearest valid word.

Callers: ``cli``, and ``cli.problems`` for the lines of a file.
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from tracea_jax.mistakes import similar

INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended

_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<valid>.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser with a suggestion at the end of an error about a word."""

    def error(self, message: str) -> NoReturn:
        super().error(with_suggestion(message))


def with_suggestion(message: str) -> str:
    """An error of argparse about an unknown word, with the nearest valid one."""
    found = _CHOICE.search(message)
    if found is None:
        return message
    valid = re.findall(r"[\w.:/-]+", found["valid"])
    return message + similar(found["word"], valid)

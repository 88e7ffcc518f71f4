"""The code blocks of the documents: run in order, as a reader would paste them.

| block                                      | what is done                          |
|--------------------------------------------|---------------------------------------|
| ``python``                                 | run; all of a page share their names  |
| ``python``, first line ``# model.py``      | saved under that name                 |
| ``python``, first line ``# Raises NAME``   | run; it must raise that               |
| ``sh``                                     | run by bash, as if in one terminal    |
| any, first line ``# Not run here: reason`` | its syntax is checked                 |
| ``text`` below one of these                | must be what that one printed, where  |
|                                            | ... stands for anything               |

What else is between fences must be named: a directive of MyST, or a language that is
only shown (``SHOWN``). Callers: test_docs and test_readme.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

from processes import forked

SHOWN = ("cmake", "cpp", "html", "ini", "toml")
_FENCED = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
_ALIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block between two fences.

    Attributes:
      place: "page.md:12", for messages.
      language: what follows the first fence.
      text: with the line breaks of the page.
      follows: whether nothing but empty lines are between it and the block before.
    """

    place: str
    language: str
    text: str
    follows: bool

    @property
    def mark(self) -> str:
        """The first line, if it is a comment that says what is to be done."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("# ") if first.startswith("# ") else ""

    @property
    def is_run(self) -> bool:
        is_code = self.language in ("python", "sh")
        return is_code and not self.mark.startswith("Not run here: ")


def blocks(page: pathlib.Path) -> list[Block]:
    """Every block of a page, in order."""
    text = page.read_text()
    found, end = [], 0
    for match in _FENCED.finditer(text):
        found.append(
            Block(
                place=f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}",
                language=match[2].strip(),
                text=match[3],
                follows=bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


class Reader:
    """Pastes blocks into one Python and one terminal, both in an empty directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._module = types.ModuleType("__page__")
        self._printed: str | None = None
        self._shell = directory.parent / f"{directory.name}.shell"
        self._programs = directory.parent / f"{directory.name}.bin"
        self._programs.mkdir()
        # A page may set what our command reads, but nothing that JAX does.
        commands = {"python": [sys.executable], "tracea": forked("", strict=False)}
        for name, command in commands.items():
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            program.chmod(0o755)

    @property
    def names(self) -> dict[str, object]:
        """Names that the Python blocks defined."""
        return self._module.__dict__

    @property
    def printed(self) -> str:
        """The output of the last block."""
        return self._printed or ""

    def read(self, block: Block) -> None:
        """Does with a block what the table says.

        Raises:
          AssertionError: if the block does something else than the page says.
          Exception: whatever a Python block raises.
        """
        if block.language == "text":
            if block.follows and self._printed is not None:
                self._compare(block)
        elif block.language in ("python", "sh"):
            run = self._python if block.language == "python" else self._sh
            self._printed = run(block)
        else:
            known = block.language.startswith("{") or block.language in SHOWN
            assert known, f"{block.place}: {block.language!r} says not what to do"
            assert "```" not in block.text, f"{block.place} hides blocks: use colons"

    def _python(self, block: Block) -> str | None:
        # The line of the page, in tracebacks and in what explain prints.
        line = int(block.place.rpartition(":")[2])
        code = compile("\n" * line + block.text, block.place.split(":")[0], "exec")
        if not block.is_run:
            return None
        if re.fullmatch(r"\w+\.py", block.mark):
            (self._directory / block.mark).write_text(block.text)
            return None
        kind, _, raised = block.mark.partition("Raises ")
        wanted = raised if not kind else ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.chdir(self._directory):
            try:
                exec(code, self._module.__dict__)
            except Exception as e:
                if type(e).__name__ != wanted:
                    raise
                return f"{wanted}: {e}"
        assert not wanted, f"{block.place} raises no {wanted}"
        return printed.getvalue()

    def _sh(self, block: Block) -> str | None:
        if not block.is_run:
            subprocess.run(["bash", "-nc", block.text], check=True)
            return None
        # What one block exports, the next one has.
        around = '[ ! -f "$0" ] || . "$0"; trap \'export -p > "$0"\' EXIT\n'
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", around + block.text, self._shell],
            cwd=self._directory,
            env={**os.environ, "PATH": f"{self._programs}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block.place}: {done.stdout}"
        return done.stdout

    def _compare(self, block: Block) -> None:
        checker, wanted = doctest.OutputChecker(), block.text
        if checker.check_output(wanted, self._printed or "", _ALIKE):
            return
        example = doctest.Example("", wanted)
        why = checker.output_difference(example, self._printed or "", _ALIKE)
        raise AssertionError(f"{block.place}: {why}")

"""The process in which attention races, which may be lost; see ``attention_groups``.

    python -m attention_process   the process's program

An error of a kernel, or of XLA's runtime, can leave a process with a GPU that answers
nothing but errors, or hang it. The next question then has a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any

from attention_answers import Raced, Races
from attention_groups import Racer

from tracea_jax.campaign import local_device
from tracea_jax.problem import AttentionProblem
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.lab.worker import Worker

PROGRAM = ("-m", "attention_process")
LONGEST_S = 90.0  # of a question, of which the first waits for JAX and for programs


class Apart:
    """A ``Racer`` in another process, which is replaced when it is lost."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def race(
        self,
        group: Sequence[AttentionProblem],
        following: Sequence[AttentionProblem] = (),
    ) -> Races:
        """See ``Racer.race``; a process that raises is replaced, too."""
        return self._ask("race", tuple(group), tuple(following))

    def verify(self, found: Sequence[Raced]) -> dict[AttentionProblem, str]:
        """See ``Racer.verify``."""
        return self._ask("verify", tuple(found))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _ask(self, *question: Any) -> Any:
        self._worker = self._worker or Worker(PROGRAM, os.environ)
        try:
            return self._worker.ask(question, LONGEST_S, _show)
        except BaseException:
            self.close()
            raise


def _show(text: Any) -> None:
    print(text, end="", flush=True)


class _Events(io.TextIOBase):
    """Sends to the parent what is printed."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        self._tell(text)
        return len(text)


def main() -> None:
    racer: list[Racer] = []

    def answer(question: tuple[Any, ...], tell: Tell) -> Any:
        if not racer:
            racer.append(Racer(local_device()))
        method, *arguments = question
        with contextlib.redirect_stdout(_Events(tell)):
            return getattr(racer[0], method)(*arguments)

    serve(answer)


if __name__ == "__main__":
    main()

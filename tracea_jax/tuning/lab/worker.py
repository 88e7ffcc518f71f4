"""The parent's side of a process that answers questions and may hang or die.

    parent -> process   (number, question, seconds it may take)
    process -> parent   (number, kind, value), kind one of "event", "answer", "error"

They talk over two pipes of their own, apart from what libraries print. The process ends
with its parent, even when the parent is killed, and a Ctrl-C meant for the parent does
not reach the process. The process's side is ``serving``. Callers: ``child`` and
``compile_pool``, which also replace a process that was lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from tracea_jax.tuning.lab.frames import Frames, Garbage, write
from tracea_jax.tuning.lab.serving import Tell

_PRINTED_BYTES = 1 << 20  # of the process's printed output that are kept
_TAIL_BYTES, _TAIL_LINES, _TAIL_COLUMNS = 1 << 14, 8, 160
_POLL_S = 1.0
_END_S = 5.0  # that a process may take to end after it closed its pipe or was killed


# Importing the package imports JAX; this stand-in for it lets a module do without.
_BARE = """
import importlib, sys, types
package = types.ModuleType("tracea_jax")
package.__path__ = [{path!r}]
sys.modules["tracea_jax"] = package
importlib.import_module({module!r}).main()
"""


def bare(module: str) -> tuple[str, ...]:
    """Python's arguments that run ``main`` of one module and import no JAX with it."""
    (path,) = sys.modules[__name__.partition(".")[0]].__path__
    return "-c", _BARE.format(path=path, module=module)


class WorkerLost(Exception):
    """The process ended, or was killed because its answer could not be understood.

    Attributes:
      began: whether the process had begun to answer; if not, the question cannot be to
        blame.
    """

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class WorkerHung(WorkerLost):
    """The process was killed because it did not answer in time."""


class Worker:
    """One process that answers questions."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Starts the process.

        Args:
          arguments: of the Python interpreter; the numbers of two pipes follow them.
          environment: all variables of the process, except that it imports from the
            same places as this process.

        Raises:
          OSError: if the process cannot be started.
        """
        self._owner = os.getpid()
        self._number = 0
        self._owed_s = 0.0  # limit of a question abandoned unanswered, as after Ctrl-C
        self._frames = Frames()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self._printed = ours.enter_context(tempfile.TemporaryFile("a+b"))
            questions_fd, self._send_fd = _pipe(theirs, ours)
            self._receive_fd, answers_fd = _pipe(ours, theirs)
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments, str(questions_fd), str(answers_fd)],
                env={**environment, "PYTHONPATH": _import_path()},
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(questions_fd, answers_fd),
                start_new_session=True,  # a terminal's Ctrl-C goes to its session
            )
            # The process also ends if the worker is forgotten, or Python ends.
            self._end = weakref.finalize(
                self, _end, self._owner, self._process, ours.pop_all()
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ask(
        self, question: Any, limit_s: float, on_event: Tell = lambda event: None
    ) -> Any:
        """The answer to a question.

        Args:
          question: anything that can be pickled.
          limit_s: time for the answer; every event starts the time anew.
          on_event: called with every event that the process sends meanwhile.

        Raises:
          Exception: the one that answering raised in the process.
          WorkerHung: if the answer took too long.
          WorkerLost: if the process has ended.
        """
        if not self._end.alive:
            raise WorkerLost("its process was ended before", began=False)
        _trim(self._printed)
        if self._owed_s:
            self._catch_up()
        kind, value = self._exchange(question, limit_s, on_event)
        if kind == "error":
            raise value
        return value

    def kill(self) -> None:
        """Ends the process; a thread that waits for an answer gets ``WorkerLost``."""
        if os.getpid() == self._owner:
            self._process.kill()

    def close(self) -> None:
        """Ends the process, even a busy one, and frees its pipes and files here."""
        self._end()

    def _catch_up(self) -> None:
        """Waits for the answer to an abandoned question, and drops it."""
        try:
            self._exchange(None, self._owed_s, lambda event: None)
        except WorkerLost as e:
            raise WorkerLost(str(e), began=False) from e

    def _exchange(
        self, question: Any, limit_s: float, on_event: Tell
    ) -> tuple[str, Any]:
        """Sends a question; returns kind and value of the answer."""
        self._number += 1
        self._owed_s = max(self._owed_s, limit_s)
        try:
            write(self._send_fd, (self._number, question, limit_s))
        except OSError:
            raise self._lost(began=False) from None
        except BaseException:
            self.close()  # half a question may have been sent
            raise
        answer = self._receive(limit_s, on_event)
        self._owed_s = 0.0
        return answer

    def _receive(self, limit_s: float, on_event: Tell) -> tuple[str, Any]:
        began = False
        end = time.monotonic() + limit_s
        while True:
            try:
                message = self._frames.next()
                number, kind, value = message or (self._number, "", None)
            except (Garbage, TypeError, ValueError) as e:
                raise self._lost(f"it answered garbage: {e}", began=began) from e
            if message is None:
                if time.monotonic() > end:
                    raise self._hung(limit_s, began)
                if not self._read(end):
                    raise self._lost(began=began)
            elif number == self._number:
                if kind != "event":
                    return kind, value
                began = True
                end = time.monotonic() + limit_s
                if value is not None:
                    on_event(value)

    def _read(self, end: float) -> bool:
        """Reads bytes, or waits a little for some; False if no more can come."""
        # The process's children may hold the pipe open, so the pipe may never end.
        has_ended = self._process.poll() is not None
        wait_s = 0.0 if has_ended else min(max(end - time.monotonic(), 0.0), _POLL_S)
        poll = select.poll()
        poll.register(self._receive_fd, select.POLLIN)
        if not poll.poll(1 + 1e3 * wait_s):
            return not has_ended
        data = os.read(self._receive_fd, 1 << 20)
        self._frames.feed(data)
        return bool(data)

    def _hung(self, limit_s: float, began: bool) -> WorkerHung:
        printed = _tail(self._printed)
        self.close()
        return WorkerHung(f"no end after {limit_s:.3g} s{printed}", began=began)

    def _lost(self, why: str | None = None, *, began: bool) -> WorkerLost:
        if why is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            why = f"its process {_how_ended(self._process.returncode)}"
        printed = _tail(self._printed)
        self.close()
        return WorkerLost(why + printed, began=began)


def _pipe(
    reader: contextlib.ExitStack, writer: contextlib.ExitStack
) -> tuple[int, int]:
    """A pipe, whose two ends the given stacks close."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def _import_path() -> str:
    return os.pathsep.join(os.path.abspath(p) for p in sys.path)


def _end(
    owner: int, process: subprocess.Popen[bytes], files: contextlib.ExitStack
) -> None:
    """Kills the process with its children and closes its files.

    In a fork of the owner only the files are closed: the process belongs to the owner.
    """
    if os.getpid() == owner and process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    files.close()


def _how_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _trim(printed: BinaryIO) -> None:
    if os.fstat(printed.fileno()).st_size > _PRINTED_BYTES:
        os.ftruncate(printed.fileno(), 0)


def _tail(printed: BinaryIO) -> str:
    """The last lines that the process printed, each on a line of its own."""
    size = os.fstat(printed.fileno()).st_size
    data = os.pread(printed.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    lines = [s for s in data.decode(errors="replace").splitlines() if s.strip()]
    return "".join(f"\n  {line[:_TAIL_COLUMNS]}" for line in lines[-_TAIL_LINES:])

"""The worker's side of ``lab.worker``: answers questions until the parent is gone.

A worker process ends with its parent, even while it is busy, and ignores Ctrl-C.
Callers: the programs of the processes, ``child_server`` and ``compile_pool``.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tracea_jax.tuning.lab.frames import Frames, Garbage, write

Tell = Callable[[Any], None]

_POLL_S = 1.0
_ORPHAN_S = 30.0  # after a question's time limit, until the process ends itself


def serve(answer: Callable[[Any, Tell], Any]) -> None:
    """Answers questions for ever; the two last arguments of the program are its pipes.

    Args:
      answer: (question, tell) -> answer; ``tell`` sends an event. The parent raises
        the exceptions of ``answer``.
    """
    questions_fd, answers_fd = (int(a) for a in sys.argv[-2:])
    for fd in (questions_fd, answers_fd):
        os.set_inheritable(fd, False)  # the pipes shall end with this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # crashes are expected
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = threading.Thread(
        target=_listen, args=(questions_fd, inbox, os.getppid()), daemon=True
    )
    listener.start()
    while True:
        number, question, limit_s = inbox.get()
        # The listener cannot end the process while the interpreter's lock is held.
        faulthandler.dump_traceback_later(limit_s + _ORPHAN_S, exit=True)

        def tell(event: Any, number: int = number) -> None:
            write(answers_fd, (number, "event", event))

        tell(None)  # the answer has begun
        try:
            value = None if question is None else answer(question, tell)
            message = (number, "answer", value)
        except Exception as e:
            message = (number, "error", _sendable(e))
        write(answers_fd, message)
        faulthandler.cancel_dump_traceback_later()


def _listen(fd: int, inbox: queue.SimpleQueue[Any], parent: int) -> None:
    """Passes questions on; ends the process when no more questions can come."""
    frames = Frames()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        # A fork of the parent may hold the pipe open, so the pipe may never end.
        while os.getppid() == parent:
            if not poll.poll(1e3 * _POLL_S):
                continue
            if not (data := os.read(fd, 1 << 20)):
                break
            frames.feed(data)
            while (message := frames.next()) is not None:
                inbox.put(message)
    except (OSError, Garbage) as e:
        print(f"the parent sent garbage: {e}", file=sys.stderr)
    os._exit(0)


def _sendable(error: Exception) -> Exception:
    """The exception, or a RuntimeError of the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

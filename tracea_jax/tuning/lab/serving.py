"""A worker's side of ``tuning.worker``: answers questions until the parent is gone.

Whatever it is busy with, the process ends with its parent, and it ignores Ctrl-C.
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
_ORPHAN_S = 30.0  # a question that nobody ends any more ends its process, so much late


def serve(answer: Callable[[Any, Tell], Any]) -> None:
    """Answers questions; the two last arguments of the program are its pipes.

    Args:
      answer: (question, tell) -> answer; ``tell`` sends an event. What it raises is
        raised in the parent.
    """
    questions_fd, answers_fd = (int(a) for a in sys.argv[-2:])
    for fd in (questions_fd, answers_fd):
        os.set_inheritable(fd, False)  # the pipes shall end with this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # to crash is nothing special
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = threading.Thread(
        target=_listen, args=(questions_fd, inbox, os.getppid()), daemon=True
    )
    listener.start()
    while True:
        number, question, limit_s = inbox.get()
        # Were the interpreter's lock held for ever, the listener could not end this.
        faulthandler.dump_traceback_later(limit_s + _ORPHAN_S, exit=True)

        def tell(event: Any, number: int = number) -> None:
            write(answers_fd, (number, "event", event))

        tell(None)  # it began
        try:
            value = None if question is None else answer(question, tell)
            message = (number, "answer", value)
        except Exception as e:
            message = (number, "error", _sendable(e))
        write(answers_fd, message)
        faulthandler.cancel_dump_traceback_later()


def _listen(fd: int, inbox: queue.SimpleQueue[Any], parent: int) -> None:
    """Passes questions on; ends the process when there will be no more."""
    frames = Frames()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        # A fork of the parent may hold the pipe open, which then has no end.
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
    """The exception, or one that says as much, if it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

"""Compiles kernels ahead, in processes that may be killed: assemblers can hang.

The results are in the store on disk, where whoever lowers a kernel finds them. The
workers know neither JAX nor the GPU.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import threading
import weakref
from typing import Any

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.lab.worker import Worker, WorkerHung, WorkerLost, bare

TIMEOUT_S = 60.0  # for one kernel; they take about a second
_START_S = 120.0
_BYTES_EACH = 700 << 20  # that a worker may need
_MOST_WORKERS = 8
_HELLO = "hello"
_STOP: Any = object()  # ends a thread of the crew
_TRIES = 2  # of a kernel whose worker died before it began with it

PROGRAM = bare("tracea_jax.tuning.lab.compile_pool")
Future = concurrent.futures.Future


class CompilePool:
    """Worker processes, started as there is work for them."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        workers: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Starts nothing yet.

        Args:
          directory: the cache directory whose store receives the kernels.
          workers: processes at most; by default as many as cores, but one, and memory
            allow, 8 at most.
          timeout_s: after which compiling one kernel has failed.
        """
        self._directory = directory
        self._timeout_s = timeout_s
        self._workers = workers or default_workers()
        self._futures: dict[str, Future[None]] = {}
        self._crew = _Crew()
        # Also when the pool is forgotten without ``close``, and when Python ends.
        self._end = weakref.finalize(self, self._crew.dismiss)

    def submit(self, kernel: Kernel) -> Future[None]:
        """Compiles a kernel, unless that was done before or is under way.

        The future raises ``nvrtc.CompileError``, a ``cubins.KnownFailure`` if that was
        known or took too long. It is cancelled when the pool is closed.

        Raises:
          ToolchainMissing: if kernels cannot be compiled here.
        """
        key = nvrtc.key(kernel)
        if key not in self._futures:
            self._futures[key] = future = Future()
            known = cubins.failure(self._directory, kernel.arch, key)
            if cubins.has(self._directory, kernel):
                future.set_result(None)
            elif known is not None:
                future.set_exception(known)
            else:
                task = _Task(kernel, self._directory, self._timeout_s, future)
                busy = sum(not f.done() for f in self._futures.values())
                self._crew.add(task, size=min(self._workers, busy))
        return self._futures[key]

    def close(self) -> None:
        """Ends all workers; what is not compiled yet is cancelled."""
        self._end()


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    kernel: Kernel
    directory: pathlib.Path
    timeout_s: float
    future: Future[None]


class _Crew:
    """Threads with a worker each; they do not know the pool, so it can be forgotten."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._is_dismissed = False

    def add(self, task: _Task, size: int) -> None:
        """Queues a task; the crew grows to ``size``."""
        with self._lock:
            if self._is_dismissed:
                task.future.cancel()
                return
            self._tasks.put(task)
            if len(self._threads) < size:
                thread = threading.Thread(target=self._work, daemon=True)
                self._threads.append(thread)
                thread.start()

    def dismiss(self) -> None:
        with self._lock:
            self._is_dismissed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(_STOP)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        worker: Worker | None = None
        while (task := self._tasks.get()) is not _STOP:
            if self._is_dismissed:
                task.future.cancel()
            elif task.future.set_running_or_notify_cancel():
                worker = self._finish(task, worker)
        self._part(worker)

    def _finish(self, task: _Task, worker: Worker | None) -> Worker | None:
        """Does a task; the worker to go on with."""
        for attempt in range(_TRIES):
            try:
                worker = worker or self._hire()
                question = (task.kernel, str(task.directory))
                failed = worker.ask(question, task.timeout_s)
            except (WorkerLost, OSError) as e:
                worker = self._part(worker)
                began = isinstance(e, WorkerLost) and e.began
                if began or self._is_dismissed or attempt + 1 == _TRIES:
                    task.future.set_exception(self._failure(task, e, began))
                    break
            except Exception as e:
                task.future.set_exception(e)
                break
            else:
                if failed is None:
                    task.future.set_result(None)
                else:
                    task.future.set_exception(cubins.KnownFailure(*failed))
                break
        return worker

    def _failure(self, task: _Task, error: Exception, began: bool) -> Exception:
        """What the end of a worker means for the task at hand."""
        if self._is_dismissed:
            return concurrent.futures.CancelledError()
        if began and isinstance(error, WorkerHung):
            return _timeout(task)
        # A crash is not remembered: it may have been for want of memory.
        message = f"compiling {task.kernel.entry} failed: {error}"
        return nvrtc.CompileError(message, "")

    def _hire(self) -> Worker:
        worker = Worker(PROGRAM, os.environ)
        with self._lock:
            self._workers.add(worker)
            if self._is_dismissed:
                worker.kill()
        try:
            worker.ask(_HELLO, _START_S)
        except BaseException:
            self._part(worker)
            raise
        return worker

    def _part(self, worker: Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


def _timeout(task: _Task) -> cubins.KnownFailure:
    """Remembers that a kernel takes too long."""
    message = f"compiling {task.kernel.entry} did not end within {task.timeout_s:g} s"
    cubins.record_failure(task.directory, task.kernel, "timeout", message)
    return cubins.KnownFailure(message, "timeout")


def default_workers() -> int:
    """Processes that this machine can compile in at once, leaving a core to us."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    memory = _available_bytes() // _BYTES_EACH
    return max(1, min(cores - 1, _MOST_WORKERS, memory))


def _available_bytes() -> int:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        kib = next(s.split()[1] for s in lines if s.startswith("MemAvailable:"))
        return int(kib) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def answer(question: Any, tell: Tell) -> tuple[str, str] | None:
    """In the worker: compiles into the store; (message, kind) if that failed."""
    if question == _HELLO:
        nvrtc.version()
        return None
    kernel, directory = question
    try:
        cubins.get_or_compile(kernel, pathlib.Path(directory))
    except cubins.KnownFailure as e:
        return str(e), e.kind
    except nvrtc.CompileError as e:
        return str(e), "compile_error"
    return None


def main() -> None:
    """The worker's program."""
    serve(answer)

"""Compiles kernels ahead, in processes that can be killed when an assembler hangs.

The cubins go to the store on disk (``runtime.cubins``), where lowering finds them. The
workers import neither JAX nor anything of the GPU. Which kernels a choice needs is in
``ahead``. Callers: ``ahead``, the labs, and benchmarks/record_space.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import sys
import threading
import weakref
from typing import Any

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.lab.worker import Worker, WorkerHung, WorkerLost, bare

TIMEOUT_S = 60.0  # for one kernel; most kernels take about a second
_START_S = 120.0
_BYTES_EACH = 700 << 20  # memory that one worker may need
_MOST_WORKERS = 8
_CGROUP = pathlib.Path("/sys/fs/cgroup")  # a container sees its own here
_HELLO = "hello"
_STOP: Any = object()  # ends a thread of the crew
_TRIES = 2  # of a kernel, if the worker dies before it begins to compile

PROGRAM = bare("tracea_jax.tuning.lab.compile_pool")
Future = concurrent.futures.Future


class CompilePool:
    """Worker processes that compile kernels; each starts when there is work for it."""

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
          workers: processes at most; by default one fewer than cores, as many as memory
            allows, and 8 at most.
          timeout_s: seconds after which compiling one kernel counts as failed.
        """
        self._directory = directory
        self._timeout_s = timeout_s
        self._workers = workers or default_workers()
        self._futures: dict[str, Future[None]] = {}
        self._crew = _Crew()
        # The crew also ends if the pool is forgotten without ``close``, or Python ends.
        self._end = weakref.finalize(self, self._crew.dismiss)

    def submit(self, kernel: Kernel) -> Future[None]:
        """Compiles a kernel, unless it is compiled already or under way.

        The future raises ``nvrtc.CompileError`` if the kernel cannot be compiled, or
        ``cubins.KnownFailure`` if this failure was known before or compiling took too
        long. The future is cancelled when the pool is closed.

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
        """Ends all workers; futures of kernels not yet compiled are cancelled."""
        self._end()


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    kernel: Kernel
    directory: pathlib.Path
    timeout_s: float
    future: Future[None]


class _Crew:
    """Threads with a worker process each.

    They hold no reference to the pool, so that the pool can be garbage-collected.
    """

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
        self._end_worker(worker)

    def _finish(self, task: _Task, worker: Worker | None) -> Worker | None:
        """Does a task; returns the worker for the next one, None if it was lost."""
        for attempt in range(_TRIES):
            try:
                worker = worker or self._start_worker()
                question = (task.kernel, str(task.directory))
                failed = worker.ask(question, task.timeout_s)
            except (WorkerLost, OSError) as e:
                worker = self._end_worker(worker)
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
        """The error of a task whose worker ended."""
        if self._is_dismissed:
            return concurrent.futures.CancelledError()
        if began and isinstance(error, WorkerHung):
            return _timeout(task)
        # A crash is not remembered as the kernel's failure: memory may have run out.
        message = f"compiling {task.kernel.entry} failed: {error}"
        return nvrtc.CompileError(message, "")

    def _start_worker(self) -> Worker:
        worker = Worker(PROGRAM, os.environ)
        with self._lock:
            self._workers.add(worker)
            if self._is_dismissed:
                worker.kill()
        try:
            worker.ask(_HELLO, _START_S)
        except BaseException:
            self._end_worker(worker)
            raise
        return worker

    def _end_worker(self, worker: Worker | None) -> None:
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
    """Number of processes that can compile here at once, with one core kept free."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    memory = _available_bytes() // _BYTES_EACH
    return max(1, min(cores - 1, _MOST_WORKERS, memory))


def _available_bytes() -> int:
    """Free memory of the machine, or of the container if that has less."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        kib = next(s.split()[1] for s in lines if s.startswith("MemAvailable:"))
        available = int(kib) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(available, _left_of_cgroup())


def _left_of_cgroup() -> int:
    """Memory that the control group may still take (Linux' "Control Group v2", 5.2.1).

    Files that were read long ago are given back when memory is short.
    """
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # "max" if there is none
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        read = next(s.split()[1] for s in lines if s.startswith("inactive_file "))
        return max(limit - used + int(read), 0)
    except (OSError, StopIteration, ValueError, IndexError):
        return sys.maxsize


def answer(question: Any, tell: Tell) -> tuple[str, str] | None:
    """In the worker: compiles a kernel into the store.

    Returns:
      None, or (message, kind) of a failure.
    """
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
    serve(answer)

"""Rows of a GPU: many processes compile what one process measures.

    peers   processes that compile XLA's programs into JAX's compilation cache; XLA
            tries kernels on the GPU meanwhile
    racer   a process that loads the programs of a few problems and times their kernels
            in one profile, while no peer's process uses the GPU

Both may be lost, as XLA's autotuner or a kernel may hang or break the GPU's context:
then another one is started. What a lost racer was asked is asked again problem by
problem. A problem that ends two racers has a row without times.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tracea_jax import knowledge
from tracea_jax.device import Device
from tracea_jax.options import current, local_device
from tracea_jax.policy import Choice
from tracea_jax.survey import loaded
from tracea_jax.survey.ahead import Planned
from tracea_jax.survey.candidates import PEERS
from tracea_jax.survey.measure import row_of
from tracea_jax.survey.rows import Row
from tracea_jax.survey.turns import on_visible_gpus
from tracea_jax.tuning import measure
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.lab.worker import Worker
from tracea_jax.tuning.measure import Race

PROGRAM = ("-m", "tracea_jax.survey.gpu")
TOGETHER = 24  # problems of a profile, at most
MOST_BYTES = 8 << 30  # of their operands and results
ROUNDS = 5
MOST_COMPILERS = 24
PEER_S = 120.0  # for the peers of a problem, among them waiting for the racer
RACER_S = 180.0  # for a few problems
TRIES = 2  # of a problem whose racer is lost

Ask = Callable[[Any, float], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Directory in which processes of one survey meet.

    Attributes:
      cache: tracea_jax's cache directory, with the compiled kernels.
      programs: JAX's compilation cache.
      platforms: that the processes use, as ``JAX_PLATFORMS``.
    """

    cache: pathlib.Path
    programs: pathlib.Path
    platforms: str = "cuda,cpu"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the racer, and of all processes by default."""
        flags = os.environ.get("XLA_FLAGS", "")
        return {
            **os.environ,
            "JAX_PLATFORMS": self.platforms,
            "TRACEA_CACHE_DIR": str(self.cache),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several share the GPU
            "JAX_COMPILATION_CACHE_DIR": str(self.programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # Kernels in command buffers have no names in profiles.
            "XLA_FLAGS": f"{flags} --xla_gpu_enable_command_buffer=".strip(),
        }

    @property
    def compiling(self) -> dict[str, str]:
        """Environment variables of processes that compile peers.

        A pool of JAX's default allocator never returns what XLA's autotuner took: those
        of 15 processes left the racer no memory after some hundred problems.
        """
        return {**self.environment, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


class Workers:
    """Processes that answer questions, one for each thread; lost ones are replaced."""

    def __init__(self, environment: Mapping[str, str], count: int) -> None:
        self._environment = dict(environment)
        self._local = threading.local()
        self._started: list[Worker] = []
        self.pool = concurrent.futures.ThreadPoolExecutor(count)

    def ask(self, question: Any, limit_s: float) -> Any:
        """The answer of this thread's process; called in a thread of ``pool``.

        Raises:
          WorkerLost: if the process has ended, or did not answer in time.
          Exception: that answering raised.
        """
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.is_alive:
            worker = self._local.worker = Worker(PROGRAM, self._environment)
            self._started.append(worker)
        try:
            return worker.ask(question, limit_s)
        except Exception:
            worker.close()  # the next question has a process that works
            raise

    def close(self) -> None:
        for worker in self._started:
            worker.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def measured(
    plan: Iterable[Planned],
    device: Device,
    place: Place,
    *,
    compilers: int,
    kernels: int = 2,
    on_failure: Callable[[str], None] = lambda why: None,
) -> Iterator[Row]:
    """Measures problems in their order, a few at a time, with all processes needed.

    Args:
      plan: what to measure; it is read a few groups ahead.
      device: the local device.
      place: directories that the processes share.
      compilers: processes that compile peers.
      kernels: processes that compile kernels that the cache lacks.
      on_failure: called with what went wrong.
    """
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(
            contextlib.closing(Workers(place.compiling, compilers))
        )
        racer = stack.enter_context(contextlib.closing(Workers(place.environment, 1)))
        pool = CompilePool(place.cache, workers=kernels)
        ahead = stack.enter_context(contextlib.closing(Ahead(pool, device)))
        yield from in_groups(
            plan,
            device,
            compile_peers=lambda p: peers.pool.submit(
                peers.ask, ("compile", p), PEER_S
            ),
            start_kernels=lambda p: ahead.start(p.numbered.problem, p.choices),
            race=lambda group: racer.pool.submit(
                racer.ask, ("race", group), RACER_S
            ).result(),
            depth=max(2, compilers // TOGETHER + 2),
            on_failure=on_failure,
        )


def in_groups(
    plan: Iterable[Planned],
    device: Device,
    *,
    compile_peers: Callable[[Planned], concurrent.futures.Future[Any]],
    start_kernels: Callable[[Planned], None],
    race: Callable[[tuple[Planned, ...]], Sequence[Row]],
    depth: int = 3,
    on_failure: Callable[[str], None] = lambda why: None,
) -> Iterator[Row]:
    """Races groups of problems whose peers were compiled; see ``measured``.

    A peer that was not compiled in time is raced without; the row says so.

    Args:
      plan, device, on_failure: see ``measured``.
      compile_peers, start_kernels: begin to compile for a problem.
      race: the rows of a few problems.
      depth: groups whose peers are being compiled before the first of them races.
    """
    waiting: list[tuple[tuple[Planned, ...], list[concurrent.futures.Future[Any]]]] = []
    left = groups(plan)

    def refill() -> None:
        for group in itertools.islice(left, depth - len(waiting)):
            for planned in group:
                start_kernels(planned)
            waiting.append((group, [compile_peers(planned) for planned in group]))

    refill()
    while waiting:
        group, futures = waiting.pop(0)
        refill()
        ready: list[Planned] = []
        lost: dict[str, Row] = {}
        for planned, future in zip(group, futures, strict=True):
            try:
                future.result()
                ready.append(planned)
            except Exception as e:
                on_failure(f"peers of {planned.numbered.problem}: {_brief(e)}")
                row = _failed(planned, device, "timeout")
                lost[planned.numbered.name] = row
        for row in _raced(tuple(ready), device, race, on_failure):
            yield row
        yield from lost.values()


def groups(plan: Iterable[Planned]) -> Iterator[tuple[Planned, ...]]:
    """Problems in their order, as many together as fit a profile and the memory."""
    group: list[Planned] = []
    held = 0
    for planned in plan:
        need = 2 * planned.numbered.problem.bytes
        if group and (len(group) == TOGETHER or held + need > MOST_BYTES):
            yield tuple(group)
            group, held = [], 0
        group.append(planned)
        held += need
    if group:
        yield tuple(group)


def _raced(
    group: tuple[Planned, ...],
    device: Device,
    race: Callable[[tuple[Planned, ...]], Sequence[Row]],
    on_failure: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of a group; of each problem alone if the group's racer is lost."""
    if not group:
        return
    for attempt in range(1 if len(group) > 1 else TRIES):
        try:
            yield from race(group)
            return
        except Exception as e:  # a lost process; others go on
            on_failure(f"{len(group)} problems, try {attempt + 1}: {_brief(e)}")
    if len(group) == 1:
        yield _failed(group[0], device, "launch_error")
        return
    middle = len(group) // 2
    for part in (group[:middle], group[middle:]):
        yield from _raced(part, device, race, on_failure)


def _failed(planned: Planned, device: Device, kind: str) -> Row:
    """A row without times: so that the problem is not tried again."""
    nothing = Race(times_us={}, repeats={}, failures={})
    failed = dict.fromkeys(planned.choices, kind)
    return row_of(planned.numbered, nothing, failed, device)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


# --- in the processes -----------------------------------------------------------------


def race_here(group: Sequence[Planned], device: Device) -> list[Row]:
    """The rows of a few problems, measured in this process in one profile.

    Raises:
      loaded.GpuLost: if this process must be replaced.
    """
    turns = on_visible_gpus(current().directory)
    asked = {
        i: (loaded.Subject.of(planned.numbered.problem, device), planned.choices)
        for i, planned in enumerate(group)
    }
    with (
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads,
        turns.together(),
    ):
        found = loaded.loaded(asked, threads)
    with turns.alone(), measure.exclusive(current().directory, device):
        calls = {i: of.calls for i, of in found.items()}
        times = loaded.kernel_times(calls, ROUNDS, device)
    if len(group) > 1 and not times:
        raise loaded.GpuLost("no profile shows a kernel")
    return [
        _row(planned, times.get(i, {}), found[i].failed, device)
        for i, planned in enumerate(group)
    ]


def _row(
    planned: Planned,
    us: Mapping[Choice, Sequence[float]],
    failed: Mapping[Choice, str],
    device: Device,
) -> Row:
    times = {c: tuple(us[c]) for c in planned.choices if c in us}
    race = Race(times_us=times, repeats=dict.fromkeys(times, 1), failures={})
    missing = [c for c in planned.choices if c not in us]
    kinds = {c: failed.get(c, "launch_error") for c in missing}
    return row_of(planned.numbered, race, kinds, device)


def compile_here(planned: Planned, device: Device) -> tuple[str, ...]:
    """Compiles the peers of a problem into the cache; their failures, in words."""
    turns = on_visible_gpus(current().directory)
    subject = loaded.Subject.of(planned.numbered.problem, device)
    failed = []
    for choice in planned.choices:
        if choice.variant in PEERS:
            try:
                with turns.together():  # XLA tries kernels on the GPU
                    subject.compiled(choice)
            except Exception as e:  # the racer finds it, too
                failed.append(f"{choice}: {_brief(e)}")
    return tuple(failed)


def main() -> None:
    device = local_device()
    methods: Mapping[str, Callable[[Any, Device], Any]] = {
        "race": race_here,
        "compile": compile_here,
    }

    def answer(question: tuple[str, Any], tell: Tell) -> Any:
        method, asked = question
        with knowledge.undisturbed():
            return methods[method](asked, device)

    serve(answer)


if __name__ == "__main__":
    main()

"""Benches for the child of ``test_child``: each config of kc >= 100 has a fault.

XLA's choice works unless the file that FAULTY_BENCHES names exists; the file simulates
a dead device.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

from tracea_jax.policy import Choice
from tracea_jax.tuning.measure import CandidateError, Run, Verification

FILE = "FAULTY_BENCHES"
GOOD_US = 20.0


class Unsendable(Exception):
    """Cannot be made from its own arguments, as pickle tries."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(f"{message}, {detail}")


_lost: list[str] = []  # a fault that lasts as long as the process
_interrupted: list[int] = []


def _abort() -> None:
    os.abort()


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> None:
    print("out of patience", file=sys.stderr, flush=True)
    os._exit(3)


def _leave() -> None:
    sys.exit(4)


def _hang() -> None:
    time.sleep(1000)


def _raise() -> None:
    raise RuntimeError("bad launch")


def _unsendable() -> None:
    raise Unsendable("bad launch", "and more")


def _lose_context() -> None:
    _lost.append("illegal address")


def _garbage() -> None:
    os.write(int(sys.argv[-1]), b"Warning: the GPU is hot\n" * 4)


def _half_a_frame() -> None:
    os.write(int(sys.argv[-1]), b"tracea1\n")
    os._exit(0)


def _chatter() -> None:
    for _ in range(100):
        print("noise " * 100)
        print("noise " * 100, file=sys.stderr)
    os.write(1, b"\x00\xff" * 1000)


def _jump() -> None:
    """The wall clock moves by years at each look."""
    clock = iter(range(10**9, 0, -(10**7)))
    time.time = lambda: float(next(clock))


def _interrupt_parent() -> None:
    """Ctrl-C in the parent, once, while it waits for us, who go on."""
    if not _interrupted:
        _interrupted.append(os.getppid())
        time.sleep(0.5)  # until it does wait: half a question would end us
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.02)


FAULTS: dict[int, Callable[[], None]] = {
    100: _abort,
    101: _segfault,
    102: _killed,
    103: _exit,
    104: _leave,
    105: _hang,
    106: _raise,
    107: _unsendable,
    108: _lose_context,
    109: _garbage,
    110: _half_a_frame,
    111: _chatter,
    112: _jump,
    113: _interrupt_parent,
}
KC = {fault.__name__[1:]: kc for kc, fault in FAULTS.items()}


class Bench:
    """``fault`` happens when the choice first does ``at``: prepare, run or verify."""

    def __init__(self, at: str) -> None:
        self.at = at

    def prepare(self, choice: Choice) -> Run:
        self._reach("prepare", choice)

        def run(repeats: int) -> None:
            self._reach("run", choice)
            if _lost:
                raise RuntimeError(_lost[0])
            time.sleep(repeats * GOOD_US * 1e-6)

        return run

    def verify(self, choice: Choice) -> Verification:
        self._reach("verify", choice)
        if _lost:
            raise RuntimeError(_lost[0])
        return Verification(
            max_rel_error=float(os.getpid()), tolerance=1e9, ok=True, message=self.at
        )

    def flush(self) -> None:
        pass

    def kernel_times(self, runs, rounds) -> dict[Choice, list[float]]:
        return {}  # as where the device does not tell them

    def _reach(self, step: str, choice: Choice) -> None:
        if choice.variant == "xla":
            if FILE in os.environ and pathlib.Path(os.environ[FILE]).exists():
                raise RuntimeError("no device")
        elif step == self.at and choice.config.kc in FAULTS:
            FAULTS[choice.config.kc]()


def at_run(problem, device) -> Bench:
    return Bench("run")


def at_prepare(problem, device) -> Bench:
    return Bench("prepare")


def at_verify(problem, device) -> Bench:
    return Bench("verify")


def refuses(problem, device) -> Bench:
    raise ValueError(f"m={problem.m} is odd")


def settings(problem, device) -> Bench:
    """Tells the child's settings as the failure of every choice."""
    import jax

    names = ("JAX_PLATFORMS", "TRACEA_CACHE_DIR", "XLA_PYTHON_CLIENT_PREALLOCATE")
    told = [os.environ.get(name) for name in names]
    told += [jax.config.jax_enable_x64, os.getsid(0) == os.getpid()]  # type: ignore[attr-defined]
    raise CandidateError("unlaunchable", repr(told))

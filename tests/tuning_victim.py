"""Processes for ``test_tuning_faults``: they tune, record and lock, and may be killed.

One interpreter serves all tests and forks the processes, which is quick enough to kill
a tuning at every single system call. It reads requests (see ``redirected``) and answers
each with the exit status.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable

import synthetic_bench as synthetic
from synthetic_bench import DEVICE, HERO, PROBLEM, XLA, Bench, Clock, choice

from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.session import identity_of
from tracea_jax.tuning.store import exchange, records, upkeep
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation

SIZE = 5
WRITERS = 8
RECORDS = 4  # of each writer for each of its two problems
write = os.write  # as it is before anything is replaced


def bench() -> Bench:
    times = {HERO: 80.0, XLA: 90.0, choice(3): 40.0, choice(4): 1.0}
    return Bench(
        Clock(), times, broken=frozenset({choice(2)}), wrong=frozenset({choice(4)})
    )


def killing(call: Callable, countdown: list[int], torn: bool) -> Callable:
    """The system call, but the process dies at the n-th of all calls so replaced."""

    def replaced(*args):
        countdown[0] -= 1
        if countdown[0] == 0:
            if torn:
                write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)

    return replaced


def tune_and_die(directory: pathlib.Path, at: int) -> None:
    """Tunes until the n-th call that writes; logs each evaluation that is finished."""
    log = os.open(directory / "finished.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    evaluated: list[str] = []

    def progress(*, phase, message, **_):
        # When the next choice is announced, all those before are evaluated.
        if phase == "search":
            write(log, "".join(f"{e}\n" for e in evaluated[-1:]).encode())
            evaluated.append(message)

    countdown = [at]
    for name in ("write", "fsync", "replace", "unlink"):
        call = killing(getattr(os, name), countdown, torn=name == "write")
        setattr(os, name, call)
    synthetic.tune(bench(), directory / "cache", size=SIZE, progress=progress)


def tune_again(directory: pathlib.Path) -> None:
    """Tunes to the end and tells what the sweep measured."""
    swept, phase = [], ["search"]
    resumed = bench()

    def hook(step, c):
        if step == "verify":
            phase[0] = "race"
        if step == "prepare" and phase[0] == "search":
            swept.append(identity_of(c))

    before = Knowledge(directory / "cache").observations(PROBLEM, DEVICE)
    resumed.hook = hook
    synthetic.tune(resumed, directory / "cache", size=SIZE)
    told = {"known": [o.identity for o in before], "swept": swept}
    (directory / "resumed.json").write_text(json.dumps(told))


def record_many(directory: pathlib.Path, writer: int) -> None:
    """Records observations of one shared problem and one problem of its own."""
    for number in range(RECORDS):
        for problem in (PROBLEM, dataclasses.replace(PROBLEM, m=writer + 1)):
            knowledge = Knowledge(directory / "cache")
            kc = writer * RECORDS + number + 1
            name = named(problem, choice(kc), DEVICE)
            seen = Observation(**name, time_us=float(kc), repeats=1)
            journal = knowledge.own.journal(problem, DEVICE)
            knowledge.own.append(journal, (seen,))
            entry = Entry(
                problem=problem.to_json(),
                environment=environment(DEVICE),
                best=Best(**name, time_us=float(kc)),
                observations=records.union([seen]),
                written=f"{kc:06}",
            )
            knowledge.own.record(entry, journal)
            journal.close()


def tune_at_once(directory: pathlib.Path, writer: int) -> None:
    """Tunes the shared problem over a space that grows with the writer's number."""
    synthetic.tune(bench(), directory / "cache", size=writer + 4)


def shaped(m: int) -> GemmProblem:
    return dataclasses.replace(PROBLEM, m=m)


def prepare(directory: pathlib.Path) -> None:
    """A cache, a journal of an ended tuning, and a file to merge."""
    knowledge = Knowledge(directory / "cache")
    for m in (1, 2, 3):
        knowledge.own.record(
            synthetic.entry(
                problem=shaped(m),
                observations=[synthetic.measured(m), synthetic.measured(9)],
                written=f"2026-01-0{m}",
            )
        )
    journal = knowledge.own.journal(shaped(4), DEVICE)
    knowledge.own.append(journal, (synthetic.measured(4),))
    journal.close()
    theirs = [
        synthetic.entry(
            choice(kc),
            problem=shaped(m),
            observations=[synthetic.measured(kc, 5.0, repeats=50)],
        )
        for m, kc in ((2, 7), (4, 8), (5, 6))
    ]
    (directory / "theirs.json").write_bytes(exchange.pack(theirs))
    exchange.export(Store(directory / "cache" / "tuned"), directory / "out.json")


def maintain(directory: pathlib.Path, what: str) -> None:
    """Merges, exports or prunes."""
    cache = Store(directory / "cache" / "tuned")
    if what == "merge":
        exchange.merge(cache, exchange.read(directory / "theirs.json"))
    elif what == "export":
        exchange.export(cache, directory / "out.json", ops=["matmul"])
    else:
        upkeep.prune(cache, max_entries=1, journals=True, now_s=0)


def maintain_and_die(directory: pathlib.Path, what: str, at: int) -> None:
    countdown = [at]
    for name in ("write", "fsync", "replace", "unlink"):
        call = killing(getattr(os, name), countdown, torn=name == "write")
        setattr(os, name, call)
    maintain(directory, what)


def kill_maintenance(root: pathlib.Path, what: str) -> None:
    """Kills at the first writing call, at the second, ... until one run survives."""
    for at in range(1, 100):
        directory = root / str(at)
        directory.mkdir()
        prepare(directory)
        code = ended(forked(maintain_and_die, directory, what, at))
        (directory / "code").write_text(str(code))
        shutil.copytree(directory / "cache", directory / "after_kill")
        shutil.copy(directory / "out.json", directory / "out_after_kill.json")
        if code != -signal.SIGKILL:
            return
        if again := ended(forked(maintain, directory, what)):
            sys.exit(again)


def merge_many(directory: pathlib.Path, writer: int) -> None:
    """Merges observations of one shared problem, and exports all that is there."""
    cache = Store(directory / "cache" / "tuned")
    for number in range(RECORDS):
        kc = writer * RECORDS + number + 1
        seen = synthetic.measured(kc, 100.0 - kc, repeats=kc)
        exchange.merge(cache, [synthetic.entry(choice(kc), observations=[seen])])
        exchange.export(cache, directory / "out.json")
        if not exchange.read(directory / "out.json"):
            sys.exit("what this process wrote was lost")


def write_on_a_full_disk(directory: pathlib.Path) -> None:
    """No file may grow beyond a few bytes; what cannot be written fails, or warns."""
    import resource  # not everywhere

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
    told: dict[str, list[str]] = {"warnings": [], "errors": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        synthetic.tune(bench(), directory / "cache", size=SIZE)
    told["warnings"] = [str(w.message) for w in caught]
    told["kept"] = [str(Knowledge(directory / "cache").lookup(PROBLEM, DEVICE))]
    for what in ("merge", "export"):
        try:
            maintain(directory, what)
        except OSError as e:
            told["errors"].append(f"{what} {e.strerror}")
    write(1, json.dumps(told).encode())


def measure_alone(directory: pathlib.Path, writer: int) -> None:
    """Logs when it measures; one of the writers is killed while it does."""
    log = os.open(directory / "measured.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(RECORDS):
        with measure.exclusive(directory, DEVICE) as held:
            assert held
            os.write(log, f"{writer}\n".encode())
            if writer == 3 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(log, f"{writer}\n".encode())


def forked(work: Callable, *args) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(*args)
        except BaseException as e:
            os.write(2, f"{work.__name__}{args}: {e!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(root: pathlib.Path, before: int = 0) -> None:
    """Kills at the first writing call, at the second, ... until one tuning survives.

    Every time, another tuning was killed ``before``, at that call.
    """
    for at in range(1, 500):
        directory = root / str(at)
        directory.mkdir()
        if before:
            ended(forked(tune_and_die, directory, before))
        code = ended(forked(tune_and_die, directory, at))
        (directory / "code").write_text(str(code))
        if code != -signal.SIGKILL:
            return
        if again := ended(forked(tune_again, directory)):
            sys.exit(again)


def together(root: pathlib.Path, work: Callable) -> None:
    children = [forked(work, root, writer) for writer in range(WRITERS)]
    (root / "codes.json").write_text(json.dumps([ended(c) for c in children]))


def warm_up() -> None:
    """Loads and traces what tunings need, once and not in every fork.

    Another user may not reach Python's own files later.
    """
    with tempfile.TemporaryDirectory() as once:
        prepare(pathlib.Path(once))
        tune_again(pathlib.Path(once))


def become_owner_of(root: pathlib.Path) -> None:
    """Goes on as the user whose directory it is; nobody but root can."""
    owner = root.stat().st_uid
    if owner != os.geteuid():
        os.setgroups([])
        os.setgid(owner)
        os.setuid(owner)


def work(what: str, directory: str, *arguments: str) -> None:
    """Does a test's work as the owner of the directory."""
    root = pathlib.Path(directory)
    become_owner_of(root)
    if what == "kill_everywhere":
        kill_everywhere(root, int(*arguments))
    elif what == "kill_maintenance":
        kill_maintenance(root, *arguments)
    elif what == "write_on_a_full_disk":
        prepare(root)
        write_on_a_full_disk(root)
    else:
        together(root, globals()[what])


def redirected(output: str, what: str, *arguments: str) -> None:
    """``work``, whose outputs go to the files ``output`` + "1" and "2"."""
    for stream in (1, 2):
        os.dup2(os.open(f"{output}{stream}", os.O_WRONLY | os.O_CREAT, 0o666), stream)
    work(what, *arguments)


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        code = ended(forked(redirected, *json.loads(line)))
        print(code, flush=True)

"""Programs of several processes: one tunes, and all answer alike or raise an error."""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
import synthetic_bench as synthetic
from processes import forked
from synthetic_bench import DEVICE, PROBLEM, choice, entry, found, measured

from tracea_jax.tuning import agreement
from tracea_jax.tuning.agreement import Agreement, Disagreement
from tracea_jax.tuning.answers.knowledge import Knowledge


class Board:
    """A key-value store of this process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)


@pytest.fixture
def both():
    board = Board()
    return Agreement(board, 0), Agreement(board, 1)


# --- what is compared -----------------------------------------------------------------


def test_equal_caches_have_equal_digests_wherever_they_lie(tmp_path):
    digests = set()
    for name in ("one", "other"):
        knowledge = Knowledge(tmp_path / name)
        knowledge.own.record(entry(observations=[measured(3)]))
        digests.add(Knowledge(tmp_path / name).digest(DEVICE))
    held = Knowledge(tmp_path / "third")
    held.own.hold(entry(observations=[measured(3)]))
    digests.add(Knowledge(tmp_path / "third").digest(DEVICE))
    assert len(digests) == 1
    empty = Knowledge(tmp_path / "fourth").digest(DEVICE)
    knowledge.own.record(entry(choice(4), written="2027"))
    assert len(digests | {empty, Knowledge(tmp_path / "other").digest(DEVICE)}) == 3


def test_every_part_of_an_answer_counts(tmp_path):
    def digest(name, record, **how):
        Knowledge(tmp_path / name).own.record(record)
        return Knowledge(tmp_path / name, **how).digest(DEVICE)

    base = digest("base", entry())
    others = [
        digest("best", entry(choice(9))),
        digest("observed", entry(observations=[measured(9)])),
        digest("shipped", entry(), shipped=(tmp_path / "base" / "tuned",)),
        Knowledge(None, shipped=(tmp_path / "base" / "tuned",)).digest(DEVICE),
    ]
    assert len({base, *others}) == 5


def test_what_is_not_an_answer_does_not_count(tmp_path):
    digests = []
    for name in ("one", "other"):
        knowledge = Knowledge(tmp_path / name)
        knowledge.own.record(entry())
        if name == "other":
            journal = knowledge.own.journal(PROBLEM, DEVICE)
            knowledge.own.append(journal, (measured(5),))
            journal.close()
            foreign = synthetic.file_of(tmp_path / name).parents[2] / "0123456789ab"
            (foreign / "matmul").mkdir(parents=True)
            (foreign / "matmul" / "0.json").write_bytes(b"of another machine")
        digests.append(Knowledge(tmp_path / name).digest(DEVICE))
    assert digests[0] == digests[1]


def test_a_digest_fixes_the_answers(tmp_path):
    knowledge = Knowledge(tmp_path)
    knowledge.own.record(entry(choice(3)))
    told = knowledge.digest(DEVICE)
    Knowledge(tmp_path).own.record(entry(choice(4), written="2027"))
    assert found(knowledge).choice == choice(3)
    assert knowledge.digest(DEVICE) == told
    assert found(Knowledge(tmp_path)).choice == choice(4)


def test_a_damaged_file_changes_the_digest(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    told = Knowledge(tmp_path).digest(DEVICE)
    file = synthetic.file_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert Knowledge(tmp_path).digest(DEVICE) != told


# --- how it is compared ---------------------------------------------------------------


def test_equal_digests_agree_and_others_do_not(both):
    first, second = both
    first.check("cpu", "a" * 64)
    second.check("cpu", "a" * 64)
    first.check("cuda", "b" * 64)
    first.check("cpu", "c" * 64)
    second.check("cuda", "b" * 64)  # each subject counts for itself
    with pytest.raises(Disagreement, match="TRACEA_CACHE_DIR.*cache export"):
        second.check("cpu", "d" * 64)


def test_process_0_never_waits_and_others_not_for_ever(both, monkeypatch):
    first, second = both
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.01)
    with pytest.raises(Disagreement, match="process 0"):
        second.check("cpu", "a")
    first.check("cpu", "a")
    first.share(lambda: b"", lambda: None)


def test_one_process_works_for_all(both, monkeypatch):
    monkeypatch.setattr(agreement, "_SLICE_S", 0.01)
    first, second = both
    waits, got = queue.Queue(), queue.Queue()

    def never():
        raise AssertionError("only process 0 works")

    def other():
        got.put(second.share(never, lambda: waits.put(1)))

    thread = threading.Thread(target=other)
    thread.start()
    waits.get(timeout=60)  # it tells that it waits
    assert first.share(lambda: b"result", lambda: None) == b"result"
    thread.join()
    assert got.get() == b"result"


def test_a_failure_is_everyones(both):
    first, second = both

    def fails():
        raise ValueError("no such effort")

    with pytest.raises(ValueError, match="effort"):
        first.share(fails, lambda: None)
    with pytest.raises(Disagreement, match="process 0 failed: ValueError: no such"):
        second.share(fails, lambda: None)


# --- real processes -------------------------------------------------------------------

_PROLOGUE = """
    import json, os, sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    import tracea_jax as tracea
    from tracea_jax.dispatch import plan
    from tracea_jax.knowledge import known, tune
    from tracea_jax.options import device_for
    from tracea_jax.ops import matmul
    from tracea_jax.options import current

    cpu, told = device_for("cpu"), []
    problem = tracea.GemmProblem(m=16, n=24, k=8)

    def planned():
        found = plan(problem, cpu)
        return [found.variant, str(found.config), found.origin, found.time_us]
"""


def fresh(source: str, *arguments: str) -> list[str]:
    """The command that runs Python code in a process with hashes of its own."""
    return [sys.executable, "-P", "-c", source, *arguments]


def together(program: str, *cache_dirs: str, command=fresh) -> list:
    """The JSON output of two processes of one program."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    source = textwrap.dedent(_PROLOGUE) + textwrap.dedent(program)
    processes = [
        subprocess.Popen(
            command(source, coordinator, str(i)),
            env={**os.environ, "TRACEA_CACHE_DIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, directory in enumerate(cache_dirs)
    ]
    ends = [p.communicate(timeout=240) for p in processes]
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def test_two_processes_tune_once_and_plan_alike(tmp_path):
    program = """
        before = planned()
        phases = []
        entry = tune(
            problem, cpu, effort="none", budget_s=0.5,
            progress=lambda *, phase, **_: phases.append(phase),
        )
        text = jax.jit(lambda a, b: matmul(a, b)).trace(
            jax.ShapeDtypeStruct((16, 8), "float32"),
            jax.ShapeDtypeStruct((8, 24), "float32"),
        ).lower().as_text()
        digest = known(current()).digest(cpu)
        print(json.dumps([before, planned(), text, digest, entry.written, phases]))
    """
    first, second = together(program, tmp_path / "one", tmp_path / "other")
    assert first[:5] == second[:5]
    assert first[0][2] == "policy" and first[1][2] == "tuned"
    assert "race" in first[5] and "race" not in second[5]
    assert list(tmp_path.glob("one/tuned/*/matmul/*.json"))
    assert not (tmp_path / "other" / "tuned").exists()


def test_two_processes_with_other_answers_end_with_an_error(tmp_path):
    program = """
        from tracea_jax.tuning.agreement import Disagreement
        if jax.process_index() == 1:
            import dataclasses
            from tracea_jax.tuning.store.environment import environment
            from tracea_jax.tuning.store.records import Best, Entry
            known(current()).own.record(Entry(
                problem=problem.to_json(),
                environment=environment(cpu),
                best=Best(variant="xla", config={}),
            ))
        try:
            print(json.dumps(planned()))
        except Disagreement as e:
            print(json.dumps(str(e)))
    """
    run = functools.partial(together, program, command=forked)
    first, second = run(tmp_path / "one", tmp_path / "other")
    assert first[2] == "policy"
    assert "process 1 differ from those of process 0" in second
    first, second = run(tmp_path / "shared", tmp_path / "shared")
    assert isinstance(first, list)

"""Damage, full disks, kills and crowds: no finished measurement is lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import warnings

import pytest
import synthetic_bench as synthetic
import tuning_victim as victim
from slow_cases import slow_unless
from synthetic_bench import (
    DEVICE,
    PROBLEM,
    Bench,
    Clock,
    choice,
    entry,
    file_of,
    found,
    measured,
    why_missed,
)

from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.session import identity_of
from tracea_jax.tuning.store import entries as store
from tracea_jax.tuning.store import exchange, files, formats, upkeep

pytestmark = pytest.mark.once

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


NOBODY = 65534


@pytest.fixture(params=["this user", "another user"])
def workplace(request, tmp_path):
    """An empty directory; what works in it does so as its owner.

    Tests often run as root, whom no permission stops.
    """
    if request.param == "this user":
        yield tmp_path
        return
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # Not below ``tmp_path``, which other users do not reach.
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, NOBODY, NOBODY)
        yield pathlib.Path(place)


@pytest.fixture(scope="module")
def victims():
    """The process that forks those that are killed: see ``tuning_victim``."""
    script = pathlib.Path(__file__).parent / "tuning_victim.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate(timeout=600)


@pytest.fixture
def start(victims, tmp_path_factory):
    """Has something done in a directory, and returns what was printed."""

    def start(what: str, root: pathlib.Path, *arguments: str) -> str:
        output = tmp_path_factory.mktemp("victim") / "output"
        request = json.dumps([str(output), what, str(root), *arguments])
        victims.stdin.write(f"{request}\n")
        victims.stdin.flush()
        code = victims.stdout.readline()
        printed, errors = (output.with_name(f"output{n}").read_text() for n in (1, 2))
        assert code == "0\n", errors
        for path in (
            root,
            *root.rglob("*"),
        ):  # what another user made is looked at here
            if path.lstat().st_uid != os.geteuid():
                os.lchown(path, os.geteuid(), -1)
        return printed

    return start


# Damage.

GOOD = entry(observations=[measured(8)]).to_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'{"schema": 1}',
        b"[" * 100_000,
        GOOD[:-1],
        GOOD[: len(GOOD) // 2],
        GOOD.replace(b'"time_us":10.0', b'"time_us":11.0'),
        GOOD.replace(b'{"schema": 1', b'{"schema": 0'),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_damaged_file_is_set_aside_with_one_warning(tmp_path, content):
    Knowledge(tmp_path).own.record(entry())
    file = file_of(tmp_path)
    file.write_bytes(content)
    knowledge = Knowledge(tmp_path)
    with pytest.warns(RuntimeWarning, match="damaged.*renamed") as caught:
        assert knowledge.lookup(PROBLEM, DEVICE) is None
        assert list(Knowledge(tmp_path).own.entries()) == []
        assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
    assert len(caught) == 1
    assert "cannot be read" in why_missed(knowledge)
    (aside,) = file.parent.glob(f"{file.name}.corrupt-*")
    assert aside.read_bytes() == content
    Knowledge(tmp_path).own.record(entry())
    assert found(Knowledge(tmp_path)).choice == choice(8)
    assert aside.exists()


def test_recording_over_a_damaged_file_sets_it_aside(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    file_of(tmp_path).write_bytes(b"garbage")
    with pytest.warns(RuntimeWarning, match="damaged.*renamed"):
        Knowledge(tmp_path).own.record(entry(choice(9)))
    assert found(Knowledge(tmp_path)).choice == choice(9)


@pytest.mark.parametrize("repaired", [GOOD, b'{"schema": 99}'])
def test_a_file_that_was_replaced_meanwhile_is_not_set_aside(tmp_path, repaired):
    Knowledge(tmp_path).own.record(entry())
    file_of(tmp_path).write_bytes(repaired)
    store.Store(tmp_path / "tuned")._set_aside(file_of(tmp_path), formats.Damaged("?"))
    assert file_of(tmp_path).read_bytes() == repaired


def test_a_directory_in_place_of_the_file_is_no_crash(tmp_path):
    file_of(tmp_path).mkdir(parents=True)
    knowledge = Knowledge(tmp_path)
    assert "cannot be read" in why_missed(knowledge)


def test_damaged_shipped_files_stay_where_they_are(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    file_of(tmp_path).write_bytes(b"garbage")
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(RuntimeWarning, match="damaged"):
        shipped = Knowledge(None, shipped=(tmp_path / "tuned",))
        assert shipped.lookup(PROBLEM, DEVICE) is None
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "content",
    [GOOD.replace(b'{"schema": 1', b'{"schema": 99'), b'{"schema":99,"new":\n{}}'],
)
def test_a_newer_schema_is_neither_read_nor_overwritten(tmp_path, content):
    file = file_of(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    knowledge = Knowledge(tmp_path)
    assert "newer" in why_missed(knowledge)
    with pytest.warns(RuntimeWarning, match="newer.*in memory") as caught:
        knowledge.own.record(entry(written="1", observations=[measured(1)]))
        knowledge.own.record(entry(choice(9), written="2", observations=[measured(2)]))
    assert len(caught) == 1
    assert file.read_bytes() == content
    # The next instance in this process still has it.
    assert found(Knowledge(tmp_path)).choice == choice(9)
    (kept,) = Knowledge(tmp_path).own.entries()
    assert kept.observations == (measured(1), measured(2))


# Directories that take nothing.


def refuse_writing(monkeypatch, code):
    """Refuses writing like a read-only file system, also to the superuser."""
    real_open, error = os.open, OSError(code, os.strerror(code))

    def refusing_open(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise error
        return real_open(path, flags, *args, **kwargs)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, "open", refusing_open)
    for name in ("mkdir", "replace", "unlink", "rename"):
        monkeypatch.setattr(os, name, refuse)


def test_a_read_only_directory_costs_one_warning(tmp_path, monkeypatch):
    Knowledge(tmp_path).own.record(entry(observations=[measured(12)]))
    before = file_of(tmp_path).read_bytes()
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refuse_writing(patch, errno.EROFS)
        assert found(Knowledge(tmp_path)).choice == choice(8)
        tuned = synthetic.tune(Bench(Clock(), {choice(3): 20.0}), tmp_path)
        answer = found(Knowledge(tmp_path))
    assert [str(w.message).count("Read-only") for w in caught] == [1]
    assert answer.choice == choice(3)
    assert tuned.best.config == dataclasses.asdict(choice(3).config)
    assert file_of(tmp_path).read_bytes() == before


def test_a_path_that_can_be_no_directory_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "cache"
    assert Knowledge(directory).lookup(PROBLEM, DEVICE) is None
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        synthetic.tune(Bench(Clock(), {choice(3): 20.0}), directory)
    assert len(caught) == 1
    assert found(Knowledge(directory)).choice == choice(3)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_entry(tmp_path, monkeypatch, call):
    Knowledge(tmp_path).own.record(entry(observations=[measured(1)]))
    before = file_of(tmp_path).read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as patch,
        pytest.warns(RuntimeWarning, match="space") as w,
    ):
        patch.setattr(os, call, full)
        synthetic.tune(Bench(Clock(), {choice(3): 20.0}), tmp_path)
    assert len(w) == 1
    assert file_of(tmp_path).read_bytes() == before
    assert list(file_of(tmp_path).parent.glob("*.tmp")) == []
    assert found(Knowledge(tmp_path)).choice == choice(3)
    # With space again, all is written.
    synthetic.tune(Bench(Clock(), {choice(3): 20.0}), tmp_path)
    stored = json.loads(file_of(tmp_path).read_text())
    assert stored["head"]["best"]["config"]["kc"] == 3
    assert len(stored["observations"]) == 13


def test_a_journal_goes_on_after_a_full_disk(tmp_path, monkeypatch):
    real_write, journal = os.write, files.Journal(tmp_path / "x.journal")
    journal.append([measured(1)])

    def fill(fd, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(os, "write", fill)
        journal.append([measured(2)])
    journal.append([measured(3)])
    journal.close()
    assert files.read_journal(tmp_path / "x.journal").observations == (
        measured(1),
        measured(3),
    )


# Kills.


def without_times(entries):
    """Contents of entries that must be equal, however often a tuning was begun."""
    return [
        dataclasses.replace(
            e, written="", tuner={**e.tuner, "wall_s": 0, "compiles": 0}
        )
        for e in entries
    ]


@posix
@pytest.mark.parametrize("before", slow_unless([0], [0, 11]))
def test_a_kill_at_any_moment_loses_nothing(start, workplace, before):
    """SIGKILL at each call that writes, once, with half of the bytes written.

    The second time, each tuning continues one that was killed before.
    """
    start("kill_everywhere", workplace, str(before))
    runs = sorted(workplace.iterdir(), key=lambda run: int(run.name))
    *killed, survivor = runs
    assert (survivor / "code").read_text() == "0"
    assert len(killed) > 12
    expected = without_times(Knowledge(survivor / "cache").own.entries(complete=True))
    (told,) = expected
    assert told.best.config == dataclasses.asdict(choice(3).config)
    assert {o.failure for o in told.observations} >= {"compile_error", "wrong_result"}
    resumed_somewhere = False
    for run in killed:
        assert (run / "code").read_text() == str(-signal.SIGKILL)
        resumed = json.loads((run / "resumed.json").read_text())
        finished = (run / "finished.log").read_text().split("\n")[:-1]
        names = {
            str(c): identity_of(c) for c in synthetic.decision(victim.SIZE).choices
        }
        assert {names[f] for f in finished} <= set(resumed["known"])
        assert not set(resumed["known"]) & set(resumed["swept"])
        resumed_somewhere |= bool(resumed["known"] and resumed["swept"])
        entries = Knowledge(run / "cache").own.entries(complete=True)
        assert without_times(entries) == expected
        files = {p.suffix for p in (run / "cache").rglob("*") if p.is_file()}
        assert files <= {".json", ".lock", ""}
    assert resumed_somewhere


@posix
@pytest.mark.parametrize("what", ["merge", "export", "prune"])
def test_a_kill_while_a_command_works_loses_nothing(start, workplace, what):
    """SIGKILL at each call that writes; afterwards the command is run again."""
    start("kill_maintenance", workplace, what)
    *killed, survivor = sorted(workplace.iterdir(), key=lambda run: int(run.name))
    assert (survivor / "code").read_text() == "0" and len(killed) >= 3
    victim.prepare(workplace / "fresh")
    before, after = observed(workplace / "fresh"), observed(survivor)
    assert (before == after) == (what == "export")
    for run in killed:
        assert (run / "code").read_text() == str(-signal.SIGKILL)
        _, findings = upkeep.verify(store.Store(run / "after_kill" / "tuned"), [DEVICE])
        assert not any(finding.is_wrong for finding in findings)
        # Every entry is as it was or as it should be, never between and never gone.
        for m, seen in observed(run, "after_kill").items():
            assert seen in (before.get(m), after.get(m))
        if what == "merge":
            assert set(observed(run, "after_kill")) >= set(before)
        assert exchange.read(run / "out_after_kill.json")
        # Run again, it does what was left to do.
        assert observed(run) == after
        assert (run / "out.json").read_bytes() == (survivor / "out.json").read_bytes()


def observed(directory, cache="cache"):
    """The configs that were measured, by the problem's m."""
    return {
        e.problem["m"]: [o.config["kc"] for o in e.observations]
        for e in Knowledge(directory / cache).own.entries(complete=True)
    }


@posix
def test_eight_processes_merging_and_exporting_at_once_lose_nothing(start, workplace):
    start("merge_many", workplace)
    assert json.loads((workplace / "codes.json").read_text()) == [0] * victim.WRITERS
    (stored,) = Knowledge(workplace / "cache").own.entries(complete=True)
    everything = set(range(1, victim.WRITERS * victim.RECORDS + 1))
    assert {o.config["kc"] for o in stored.observations} == everything
    assert stored.best.config["kc"] == max(everything)  # the most often measured
    assert exchange.read(workplace / "out.json")
    assert not [p.name for p in workplace.rglob("*") if "corrupt" in p.name]


@posix
def test_a_disk_that_is_really_full_keeps_what_was_there(start, workplace):
    told = json.loads(start("write_on_a_full_disk", workplace))
    assert len(told["warnings"]) == 1 and "cannot be written" in told["warnings"][0]
    assert "kc=3" in told["kept"][0] and "tuned" in told["kept"][0]
    assert [e.split()[0] for e in told["errors"]] == ["merge", "export"]
    victim.prepare(workplace / "fresh")
    assert observed(workplace) == observed(workplace / "fresh")
    whole = (workplace / "fresh" / "out.json").read_bytes()
    assert (workplace / "out.json").read_bytes() == whole
    assert list(workplace.rglob("*.tmp")) == []


@posix
def test_eight_processes_recording_at_once_lose_nothing(start, workplace):
    start("record_many", workplace)
    assert json.loads((workplace / "codes.json").read_text()) == [0] * victim.WRITERS
    entries = {
        e.problem["m"]: e
        for e in Knowledge(workplace / "cache").own.entries(complete=True)
    }
    everything = range(1, victim.WRITERS * victim.RECORDS + 1)
    shared = entries.pop(PROBLEM.m)
    assert {o.config["kc"] for o in shared.observations} == set(everything)
    assert shared.best.config["kc"] == everything[-1]  # of the latest race
    assert len(entries) == victim.WRITERS
    for own in entries.values():
        assert len(own.observations) == victim.RECORDS
    leftovers = [
        p.name for p in (workplace / "cache").rglob("*") if "corrupt" in p.name
    ]
    assert leftovers == []


@posix
def test_eight_processes_tuning_one_problem_lose_nothing(start, workplace):
    start("tune_at_once", workplace)
    assert json.loads((workplace / "codes.json").read_text()) == [0] * victim.WRITERS
    (stored,) = Knowledge(workplace / "cache").own.entries(complete=True)
    widest = synthetic.decision(victim.WRITERS + 3).choices
    assert {o.identity for o in stored.observations} == {identity_of(c) for c in widest}
    assert stored.best.config == dataclasses.asdict(choice(3).config)
    assert list((workplace / "cache").rglob("*.journal")) == []


@posix
def test_one_process_measures_at_a_time_and_a_killed_one_blocks_nobody(
    start, workplace
):
    start("measure_alone", workplace)
    codes = json.loads((workplace / "codes.json").read_text())
    assert codes == [-signal.SIGKILL if w == 3 else 0 for w in range(victim.WRITERS)]
    lines = (workplace / "measured.log").read_text().split()
    while lines:
        first = lines.pop(0)
        if lines and lines[0] == first:
            lines.pop(0)
        else:
            assert first == "3", "two processes measured at once"

"""Pipes, links, huge and planted files do no harm where caches have files."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import threading

import pytest
from processes import forked
from synthetic_bench import DEVICE, PROBLEM, choice, entry, file_of, found, measured
from trusted import KEY, collected, posix, save_kernel

from tracea_jax.runtime import cubins as kernels
from tracea_jax.runtime import trust
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import exchange, files, upkeep
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.records import union

pytestmark = [posix, pytest.mark.usefixtures("nothing_warned")]


def within(seconds: float, run) -> None:
    """Runs it; a call that hangs fails the test."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def test_a_pipe_does_not_hang(tmp_path, recwarn):
    path = file_of(tmp_path)
    trust.make_private_directory(path.parent)
    os.mkfifo(path, 0o600)
    os.mkfifo(path.with_name(f"{path.stem}.1-0.journal"), 0o600)
    image = kernels.path(tmp_path, "sm_90a", KEY)
    trust.make_private_directory(image.parent)
    os.mkfifo(image, 0o600)
    os.mkfifo(tmp_path / "archive", 0o600)

    def use():
        knowledge = Knowledge(tmp_path)
        assert knowledge.lookup(PROBLEM, DEVICE) is None
        assert not knowledge.observations(PROBLEM, DEVICE)
        assert not list(knowledge.neighbours(PROBLEM, DEVICE))
        knowledge.own.record(entry())
        assert kernels.load(tmp_path, "sm_90a", KEY) is None
        with pytest.raises(OSError, match="not a regular file"):
            exchange.read(tmp_path / "archive")

    within(60, use)
    assert found(Knowledge(tmp_path)).choice == choice(8)


def test_links_are_not_followed(tmp_path, recwarn):
    Knowledge(tmp_path / "other").own.record(entry())
    path = file_of(tmp_path / "mine")
    trust.make_private_directory(path.parent)
    path.symlink_to(file_of(tmp_path / "other"))
    assert Knowledge(tmp_path / "mine").lookup(PROBLEM, DEVICE) is None
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    lock = path.parent.parent / ".lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(target)
    Knowledge(tmp_path / "mine").own.record(entry())
    assert target.read_bytes() == b"precious"


def test_a_file_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "large"
    with file.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(trust.Refused, match="at most 100 are read"):
        trust.read_file(file, 100)
    file.write_bytes(b"x" * 100)
    assert trust.read_file(file, 100) == b"x" * 100
    with pytest.raises(trust.Refused, match="grew"):
        trust._read_all(os.open(file, os.O_RDONLY), file, 50, 99)


def test_an_archive_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    Knowledge(tmp_path / "cache").own.record(entry())
    exchange.export(Store.of_cache(tmp_path / "cache"), tmp_path / "out")
    size = (tmp_path / "out").stat().st_size
    monkeypatch.setattr(exchange, "LIMIT_BYTES", size)
    assert len(exchange.read(tmp_path / "out")) == 1
    monkeypatch.setattr(exchange, "LIMIT_BYTES", size - 1)
    with pytest.raises(OSError, match=f"{size} bytes; at most {size - 1} are read"):
        exchange.read(tmp_path / "out")


def test_a_writer_overwrites_no_planted_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trust.secrets, "token_hex", lambda n: "ab" * n)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    planted = tmp_path / f".x.{'ab' * 8}.tmp"
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        trust.write_atomically(tmp_path / "x", b"new")
    assert victim.read_bytes() == b"precious" and planted.is_symlink()


KILLED_EXPORT = """
import os, pathlib, sys
from tracea_jax.tuning.store import exchange
from tracea_jax.tuning.store.entries import Store
os.fsync = lambda fd: os._exit(9)
exchange.export(Store(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""


def test_a_killed_export_is_cleaned_by_the_next(tmp_path):
    places = str(tmp_path), str(tmp_path / "out")
    command = forked(KILLED_EXPORT, *places, strict=False)
    assert subprocess.run(command, cwd="/").returncode == 9
    (leftover,) = tmp_path.glob(".out.*.tmp")
    # No names of ours.
    names = ".out.notes.tmp", "out.2024.tmp", ".out.2024.tmp", f"out.{'0' * 16}.tmp"
    mine = [tmp_path / name for name in names]
    for file in mine:
        file.write_text("keep")
        os.utime(file, (1e9, 1e9))
    exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert leftover.exists()  # its writer may be alive
    os.utime(leftover, (1e9, 1e9))
    exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert not leftover.exists() and all(file.exists() for file in mine)


def test_an_export_replaces_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "out")
    with pytest.raises(OSError, match="not a regular file"):
        exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)


def test_an_unreadable_journal_is_not_removed(tmp_path, monkeypatch):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    many = tuple(measured(kc) for kc in range(3, 60))
    knowledge.own.append(journal, many)
    journal.close()
    assert journal.path is not None
    assert len(entry().to_bytes()) < 2000 < os.path.getsize(journal.path)
    monkeypatch.setattr(files, "LIMIT_BYTES", 2000)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        Knowledge(tmp_path).own.record(entry())
    monkeypatch.undo()
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == union(many)


@pytest.mark.parametrize("below", ["", "tuned", "tuned/*", "tuned/*/matmul"])
def test_journals_where_others_can_write_are_neither_read_nor_removed(tmp_path, below):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(3),))
    journal.close()
    assert journal.path is not None
    aside = journal.path.with_name("x.json.corrupt-1")
    aside.write_bytes(b"")
    (place,) = [tmp_path] if not below else tmp_path.glob(below)
    place.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w") as caught:
        assert not Knowledge(tmp_path).observations(PROBLEM, DEVICE)
        tidied = {"older_than_s": 1.0, "journals": True, "now_s": 9e9}
        assert not upkeep.prune(Store.of_cache(tmp_path), **tidied)
    assert len(caught) == 1
    place.chmod(0o700)
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == (measured(3),)
    pruned = upkeep.prune(Store.of_cache(tmp_path), **tidied)
    assert {p.path for p in pruned} == {aside, journal.path}


@pytest.mark.parametrize("linked", ["cubin", "cubin/sm_90a"])
def test_the_collector_follows_no_links(tmp_path, linked):
    save_kernel(tmp_path / "other")
    image = kernels.path(tmp_path / "other", "sm_90a", KEY)
    mine = tmp_path / "mine"
    trust.make_private_directory((mine / linked).parent)
    (mine / linked).symlink_to(tmp_path / "other" / linked)
    assert collected(mine) == kernels.Collected(kernels=0, freed_bytes=0, left_bytes=0)
    assert image.exists() and kernels.count(mine) == 0
    (mine / linked).unlink()
    save_kernel(mine)
    own = kernels.path(mine, "sm_90a", KEY)
    own.unlink()
    own.symlink_to(image)
    assert collected(mine).kernels == 0
    assert image.exists() and own.is_symlink()
    assert collected(tmp_path / "other").kernels == 1 and not image.exists()


def test_the_collector_removes_only_what_the_store_wrote(tmp_path):
    save_kernel(tmp_path)
    folder = tmp_path / "cubin" / "sm_90a"
    names = "notes.txt", "model.cubin", f"{KEY}.bin", f"{KEY[1:]}.cubin", f"{KEY}x.cu"
    others = [folder / name for name in (*names, f".{KEY}.tmp", ".x.0123456789.tmp")]
    others.append(tmp_path / "cubin" / f"{KEY}.cubin")
    for file in others:
        file.write_bytes(b"keep")
    (folder / ("1" * 64 + ".cubin")).mkdir()
    assert kernels.count(tmp_path) == 1
    assert collected(tmp_path).kernels == 1
    assert kernels.count(tmp_path) == 0
    assert all(file.read_bytes() == b"keep" for file in others)


def test_the_collector_leaves_what_others_can_write(tmp_path):
    save_kernel(tmp_path)
    (tmp_path / "cubin").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        assert collected(tmp_path).kernels == 0
    assert kernels.path(tmp_path, "sm_90a", KEY).exists()


def test_the_collector_waits_for_nobody_else(tmp_path):
    """In a directory that others can write, the lock may be theirs for ever."""
    save_kernel(tmp_path)
    lock = os.open(tmp_path / "cubin" / ".lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "cubin").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        within(60, lambda: collected(tmp_path))
    os.close(lock)


def test_the_collector_makes_no_lock_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cubin").symlink_to(tmp_path / "elsewhere")
    collected(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_lock_that_is_a_link_makes_no_file(tmp_path):
    save_kernel(tmp_path)
    lock = tmp_path / "cubin" / ".lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "planted")
    collected(tmp_path)
    assert not (tmp_path / "planted").exists()

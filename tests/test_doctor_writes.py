"""The doctor tries to write into the cache, and tells what came of it."""

from __future__ import annotations

import errno
import os
import stat

import pytest

import tracea_jax as tracea
from tracea_jax.runtime import trust


def told(directory, monkeypatch) -> str:
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(directory))
    (line,) = [s for s in str(tracea.doctor()).splitlines() if "directory:" in s]
    return line


def test_a_file_is_written_and_leaves_nothing(tmp_path, monkeypatch):
    written = []
    real = trust.write_atomically

    def write(path, data, *args):
        written.append(path)
        real(path, data, *args)
        assert path.exists()

    monkeypatch.setattr(trust, "write_atomically", write)
    fresh = tmp_path / "not" / "there" / "yet"
    assert "writable, as a test file showed" in told(fresh, monkeypatch)
    assert [path.parent for path in written] == [fresh]
    assert list(fresh.iterdir()) == []
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    line = told(tmp_path / "file" / "cache", monkeypatch)
    assert "cannot be written: " in line and str(tmp_path / "file") in line
    assert "set TRACEA_CACHE_DIR to another directory" in line


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trust, "write_all", full)
    assert "cannot be written: [Errno 28] No space" in told(tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_below_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    below = tmp_path / "cubin" / "sm_90a"
    below.mkdir(parents=True, mode=0o700)
    real = os.access

    def access(path, mode):  # root may write everything
        return False if str(path) == str(below) else real(path, mode)

    monkeypatch.setattr(os, "access", access)
    line = told(tmp_path, monkeypatch)
    assert f"cannot be written: [Errno 13] Permission denied: '{below}'" in line


def test_a_cache_that_others_can_write_is_not_written(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    tried = []
    monkeypatch.setattr(trust, "try_writing", tried.append)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        assert "ignored: " in told(tmp_path, monkeypatch)
    assert tried == []

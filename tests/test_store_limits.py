"""Files that the cubin store removes when it is too large, and those it keeps."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest
import sample_kernels
from stored_kernels import broken, failure_path, image_path

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import cubins, nvrtc

pytestmark = [pytest.mark.nvrtc, pytest.mark.once]


def variation(number: int) -> Kernel:
    return dataclasses.replace(sample_kernels.scale(), options=(f"-DX={number}",))


@pytest.fixture
def stored(tmp_path):
    """Five kernels, the first unused for longest; all older than an hour."""
    kernels = [variation(i) for i in range(5)]
    for age, kernel in zip((9, 8, 7, 6, 5), kernels, strict=True):
        cubins.get_or_compile(kernel, tmp_path)
        grow_old(tmp_path, kernel, hours=age)
    return kernels


def grow_old(directory, kernel, hours):
    then = time.time() - 3600 * hours
    file = cubins.path(directory, kernel.arch, nvrtc.key(kernel))
    for path in file.parent.glob(f"{file.stem}.*"):
        os.utime(path, (then, then))


def size(directory) -> int:
    return sum(f.stat().st_size for f in (directory / "cubin").glob("*/*"))


def left(directory, kernels) -> list[int]:
    return [i for i, k in enumerate(kernels) if cubins.has(directory, k)]


def test_the_longest_unused_kernels_go_first(tmp_path, stored):
    before = size(tmp_path)
    each = before / 5
    done = cubins.collect(tmp_path, int(2.5 * each))
    assert left(tmp_path, stored) == [3, 4]
    assert done.kernels == 3
    assert done.left_bytes == size(tmp_path)
    assert done.freed_bytes == before - size(tmp_path)
    assert cubins.collect(tmp_path, int(2.5 * each)).kernels == 0
    for i in (3, 4):  # what is left is whole
        assert cubins.load(tmp_path, "sm_90a", nvrtc.key(stored[i])) is not None
    assert {f.name.partition(".")[0] for f in (tmp_path / "cubin").glob("*/*")} == {
        nvrtc.key(stored[i]) for i in (3, 4)
    }


def test_reading_a_kernel_keeps_it(tmp_path, stored):
    assert cubins.load(tmp_path, "sm_90a", nvrtc.key(stored[0])) is not None
    cubins.collect(tmp_path, 0)
    assert left(tmp_path, stored) == [0]  # used just now


def test_answers_of_tunings_go_last_and_kept_ones_never(tmp_path, stored):
    cubins.mark_winner(tmp_path, stored[0])
    grow_old(tmp_path, stored[0], hours=9)
    each = size(tmp_path) / 5
    keep = frozenset({nvrtc.key(stored[1])})
    cubins.collect(tmp_path, int(2.5 * each), keep)
    assert left(tmp_path, stored) == [0, 1]
    cubins.collect(tmp_path, 0, keep)
    assert left(tmp_path, stored) == [1]


def test_young_kernels_stay_whatever_the_limit(tmp_path, stored):
    cubins.get_or_compile(variation(5), tmp_path)
    cubins.collect(tmp_path, 0)
    assert left(tmp_path, [*stored, variation(5)]) == [5]
    cubins.collect(tmp_path, 0, min_age_s=-60)
    assert left(tmp_path, [*stored, variation(5)]) == []


def test_a_clock_set_back_removes_nothing(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert cubins.collect(tmp_path, 0).kernels == 0
    assert left(tmp_path, stored) == [0, 1, 2, 3, 4]


def test_what_a_kill_left_goes_even_if_there_is_room(tmp_path, stored):
    directory = image_path(tmp_path).parent
    key = "0" * 64
    torn = [directory / f"{key}.cu", directory / f"{key}.json"]
    torn.append(directory / f".{key}.cubin.0123456789abcdef.tmp")
    young = directory / f".{'1' * 64}.cubin.0123456789abcdef.tmp"
    for file in (*torn, young):
        file.write_bytes(b"half")
        if file != young:
            os.utime(file, (1e9, 1e9))
    done = cubins.collect(tmp_path, 1 << 30)
    assert (done.kernels, done.freed_bytes) == (0, 12)
    assert not any(file.exists() for file in torn) and young.exists()
    assert left(tmp_path, stored) == [0, 1, 2, 3, 4]


def test_failures_are_collected_like_kernels(tmp_path):
    cubins.record_failure(tmp_path, broken(), "timeout", "60 s")
    grow_old(tmp_path, broken(), hours=2)
    cubins.collect(tmp_path, 1 << 30)
    assert failure_path(tmp_path).exists()
    cubins.collect(tmp_path, 0)
    assert not failure_path(tmp_path).exists()


def test_a_store_that_is_not_there_is_small(tmp_path):
    assert cubins.collect(tmp_path / "none", 0) == cubins.Collected(
        kernels=0, freed_bytes=0, left_bytes=0
    )
    assert not (tmp_path / "none").exists()


COLLECTOR = """
import pathlib, sys
from tracea_jax.runtime import cubins
while not pathlib.Path({directory!r}, "stop").exists():
    cubins.collect(pathlib.Path({directory!r}), 0, min_age_s=-60)
"""


def test_readers_and_writers_bear_a_collector(tmp_path, recwarn):
    """Whoever asks gets a whole kernel or none, without a warning."""
    script = COLLECTOR.format(directory=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], cwd="/") as collector:
        kernels, removed = [variation(i) for i in range(3)], 0
        images = [nvrtc.compile(k) for k in kernels]
        end = time.monotonic() + 2
        while (time.monotonic() < end or removed < 10) and collector.poll() is None:
            for kernel, cubin in zip(kernels, images, strict=True):
                cubins._save(tmp_path, kernel, cubin)
                loaded = cubins.load(tmp_path, kernel.arch, cubin.key)
                removed += loaded is None
                assert loaded is None or loaded.image == cubin.image
        (tmp_path / "stop").touch()
    assert collector.returncode == 0
    assert removed >= 10
    assert list(recwarn) == []

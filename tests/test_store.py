"""The cubin store under faults: nothing is compiled twice, nothing damaged is used."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import warnings

import pytest
import sample_kernels

from tracea_jax.runtime import nvrtc, store

pytestmark = pytest.mark.nvrtc


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    """Forgets what this process has compiled and complained about."""
    monkeypatch.setattr(store, "_memory", {})
    monkeypatch.setattr(store, "_warned", set())


@pytest.fixture
def compilations(monkeypatch):
    """Counts calls of the compiler, which still runs."""
    calls = []

    def counted(kernel, compile=nvrtc.compile):
        calls.append(kernel.entry)
        return compile(kernel)

    monkeypatch.setattr(nvrtc, "compile", counted)
    return calls


def forget():
    """What a new process knows."""
    store._memory.clear()
    store._warned.clear()


def image_path(directory) -> pathlib.Path:
    kernel = sample_kernels.scale()
    return store.path(directory, kernel.arch, nvrtc.key(kernel))


def test_compiles_once_per_process_and_once_per_directory(tmp_path, compilations):
    first = store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert store.get_or_compile(sample_kernels.scale(), tmp_path) is first
    forget()
    second = store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert second == first
    assert compilations == ["scale"]


def test_entry_is_complete_and_readable_by_others(tmp_path):
    cubin = store.get_or_compile(sample_kernels.scale(), tmp_path)
    file = tmp_path / "cubin" / "sm_90a" / f"{cubin.key}.cubin"
    assert file.read_bytes() == cubin.image
    assert file.with_suffix(".cu").read_text() == sample_kernels.SCALE
    metadata = json.loads(file.with_suffix(".json").read_text())
    assert metadata["registers"] == cubin.registers
    assert metadata["log"] == cubin.log
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode


def test_a_kernel_compiled_without_a_store_is_saved_later(tmp_path, compilations):
    store.get_or_compile(sample_kernels.scale(), None)
    assert not any(tmp_path.iterdir())
    store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert image_path(tmp_path).exists()
    assert compilations == ["scale"]


def truncate(file: pathlib.Path):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: pathlib.Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap_metadata(file: pathlib.Path):
    metadata = json.loads(file.with_suffix(".json").read_text())
    file.with_suffix(".json").write_text(json.dumps({**metadata, "key": "0" * 64}))


DAMAGES = {
    "truncated": truncate,
    "bit flipped": flip_a_bit,
    "empty": lambda file: file.write_bytes(b""),
    "no metadata": lambda file: file.with_suffix(".json").unlink(),
    "garbage": lambda file: file.with_suffix(".json").write_bytes(b"\xff{"),
    "not an object": lambda file: file.with_suffix(".json").write_text("[1, 2]"),
    "fields missing": lambda file: file.with_suffix(".json").write_text("{}"),
    "another kernel's": swap_metadata,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_replaced_with_one_warning(tmp_path, compilations, damage):
    good = store.get_or_compile(sample_kernels.scale(), tmp_path)
    damage(image_path(tmp_path))
    forget()
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        repaired = store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert len(caught) == 1
    assert repaired.image == good.image
    assert len(compilations) == 2
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get_or_compile(sample_kernels.scale(), tmp_path) == repaired
    assert len(compilations) == 2


def test_an_unwritable_directory_keeps_kernels_in_memory(tmp_path, compilations):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "cache"  # not even root can make this
    other = dataclasses.replace(sample_kernels.scale(), options=("-lineinfo",))
    with pytest.warns(RuntimeWarning, match="memory only") as caught:
        first = store.get_or_compile(sample_kernels.scale(), directory)
        assert store.get_or_compile(sample_kernels.scale(), directory) is first
        store.get_or_compile(other, directory)
    assert len(caught) == 1
    assert "TRACEA_CACHE_DIR" in str(caught[0].message)
    assert len(compilations) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_serves_what_it_has(tmp_path, compilations):
    store.get_or_compile(sample_kernels.scale(), tmp_path)
    for directory in (tmp_path, *tmp_path.rglob("*/")):
        directory.chmod(0o555)
    forget()
    store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert compilations == ["scale"]


@pytest.mark.parametrize("survivors", range(4))
def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch, survivors):
    """Writing fails after some files; readers then see a whole kernel or none."""
    replaced = []

    def replace(source, target, replace=os.replace):
        if len(replaced) >= survivors:
            raise OSError(28, "No space left on device")
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if survivors < 3:
        with pytest.warns(RuntimeWarning, match="No space left"):
            store.get_or_compile(sample_kernels.scale(), tmp_path)
    else:
        store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    assert image_path(tmp_path).exists() == (survivors == 3)
    loaded = store.load(tmp_path, "sm_90a", nvrtc.key(sample_kernels.scale()))
    assert (loaded is not None) == (survivors == 3)


KILLED = """
import os, pathlib, sys
sys.path.append({tests!r})
import sample_kernels
from tracea_jax.runtime import store
calls = []
def fsync(handle, fsync=os.fsync):
    fsync(handle)
    calls.append(handle)
    if len(calls) == {nth}: os._exit(9)
os.fsync = fsync
store.get_or_compile(sample_kernels.scale(), pathlib.Path({directory!r}))
"""


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_leaves_a_store_that_works(tmp_path, compilations, nth):
    script = KILLED.format(
        tests=os.path.dirname(sample_kernels.__file__), directory=str(tmp_path), nth=nth
    )
    done = subprocess.run([sys.executable, "-c", script], cwd="/", check=False)
    assert done.returncode == 9
    assert not image_path(tmp_path).exists()
    store.get_or_compile(sample_kernels.scale(), tmp_path)
    forget()
    store.get_or_compile(sample_kernels.scale(), tmp_path)
    assert compilations == ["scale"]


WRITER = """
import pathlib, sys
sys.path.append({tests!r})
import sample_kernels
from tracea_jax.runtime import nvrtc, store
kernel = sample_kernels.scale()
for _ in range(2):
    cubin = nvrtc.compile(kernel)
    for _ in range(8):
        store._save(pathlib.Path({directory!r}), kernel, cubin)
"""


def test_concurrent_writers_never_show_a_partial_image(tmp_path):
    image = store.get_or_compile(sample_kernels.scale(), tmp_path).image
    script = WRITER.format(
        tests=os.path.dirname(sample_kernels.__file__), directory=str(tmp_path)
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script], cwd="/") for _ in range(2)
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        loaded = store.load(tmp_path, "sm_90a", nvrtc.key(sample_kernels.scale()))
        assert loaded is not None
        assert loaded.image == image
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 2
    assert not list(tmp_path.rglob("*.tmp"))

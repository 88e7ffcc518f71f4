"""The cubin store under faults.

No kernel is compiled twice, no damaged file is used, and no failure is tried again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import warnings

import pytest
import sample_kernels
from processes import forked
from stored_kernels import broken, failure_path, image_path

from tracea_jax.runtime import cubins, nvrtc, trust

pytestmark = [pytest.mark.nvrtc, pytest.mark.once]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    """Forgets what this process has compiled and complained about."""
    monkeypatch.setattr(cubins, "_memory", {})
    monkeypatch.setattr(trust, "_warned", set())


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
    """Clears what a new process does not have in memory."""
    cubins._memory.clear()
    trust._warned.clear()


def test_compiles_once_per_process_and_once_per_directory(tmp_path, compilations):
    first = cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert cubins.get_or_compile(sample_kernels.scale(), tmp_path) is first
    forget()
    second = cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert second == first
    assert compilations == ["scale"]


def test_entry_is_complete_and_readable_by_others(tmp_path):
    cubin = cubins.get_or_compile(sample_kernels.scale(), tmp_path)
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
    cubins.get_or_compile(sample_kernels.scale(), None)
    assert not any(tmp_path.iterdir())
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
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
    good = cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    damage(image_path(tmp_path))
    forget()
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        repaired = cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert len(caught) == 1
    assert repaired.image == good.image
    assert len(compilations) == 2
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.get_or_compile(sample_kernels.scale(), tmp_path) == repaired
    assert len(compilations) == 2


def test_an_unwritable_directory_keeps_kernels_in_memory(tmp_path, compilations):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "cache"  # not even root can make this
    other = dataclasses.replace(sample_kernels.scale(), options=("-lineinfo",))
    with pytest.warns(RuntimeWarning, match="memory only") as caught:
        first = cubins.get_or_compile(sample_kernels.scale(), directory)
        assert cubins.get_or_compile(sample_kernels.scale(), directory) is first
        cubins.get_or_compile(other, directory)
    assert len(caught) == 1
    assert "TRACEA_CACHE_DIR" in str(caught[0].message)
    assert len(compilations) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_serves_what_it_has(tmp_path, compilations):
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    for directory in (tmp_path, *tmp_path.rglob("*/")):
        directory.chmod(0o555)
    forget()
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
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
            cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    else:
        cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    assert image_path(tmp_path).exists() == (survivors == 3)
    loaded = cubins.load(tmp_path, "sm_90a", nvrtc.key(sample_kernels.scale()))
    assert (loaded is not None) == (survivors == 3)


KILLED = """
import os, pathlib, sys
sys.path.append({tests!r})
import sample_kernels
from tracea_jax.runtime import cubins
calls = []
def fsync(handle, fsync=os.fsync):
    fsync(handle)
    calls.append(handle)
    if len(calls) == {nth}: os._exit(9)
os.fsync = fsync
cubins.get_or_compile(sample_kernels.scale(), pathlib.Path({directory!r}))
"""


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_leaves_a_store_that_works(tmp_path, compilations, nth):
    script = KILLED.format(
        tests=os.path.dirname(sample_kernels.__file__), directory=str(tmp_path), nth=nth
    )
    done = subprocess.run(forked(script, strict=False), cwd="/", check=False)
    assert done.returncode == 9
    assert not image_path(tmp_path).exists()
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    forget()
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert compilations == ["scale"]


WRITER = """
import pathlib, sys
sys.path.append({tests!r})
import sample_kernels
from tracea_jax.runtime import cubins, nvrtc, trust
kernel = sample_kernels.scale()
for _ in range(2):
    cubin = nvrtc.compile(kernel)
    for _ in range(8):
        cubins._save(pathlib.Path({directory!r}), kernel, cubin)
"""


def test_concurrent_writers_never_show_a_partial_image(tmp_path):
    image = cubins.get_or_compile(sample_kernels.scale(), tmp_path).image
    script = WRITER.format(
        tests=os.path.dirname(sample_kernels.__file__), directory=str(tmp_path)
    )
    writers = [
        subprocess.Popen(forked(script, strict=False), cwd="/") for _ in range(2)
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        loaded = cubins.load(tmp_path, "sm_90a", nvrtc.key(sample_kernels.scale()))
        assert loaded is not None
        assert loaded.image == image
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_the_compiler_refused_is_not_tried_again(tmp_path, compilations):
    with pytest.raises(nvrtc.CompileError, match="expected an expression") as first:
        cubins.get_or_compile(broken(), tmp_path)
    assert not isinstance(first.value, cubins.KnownFailure)
    forget()
    with pytest.raises(cubins.KnownFailure, match="NVRTC_ERROR_COMPILATION") as again:
        cubins.get_or_compile(broken(), tmp_path)
    assert compilations == ["scale"]
    assert again.value.kind == "compile_error"
    assert ">    1 | int broken = ;" in again.value.log
    assert str(failure_path(tmp_path)) in str(again.value)
    # As the message says.
    failure_path(tmp_path).unlink()
    with pytest.raises(nvrtc.CompileError):
        cubins.get_or_compile(broken(), tmp_path)
    assert compilations == ["scale"] * 2


def test_a_failure_belongs_to_source_options_and_compiler(
    tmp_path, compilations, monkeypatch
):
    cubins.record_failure(tmp_path, sample_kernels.scale(), "timeout", "60 s")
    with pytest.raises(cubins.KnownFailure) as caught:
        cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert caught.value.kind == "timeout" and compilations == []
    other = dataclasses.replace(sample_kernels.scale(), options=("-lineinfo",))
    cubins.get_or_compile(other, tmp_path)
    monkeypatch.setattr(nvrtc, "ABI", nvrtc.ABI + 1)
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert len(compilations) == 2


def test_an_image_outweighs_a_failure(tmp_path, compilations):
    cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    cubins.record_failure(tmp_path, sample_kernels.scale(), "timeout", "60 s")
    forget()
    assert cubins.get_or_compile(sample_kernels.scale(), tmp_path).registers
    assert compilations == ["scale"]


def test_want_of_memory_is_not_remembered(tmp_path, monkeypatch):
    def compile(kernel):
        raise nvrtc.CompileError("NVRTC 13.0: NVRTC_ERROR_OUT_OF_MEMORY", "")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile", compile)
        with pytest.raises(nvrtc.CompileError, match="OUT_OF_MEMORY"):
            cubins.get_or_compile(sample_kernels.scale(), tmp_path)
    assert cubins.get_or_compile(sample_kernels.scale(), tmp_path).registers


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", b'{"kind": "rain", "message": "", "log": ""}'],
)
def test_a_damaged_failure_is_no_failure(tmp_path, compilations, content):
    with pytest.raises(nvrtc.CompileError):
        cubins.get_or_compile(broken(), tmp_path)
    good = failure_path(tmp_path).read_bytes()
    failure_path(tmp_path).write_bytes(content)
    with pytest.raises(nvrtc.CompileError):
        cubins.get_or_compile(broken(), tmp_path)
    assert compilations == ["scale"] * 2
    assert failure_path(tmp_path).read_bytes() == good


def test_a_failure_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="TRACEA_CACHE_DIR"):
        with pytest.raises(nvrtc.CompileError, match="expected an expression"):
            cubins.get_or_compile(broken(), tmp_path / "file" / "cache")


def test_an_unknown_kind_of_failure_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="compile_error, timeout"):
        cubins.record_failure(tmp_path, broken(), "rain", "wet")

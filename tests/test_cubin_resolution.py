"""Which image the native launcher takes, without a GPU.

First the program's own copy, then an image that this process lowered, then a file whose
bytes match the hash that the program states.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import pathlib
import random
import re
import threading
from collections.abc import Callable

import pytest
import sample_kernels
from sample_kernels import elf

from tracea_jax import _native
from tracea_jax.options import current
from tracea_jax.runtime import cubins, launch, nvrtc

pytestmark = pytest.mark.once

ARCH = "sm_90a"
_numbers = itertools.count()


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o755)
    launch.set_cubin_directory(tmp_path)
    yield tmp_path
    launch.set_cubin_directory(current().directory)


def fresh_image() -> bytes:
    """One that this process has never registered."""
    return elf(f"{os.getpid()} {next(_numbers)} ".encode() * 9)


def fresh_key() -> str:
    return hashlib.sha256(fresh_image()).hexdigest()


def digest(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


def place(directory: pathlib.Path, key: str, image: bytes) -> pathlib.Path:
    file = cubins.path(directory, ARCH, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in (file.parent, file.parent.parent):
        folder.chmod(0o755)
    file.write_bytes(image)
    file.chmod(0o644)
    return file


def text(image: bytes) -> str:
    return base64.b64encode(image).decode()


@pytest.mark.parametrize("size", [*range(0, 140), 1000, 65536 + 55])
def test_sha256_is_the_standards(size):
    data = random.Random(size).randbytes(size)
    assert _native.sha256(data) == hashlib.sha256(data).hexdigest()


def test_a_file_with_the_stated_bytes_is_taken(directory):
    key, image = fresh_key(), fresh_image()
    place(directory, key, image)
    assert _native.resolve_cubin(key, ARCH, digest(image)) == image


def test_a_file_with_other_bytes_is_refused_whatever_lies_beside_it(directory):
    key, image, other = fresh_key(), fresh_image(), fresh_image()
    file = place(directory, key, other)
    file.with_suffix(".json").write_text(f'{{"sha256": "{digest(other)}"}}')
    with pytest.raises(ValueError, match=f"sha256 is not {digest(image)}"):
        _native.resolve_cubin(key, ARCH, digest(image))


def test_a_file_is_not_taken_for_a_program_without_sha256(directory):
    key, image = fresh_key(), fresh_image()
    place(directory, key, image)
    with pytest.raises(ValueError, match="does not state its sha256"):
        _native.resolve_cubin(key, ARCH, "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("flips", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_flipped_bits_of_a_stored_image_are_refused(directory, flips):
    # What follows the last section is no code; it makes the image a new one.
    image = nvrtc.compile(sample_kernels.scale()).image + fresh_image()
    key, sha256 = fresh_key(), digest(image)
    file = place(directory, key, image)
    draw = random.Random(25)
    for _ in range(flips):
        # Headers are excluded: those are refused as no cubin, which proves less.
        bit = draw.randrange(8 * 64, 8 * len(image) * 3 // 4)
        broken = bytearray(image)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="no cubin|sha256 is not"):
            _native.resolve_cubin(key, ARCH, sha256)
    file.write_bytes(image)
    assert _native.resolve_cubin(key, ARCH, sha256) == image


def test_the_programs_copy_comes_before_the_process_and_the_store(directory):
    key, own, registered, stored = fresh_key(), *(fresh_image() for _ in range(3))
    _native.put_cubin(key, registered)
    place(directory, key, stored)
    assert _native.resolve_cubin(key, ARCH, "", text(own)) == own
    assert _native.resolve_cubin(key, ARCH, digest(own), text(own)) == own


def test_the_process_comes_before_the_store(directory):
    key, image = fresh_key(), fresh_image()
    _native.put_cubin(key, image)
    place(directory, key, b"not looked at")
    assert _native.resolve_cubin(key, ARCH, digest(image)) == image
    assert _native.resolve_cubin(key, ARCH, "") == image


def test_what_one_program_carries_is_not_given_to_another(directory):
    key, image = fresh_key(), fresh_image()
    _native.resolve_cubin(key, ARCH, digest(image), text(image))
    assert not _native.has_cubin(key)
    with pytest.raises(ValueError, match="not registered"):
        _native.resolve_cubin(key, ARCH, "")


def test_a_copy_that_is_not_the_stated_one_is_passed_over(directory):
    key, image = fresh_key(), fresh_image()
    with pytest.raises(ValueError, match="program carries is another image"):
        _native.resolve_cubin(key, ARCH, digest(image), text(fresh_image()))
    place(directory, key, image)
    changed = text(fresh_image())
    assert _native.resolve_cubin(key, ARCH, digest(image), changed) == image


# ---- files and directories that are not trusted --------------------------------------


def link_file(file: pathlib.Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


def link_folder(file: pathlib.Path) -> None:
    real = file.parent.with_name("elsewhere")
    file.parent.rename(real)
    file.parent.symlink_to(real)


def become_fifo(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


def become_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def grow(file: pathlib.Path) -> None:
    os.truncate(file, 2**40)  # sparse


def open_file(file: pathlib.Path) -> None:
    file.chmod(0o666)


def give_file_away(file: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(file, 12345, -1)


def open_to(mode: int, depth: int) -> Callable[[pathlib.Path], None]:
    return lambda file: file.parents[depth].chmod(mode)


def give_away(depth: int) -> Callable[[pathlib.Path], None]:
    def change(file: pathlib.Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give directories away")
        os.chown(file.parents[depth], 12345, -1)

    return change


UNTRUSTED = {
    "linked file": (link_file, "symbolic link"),
    "linked folder": (link_folder, "cannot be opened: Not a directory|symbolic link"),
    "fifo": (become_fifo, "no regular file"),
    "folder": (become_folder, "no regular file"),
    "huge": (grow, "1099511627776 bytes, more than"),
    "file writable by all": (open_file, "others may write.*cubin"),
    "file of another": (give_file_away, "cubin belongs to user 12345"),
    "writable by all": (open_to(0o777, 0), "others may write.*chmod go-w"),
    "store writable by all": (open_to(0o777, 1), "others may write"),
    "cache writable by the group": (open_to(0o775, 2), "others may write"),
    "folder of another": (give_away(0), "belongs to user 12345"),
    "cache of another": (give_away(2), "belongs to user 12345"),
}


@pytest.mark.parametrize("case", UNTRUSTED)
def test_a_file_that_others_may_have_placed_is_refused(directory, case):
    change, message = UNTRUSTED[case]
    key, image = fresh_key(), fresh_image()
    file = place(directory, key, image)
    change(file)
    said: list[str] = []

    def resolve() -> None:
        try:
            _native.resolve_cubin(key, ARCH, digest(image))
        except ValueError as e:
            said.append(str(e))

    # A thread: whoever opens a FIFO may wait for ever.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(30)
    try:
        assert not thread.is_alive()
        (error,) = said
        assert re.search(message, error), error
    finally:
        directory.chmod(0o755)

"""Compiled kernels on disk, by content hash, so no kernel is compiled twice.

    <directory>/cubin/<arch>/<key>.cu     what was compiled
    <directory>/cubin/<arch>/<key>.json   resource usage, log, sha256 of the image
    <directory>/cubin/<arch>/<key>.cubin  the image; the native launcher reads it too
    <directory>/cubin/<arch>/<key>.failed.json  instead of these: why it cannot be had

Files are replaced atomically and the image comes last: a kill leaves a kernel either
whole or absent, and any number of processes may write the same one. What was refused is
as lasting: the key covers the compiler, so trying again would fail again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import threading
import time
from typing import Any

from tracea_jax import schema
from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc, trust
from tracea_jax.runtime.collect import Collected, collect, count, locked
from tracea_jax.runtime.nvrtc import CompileError, Cubin
from tracea_jax.runtime.trust import Trust, warn_once

FAILURES = ("compile_error", "timeout")
_LOG_CHARACTERS = 4000  # of a failure that are kept, from its start
# NVRTC's states that say nothing about the kernel.
_TRANSIENT = ("OUT_OF_MEMORY", "INTERNAL_ERROR", "PROGRAM_CREATION_FAILURE")

_TOUCH_AFTER_S = 3600.0
_IMAGE_BYTES = 256 << 20  # far more than a cubin has
_METADATA_BYTES = 16 << 20  # with the compiler's log
_DAMAGE = (ValueError, RecursionError)  # what decoding raises

_memory: dict[str, Cubin] = {}
_lock = threading.Lock()
# Kernels that processes compile into the store, by key.
_expected: dict[str, concurrent.futures.Future[None]] = {}


class KnownFailure(CompileError):
    """The kernel could not be compiled before, and was not tried again.

    Attributes:
      kind: one of ``FAILURES``.
    """

    def __init__(self, summary: str, kind: str, log: str = "") -> None:
        super().__init__(summary, log)
        self.kind = kind


def get_or_compile(
    kernel: Kernel,
    directory: pathlib.Path | None,
    shared: tuple[pathlib.Path, ...] = (),
) -> Cubin:
    """The compiled kernel: from this process, else from the store, else compiled now.

    A kernel that another process compiles into the store (``expect``) is waited for.
    What the compiler refused is remembered in the store and not tried again.
    A damaged entry is compiled again and replaced. Where the store cannot be written,
    kernels are kept in memory only. Either is reported by one warning.

    Args:
      kernel: what to compile.
      directory: the cache directory that holds the store; None keeps to memory.
      shared: more cache directories, which are only read.

    Raises:
      KnownFailure: if an earlier try failed.
      CompileError, ToolchainMissing: see ``nvrtc.compile``.
    """
    key = nvrtc.key(kernel)
    if (future := _expected.get(key)) is not None:
        concurrent.futures.wait([future])  # if it failed, the store says so, or not
        _expected.pop(key, None)
    with _lock:  # one compilation at a time: NVRTC gains nothing from threads
        cubin = _memory.get(key)
        if cubin is None and directory is not None:
            cubin = load(directory, kernel.arch, key)
        for place in shared:
            cubin = cubin or load(place, kernel.arch, key, Trust.SHARED)
        if cubin is None:
            try:
                cubin = _compile(kernel, key, directory)
            except CompileError as e:
                raise nvrtc.located(e, kernel) from None
        _memory[key] = cubin
    if directory is not None and not os.path.exists(path(directory, kernel.arch, key)):
        _save(directory, kernel, cubin)
    return cubin


def expect(key: str, future: concurrent.futures.Future[None]) -> None:
    """Lets ``get_or_compile`` wait for a kernel.

    Args:
      key: of the kernel.
      future: done when the store has the kernel, or when it could not be compiled.
    """
    _expected[key] = future


def is_known(key: str) -> bool:
    """Whether this process has the kernel, or expects it."""
    return key in _memory or key in _expected


def known_failure(
    kernel: Kernel,
    directory: pathlib.Path | None,
    shared: tuple[pathlib.Path, ...] = (),
) -> KnownFailure | None:
    """The failure that ``get_or_compile`` would raise without trying; None if none.

    Of a kernel that no compiler is installed for, nothing is known.
    """
    try:
        key = nvrtc.key(kernel)
    except nvrtc.ToolchainMissing:
        return None
    if directory is None or key in _memory:
        return None
    places = (directory, *shared)
    if any(os.path.exists(path(place, kernel.arch, key)) for place in places):
        return None
    return failure(directory, kernel.arch, key)


def _compile(kernel: Kernel, key: str, directory: pathlib.Path | None) -> Cubin:
    if directory is not None and (known := failure(directory, kernel.arch, key)):
        raise known
    try:
        return nvrtc.compile(kernel)
    except CompileError as e:
        if directory is not None and not any(name in str(e) for name in _TRANSIENT):
            record_failure(directory, kernel, "compile_error", str(e))
        raise


def path(directory: pathlib.Path, arch: str, key: str) -> pathlib.Path:
    """Path of the image of a kernel."""
    return directory / "cubin" / arch / f"{key}.cubin"


def has(directory: pathlib.Path, kernel: Kernel) -> bool:
    """Returns whether the kernel's image is there; it may still prove damaged."""
    return os.path.exists(path(directory, kernel.arch, nvrtc.key(kernel)))


def is_trusted(directory: pathlib.Path) -> bool:
    """True if the native launcher, which checks no owners, may read here; or it warns.

    What is not there yet is trusted, as only this user can make it trustworthy.
    """
    try:
        for arch in _architectures(directory):
            trust.check(directory, "cubin", arch)
    except trust.Untrusted as e:
        e.warn()
        return False
    except OSError:
        return False
    return True


def _architectures(directory: pathlib.Path) -> list[str]:
    try:
        return ["", *sorted(os.listdir(directory / "cubin"))]
    except (FileNotFoundError, NotADirectoryError):
        return [""]


def failure(directory: pathlib.Path, arch: str, key: str) -> KnownFailure | None:
    """The remembered failure of a kernel; None if there is none that can be read."""
    file = path(directory, arch, key).with_suffix(".failed.json")
    try:
        content = _read(file, _METADATA_BYTES, Trust.USER)
        if content is None:
            return None
        data, _ = _FAILED.split(json.loads(content))
        kind, message = data["kind"], schema.visible(data["message"])
        if kind not in FAILURES or data["key"] != key:
            return None
    except (OSError, *_DAMAGE):
        return None  # at worst, it is tried again
    return KnownFailure(
        f"{message} (found before; remove {file} to try again)",
        kind,
        schema.visible(data["log"]),
    )


def record_failure(
    directory: pathlib.Path, kernel: Kernel, kind: str, message: str
) -> None:
    """Remembers that a kernel cannot be compiled.

    Args:
      directory: the cache directory that holds the store.
      kernel: what failed.
      kind: one of ``FAILURES``.
      message: its first line says what happened; the rest is kept as the log.
    """
    if kind not in FAILURES:
        raise ValueError(f"{kind=} must be one of {', '.join(FAILURES)}")
    key = nvrtc.key(kernel)
    summary, _, log = message.partition("\n")
    data = {
        "key": key,
        "entry": kernel.entry,
        "kind": kind,
        "message": summary,
        "log": log[:_LOG_CHARACTERS],
    }
    file = path(directory, kernel.arch, key).with_suffix(".failed.json")
    _write_files(directory, {file: json.dumps(data, indent=1).encode()})


def mark_winner(directory: pathlib.Path, kernel: Kernel) -> None:
    """Marks a stored kernel as the answer of a tuning: collected after all others."""
    file = path(directory, kernel.arch, nvrtc.key(kernel))
    with contextlib.suppress(OSError):
        trust.check(directory, "cubin", kernel.arch)
        if os.path.exists(file):
            file.with_suffix(".winner").touch(0o600)


def load(
    directory: pathlib.Path, arch: str, key: str, trust_in: Trust = Trust.USER
) -> Cubin | None:
    """The stored kernel; None if there is none.

    A damaged one is removed with a warning, so that it is compiled and saved again.
    What others could have replaced is not loaded (see ``trust``).
    """
    file = path(directory, arch, key)
    try:
        image = _read(file, _IMAGE_BYTES, trust_in)
        if image is None:
            return None
        metadata = _read(file.with_suffix(".json"), _METADATA_BYTES, trust_in)
    except trust.Untrusted as e:
        e.warn()
        return None
    except trust.Refused as e:
        _replace_later(file, trust_in, e)
        return None
    except OSError as e:
        warn_once(f"the kernel store {directory} cannot be read: {e}")
        return None
    try:
        if metadata is None:
            raise ValueError("its metadata is missing")
        cubin = _decode(json.loads(metadata), image)
        if (cubin.key, cubin.arch) != (key, arch):
            raise ValueError("its metadata belongs to another kernel")
    except _DAMAGE as e:
        if not os.path.exists(file):
            return None  # collected between the two reads
        _replace_later(file, trust_in, e)
        return None
    _touch(file)
    return cubin


def _replace_later(file: pathlib.Path, trust_in: Trust, why: Exception) -> None:
    """Removes a damaged kernel of the user's, so that a good one is saved."""
    what = "will be replaced" if trust_in is Trust.USER else "is not used"
    warn_once(f"the compiled kernel {file} is damaged and {what}: {why}")
    if trust_in is Trust.USER:
        with contextlib.suppress(OSError):
            file.unlink()


def _read(file: pathlib.Path, limit_bytes: int, trust_in: Trust) -> bytes | None:
    """A file of the store, if there is one; see ``trust`` for the errors."""
    top = file.parent.parent.parent
    trust.check(top, "cubin", file.parent.name, trust=trust_in)
    try:
        return trust.read_file(file, limit_bytes, top=top, trust=trust_in)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _touch(file: pathlib.Path) -> None:
    """Marks a kernel as used; not every time, as that writes to the disk."""
    with contextlib.suppress(OSError):
        if time.time() - file.stat().st_mtime > _TOUCH_AFTER_S:
            os.utime(file)


def _save(directory: pathlib.Path, kernel: Kernel, cubin: Cubin) -> None:
    file = path(directory, cubin.arch, cubin.key)
    metadata = json.dumps(_encode(cubin), indent=1).encode()
    files = {
        file.with_suffix(".cu"): kernel.source.encode(),
        file.with_suffix(".json"): metadata,
        file: cubin.image,
    }
    _write_files(directory, files)


def _write_files(directory: pathlib.Path, files: dict[pathlib.Path, bytes]) -> None:
    """Writes files in this order; one warning says if the directory takes nothing."""
    try:
        for folder in {file.parent for file in files}:
            trust.check(directory, "cubin", folder.name)
            trust.make_private_directory(folder)
        with locked(directory, is_collector=False):
            for file, data in files.items():
                trust.write_atomically(file, data, mode=0o644)
    except trust.Untrusted as e:
        e.warn()
    except OSError as e:
        warn_once(
            f"compiled kernels are kept in memory only: {directory} cannot be written "
            f"({e.strerror or e}); set TRACEA_CACHE_DIR to a writable directory"
        )


def _encode(cubin: Cubin) -> dict[str, Any]:
    data = dataclasses.asdict(cubin)
    image = data.pop("image")
    return {**data, "sha256": hashlib.sha256(image).hexdigest()}


def _decode(data: Any, image: bytes) -> Cubin:
    """The inverse of ``_encode``.

    Raises:
      ValueError: if it is not what was saved.
    """
    known, _ = _METADATA.split(data)
    if known.pop("sha256") != hashlib.sha256(image).hexdigest():
        raise ValueError("its sha256 is not the recorded one")
    return Cubin(**{**known, "image": image, "warnings": tuple(known["warnings"])})


_COUNT = schema.optional(schema.integer(0, 1 << 31))
_RESOURCES = "registers", "stack_bytes", "spill_bytes", "smem_static_bytes"
_METADATA_FIELDS = {
    **dict.fromkeys(("key", "arch", "entry", "sha256"), schema.line),
    **dict.fromkeys(_RESOURCES, _COUNT),
    "warnings": schema.sequence(schema.anything, 1 << 20),
    "log": schema.anything,
    "compile_s": schema.number(0, 1e9),
}
_METADATA = schema.Table(
    name="metadata",
    fields=_METADATA_FIELDS,
    required=frozenset(_METADATA_FIELDS),
)
_FAILED_FIELDS = {
    **dict.fromkeys(("key", "kind"), schema.line),
    **dict.fromkeys(("message", "log"), schema.anything),
}
_FAILED = schema.Table(
    name="failure", fields=_FAILED_FIELDS, required=frozenset(_FAILED_FIELDS)
)


__all__ = [
    "FAILURES",
    "Collected",
    "KnownFailure",
    "collect",
    "count",
    "expect",
    "failure",
    "get_or_compile",
    "has",
    "is_known",
    "is_trusted",
    "load",
    "mark_winner",
    "path",
    "record_failure",
]

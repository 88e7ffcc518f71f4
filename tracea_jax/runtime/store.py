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

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
import threading
import time
import warnings
from typing import Any

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc
from tracea_jax.runtime.collect import Collected, collect, locked
from tracea_jax.runtime.nvrtc import CompileError, Cubin

FAILURES = ("compile_error", "timeout")
_LOG_CHARACTERS = 4000  # of a failure that are kept, from its start
# NVRTC's states that say nothing about the kernel.
_TRANSIENT = ("OUT_OF_MEMORY", "INTERNAL_ERROR", "PROGRAM_CREATION_FAILURE")

_TOUCH_AFTER_S = 3600.0

_memory: dict[str, Cubin] = {}
_lock = threading.Lock()
_warned: set[str] = set()


class KnownFailure(CompileError):
    """The kernel could not be compiled before, and was not tried again.

    Attributes:
      kind: one of ``FAILURES``.
    """

    def __init__(self, summary: str, kind: str, log: str = "") -> None:
        super().__init__(summary, log)
        self.kind = kind


def get_or_compile(kernel: Kernel, directory: pathlib.Path | None) -> Cubin:
    """The compiled kernel: from this process, else from the store, else compiled now.

    What the compiler refused is remembered in the store and not tried again.
    A damaged entry is compiled again and replaced. Where the store cannot be written,
    kernels are kept in memory only. Either is reported by one warning.

    Args:
      kernel: what to compile.
      directory: the cache directory that holds the store; None keeps to memory.

    Raises:
      KnownFailure: if an earlier try failed.
      CompileError, ToolchainMissing: see ``nvrtc.compile``.
    """
    key = nvrtc.key(kernel)
    with _lock:  # one compilation at a time: NVRTC gains nothing from threads
        cubin = _memory.get(key)
        if cubin is None and directory is not None:
            cubin = load(directory, kernel.arch, key)
        if cubin is None:
            cubin = _compile(kernel, key, directory)
        _memory[key] = cubin
    if directory is not None and not os.path.exists(path(directory, kernel.arch, key)):
        _save(directory, kernel, cubin)
    return cubin


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
    """Where the image of a kernel is kept."""
    return directory / "cubin" / arch / f"{key}.cubin"


def has(directory: pathlib.Path, kernel: Kernel) -> bool:
    """Whether the kernel's image is there; it may still prove damaged."""
    return path(directory, kernel.arch, nvrtc.key(kernel)).exists()


def failure(directory: pathlib.Path, arch: str, key: str) -> KnownFailure | None:
    """The remembered failure of a kernel; None if there is none that can be read."""
    file = path(directory, arch, key).with_suffix(".failed.json")
    try:
        data = json.loads(file.read_bytes())
        kind, message, log = data["kind"], data["message"], data["log"]
        if kind not in FAILURES or data["key"] != key:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # at worst, it is tried again
    return KnownFailure(
        f"{message} (found before; remove {file} to try again)", kind, log
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
        if file.exists():
            file.with_suffix(".winner").touch()


def load(directory: pathlib.Path, arch: str, key: str) -> Cubin | None:
    """The stored kernel; None if there is none.

    A damaged one is removed with a warning, so that it is compiled and saved again.
    """
    file = path(directory, arch, key)
    try:
        image = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        _warn_once(f"the kernel store {directory} cannot be read: {e}")
        return None
    try:
        cubin = _decode(json.loads(file.with_suffix(".json").read_bytes()), image)
        if (cubin.key, cubin.arch) != (key, arch):
            raise ValueError("its metadata belongs to another kernel")
        _touch(file)
        return cubin
    except (OSError, ValueError, TypeError, KeyError) as e:
        if not file.exists():
            return None  # collected between the two reads
        _warn_once(f"the compiled kernel {file} is damaged and will be replaced: {e}")
        with contextlib.suppress(OSError):
            file.unlink()
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
            folder.mkdir(parents=True, exist_ok=True)
        with locked(directory, is_collector=False):
            for file, data in files.items():
                _write(file, data)
    except OSError as e:
        _warn_once(
            f"compiled kernels are kept in memory only: {directory} cannot be written "
            f"({e.strerror or e}); set TRACEA_CACHE_DIR to a writable directory"
        )


def _write(file: pathlib.Path, data: bytes) -> None:
    """Replaces a file atomically: readers see the old content or the new one."""
    # Not tempfile: its files are unreadable to others, and a cache may be shared.
    new = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with new.open("xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _encode(cubin: Cubin) -> dict[str, Any]:
    data = dataclasses.asdict(cubin)
    image = data.pop("image")
    return {**data, "sha256": hashlib.sha256(image).hexdigest()}


def _decode(data: dict[str, Any], image: bytes) -> Cubin:
    fields = dict(data)
    if fields.pop("sha256") != hashlib.sha256(image).hexdigest():
        raise ValueError("its sha256 is not the recorded one")
    return Cubin(**{**fields, "image": image, "warnings": tuple(fields["warnings"])})


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


__all__ = [
    "FAILURES",
    "Collected",
    "KnownFailure",
    "collect",
    "failure",
    "get_or_compile",
    "has",
    "load",
    "mark_winner",
    "path",
    "record_failure",
]

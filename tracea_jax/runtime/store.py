"""Compiled kernels on disk, by content hash, so no kernel is compiled twice.

    <directory>/cubin/<arch>/<key>.cu     what was compiled
    <directory>/cubin/<arch>/<key>.json   resource usage, log, sha256 of the image
    <directory>/cubin/<arch>/<key>.cubin  the image; the native launcher reads it too

Files are replaced atomically and the image comes last: a kill leaves a kernel either
whole or absent, and any number of processes may write the same one.
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
import warnings
from typing import Any

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc
from tracea_jax.runtime.nvrtc import Cubin

_memory: dict[str, Cubin] = {}
_lock = threading.Lock()
_warned: set[str] = set()


def get_or_compile(kernel: Kernel, directory: pathlib.Path | None) -> Cubin:
    """The compiled kernel: from this process, else from the store, else compiled now.

    A damaged entry is compiled again and replaced. Where the store cannot be written,
    kernels are kept in memory only. Either is reported by one warning.

    Args:
      kernel: what to compile.
      directory: the cache directory that holds the store; None keeps to memory.

    Raises:
      CompileError, ToolchainMissing: see ``nvrtc.compile``.
    """
    key = nvrtc.key(kernel)
    with _lock:  # one compilation at a time: NVRTC gains nothing from threads
        cubin = _memory.get(key)
        if cubin is None and directory is not None:
            cubin = load(directory, kernel.arch, key)
        if cubin is None:
            cubin = nvrtc.compile(kernel)
        _memory[key] = cubin
    if directory is not None and not os.path.exists(path(directory, kernel.arch, key)):
        _save(directory, kernel, cubin)
    return cubin


def path(directory: pathlib.Path, arch: str, key: str) -> pathlib.Path:
    """Where the image of a kernel is kept."""
    return directory / "cubin" / arch / f"{key}.cubin"


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
        return cubin
    except (OSError, ValueError, TypeError, KeyError) as e:
        _warn_once(f"the compiled kernel {file} is damaged and will be replaced: {e}")
        with contextlib.suppress(OSError):
            file.unlink()
        return None


def _save(directory: pathlib.Path, kernel: Kernel, cubin: Cubin) -> None:
    file = path(directory, cubin.arch, cubin.key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file.with_suffix(".cu"), kernel.source.encode())
        _write(file.with_suffix(".json"), json.dumps(_encode(cubin), indent=1).encode())
        _write(file, cubin.image)
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

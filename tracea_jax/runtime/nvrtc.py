"""CUDA text to machine code, with NVRTC: no GPU and no driver are needed.

    key(kernel)      what the compiled code depends on, without compiling
    compile(kernel)  the code, its resource usage and the compiler's log

Headers are passed in memory, so the compiler reads no file.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

from tracea_jax.emit.kernel import Kernel

_logger = logging.getLogger(__name__)

ABI = 1  # raise when compiled code changes for a reason that ``key`` does not cover
_INSTALL = "pip install 'tracea_jax[cuda13]'"


class ToolchainMissing(RuntimeError):
    """NVRTC cannot be used; the message says why and what to install."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel.

    Attributes:
      log: the compiler's output.
      excerpt: the numbered source lines around each error.
    """

    def __init__(self, summary: str, log: str, excerpt: str = "") -> None:
        super().__init__("\n".join(part for part in (summary, log, excerpt) if part))
        self.log = log
        self.excerpt = excerpt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """A compiled kernel.

    Attributes:
      key: see ``key``.
      arch: the target it was compiled for, such as "sm_90a".
      entry: name of the kernel in the image.
      image: the cubin, an ELF file.
      registers: for each thread; None, as the next three, if the assembler did not say.
      stack_bytes: local memory of each thread, spills included.
      spill_bytes: bytes stored to and loaded from local memory for want of registers.
      smem_static_bytes: shared memory that the kernel declares, dynamic not counted.
      warnings: log lines in which the compiler reports code slower than written.
      log: all that the compiler said.
      compile_s: seconds that compiling took.
    """

    key: str
    arch: str
    entry: str
    image: bytes = dataclasses.field(repr=False)
    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    smem_static_bytes: int | None
    warnings: tuple[str, ...]
    log: str = dataclasses.field(repr=False)
    compile_s: float


def why_unavailable() -> str | None:
    """None, or a sentence saying why kernels cannot be compiled here."""
    try:
        _require()
    except ToolchainMissing as e:
        return str(e)
    return None


def version() -> str | None:
    """The version of NVRTC, such as "13.0"; None if it cannot be used."""
    return None if why_unavailable() else _require()


def key(kernel: Kernel) -> str:
    """sha256, in hexadecimal, of all that determines the compiled code.

    That is source, headers, entry, options, architecture, NVRTC version and ``ABI``;
    the order of the headers does not matter.

    Raises:
      ToolchainMissing: cuda-bindings or the NVRTC library is not installed.
    """
    ingredients = {
        "abi": ABI,
        "nvrtc": _require(),
        "options": _options(kernel),
        "entry": kernel.entry,
        "source": kernel.source,
        "headers": sorted(kernel.headers),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def compile(kernel: Kernel) -> Cubin:
    """Compiles a kernel; nothing is cached (``store.get_or_compile`` does that).

    Raises:
      CompileError: with the log and the source around each error.
      ToolchainMissing: cuda-bindings or the NVRTC library is not installed.
    """
    _require()
    start = time.perf_counter()
    image, log, entry = _compile(kernel)
    compile_s = time.perf_counter() - start
    _logger.debug("%s for %s compiled in %.2f s", kernel.entry, kernel.arch, compile_s)
    _check_entry(entry, image, log)
    return Cubin(
        key=key(kernel),
        arch=kernel.arch,
        entry=entry,
        image=image,
        **_resources(entry, log),
        warnings=tuple(s for s in log.splitlines() if "Performance Loss" in s),
        log=log,
        compile_s=compile_s,
    )


@functools.cache
def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as e:
        raise ToolchainMissing(f"cuda-bindings is not installed; {_INSTALL}") from e


@functools.cache
def _require() -> str:
    """The version of NVRTC, or ``ToolchainMissing``."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as e:  # cuda-bindings loads the library here
        why = " ".join(str(e).split())
        raise ToolchainMissing(f"NVRTC cannot be loaded ({why}); {_INSTALL}") from e
    _check(status, "nvrtcVersion")
    _load_builtins(f"{major}.{minor}")
    return f"{major}.{minor}"


def _load_builtins(version: str) -> None:
    """Loads the library of NVRTC's own device functions from beside NVRTC.

    NVRTC opens it by its name, which the loader may not find where JAX loaded NVRTC
    before; a library that is loaded already is found. Where this fails, NVRTC searches
    as ever, and says what it misses.
    """
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        beside = pathlib.Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
        ctypes.CDLL(str(beside.with_name(f"libnvrtc-builtins.so.{version}")))
    except (ImportError, OSError, RuntimeError, TypeError) as e:
        _logger.debug("NVRTC's own device functions were not loaded: %s", e)


def _check(status: Any, what: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status.name}")


def _options(kernel: Kernel) -> list[str]:
    # Verbose, because the log is the only place that reports registers and spills.
    return [
        f"--gpu-architecture={kernel.arch}",
        "-std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        *kernel.options,
    ]


def _compile(kernel: Kernel) -> tuple[bytes, str, str]:
    """The image, the log, and the name of the entry point in the image."""
    nvrtc = _nvrtc()
    is_expression = not kernel.entry.isidentifier()
    names = [name.encode() for name, _ in kernel.headers]
    texts = [text.encode() for _, text in kernel.headers]
    options = [o.encode() for o in _options(kernel)]
    status, program = nvrtc.nvrtcCreateProgram(
        kernel.source.encode(), _file(kernel).encode(), len(names), texts, names
    )
    _check(status, "nvrtcCreateProgram")
    try:
        if is_expression:
            (status,) = nvrtc.nvrtcAddNameExpression(program, kernel.entry.encode())
            _check(status, "nvrtcAddNameExpression")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read(program, "nvrtcGetProgramLog").decode(errors="replace")
        log = log.rstrip("\0").strip()
        if int(status) != 0:
            # The log itself shows a user's line, with a caret below it.
            excerpt = _excerpt(kernel, log) if kernel.place is None else ""
            raise CompileError(_summary(kernel, status), log, excerpt)
        image = _read(program, "nvrtcGetCUBIN")
        return image, log, _lowered(program, kernel) if is_expression else kernel.entry
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, getter: str) -> bytes:
    """The bytes that an NVRTC getter and its ``...Size`` companion give."""
    nvrtc = _nvrtc()
    status, size = getattr(nvrtc, getter + "Size")(program)
    _check(status, getter + "Size")
    buffer = b" " * size
    _check(getattr(nvrtc, getter)(program, buffer)[0], getter)
    return buffer


def _lowered(program: Any, kernel: Kernel) -> str:
    """The mangled name of the kernel that an expression names."""
    nvrtc = _nvrtc()
    status, name = nvrtc.nvrtcGetLoweredName(program, kernel.entry.encode())
    _check(status, "nvrtcGetLoweredName")
    return name.decode()


def _file(kernel: Kernel) -> str:
    (name,) = re.findall(r"\w+", kernel.entry)[:1] or ["kernel"]
    return f"{name}.cu"


def located(error: CompileError, kernel: Kernel) -> CompileError:
    """The error with names, lines and columns of the file that the source is from.

    NVRTC tells no columns, but points at them: below the line, which it indents.
    """
    if kernel.place is None:
        return error
    own, (file, first) = re.escape(_file(kernel)), kernel.place

    def moved(match: re.Match[str]) -> str:
        column = "" if match[3] is None else f",{len(match[3]) + 1}"
        return f"{file}({int(match[1]) + first - 1}{column}){match[2] or ''}"

    shown = rf"\b{own}\((\d+)\)(: .*\n  .*\n  (\s*)\^)?"
    error.args = (re.sub(shown, moved, str(error)),)
    return error


def _summary(kernel: Kernel, status: Any) -> str:
    return (
        f"NVRTC {_require()} cannot compile kernel {kernel.entry} with "
        f"{' '.join(_options(kernel))}: {status.name}"
    )


# ---- what the log says --------------------------------------------------------------

_ERROR = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): .*error", re.MULTILINE)
_CONTEXT = 2  # lines shown before and after an error
_MOST_ERRORS = 5  # one mistake often causes many


def _excerpt(kernel: Kernel, log: str) -> str:
    texts = {_file(kernel): kernel.source, **dict(kernel.headers)}
    places = dict.fromkeys((m["file"], int(m["line"])) for m in _ERROR.finditer(log))
    known = [(file, line) for file, line in places if file in texts][:_MOST_ERRORS]
    return "\n".join("\n".join(_around(texts[f], f, line)) for f, line in known)


def _around(text: str, file: str, line: int) -> Iterator[str]:
    yield f"{file}:"
    lines = text.splitlines()
    for n in range(max(1, line - _CONTEXT), min(len(lines), line + _CONTEXT) + 1):
        yield f"{'>' if n == line else ' '}{n:5d} | {lines[n - 1]}"


def _check_entry(entry: str, image: bytes, log: str) -> None:
    """Raises CompileError unless the image has code for the entry point."""
    defined = {m.decode() for m in re.findall(rb"\.text\.([\w$]+)\0", image)}
    if entry not in defined:
        raise CompileError(
            f'the source defines no extern "C" __global__ {entry}; it defines '
            f"{', '.join(sorted(defined)) or 'no kernel'}",
            log,
        )


_RESOURCES = ("registers", "stack_bytes", "spill_bytes", "smem_static_bytes")


def _resources(entry: str, log: str) -> dict[str, int | None]:
    """Resource usage of the kernel, functions that it calls included.

    Unknown where the assembler does not report, as under tools that intercept it.
    """
    parts = re.split(r"Compiling entry function '([^']+)'", log)
    section = dict(zip(parts[1::2], parts[2::2], strict=True)).get(entry)
    if section is None:
        return dict.fromkeys(_RESOURCES)

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, section)]

    values = (
        max(numbers(r"Used (\d+) registers"), default=0),
        max(numbers(r"(\d+) bytes stack frame"), default=0),
        sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        max(numbers(r"(\d+) bytes smem"), default=0),
    )
    return dict(zip(_RESOURCES, values, strict=True))

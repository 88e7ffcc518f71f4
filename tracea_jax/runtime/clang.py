"""HIP text to machine code, with clang: neither a GPU nor ROCm is needed.

    compile(kernel)  the code object, its resource usage and the compiler's log

The kernels use builtins of clang only, so that no device library is linked. Nothing
here can be launched; see ``emit.targets``.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime.code_object import Usage, usage
from tracea_jax.runtime.nvrtc import CompileError, ToolchainMissing

OLDEST = 17  # the first that knows gfx942
_NAMES = ("clang++", *(f"clang++-{v}" for v in range(24, OLDEST - 1, -1)))
_ANSWER_S = 30.0  # for which a compiler may think about its version
_ROCM = "/opt/rocm/llvm/bin"
_INSTALL = f"apt-get install clang-19 lld-19, or any from {OLDEST} on"
_OPTIONS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-nogpulib",
    "-nogpuinc",
    "-std=c++17",
    "-O3",
    "-Wall",
    "-Wno-unused-const-variable",  # Traits are one for all dialects
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodeObject:
    """A compiled kernel.

    Attributes:
      arch: the target it was compiled for, such as "gfx90a".
      entry: name of the kernel in the image.
      image: the code object, an ELF file.
      usage: what the kernel needs of the GPU.
      log: all that the compiler said.
      compile_s: seconds that compiling took.
    """

    arch: str
    entry: str
    image: bytes = dataclasses.field(repr=False)
    usage: Usage
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
    """The version of clang, such as "19.1.7"; None if it cannot be used."""
    return None if why_unavailable() else _require()[1]


def program() -> str:
    """The compiler's path.

    Raises:
      ToolchainMissing: there is none that compiles for AMD GPUs.
    """
    return _require()[0]


def compile(kernel: Kernel) -> CodeObject:
    """Compiles a kernel of HIP; nothing is cached.

    Raises:
      CompileError: with the log, which shows the lines of the errors.
      ToolchainMissing: there is no clang that compiles for AMD GPUs.
    """
    clang, number = _require()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        root = pathlib.Path(place)
        source, out = write(kernel, root), root / "kernel.o"
        command = [clang, *_OPTIONS, f"--offload-arch={kernel.arch}", *kernel.options]
        command += ["-I", str(root), str(source), "-o", str(out)]
        ran = subprocess.run(command, capture_output=True, text=True)
        log = ran.stderr.replace(f"{root}/", "").strip()
        if ran.returncode:
            summary = f"clang {number} cannot compile kernel {kernel.entry}"
            raise CompileError(f"{summary} for {kernel.arch}", log)
        image = out.read_bytes()
    return CodeObject(
        arch=kernel.arch,
        entry=kernel.entry,
        image=image,
        usage=usage(image, kernel.entry),
        log=log,
        compile_s=time.perf_counter() - start,
    )


def write(kernel: Kernel, directory: pathlib.Path) -> pathlib.Path:
    """Writes a kernel's headers, and its source, whose path is returned."""
    for name, text in kernel.headers:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    source = directory / "kernel.hip"
    source.write_text(kernel.source)
    return source


@functools.cache
def _require() -> tuple[str, str]:
    """Path and version of a clang that compiles for AMD GPUs, or raises."""
    found: list[str] = []
    for name in _NAMES:
        path = shutil.which(name) or shutil.which(name, path=_ROCM)
        if path is None:
            continue
        try:
            said = _said(path, "--version")
            match = re.search(r"clang version ((\d+)[\d.]*)", said)
            if match and int(match[2]) >= OLDEST and _links(path):
                return path, match[1]
        except (OSError, subprocess.TimeoutExpired) as e:
            found.append(f"{name} cannot be run ({e})")
            continue
        found.append(f"{name} is {match[1] if match else 'of an unknown version'}")
    why = "; ".join(found) or "there is none"
    raise ToolchainMissing(
        f"HIP needs clang {OLDEST} or newer and lld: {why}; {_INSTALL}"
    )


def _links(clang: str) -> bool:
    """Returns whether this clang finds the linker of its code objects."""
    return shutil.which(_said(clang, "-print-prog-name=ld.lld").strip()) is not None


def _said(*command: str) -> str:
    """The output of a command that ends at once; raises if it cannot be run."""
    ran = subprocess.run(command, capture_output=True, timeout=_ANSWER_S)
    return ran.stdout.decode(errors="replace")

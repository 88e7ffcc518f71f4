"""libtracea in programs with little memory, with signals and with pipes."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys

from tracea_jax.bundle.installation import Library

# ctypes alone, as importing JAX would take seconds, and memory that counts.
_HEAD = """
import ctypes, os, resource, sys

class Device(ctypes.Structure):
    _fields_ = [("platform", ctypes.c_int32), ("ordinal", ctypes.c_int32)]

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("rank", ctypes.c_int32),
                ("dtype", ctypes.c_int32), ("device", Device)]

library = ctypes.CDLL(sys.argv[1])
library.tracea_last_error.restype = ctypes.c_char_p
CPU = Device(0, 0)
context, graph = ctypes.c_void_p(), ctypes.c_void_p()

def said(status):
    return status, library.tracea_last_error().decode()

def create(threads):
    return said(library.tracea_context_create(CPU, threads, ctypes.byref(context)))

def load(path):
    return said(library.tracea_graph_load(context, path.encode(), ctypes.byref(graph)))
"""


def run(script: str, *arguments: str | pathlib.Path) -> None:
    library = Library.installed().file
    command = [sys.executable, "-c", _HEAD + script, library, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def test_threads_that_cannot_be_had_are_an_error():
    run("""
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))  # for their stacks
status, sentence = create(4000)
assert status == 4 and "There are no 4000 threads" in sentence, (status, sentence)
assert create(2)[0] == 0
""")


def test_a_program_that_wants_signals_of_exceptions_gets_none_from_kernels():
    run("""
libm = ctypes.CDLL("libm.so.6")
libm.feenableexcept(1 | 4 | 8)  # invalid, by zero, overflow
assert create(2)[0] == 0
numbers = ctypes.c_float * 64
inf = float("inf")
x, y = numbers(*[inf, -inf] * 32), numbers(*[1.0] * 64)
out = numbers()

def tensor(array, *shape):
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    kept.append(sizes)
    return Tensor(ctypes.addressof(array), ctypes.addressof(sizes), None, 2, 0, CPU)

kept = []
lhs, rhs, o = tensor(x, 8, 8), tensor(y, 8, 8), tensor(out, 8, 8)
status = library.tracea_matmul(
    context, ctypes.byref(lhs), ctypes.byref(rhs), None, None, 0, ctypes.byref(o), None
)
assert libm.fegetexcept() == 1 | 4 | 8  # the caller's, as before
libm.fedisableexcept(1 | 4 | 8)
assert status == 0 and all(value != value for value in out)
""")


def test_weights_are_in_memory_once(mlp_bundle):
    size = 64 << 20
    file, sums = mlp_bundle / "constants.bin", mlp_bundle / "SHA256SUMS"
    with file.open("r+b") as constants:
        constants.truncate(size)  # with zeros, which nothing reads
    new = hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [
        f"{new}  constants.bin" if line.endswith("constants.bin") else line
        for line in sums.read_text().splitlines()
    ]
    sums.write_text("\n".join(lines) + "\n")
    run(
        """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

assert create(1)[0] == 0
before = resident()
assert load(sys.argv[2]) == (0, "")
grown = (resident() - before) / int(sys.argv[3])
assert 0.9 < grown < 1.5, grown
""",
        mlp_bundle,
        str(size),
    )


def test_a_pipe_in_a_bundle_is_not_waited_for(mlp_bundle):
    (mlp_bundle / "constants.bin").unlink()
    os.mkfifo(mlp_bundle / "constants.bin")
    run(
        """
assert create(1)[0] == 0
status, sentence = load(sys.argv[2])
assert status == 1 and "is no file" in sentence, (status, sentence)
""",
        mlp_bundle,
    )


def test_texts_of_errors_outlive_the_next_failures():
    """A pointer that was kept is valid, and its text the same for seven failures."""
    run("""
import threading
last = library.tracea_last_error
last.restype = ctypes.c_void_p

def fail(name):
    return library.tracea_graph_load(context, name.encode(), ctypes.byref(graph))

assert library.tracea_context_create(CPU, 1, ctypes.byref(context)) == 0
assert ctypes.string_at(last()) == b""
kept = []
for i in range(20):
    assert fail(f"missing{i}") != 0
    kept.append(last())
    assert f"missing{i}".encode() in ctypes.string_at(kept[-1])
    for back, pointer in enumerate(reversed(kept[-8:])):
        assert f"missing{i - back}".encode() in ctypes.string_at(pointer), (i, back)
assert len(set(kept)) == 8  # none is freed, and none is new for ever

others = []
def other():
    others.append(ctypes.string_at(last()))
    fail("elsewhere")
    others.append(ctypes.string_at(last()))
thread = threading.Thread(target=other)
thread.start(); thread.join()
assert others[0] == b"" and b"elsewhere" in others[1], others
assert b"missing19" in ctypes.string_at(last())

for extra in range(4):
    fail("/" + "x" * (2000 + extra) + "\u20ac" * 600)
    text = ctypes.string_at(last())
    text.decode()  # characters are whole
    assert 2040 < len(text) < 2048 and text.endswith(b"..."), len(text)
""")

"""Metadata of kernels in a code object of an AMD GPU.

An ELF file with a note in MessagePack, which lists the kernels with the registers and
memory that each needs. (LLVM, "User Guide for AMDGPU Backend", "Code Object Metadata".)
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

MACHINE = 224  # EM_AMDGPU
_METADATA = 32  # NT_AMDGPU_METADATA
_NOTE_SECTION = 7  # SHT_NOTE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources of one kernel.

    Attributes:
      registers: vector registers of each thread.
      spills: vector and scalar registers that were spilled.
      stack_bytes: scratch memory of each thread, spills included.
      smem_bytes: shared memory that the kernel declares.
      wave: threads of a wave.
    """

    registers: int
    spills: int
    stack_bytes: int
    smem_bytes: int
    wave: int


def usage(image: bytes, entry: str) -> Usage:
    """The resources of the kernel ``entry`` in a code object.

    Raises:
      ValueError: it is no code object of an AMD GPU, or has no such kernel.
    """
    kernels = {kernel[".name"]: kernel for kernel in _kernels(image)}
    if entry not in kernels:
        names = ", ".join(sorted(kernels)) or "no kernel"
        raise ValueError(f"the code object has no kernel {entry}; it has {names}")
    kernel = kernels[entry]
    return Usage(
        registers=kernel[".vgpr_count"],
        spills=kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"],
        stack_bytes=kernel[".private_segment_fixed_size"],
        smem_bytes=kernel[".group_segment_fixed_size"],
        wave=kernel[".wavefront_size"],
    )


def _kernels(image: bytes) -> list[dict[str, Any]]:
    if image[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", image, 18) != (MACHINE,):
        raise ValueError("it is no code object of an AMD GPU")
    for kind, data in _notes(image):
        if kind == _METADATA:
            return _unpacked(data, 0)[0]["amdhsa.kernels"]
    raise ValueError("the code object has no note on its kernels")


def _notes(image: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, contents) of every note of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    for section in range(table, table + size * count, size):
        kind = struct.unpack_from("<I", image, section + 4)[0]
        begin, length = struct.unpack_from("<QQ", image, section + 24)
        at = begin
        while kind == _NOTE_SECTION and at < begin + length:
            name, data, note = struct.unpack_from("<III", image, at)
            at += 12 + -(-name // 4) * 4
            yield note, image[at : at + data]
            at += -(-data // 4) * 4


def _unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """The MessagePack value that begins at a byte, and where it ends."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in _NUMBERS:
        form = _NUMBERS[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    count, kind, at = _length(data, tag, at)
    if kind is str:
        return data[at : at + count].decode(), at + count
    values = []
    for _ in range(count * (1 + (kind is dict))):
        value, at = _unpacked(data, at)
        values.append(value)
    return (
        (dict(zip(values[::2], values[1::2], strict=True)), at)
        if (kind is dict)
        else (values, at)
    )


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    **dict(zip(range(0xCC, 0xD0), (">B", ">H", ">I", ">Q"), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (">b", ">h", ">i", ">q"), strict=True)),
    0xCA: ">f",
    0xCB: ">d",
}
_LENGTHS: dict[int, tuple[type, str]] = {
    0xD9: (str, ">B"),
    0xDA: (str, ">H"),
    0xDB: (str, ">I"),
    0xDC: (list, ">H"),
    0xDD: (list, ">I"),
    0xDE: (dict, ">H"),
    0xDF: (dict, ">I"),
}


def _length(data: bytes, tag: int, at: int) -> tuple[int, type, int]:
    """Length, kind and start of the characters, items or pairs that follow."""
    if tag < 0xA0:
        return tag & 0x0F, dict if tag < 0x90 else list, at
    if tag < 0xC0:
        return tag & 0x1F, str, at
    kind, form = _LENGTHS[tag]
    return struct.unpack_from(form, data, at)[0], kind, at + struct.calcsize(form)

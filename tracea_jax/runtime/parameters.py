"""The parameters of a compiled kernel, as its cubin lists them.

A launch that passes too few parameters, or narrower ones, makes the driver read beyond
them; so ``launch`` compares what it passes with what the compiler saw. The layout of
the lists is that of ``EIATTR_KPARAM_INFO`` in the ``.nv.info`` sections, which
``cuobjdump -elf`` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tracea_jax.emit.kernel import SCALAR_BITS, Kernel, Param, Pointer, Scalar

_SIZED, _KPARAM_INFO = 0x04, 0x17
_MAP_BYTES = 128  # of a CUtensorMap


def sizes(image: bytes, entry: str) -> tuple[int, ...] | None:
    """The bytes of each parameter of a kernel; None if the image does not say."""
    try:
        for name, content in _sections(image):
            if name == f".nv.info.{entry}":
                found = dict(_parameters(content))
                return tuple(found[i] for i in range(len(found)))
    except (struct.error, ValueError, KeyError):
        pass  # another layout than the one known here
    return None


def mismatch(kernel: Kernel, image: bytes, entry: str) -> str | None:
    """Why the launch does not fit the code, as a sentence; None if it does."""
    found = sizes(image, entry)
    if found is None:
        return None
    if len(found) != len(kernel.params):
        return (
            f"{kernel.entry} takes {len(found)} parameters; the launch passes "
            f"{len(kernel.params)}"
        )
    for i, (size, param) in enumerate(zip(found, kernel.params, strict=True)):
        if size != (passed := _bytes(param)):
            return (
                f"parameter {i} of {kernel.entry} has {size} bytes; the launch passes "
                f"{param} of {passed} bytes"
            )
    return None


def _bytes(param: Param) -> int:
    if isinstance(param, Scalar):
        return SCALAR_BITS[param.dtype] // 8
    return 8 if isinstance(param, Pointer) else _MAP_BYTES


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    each, count, names = struct.unpack_from("<HHH", image, 0x3A)

    def header(i: int) -> tuple[int, int, int]:
        name, _, _, _, start, size = struct.unpack_from(
            "<IIQQQQ", image, table + i * each
        )
        return name, start, size

    _, texts, _ = header(names)
    for i in range(count):
        name, start, size = header(i)
        end = image.index(b"\0", texts + name)
        yield image[texts + name : end].decode(), image[start : start + size]


def _parameters(content: bytes) -> Iterator[tuple[int, int]]:
    """Number and bytes of each parameter in a section of attributes."""
    position = 0
    while position < len(content):
        form, attribute, value = struct.unpack_from("<BBH", content, position)
        position += 4
        if form != _SIZED:
            continue
        if attribute == _KPARAM_INFO:
            _, number, _, flags = struct.unpack_from("<IHHI", content, position)
            yield number, flags >> 18
        position += value

"""Device code without a kernel: lines that the compiler evaluates."""

from __future__ import annotations

from tracea_jax.device import NAMED
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc


def compiles_device_code(
    header: str, lines: list[str], *, change: tuple[str, str] | None = None
) -> bytes:
    """The image of a kernel that does nothing behind these lines of device code.

    Args:
      header: what the lines need.
      lines: of namespace tracea.
      change: what stands once in the header, and what is put in its place.
    """
    source = "\n".join(
        [
            f'#include "{header}"',
            "namespace tracea {",
            *lines,
            "}",
            'extern "C" __global__ void nothing() {}',
        ]
    )
    headers = dict(sources.headers(header))
    if change:
        right, wrong = change
        assert headers[header].count(right) == 1
        headers[header] = headers[header].replace(right, wrong)
    kernel = Kernel(
        entry="nothing",
        source=source,
        headers=tuple(headers.items()),
        arch=NAMED["H200"].arch,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        smem_bytes=0,
        params=(),
    )
    return nvrtc.compile(kernel).image

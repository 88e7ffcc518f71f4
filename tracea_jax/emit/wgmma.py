"""C++ wrappers of wgmma.mma_async for 16-bit operands, one generated header per shape.

The instruction names each of its N / 2 accumulator registers, so a wrapper for one N is
mechanical text; nobody should write or read 128 operands. (PTX ISA, "wgmma.mma_async".)
"""

from __future__ import annotations

import dataclasses

PTX_TYPE = {"bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wgmma:
    """wgmma.m64nNk16 of two shared-memory operands into f32.

    Attributes:
      n: columns of B, a multiple of 8 up to 256.
      dtype: operand type, "bfloat16" or "float16".
    """

    n: int
    dtype: str

    def __post_init__(self) -> None:
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(
                f"n={self.n} must be a multiple of 8 from 8 to 256 for wgmma"
            )
        if self.dtype not in PTX_TYPE:
            raise ValueError(
                f"dtype={self.dtype!r} must be one of {', '.join(PTX_TYPE)}"
            )

    @property
    def accumulators(self) -> int:
        """f32 registers of each of the 128 threads: 64 n / 128."""
        return self.n // 2

    @property
    def type_name(self) -> str:
        """The C++ template, over the majorness of A and of B (0: k, 1: m or n)."""
        return f"WgmmaM64N{self.n}K16{PTX_TYPE[self.dtype].capitalize()}"

    @property
    def header_name(self) -> str:
        """The name by which a translation unit includes ``header``."""
        return f"wgmma_m64n{self.n}k16_{PTX_TYPE[self.dtype]}.cuh"

    @property
    def header(self) -> str:
        """The text of the header."""
        count = self.accumulators
        ptx = PTX_TYPE[self.dtype]
        registers = _wrapped([f"%{i}" for i in range(count)], '        "', ', "')
        operands = _wrapped([f'"+f"(d[{i}])' for i in range(count)], "        ", ",")
        return f"""\
// Generated: wgmma.m64n{self.n}k16, {ptx} operands in shared memory, f32 accumulators.
#pragma once

#include "tile/common.cuh"

namespace tracea {{

// d = a b + (accumulate ? d : 0); kMajor 0: rows run along k, 1: along m or n.
template <int kMajorA, int kMajorB>
struct {self.type_name} {{
  static constexpr int kN = {self.n}, kAccumulators = {count};

  TRACEA_DEVICE static void mma(float (&d)[{count}], u64 a, u64 b, bool accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{ptx}.{ptx} {{"
{registers[:-3]}"
        "}}, %{count}, %{count + 1}, p, 1, 1, %{count + 3}, %{count + 4};\\n"
        "}}"
        :
{operands[:-1]}
        : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)), "n"(kMajorA), "n"(kMajorB)
        : "memory");
  }}
}};

}}  // namespace tracea
"""


def _wrapped(items: list[str], start: str, end: str) -> str:
    """Items joined by commas, eight to a line that opens and closes as given."""
    lines = (items[i : i + 8] for i in range(0, len(items), 8))
    return "\n".join(start + ", ".join(line) + end for line in lines)

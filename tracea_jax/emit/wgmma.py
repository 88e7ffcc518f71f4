"""C++ wrappers of wgmma.mma_async, one generated header for each shape and dtypes.

The instruction names each of its N / 2 accumulator registers, so a wrapper for one N is
mechanical text; nobody should write or read 128 operands. (PTX ISA, "wgmma.mma_async".)
"""

from __future__ import annotations

import dataclasses

# Types of the operands, alike or, of 8 bits, in any combination.
PTX_TYPE = {
    "bfloat16": "bf16",
    "float16": "f16",
    "tfloat32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
STEP_BYTES = 32  # of k that one instruction contracts, whatever the type
FRAGMENT_WORDS = 4  # of each thread, where the left operand is in registers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wgmma:
    """wgmma.m64nNkK into f32, B in shared memory and A there or in registers.

    Attributes:
      n: columns of B, a multiple of 8 up to 256.
      lhs, rhs: operand types, keys of ``PTX_TYPE``; equal unless both have 8 bits.
      lhs_in_registers: whether A is a fragment: 32 bytes of k, not 8-bit elements.
    """

    n: int
    lhs: str
    rhs: str
    lhs_in_registers: bool = False

    def __post_init__(self) -> None:
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(
                f"n={self.n} must be a multiple of 8 from 8 to 256 for wgmma"
            )
        for side, dtype in (("lhs", self.lhs), ("rhs", self.rhs)):
            if dtype not in PTX_TYPE:
                raise ValueError(
                    f"{side}={dtype!r} must be one of {', '.join(PTX_TYPE)}"
                )
        if self.lhs != self.rhs and {_BYTES[t] for t in self._types} != {1}:
            raise ValueError(
                f"lhs={self.lhs!r} and rhs={self.rhs!r} must be equal or have 8 bits"
            )
        if self.lhs_in_registers and _BYTES[self._types[0]] == 1:
            raise ValueError(f"lhs={self.lhs!r} must not come from registers")

    @property
    def _types(self) -> tuple[str, str]:
        return PTX_TYPE[self.lhs], PTX_TYPE[self.rhs]

    @property
    def k(self) -> int:
        """Elements contracted."""
        return STEP_BYTES // _BYTES[self._types[0]]

    @property
    def accumulators(self) -> int:
        """f32 registers of each of the 128 threads: 64 n / 128."""
        return self.n // 2

    @property
    def takes_mn_major(self) -> bool:
        """Returns whether operands may be stored along m or n."""
        return _BYTES[self._types[0]] == 2

    @property
    def type_name(self) -> str:
        """The C++ template, over the majorness of A and of B (0: k, 1: m or n)."""
        types = "".join(t.capitalize() for t in dict.fromkeys(self._types))
        source = "Fragment" if self.lhs_in_registers else ""
        return f"WgmmaM64N{self.n}K{self.k}{types}{source}"

    @property
    def header_name(self) -> str:
        """The name by which a translation unit includes ``header``."""
        types = "_".join(dict.fromkeys(self._types))
        source = "_fragment" if self.lhs_in_registers else ""
        return f"wgmma_m64n{self.n}k{self.k}_{types}{source}.cuh"

    @property
    def header(self) -> str:
        """The text of the header."""
        count = self.accumulators
        lhs, rhs = self._types
        left = FRAGMENT_WORDS if self.lhs_in_registers else 1
        b, predicate = count + left, count + left + 1
        registers = _wrapped([f"%{i}" for i in range(count)], '        "', ', "')
        operands = _wrapped([f'"+f"(d[{i}])' for i in range(count)], "        ", ",")
        where, a_type, a, a_operands = (
            "in shared memory",
            "u64 a",
            f"%{count}",
            '"l"(a)',
        )
        if self.lhs_in_registers:
            where, a_type = "in registers and shared memory", f"const u32 (&a)[{left}]"
            a = f"{{{', '.join(f'%{count + i}' for i in range(left))}}}"
            a_operands = ", ".join(f'"r"(a[{i}])' for i in range(left))
        told = [
            f"kMajor{side}"
            for side, is_free in (("A", not self.lhs_in_registers), ("B", True))
            if is_free and self.takes_mn_major
        ]
        majors = "".join(f", %{predicate + 1 + i}" for i in range(len(told)))
        major_operands = "".join(f', "n"({name})' for name in told)
        fixed = [name for name in ("kMajorA", "kMajorB") if name not in told]
        check = ""
        if fixed:
            check = (
                f"    static_assert({' && '.join(f'{name} == 0' for name in fixed)},\n"
                '                  "rows must run along k");\n'
            )
        return f"""\
// Generated: wgmma.m64n{self.n}k{self.k}, {lhs} and {rhs} operands {where},
// f32 accumulators.
#pragma once

#include "tile/common.cuh"

namespace tracea {{

// d = a b + (accumulate ? d : 0); kMajor 0: rows run along k, 1: along m or n.
template <int kMajorA, int kMajorB>
struct {self.type_name} {{
  static constexpr int kN = {self.n}, kAccumulators = {count};

  TRACEA_DEVICE static void mma(float (&d)[{count}], {a_type}, u64 b,
                                bool accumulate) {{
{check}    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{predicate}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.f32.{lhs}.{rhs} {{"
{registers[:-3]}"
        "}}, {a}, %{b}, p, 1, 1{majors};\\n"
        "}}"
        :
{operands[:-1]}
        : {a_operands}, "l"(b), "r"(static_cast<u32>(accumulate)){major_operands}
        : "memory");
  }}
}};

}}  // namespace tracea
"""


def _wrapped(items: list[str], start: str, end: str) -> str:
    """Items joined by commas, eight to a line that opens and closes as given."""
    lines = (items[i : i + 8] for i in range(0, len(items), 8))
    return "\n".join(start + ", ".join(line) + end for line in lines)

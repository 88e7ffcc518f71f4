"""A claim about a device function, and the kernel that compiles if claims hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel

_PRELUDE = """\
using tracea::u32;

// The state of a role that has really advanced k times.
template <int Stages>
TRACEA_HOST_DEVICE constexpr tracea::PipelineState<Stages> advanced(u32 k) {
  tracea::PipelineState<Stages> state;
  for (u32 step = 0; step < k; ++step) state.advance();
  return state;
}

// The same, a few steps of which were another's.
template <int Stages>
TRACEA_HOST_DEVICE constexpr tracea::PipelineState<Stages> skipped(u32 k) {
  const u32 passed = k * 2 / 3;
  tracea::PipelineState<Stages> state = advanced<Stages>(k - passed);
  state.skip(static_cast<int>(passed));
  return state;
}

template <class Case>
TRACEA_HOST_DEVICE constexpr int first_difference() {
  int n = 0;
  for (u32 expected : Case::kExpected) {
    if (Case::value(n) != expected) return n;
    ++n;
  }
  return -1;
}

template <class Case, int N>
struct Agrees {
  static_assert(N == -1, "device code and the Python algebra differ at n = N");
};
"""

_ENTRY = """\
#if defined(__CUDACC__)
extern "C" __global__ void parity() {}
#endif
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The claim that ``expression`` is ``expected[n]`` for every n.

    Attributes:
      name: a C++ identifier.
      expression: C++ text of the unsigned variable ``n``.
      expected: values in 0 .. 2^32 - 1, by n.
    """

    name: str
    expression: str
    expected: tuple[int, ...]

    def cxx(self) -> str:
        """A struct of the expected values and the expression, and its assertion."""
        values = ", ".join(f"{value}u" for value in self.expected)
        return (
            f"struct {self.name} {{\n"
            f"  static constexpr u32 kExpected[] = {{{values}}};\n"
            f"  TRACEA_HOST_DEVICE static constexpr u32 value(u32 n) {{\n"
            f"    return {self.expression};\n"
            f"  }}\n"
            f"}};\n"
            f"template struct Agrees<{self.name}, first_difference<{self.name}>()>;\n"
        )


def source(headers: Iterable[str], claims: Iterable[Case]) -> str:
    """The translation unit that compiles if and only if all claims hold."""
    includes = "".join(f'#include "{name}"\n' for name in headers)
    body = "\n".join(case.cxx() for case in claims)
    return f"// Device headers agree with the Python algebra.\n{includes}\n" + (
        f"{_PRELUDE}\n{body}\n{_ENTRY}"
    )


def kernel(headers: Sequence[str], claims: Iterable[Case], arch: str) -> Kernel:
    """The same as a kernel that does nothing: compile it, there is no need to launch.

    Args:
      headers: what the claims are about.
      claims: what has to hold.
      arch: target architecture.
    """
    return Kernel(
        entry="parity",
        source=source(headers, claims),
        headers=sources.headers(*headers),
        arch=arch,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        smem_bytes=0,
        params=(),
    )

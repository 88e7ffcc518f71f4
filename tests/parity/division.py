"""Claims about divisions by multiplying."""

from __future__ import annotations

from collections.abc import Iterator

from parity.proof import Case
from tracea_jax.ir.fast_divide import FastDivisor


def divisor_cases() -> Iterator[Case]:
    """Dividends around multiples of the divisor, up to the largest."""
    for divisor in (1, 3, 56, 2**16 + 1, 2**31 - 1):
        fast, most = FastDivisor.of(divisor), 2**31 - 1
        multiple = most // divisor * divisor
        fields = f"{divisor}u, {fast.multiplier}u, {fast.shift}"
        yield Case(
            name=f"divide_{divisor}",
            expression=f"tracea::FastDivisor{{{fields}}}.divide({multiple}u - n)",
            expected=tuple(fast.divide(multiple - n) for n in range(64)),
        )

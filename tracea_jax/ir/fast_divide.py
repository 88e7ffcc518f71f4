"""Division by a number that is known before, as one multiplication and one shift.

    n // d == (n * multiplier) >> shift      0 <= n < 2^31, 1 <= d < 2^31

With 2^s the power of two not below d, shift is 31 + s, multiplier ceil(2^shift / d).
The multiplier has 32 bits, and exceeds 2^shift / d by less than 1 <= 2^s / d, so that
the product is too large by less than 2^shift / d: never enough to reach the next
quotient. Device code has the same in kernels/cuda/tile/fast_divide.cuh.
"""

from __future__ import annotations

import dataclasses

_DIVIDEND_BITS = 31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FastDivisor:
    """A divisor as device code needs it; ``divide`` is what it computes."""

    divisor: int
    multiplier: int
    shift: int

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        """Raises ValueError for a divisor that is not from 1 to 2^31 - 1."""
        if not 1 <= divisor < 2**_DIVIDEND_BITS:
            raise ValueError(f"{divisor=} must be from 1 to 2^{_DIVIDEND_BITS} - 1")
        shift = _DIVIDEND_BITS + (divisor - 1).bit_length()
        return cls(divisor=divisor, multiplier=-(-(2**shift) // divisor), shift=shift)

    def divide(self, n: int) -> int:
        return n * self.multiplier >> self.shift

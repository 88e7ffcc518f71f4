"""XOR swizzles of shared-memory byte addresses.

    swizzle(a) = a ^ ((a >> shift) & ((2^bits - 1) << base))

    address bits  .. [ base+shift+bits-1 .. base+shift ] .. [ base+bits-1 .. base ] ..
                              row bits         --xor-->        chunk in the row

Rows of a tile start in the same bank whenever their stride is a multiple of 128 bytes;
XORing row bits onto the chunk index spreads a column of 16-byte chunks over all banks.
The algebra is that of kernels/cuda/tile/swizzle.cuh.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.ir.address import Index

CHUNK_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Swizzle:
    """``bits`` bits from ``base + shift`` up are XORed onto those from ``base`` up.

    Apply the same swizzle to every write and every read of a buffer. Never combine one
    with row padding: 144-byte rows are free of conflicts plain and 8-way with 3 bits.

    Attributes:
      bits: number of bits changed; 0 is the identity.
      base: lowest bit changed, so 2^base bytes stay together (4: chunks of 16 bytes).
      shift: distance from the bits changed to the bits that change them.
    """

    bits: int
    base: int = 4
    shift: int = 3

    def __post_init__(self) -> None:
        if min(self.bits, self.base, self.shift) < 0:
            raise ValueError(
                f"{self} has a negative part; bits, base and shift must be at least 0"
            )
        if self.bits + self.base + self.shift > 31:
            raise ValueError(
                f"{self} reaches past bit 31; bits + base + shift must be at most 31"
            )

    def __call__(self, byte: Index) -> Index:
        """The swizzled address: of an integer, or as an expression of an expression."""
        return byte ^ ((byte >> self.shift) & self.mask)

    @property
    def mask(self) -> int:
        """The address bits that may change."""
        return ((1 << self.bits) - 1) << self.base

    @property
    def is_bijective(self) -> bool:
        """True if no two addresses collide: any shift but 0 (which clears bits)."""
        return self.bits == 0 or self.shift >= 1

    @property
    def is_involution(self) -> bool:
        """True if applying it twice changes nothing: changing bits stay unchanged."""
        return self.bits == 0 or self.shift >= self.bits

    @property
    def period_bytes(self) -> int:
        """Alignment at which a buffer may be addressed from its own start.

        The least power of two P, at least one chunk, with
        swizzle(a + P) = swizzle(a) + P for every a.
        """
        return 1 << (self.base + self.shift + self.bits if self.bits else self.base)

    def cxx(self) -> str:
        """The C++ type, such as ``tracea::Swizzle<3, 4, 3>``.

        Raises:
          ValueError: it is not an involution; the device header takes no other.
        """
        if not self.is_involution or self.shift < 1:
            raise ValueError(
                f"{self} is not its own inverse; device code needs "
                "shift >= max(bits, 1)"
            )
        return f"tracea::Swizzle<{self.bits}, {self.base}, {self.shift}>"

    def tensor_map_mode(self) -> int:
        """The ``CUtensorMapSwizzle`` value: 0 none, 1, 2, 3 for 32, 64, 128 bytes.

        Raises:
          ValueError: tensor maps have no such mode.
        """
        if self not in TENSOR_MAP_MODES:
            raise ValueError(
                f"{self} is no tensor map mode; use one of "
                f"{', '.join(map(str, TENSOR_MAP_MODES))}"
            )
        return TENSOR_MAP_MODES.index(self)

    def __str__(self) -> str:
        return f"Swizzle({self.bits}, {self.base}, {self.shift})"


NO_SWIZZLE = Swizzle(0)
SWIZZLE_32B = Swizzle(1)
SWIZZLE_64B = Swizzle(2)
SWIZZLE_128B = Swizzle(3)
TENSOR_MAP_MODES = (NO_SWIZZLE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B)


def conflict_free_swizzle(row_bytes: int) -> Swizzle:
    """The swizzle that makes an 8-row column of 16-byte chunks free of bank conflicts.

    With row_bytes = 16 * 2^z * odd: bits = min(z, 3), shift = max(z, 3). Eight rows
    start in 2^(3 - bits) different chunks of 128 bytes; the address bits that tell
    apart the rows which share one are those from ``base + shift`` up.

    ==================  ====  =====  =======================================
    row_bytes           bits  shift  worst degree without it
    ==================  ====  =====  =======================================
    16 * odd            0     3      1: such rows are a padding in themselves
    32 * odd            1     3      2
    64 * odd            2     3      4
    128 * odd           3     3      8
    2^z * 16 * odd      3     z      8
    ==================  ====  =====  =======================================

    Args:
      row_bytes: distance between rows, a positive multiple of 16.

    Raises:
      ValueError: ``row_bytes`` is not such a multiple.
    """
    if row_bytes <= 0 or row_bytes % CHUNK_BYTES:
        raise ValueError(f"{row_bytes=} must be a positive multiple of {CHUNK_BYTES}")
    chunks = row_bytes // CHUNK_BYTES
    zeros = (chunks & -chunks).bit_length() - 1
    return Swizzle(bits=min(zeros, 3), shift=max(zeros, 3))

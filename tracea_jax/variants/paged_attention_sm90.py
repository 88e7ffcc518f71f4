"""paged_attention_sm90: attention_decode_sm90, of keys and values that lie in pages.

What both refuse and choose is in ``attention_decode_sm90``; here is what pages add.
Caller: the op's record (``ops.paged_attention.op``).
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_decode_sm90 as emit
from tracea_jax.emit.attention_decode_sm90 import AttentionDecodeSm90Config, Pages
from tracea_jax.emit.kernel import MOST_BYTES
from tracea_jax.problem import PagedAttentionProblem
from tracea_jax.variants.attention_decode_sm90 import ATTENTION_DECODE_SM90, in_steps
from tracea_jax.variants.base import Call
from tracea_jax.variants.space import Space

_SIZES = (8, 16, 32, 64, 128)  # of pages, and multiples of the last


@dataclasses.dataclass(frozen=True, slots=True)
class PagedAttentionSm90:
    """The variant paged_attention_sm90; see ``variants.base.Variant``."""

    name: str = "paged_attention_sm90"
    config_type: type = AttentionDecodeSm90Config
    sources: tuple[str, ...] = ATTENTION_DECODE_SM90.sources

    def why_not(self, problem: PagedAttentionProblem, device: Device) -> str | None:
        p = problem
        if reason := ATTENTION_DECODE_SM90.why_not(p.gathered, device):
            return reason
        if not p.pages:
            return "there are no pages"
        if p.pool_bytes > MOST_BYTES:
            return f"{p.pool_bytes} bytes of pages; it reaches up to {MOST_BYTES}"
        if p.page_size not in _SIZES and p.page_size % _SIZES[-1]:
            sizes = ", ".join(map(str, _SIZES))
            return (
                f"pages of {p.page_size} keys; it takes {sizes} and multiples of "
                f"{_SIZES[-1]}"
            )
        return None

    def check(
        self,
        problem: PagedAttentionProblem,
        config: AttentionDecodeSm90Config,
        device: Device,
    ) -> None:
        ATTENTION_DECODE_SM90.check(problem.gathered, config, device)

    def space(self, problem: PagedAttentionProblem, device: Device) -> Space:
        return ATTENTION_DECODE_SM90.space(problem.gathered, device)

    def heuristic(
        self, problem: PagedAttentionProblem, device: Device
    ) -> AttentionDecodeSm90Config:
        config = ATTENTION_DECODE_SM90.heuristic(problem.gathered, device)
        return dataclasses.replace(config, persistent=False)  # not measured with pages

    def expects_to_win(self, problem: PagedAttentionProblem, device: Device) -> bool:
        return True  # XLA reads and writes all pages of all sequences to gather them

    def call(
        self,
        problem: PagedAttentionProblem,
        config: AttentionDecodeSm90Config,
        device: Device,
    ) -> Call:
        assert isinstance(device, CudaDevice)
        pages = Pages(size=problem.page_size, count=problem.pages)
        operands = ("q", "k_pages", "v_pages", "lengths", "page_indices")
        kernels = emit.kernels(problem.gathered, config, device, pages)
        return in_steps(problem.gathered, config, kernels, operands)


PAGED_ATTENTION_SM90 = PagedAttentionSm90()

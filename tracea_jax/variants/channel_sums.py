"""channel_sums_cuda: both sums of each channel in one pass over the memory.

Blocks leave partial sums of their rows, which XLA adds in the same kernel as what the
program computes of the sums. XLA takes a pass for each sum where it does not see that
two can share one, and few multiprocessors where there are few rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import channel_sums as emit
from tracea_jax.emit.epilogue import CXX_TYPE
from tracea_jax.emit.kernel import MOST_BLOCKS_Y
from tracea_jax.problem import ChannelSumsProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.space import Space
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps

_BLOCKS = (2, 4, 8)
_UNROLL = (2, 4, 8)
_MOST = 2**31 - 1
_FEWEST_ROWS = 128  # XLA's blocks have as many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSumsConfig:
    """Blocks of a multiprocessor, and rows of a thread whose loads are in flight."""

    blocks: int
    unroll: int

    def __str__(self) -> str:
        return f"{self.blocks}x{self.unroll}"


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelSumsCuda:
    """The variant channel_sums_cuda; see ``variants.base.Variant``."""

    name: str = "channel_sums_cuda"
    config_type: type = ChannelSumsConfig
    sources: tuple[str, ...] = ("cuda/channel_sums.cuh",)

    def why_not(self, problem: ChannelSumsProblem, device: Device) -> str | None:
        p = problem
        if why := next(refused_device(device), None):
            return why
        assert isinstance(device, CudaDevice)
        if p.dtype not in CXX_TYPE:
            return f"entries of dtype {p.dtype}; it takes {', '.join(CXX_TYPE)}"
        if p.rows == 0 or p.channels == 0:
            return "the arrays are empty"
        if p.channels % emit.pack(p.dtype):
            return (
                f"{p.channels} channels; they must be a multiple of "
                f"{emit.pack(p.dtype)}, which are 16 bytes"
            )
        if p.rows > _MOST - device.sm_count * max(_BLOCKS) * emit.THREADS * max(
            _UNROLL
        ):
            return f"{p.rows} rows are more than 32 bits count"
        if (columns := emit.columns(p)) > MOST_BLOCKS_Y:
            return (
                f"{p.channels} channels take {columns} blocks side by side; a grid has "
                f"{MOST_BLOCKS_Y}"
            )
        return None

    def check(
        self, problem: ChannelSumsProblem, config: ChannelSumsConfig, device: Device
    ) -> None:
        for name, allowed in (("blocks", _BLOCKS), ("unroll", _UNROLL)):
            if (value := getattr(config, name)) not in allowed:
                raise ValueError(
                    f"{name}={value!r} must be one of {', '.join(map(str, allowed))}"
                )

    def space(self, problem: ChannelSumsProblem, device: Device) -> Space:
        return Space.of(
            *(
                ChannelSumsConfig(blocks=blocks, unroll=unroll)
                for blocks, unroll in itertools.product(_BLOCKS, _UNROLL)
            )
        )

    def heuristic(
        self, problem: ChannelSumsProblem, device: Device
    ) -> ChannelSumsConfig:
        # A gradient's threads have too many registers for more blocks at once.
        return ChannelSumsConfig(blocks=2 if problem.is_gradient else 4, unroll=4)

    def expects_to_win(self, problem: ChannelSumsProblem, device: Device) -> bool:
        is_hopper = isinstance(device, CudaDevice) and device.capability == (9, 0)
        return is_hopper and problem.rows >= _FEWEST_ROWS

    def call(
        self, problem: ChannelSumsProblem, config: ChannelSumsConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        how = {"blocks": config.blocks, "unroll": config.unroll}
        count = emit.places(problem, device, **how).blocks
        parts = Buffer(
            name="parts", shape=(count, 2, problem.channels), dtype="float32"
        )
        kept = ("dz",) * problem.keeps
        return Steps(
            operands=problem.operands,
            results=("first", "second", *kept),
            scratch=(parts,),
            steps=(
                Launch(
                    name="rows",
                    kernel=emit.kernel(problem, device, **how),
                    reads=problem.operands,
                    writes=(parts.name, *kept),
                ),
                Expression(
                    name="sum",
                    function=_both,
                    reads=(parts.name,),
                    writes=("first", "second"),
                ),
            ),
        )


def _both(module: Any, parts: Any) -> Any:
    """Both sums of each channel."""
    sums = module.sum(parts, 0)
    return sums[0], sums[1]


CHANNEL_SUMS_CUDA = ChannelSumsCuda()

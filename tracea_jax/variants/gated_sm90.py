"""gated_sm90: both products of a gated product in one Hopper kernel.

    y = activation(A @ G) * (A @ U)

The kernel is gemm_sm90 for the product with [G, U]. Each tile takes half of its columns
from G and half from U: A is read once, and no product is written unless it is a result.
Configs, space and model are those of gemm_sm90 for a product of 2 n columns. Running
the two products apart is ``gated``. Caller: the op's record (``ops.gated_matmul.op``).
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit import gemm_sm90_kernel
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import GatedMatmulProblem, GemmProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.gated import gate_epilogue, products
from tracea_jax.variants.gemm_sm90 import GEMM_SM90, choose, space_of
from tracea_jax.variants.space import Columns, Space

TILE_N = (128, 256)  # whole slabs of 64 columns of G and of U


def both(problem: GatedMatmulProblem) -> GemmProblem:
    """The product with [G, U], with the activation of the product with G."""
    gate, _ = products(problem, fused=False)
    step = gate_epilogue(problem.activation, problem.save_products, fused=False)
    return dataclasses.replace(gate, n=2 * problem.n, epilogue=step)


def _searched(problem: GatedMatmulProblem) -> GemmProblem:
    """The product with [G, U], widened to the columns of the narrowest tile."""
    seen = both(problem)
    return dataclasses.replace(seen, n=max(seen.n, TILE_N[0]))


@dataclasses.dataclass(frozen=True, slots=True)
class GatedSm90:
    """The variant gated_sm90; for its methods see ``variants.base.Variant``."""

    name: str = "gated_sm90"
    config_type: type = GemmSm90Config
    sources: tuple[str, ...] = GEMM_SM90.sources

    def why_not(self, problem: GatedMatmulProblem, device: Device) -> str | None:
        one, _ = products(problem, fused=False)
        if reason := GEMM_SM90.why_not(one, device):
            return reason
        if emit.is_swapped(one):
            return (
                "operands of dtype float32 in layout nn are multiplied as the "
                "transposed product, which cannot be gated; use layout nt"
            )
        return None

    def check(
        self, problem: GatedMatmulProblem, config: GemmSm90Config, device: Device
    ) -> None:
        if config.tile_n not in TILE_N:
            listed = " or ".join(map(str, TILE_N))
            raise ValueError(
                f"tile_n={config.tile_n!r} must be {listed}: half of it for each weight"
            )
        GEMM_SM90.check(both(problem), config, device)

    def space(self, problem: GatedMatmulProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return space_of(_searched(problem), device, tile_n=TILE_N)

    def described(
        self, problem: GatedMatmulProblem, columns: Columns, device: Device
    ) -> Space:
        return GEMM_SM90.described(_searched(problem), columns, device)

    def heuristic(self, problem: GatedMatmulProblem, device: Device) -> GemmSm90Config:
        assert isinstance(device, CudaDevice)
        return choose(_searched(problem), device, tile_n=TILE_N)

    def expects_to_win(self, problem: GatedMatmulProblem, device: Device) -> bool:
        return problem.flops >= 2**33  # XLA reads and writes both products once more

    def call(
        self, problem: GatedMatmulProblem, config: GemmSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return gemm_sm90_kernel.kernel(both(problem), config, device, gated=True)


GATED_SM90 = GatedSm90()

"""gated_fused and gated_unfused: a gated product on our matrix product kernels.

    y = activation(A @ G) * (A @ U)

Each variant runs two problems of ``matmul``. Unfused, the product with G applies the
activation, and XLA multiplies both results. Fused, A @ U is computed first, and the
epilogue of the product with G multiplies with it as the residual: y is written once,
and only A @ U is read again. The configs here have no fields: each product is planned
as a matmul problem with its own tuned answer, and a tuning of the gated problem tunes
its products first. One kernel for both products is ``gated_sm90``. Callers: the op's
record (``ops.gated_matmul.op``), its primitive, and ``gated_sm90``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import Device
from tracea_jax.problem import Epilogue, GatedMatmulProblem, GemmProblem
from tracea_jax.typing import Activation
from tracea_jax.variants.base import Call, Inline
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED, GEMM_SM90_SPLIT
from tracea_jax.variants.space import Space

PRODUCT_FIELDS = tuple(
    f.name for f in dataclasses.fields(GemmProblem) if f.name != "epilogue"
)  # the fields that a gated problem shares with its products

_KERNELS = (GEMM_SM90, GEMM_SM90_PADDED, GEMM_SM90_SPLIT, GEMM_CPU)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedConfig:
    """No fields: each product has the config of its own problem."""

    def __str__(self) -> str:
        return "-"


def gate_epilogue(
    activation: Activation, save_products: bool, *, fused: bool
) -> Epilogue:
    """The epilogue of the product with G."""
    return Epilogue(
        activation=activation,
        residual=fused,
        residual_op="multiply" if fused else "add",
        save_preactivation=save_products,
    )


def products(
    problem: GatedMatmulProblem, *, fused: bool
) -> tuple[GemmProblem, GemmProblem]:
    """The products with U and with G, in the order in which they run."""
    fields = {name: getattr(problem, name) for name in PRODUCT_FIELDS}
    epilogue = gate_epilogue(problem.activation, problem.save_products, fused=fused)
    return GemmProblem(**fields), GemmProblem(**fields, epilogue=epilogue)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """A variant that runs two products; for its methods see ``variants.base``.

    Attributes:
      fused: whether the epilogue of the product with G multiplies with A @ U.
    """

    name: str
    fused: bool
    config_type: type = GatedConfig
    implementation: str | None = "tracea"
    sources: tuple[str, ...] = tuple(s for v in _KERNELS for s in v.sources)

    def why_not(self, problem: GatedMatmulProblem, device: Device) -> str | None:
        for product in products(problem, fused=self.fused):
            reasons = {v.name: v.why_not(product, device) for v in _KERNELS}
            if None not in reasons.values():
                return "; ".join(f"{name}: {why}" for name, why in reasons.items())
        return None

    def parts(self, problem: GatedMatmulProblem) -> tuple[GemmProblem, ...]:
        return products(problem, fused=self.fused)

    def check(
        self, problem: GatedMatmulProblem, config: GatedConfig, device: Device
    ) -> None:
        return None

    def space(self, problem: GatedMatmulProblem, device: Device) -> Space:
        return Space.of(GatedConfig())

    def heuristic(self, problem: GatedMatmulProblem, device: Device) -> GatedConfig:
        return GatedConfig()

    def expects_to_win(self, problem: GatedMatmulProblem, device: Device) -> bool:
        # The product with an epilogue decides: it saves XLA a pass over the output.
        _, gate = products(problem, fused=self.fused)
        return any(
            v.expects_to_win(gate, device)
            for v in _KERNELS
            if v.why_not(gate, device) is None
        )

    def doubt(self, problem: GatedMatmulProblem, device: Device) -> str | None:
        _, gate = products(problem, fused=self.fused)
        if GEMM_CPU.why_not(gate, device) is None:
            return GEMM_CPU.doubt(gate, device)
        return None

    def call(
        self, problem: GatedMatmulProblem, config: GatedConfig, device: Device
    ) -> Call:
        return Inline(rule="fused" if self.fused else "unfused")


GATED_FUSED = Gated(name="gated_fused", fused=True)
GATED_UNFUSED = Gated(name="gated_unfused", fused=False)

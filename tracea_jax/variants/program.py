"""spliced: a whole program with its sites on our ops, but for some that are left.

What "xla" is for one product, the program as the user wrote it is here: it is the
config that leaves every op. Caller: the record of the op ``program``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax import catalogue
from tracea_jax.device import Device
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.variants.base import Call, Inline
from tracea_jax.variants.space import Space


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """Which sites run as they are written.

    Attributes:
      without: sorted; names of ops, and problems as text: sites that ask one of these
        are left.
    """

    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"without {', '.join(self.without)}" if self.without else "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Spliced:
    """The program on our ops; what the sites run is each site's own answer."""

    name: str = "spliced"
    config_type: type = ProgramConfig

    @property
    def sources(self) -> tuple[str, ...]:
        """Those of every kernel: a race is over when any of them changes."""
        every = {s for op in catalogue.ops() for v in op.variants for s in v.sources}
        return tuple(sorted(every))

    def why_not(self, problem: ProgramProblem, device: Device) -> str | None:
        return None

    def check(
        self, problem: ProgramProblem, config: ProgramConfig, device: Device
    ) -> None:
        if tuple(sorted(set(config.without))) != config.without:
            raise ValueError(f"without={config.without} must be sorted")

    def space(self, problem: ProgramProblem, device: Device) -> Space:
        return Space.of(ProgramConfig())

    def heuristic(self, problem: ProgramProblem, device: Device) -> ProgramConfig:
        return ProgramConfig()

    def expects_to_win(self, problem: ProgramProblem, device: Device) -> bool:
        return True

    def call(
        self, problem: ProgramProblem, config: ProgramConfig, device: Device
    ) -> Call:
        return Inline()


SPLICED = Spliced()

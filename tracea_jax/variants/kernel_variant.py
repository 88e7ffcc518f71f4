"""A variant of kernels for NVIDIA GPUs as a value: what is its own, told by functions.

What such variants have in common is said here once: the first reason refuses, a config
is legal by choices, ranges and rules, and the default is the first of those that are
ranked. Callers: the variants of convolutions on GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tracea_jax.device import CudaDevice, Device
from tracea_jax.problem import Problem
from tracea_jax.variants.base import Call
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_ranges,
    check_rules,
)

P = TypeVar("P", bound=Problem)
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KernelVariant(Generic[P, C]):
    """A variant whose configs are ranked; see ``variants.base.Variant``.

    Attributes:
      name, config_type, sources: of the variant.
      reasons: (problem, device) -> why it cannot serve the problem, as sentences.
      choices, ranges: values that fields of a config may have.
      rules: which of these configs are legal.
      configs: (problem, device) -> the legal configs worth measuring.
      rank: (problem, device, count) -> so many of them, the likely fastest first.
      wins: (problem, device) -> whether the first of them is expected to beat XLA.
      calls: (problem, config, device) -> what the config stands for.
    """

    name: str
    config_type: type[C]
    sources: tuple[str, ...]
    reasons: Callable[[P, Device], Iterator[str]]
    choices: Mapping[str, Sequence[Any]]
    ranges: Mapping[str, tuple[int, int]] = dataclasses.field(
        default_factory=dict[str, tuple[int, int]]
    )
    rules: tuple[Rule, ...]
    configs: Callable[[P, CudaDevice], Space]
    rank: Callable[[P, CudaDevice, int], tuple[C, ...]]
    wins: Callable[[P, Device], bool]
    calls: Callable[[P, C, CudaDevice], Call]

    def __repr__(self) -> str:
        return f"KernelVariant({self.name})"

    def why_not(self, problem: P, device: Device) -> str | None:
        return next(self.reasons(problem, device), None)

    def check(self, problem: P, config: C, device: Device) -> None:
        check_choices(config, self.choices)
        check_ranges(config, self.ranges)
        check_rules(self.rules, problem, config, device)

    def space(self, problem: P, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return self.configs(problem, device)

    def heuristic(self, problem: P, device: Device) -> C:
        return self.likely(problem, device, 1)[0]

    def likely(self, problem: P, device: Device, count: int) -> tuple[C, ...]:
        """So many legal configs, the likely fastest first."""
        assert isinstance(device, CudaDevice)
        return self.rank(problem, device, count)

    def expects_to_win(self, problem: P, device: Device) -> bool:
        return self.wins(problem, device)

    def call(self, problem: P, config: C, device: Device) -> Call:
        assert isinstance(device, CudaDevice)
        return self.calls(problem, config, device)

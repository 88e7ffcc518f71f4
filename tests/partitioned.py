"""Programs whose arrays the compiler partitions, with our kernels and without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from device_work import Measured, measured
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tracea_jax as tracea
from tracea_jax.ops.common import partition


def mesh(*sizes: int, names: str = "xyz") -> Mesh:
    """The first devices as a mesh with automatic axes."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]), (AxisType.Auto,) * len(sizes))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as it runs.

    Attributes:
      results: of the call.
      work: of one device.
      decisions: how calls were split.
    """

    results: Any
    work: Measured
    decisions: list[partition.Partitioned]

    @property
    def kernels(self) -> dict[str, int]:
        """How many calls of each kernel it has."""
        return dict(self.work.kernels)

    @property
    def collectives(self) -> dict[str, int]:
        """How many arrays each kind of collective moves."""
        return {c.kind: c.arrays for c in self.work.collectives}


def compiled(f: Callable[..., Any], *args: Any, out: Any = None) -> Compiled:
    how = {} if out is None else {"out_shardings": out}
    with partition.recording() as decisions:
        program = jax.jit(f, **how).lower(*args).compile()
    text = program.as_text()
    assert text is not None
    work = measured(text)
    return Compiled(program(*args), work, decisions)


def placed(
    mesh: Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]
) -> list[jax.Array]:
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def pair(
    f: Callable[..., Any],
    mesh: Mesh,
    arrays: Sequence[Any],
    specs: Sequence[PartitionSpec],
    out: Any = None,
) -> tuple[Compiled, Compiled]:
    """A function of the program as it is written, and with kernels of ours demanded."""
    args = placed(mesh, arrays, specs)
    wanted = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        out,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    plain = compiled(f, *args, out=wanted)
    with tracea.options(implementation="tracea"):
        ours = compiled(tracea.transform(f), *args, out=wanted)
    return plain, ours


def assert_alike(
    plain: Compiled, ours: Compiled, tolerance: float = 1e-5, work: float = 1.02
) -> None:
    """The same values up to rounding, for no more bytes and no more work a device.

    Args:
      plain, ours: the program without and with kernels of ours.
      tolerance: relative to the largest value of each result.
      work: how much more ours may be.
    """
    assert ours.work.sent <= plain.work.sent, f"{plain.work} -> {ours.work}"
    assert ours.work.flops <= work * plain.work.flops
    leaves = zip(
        jax.tree.leaves(plain.results), jax.tree.leaves(ours.results), strict=True
    )
    for want, found in leaves:
        assert found.shape == want.shape and found.dtype == want.dtype
        want, found = (np.asarray(x, np.float64) for x in (want, found))
        assert np.abs(found - want).max() <= tolerance * (np.abs(want).max() + 1e-30)

"""A compiled graph: steps that our kernels run, over arrays in memory.

``builder`` makes it, ``writing`` writes it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.bundle.arrays import Room, View
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.runtime.nvrtc import Cubin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
      kind: "cpu", "cuda", "zero", "copy" or "move".
      fields: what the manifest says of it besides.
      reads, writes: its arrays.
      source: the line of the program.
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...]
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled graph.

    Attributes:
      device: what it is compiled for.
      inputs, outputs: arrays of the caller's.
      constants: rooms, in the order in which they lie.
      steps: in the order in which they run.
      workspace_bytes, constants_bytes: sizes.
      cubins: the code of the kernels, each once.
      plans: (line of the program, plan) of each call of an op.
    """

    device: Device
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    constants: tuple[Room, ...]
    steps: tuple[Step, ...]
    workspace_bytes: int
    constants_bytes: int
    cubins: tuple[Cubin, ...]
    plans: tuple[tuple[str, Plan], ...]


def image_name(cubin: Cubin) -> str:
    """The file of a kernel in a bundle."""
    return f"kernels/{cubin.key}.cubin"

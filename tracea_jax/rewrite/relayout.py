"""Relayouts of a convolution's arrays in a program to those that the op takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.conv2d.directions import SPECS
from tracea_jax.problem.conv2d import ImageLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """Dimensions in another order, and a height of 1 for what has none.

    Attributes:
      order: the program's dimensions, in the order in which the op has them.
      height: where the op has a height that the program has not; None if it has.
    """

    order: tuple[int, ...]
    height: int | None

    @classmethod
    def of(cls, spec: Sequence[int], role: str, layout: ImageLayout) -> Relayout:
        """From a specification of ``jax.lax.ConvDimensionNumbers``.

        Args:
          spec: the dimensions that are the first two indices (batch and channels, or
            output and input channels), then the one or two of space.
          role: "x", "w" or "y".
          layout: of the op.
        """
        wanted = SPECS[layout][role]
        lacks = 4 - len(spec)
        given = [*spec[:2], *[None] * lacks, *spec[2:]]
        order = [given[wanted.index(i)] for i in range(4)]
        height = order.index(None) if lacks else None
        return cls(order=tuple(i for i in order if i is not None), height=height)

    @property
    def transposes(self) -> bool:
        """Returns whether dimensions change their order."""
        return self.order != tuple(range(len(self.order)))

    def __call__(self, x: Any) -> Any:
        """The op's array."""
        if self.transposes:
            x = x.transpose(self.order)
        return x if self.height is None else jnp.expand_dims(x, self.height)

    def back(self, y: Any) -> Any:
        """The program's array."""
        if self.height is not None:
            y = y.squeeze(self.height)
        if self.transposes:
            y = y.transpose([self.order.index(i) for i in range(len(self.order))])
        return y

"""A report of the convolutions of a patched model, layer by layer."""

from __future__ import annotations

import dataclasses

from tracea_jax.page import Column, Page, Printable, Row, Table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A convolution of a model.

    Attributes:
      name: where it is in the model, such as "layer1.0.conv1".
      fallback: the sentence why its library computes it; None where we do.
    """

    name: str
    fallback: str | None = None

    @property
    def runs(self) -> str:
        return "ops.conv2d" if self.fallback is None else "as before"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Layers(Printable):
    """The 2-D convolutions of a model, in its order.

    Attributes:
      model: the name of its class.
      layers: one entry a convolution.
    """

    model: str
    layers: tuple[Layer, ...]

    @property
    def replaced(self) -> int:
        """Number of those that run on ``ops.conv2d``."""
        return sum(layer.fallback is None for layer in self.layers)

    @property
    def page(self) -> Page:
        rows = (Row((x.name, x.runs, x.fallback or "")) for x in self.layers)
        title = f"{self.model}: {self.replaced} of {len(self.layers)} convolutions"
        columns = (Column("layer"), Column("runs", ": "), Column("reason", "; "))
        return Page((Table(columns=columns, rows=tuple(rows), title=title),))

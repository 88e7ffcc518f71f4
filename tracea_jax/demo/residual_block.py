"""A bottleneck block of a residual network at inference, in plain JAX.

Nothing of the package is used here: ``tracea.transform`` is applied by the callers,
which are the demo and benchmarks/bench_models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

Parameters = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBlock:
    """Sizes of the block: He et al., Deep Residual Learning (2016), figure 5 right.

    Attributes:
      batch, size, channels: images are (batch, size, size, channels).
      narrow: channels between the 1x1 convolutions.
      dtype: of parameters and activations.
    """

    batch: int
    size: int
    channels: int
    narrow: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.size} x {self.size} x {self.channels}, "
            f"{self.narrow} channels inside, {self.dtype}"
        )

    def inputs(self, seed: int = 0) -> tuple[Parameters, jax.Array]:
        """Parameters and random images."""
        shapes = {
            "reduce": (1, 1, self.channels, self.narrow),
            "mix": (3, 3, self.narrow, self.narrow),
            "expand": (1, 1, self.narrow, self.channels),
        }
        *keys, last = jax.random.split(jax.random.key(seed), len(shapes) + 1)
        params = {
            name: self._layer(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        image = (self.batch, self.size, self.size, self.channels)
        return params, jax.random.normal(last, image).astype(self.dtype)

    def _layer(self, key: jax.Array, shape: tuple[int, ...]) -> Parameters:
        """Random weights, and statistics as a trained batch normalisation has them."""
        height, width, inputs, outputs = shape
        keys = jax.random.split(key, 5)
        weights = jax.random.normal(keys[0], shape) / (height * width * inputs) ** 0.5
        mean, shift = (0.1 * jax.random.normal(k, (outputs,)) for k in keys[1:3])
        variance, scale = (
            jax.random.uniform(k, (outputs,), minval=0.5, maxval=1.5) for k in keys[3:]
        )
        layer = {"weights": weights, "mean": mean, "variance": variance}
        layer |= {"scale": scale, "shift": shift}
        return jax.tree.map(lambda x: x.astype(self.dtype), layer)

    def forward(self, params: Parameters, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(convolved(params["reduce"], x))
        y = jax.nn.relu(convolved(params["mix"], y))
        return jax.nn.relu(convolved(params["expand"], y) + x)


def convolved(layer: Parameters, x: jax.Array) -> jax.Array:
    """A convolution and batch normalisation with running statistics."""
    y = jax.lax.conv_general_dilated(
        x, layer["weights"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    factor = layer["scale"] * jax.lax.rsqrt(layer["variance"] + 1e-5)
    return (y - layer["mean"]) * factor + layer["shift"]

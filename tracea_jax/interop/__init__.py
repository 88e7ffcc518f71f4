"""Models of other libraries on our convolutions: of torch, flax and equinox.

    model = tracea.interop.torch.patch_conv2d(model)
    print(tracea.interop.torch.layers(model))
    tracea.interop.torch.unpatch(model)

Each module imports its library, which this package does not depend on. Programs of JAX
need none of this for speed: ``transform`` finds the convolutions of any function, with
the bias and the activation after them. A patch changes chosen layers, and no others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracea_jax.interop import equinox as equinox
    from tracea_jax.interop import flax as flax
    from tracea_jax.interop import torch as torch

__all__ = ["equinox", "flax", "torch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tracea_jax.interop' has no attribute {name!r}")
    return importlib.import_module(f"tracea_jax.interop.{name}")


def __dir__() -> list[str]:
    return [*__all__]

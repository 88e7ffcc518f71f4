"""tracea_jax: faster matmul, convolution and attention for JAX programs, with reasons.

    import tracea_jax as tracea

    fast = tracea.transform(fn)
    tracea.explain(fn)(*args)
    y = tracea.ops.matmul(x, w, bias=b, activation="gelu", residual=r)
    tracea.doctor()

Names load on first use, so importing the package costs next to nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from tracea_jax.mistakes import similar

# The API, but for ``typing``: ``import *`` must not hide Python's module.
__all__ = [
    "AttentionProblem",
    "BenchReport",
    "Conv2dProblem",
    "Epilogue",
    "Explanation",
    "GatedMatmulProblem",
    "GemmProblem",
    "Graph",
    "Options",
    "Plan",
    "TensorMap",
    "TileGraph",
    "TuneReport",
    "Unsupported",
    "bench",
    "bundle",
    "cuda_kernel",
    "doctor",
    "explain",
    "interop",
    "masks",
    "ops",
    "options",
    "transform",
    "tune",
]

# Public name -> module that defines it.
_HOMES = {
    "AttentionProblem": "problem",
    "BenchReport": "bench.report",
    "Conv2dProblem": "problem",
    "Epilogue": "problem",
    "Explanation": "explain",
    "GatedMatmulProblem": "problem",
    "GemmProblem": "problem",
    "Graph": "graph",
    "Options": "options",
    "Plan": "dispatch",
    "TileGraph": "ir.tile_graph",
    "TuneReport": "campaign.report",
    "Unsupported": "dispatch",
    "TensorMap": "ops.cuda_kernel.maps",
    "bench": "bench",
    "bundle": "bundle",
    "cuda_kernel": "ops.cuda_kernel.public",
    "doctor": "doctor",
    "explain": "explain",
    "options": "options",
    "transform": "transform",
    "tune": "campaign",
}

_MODULES = ("interop", "masks", "ops", "typing")  # that are public themselves

if TYPE_CHECKING:
    __version__: str
    from tracea_jax import interop as interop
    from tracea_jax import masks as masks
    from tracea_jax import ops as ops
    from tracea_jax import typing as typing
    from tracea_jax.bench import bench as bench
    from tracea_jax.bench.report import BenchReport as BenchReport
    from tracea_jax.bundle import bundle as bundle
    from tracea_jax.campaign import tune as tune
    from tracea_jax.campaign.report import TuneReport as TuneReport
    from tracea_jax.dispatch import Plan as Plan
    from tracea_jax.dispatch import Unsupported as Unsupported
    from tracea_jax.doctor import doctor as doctor
    from tracea_jax.explain import Explanation as Explanation
    from tracea_jax.explain import explain as explain
    from tracea_jax.graph import Graph as Graph
    from tracea_jax.ir.tile_graph import TileGraph as TileGraph
    from tracea_jax.ops.cuda_kernel.maps import TensorMap as TensorMap
    from tracea_jax.ops.cuda_kernel.public import cuda_kernel as cuda_kernel
    from tracea_jax.options import Options as Options
    from tracea_jax.options import options as options
    from tracea_jax.problem import AttentionProblem as AttentionProblem
    from tracea_jax.problem import Conv2dProblem as Conv2dProblem
    from tracea_jax.problem import Epilogue as Epilogue
    from tracea_jax.problem import GatedMatmulProblem as GatedMatmulProblem
    from tracea_jax.problem import GemmProblem as GemmProblem
    from tracea_jax.transform import transform as transform


class _Package(types.ModuleType):
    """Keeps public functions from being shadowed by submodules of the same name.

    Importing ``tracea_jax.options`` would otherwise bind the module over the function.
    Submodules stay importable with ``from tracea_jax.options import ...``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tracea_jax.{name}")
    if name == "__version__":
        from importlib import metadata

        return metadata.version("tracea_jax")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'tracea_jax' has no attribute {name!r}{_hint(name)}"
        )
    value = getattr(importlib.import_module(f"tracea_jax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """The end of the error about a name that is none of ours."""
    if name.startswith("__"):  # asked by tools
        return ""
    if os.path.isdir(os.path.join(os.path.dirname(__file__), "ops", name)):
        if name in importlib.import_module("tracea_jax.ops").__all__:
            return f"; it is tracea_jax.ops.{name}"
    return similar(name, __dir__())


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, "__version__"])


def _register() -> None:
    """Serialised programs call the handlers by name and may look for kernels on disk,
    whether or not an op is used first."""
    from tracea_jax import _compat
    from tracea_jax.options import current
    from tracea_jax.runtime import cubins, launch

    if (advice := _compat.untested_jax()) is not None:
        warnings.warn(advice, RuntimeWarning, stacklevel=3)  # at the user's import
    launch.register()
    with contextlib.suppress(ValueError):  # of a setting; its first use reports it
        directory = current().directory
        launch.set_cubin_directory(directory if cubins.is_trusted(directory) else None)


def _set_up_logging() -> None:
    from tracea_jax import logs

    with contextlib.suppress(ValueError):  # the first use of a setting reports it
        logs.install(os.environ)


_set_up_logging()
_register()

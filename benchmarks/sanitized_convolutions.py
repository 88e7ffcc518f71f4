"""Kinds of kernels of images, for ``sanitize``: convolutions, pools and group norms.

Each is a small problem whose sizes divide no tile, with a variant that has to serve it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import Device
from tracea_jax.ops.common.bench import Workload
from tracea_jax.ops.conv2d.workload import CONV2D
from tracea_jax.ops.group_norm.workload import GROUP_NORM
from tracea_jax.ops.max_pool.workload import WORKLOAD as MAX_POOL
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import (
    Conv2dProblem,
    Epilogue,
    GroupNormProblem,
    MaxPoolProblem,
)
from tracea_jax.variants.conv2d_bands import CONV2D_BANDS
from tracea_jax.variants.conv2d_depthwise import CONV2D_DEPTHWISE
from tracea_jax.variants.conv2d_grouped import CONV2D_GROUPED
from tracea_jax.variants.conv2d_grouped_images import CONV2D_GROUPED_IMAGES
from tracea_jax.variants.conv2d_sm80 import CONV2D_SM80
from tracea_jax.variants.conv2d_sm90 import CONV2D_SM90
from tracea_jax.variants.conv2d_stem_sm90 import CONV2D_STEM_SM90
from tracea_jax.variants.conv2d_stem_weights import CONV2D_STEM_WEIGHTS
from tracea_jax.variants.conv2d_strips_sm90 import CONV2D_STRIPS_SM90
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90
from tracea_jax.variants.group_norm_sm90 import GROUP_NORM_SM90
from tracea_jax.variants.layer_norm import LAYER_NORM
from tracea_jax.variants.max_pool import MAX_POOL_CUDA

# What the names of all of their kernels have one of.
KERNELS = ("conv2d", "sum_of_parts", "max_pool", "_norm_")
_FULL = Epilogue(bias="row", activation="silu", residual=True, save_preactivation=True)
_BIASED = Epilogue(bias="row", activation="relu")
_RESULTS = {"forward": "y", "input_grad": "dx", "weight_grad": "dw"}
_STEPS: dict[str, Any] = {"strides": (2, 2)}
_BACK: dict[str, Any] = {"direction": "input_grad"}
_WEIGHTS: dict[str, Any] = {"direction": "weight_grad", "out": "float32"}
_FLOAT32: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A problem that a variant serves.

    Attributes:
      name: what it is of.
      workload: how it is run.
      problem: of the workload's op.
      variant: the variant.
      choices: where the config is not the default.
    """

    name: str
    workload: Workload
    problem: Any
    variant: Any
    choices: dict[str, Any]

    def config(self, device: Device) -> Any:
        """The variant's config.

        Raises:
          ValueError: if the kernel has no such config.
        """
        usual = self.variant.heuristic(self.problem, device)
        config = dataclasses.replace(usual, **self.choices)
        self.variant.check(self.problem, config, device)
        return config

    def run(self) -> Any:
        """The results on the GPU."""
        config = self.config(device_for("cuda"))
        choice = Choice(variant=self.variant.name, config=config)
        return executed(self.workload, self.problem, choice)


def executed(workload: Any, problem: Any, choice: Choice) -> Any:
    """Results of a choice on operands made outside of the sanitizer's view."""
    import jax

    with jax.default_device(jax.devices("cpu")[0]):
        inputs = workload.operands(problem, seed=1)
    inputs = jax.device_put(inputs, jax.devices()[0])
    call = functools.partial(workload.execute, problem=problem, choice=choice)
    return jax.jit(call)(*inputs)


def kinds() -> Iterator[Kind]:
    """All kinds; the name of each begins with "images"."""
    convolutions = {
        CONV2D_SM90: _OF_SM90,
        CONV2D_STRIPS_SM90: _OF_STRIPS,
        CONV2D_STEM_SM90: _OF_STEMS,
        CONV2D_STEM_WEIGHTS: _OF_STEM_WEIGHTS,
        CONV2D_WEIGHTS_SM90: _OF_WEIGHTS,
        CONV2D_SM80: _OF_SM80,
        CONV2D_DEPTHWISE: _OF_DEPTHWISE,
        CONV2D_BANDS: _OF_BANDS,
        CONV2D_GROUPED: _OF_GROUPS,
        CONV2D_GROUPED_IMAGES: _OF_SMALL_IMAGES,
    }
    for variant, problems in convolutions.items():
        for name, (problem, choices) in problems.items():
            result = f"{_RESULTS[problem.direction]} {problem.lhs}"
            yield _kind(CONV2D, variant, f"{result}, {name}", problem, choices)
    for name, problem in _pools():
        yield _kind(MAX_POOL, MAX_POOL_CUDA, name, problem)
    for direction in ("forward", "gradients"):
        image, row = (_norm(direction, *sizes) for sizes in (_IMAGES, _ROWS))
        yield _kind(GROUP_NORM, GROUP_NORM_SM90, direction, image)
        yield _kind(GROUP_NORM, LAYER_NORM, direction, row)


def _kind(
    workload: Workload,
    variant: Any,
    name: str,
    problem: Any,
    choices: dict[str, Any] | None = None,
) -> Kind:
    return Kind(
        name=f"images, {variant.name}, {name}",
        workload=workload,
        problem=problem,
        variant=variant,
        choices=choices or {},
    )


# --- pools and norms ------------------------------------------------------------------

_IMAGES, _ROWS = (3, 57, 56, 7), (301, 1, 88, 1)  # images, pixels, channels, groups


def _pools() -> Iterator[tuple[str, MaxPoolProblem]]:
    windows: dict[str, dict[str, Any]] = {
        "overlapping": {"kernel": (3, 3), **_STEPS, "padding": ((1, 1), (1, 1))},
        "apart": {"kernel": (2, 2), **_STEPS},
    }
    sizes: dict[str, Any] = {"batch": 3, "height": 13, "width": 10, "channels": 24}
    for direction in ("forward", "gradient"):
        for name, window in windows.items():
            how = {"direction": direction, "dtype": "bfloat16", **sizes, **window}
            yield f"{direction}, {name}", MaxPoolProblem(**how)


def _norm(direction: Any, *sizes: int) -> GroupNormProblem:
    names = ("images", "pixels", "channels", "groups")
    how: dict[str, Any] = dict(zip(names, sizes, strict=True))
    how |= {"dtype": "bfloat16", "activation": "silu"}
    return GroupNormProblem(direction=direction, **how)


# --- convolutions: problems by name, with choices -------------------------------------


def _conv(
    size: tuple[int, int, int] = (3, 13, 11),
    channels: tuple[int, int] = (72, 200),
    kernel: tuple[int, int] = (3, 3),
    choices: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Conv2dProblem, dict[str, Any]]:
    """A convolution of (images, rows, columns), padded like "SAME" without strides."""
    pads = tuple(((k - 1) // 2, k // 2) for k in kernel)
    dtypes: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "bfloat16")
    problem = Conv2dProblem(
        **dict(zip(("batch", "height", "width"), size, strict=True)),
        **dict(zip(("in_channels", "out_channels"), channels, strict=True)),
        **dict(zip(("kernel_height", "kernel_width"), kernel, strict=True)),
        **{"padding": pads, **dtypes, **fields},
    )
    return problem, choices or {}


def _grouped(
    each: int, channels: int, size: tuple[int, int, int] = (2, 13, 17), **how: Any
) -> tuple[Conv2dProblem, dict[str, Any]]:
    """A grouped convolution with ``each`` channels per group."""
    return _conv(size, (channels, channels), groups=channels // each, **how)


_Kinds = dict[str, tuple[Conv2dProblem, dict[str, Any]]]
_LARGE = {"tile_m": 128, "tile_n": 128, "stages": 4, "consumers": 2}
_OF_SM90: _Kinds = {
    "all added": _conv(epilogue=_FULL),
    "steps": _conv(**_STEPS),
    "pixels": _conv(kernel=(1, 1)),
    "split": _conv(choices=_LARGE, epilogue=_BIASED),
    "in turn": _conv(choices={**_LARGE, "ping_pong": True}, epilogue=_FULL),
    "clusters": _conv(choices={**_LARGE, "cluster": 2}, epilogue=_BIASED),
    "plain": _conv(**_BACK),
    "phases": _conv(**_BACK, **_STEPS),
    "all added, tf32": _conv(**_FLOAT32, epilogue=_FULL),
    "tf32": _conv(**_FLOAT32, **_BACK),
}
_OF_STRIPS: _Kinds = {
    "all added": _conv(epilogue=_FULL),
    "weights stay": _conv(
        channels=(64, 64),
        choices={"tile_m": 128, "resident": True, "ping_pong": False, "stages": 9},
    ),
    "plain": _conv(**_BACK),
    "tf32": _conv(**_FLOAT32),
}
_STEM: dict[str, Any] = {"channels": (3, 72), "kernel": (7, 7), **_STEPS}
_OF_STEMS: _Kinds = {
    "all added": _conv((3, 37, 151), epilogue=_FULL, **_STEM),
    "plain": _conv((2, 64, 64), **_STEM),
}
_OF_STEM_WEIGHTS: _Kinds = {
    "steps": _conv((5, 64, 64), **_STEM, **_WEIGHTS),
    "plain": _conv((2, 9, 16), (3, 8), **_WEIGHTS),
}
_OF_WEIGHTS: _Kinds = {
    "plain": _conv(**_WEIGHTS),
    "steps": _conv((3, 13, 14), **_WEIGHTS, **_STEPS),
    "slabs over taps": _conv((2, 9, 17), (200, 136), **_WEIGHTS),
    "taps share": _conv(
        channels=(64, 64),
        choices={"tile_n": 192, "taps": 3, "stages": 3, "parts": 2},
        **_WEIGHTS,
    ),
    "groups of 16": _grouped(16, 80, **_WEIGHTS, **_STEPS),
    "groups of 32": _grouped(32, 96, **_WEIGHTS),
    "groups of 32, a line": _grouped(
        32, 96, choices={"tile_n": 192, "consumers_n": 3, "stages": 6}, **_WEIGHTS
    ),
}
_OF_SM80: _Kinds = {
    "all added": _conv(epilogue=_FULL),
    "phases": _conv(**_BACK, **_STEPS),
    "plain": _conv(**_WEIGHTS),
    "tf32": _conv(kernel=(1, 1), **_FLOAT32),
    "weights, tf32": _conv(**{**_WEIGHTS, **_FLOAT32}),
}
_EVERY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("forward", {"epilogue": _BIASED}),
    ("input_grad", {}),
    ("weight_grad", {}),
)


def _lines(size: tuple[int, int, int]) -> _Kinds:
    """Depthwise ones of small and large kernels, in all directions."""
    return {
        f"{name}, {direction}": _grouped(
            1, 40, size, kernel=kernel, direction=direction, **how
        )
        for name, kernel in (("3x3", (3, 3)), ("7x7", (7, 7)))
        for direction, how in _EVERY
    }


_OF_DEPTHWISE: _Kinds = {
    **_lines((2, 13, 17)),
    "all added, steps": _grouped(1, 34, epilogue=_FULL, **_STEPS),
    "plain": _grouped(1, 40, **_FLOAT32),
    "weights": _grouped(1, 40, **{**_WEIGHTS, **_FLOAT32}),
}
# Of lines so long that all threads copy: else some repeat the copy of another one, the
# same bytes to the same place, which racecheck takes for a race.
_OF_BANDS: _Kinds = _lines((2, 13, 59))
_OF_GROUPS: _Kinds = {
    "groups of 2": _grouped(2, 48),
    "groups of 4": _grouped(4, 48, **_BACK),
    "groups of 8": _grouped(8, 48, **_STEPS),
    "groups of 16": _grouped(16, 80, epilogue=_FULL),
    "groups of 32": _grouped(32, 96),
}
_SMALL = (5, 7, 7)
_OF_SMALL_IMAGES: _Kinds = {
    "groups of 16": _grouped(16, 48, _SMALL, epilogue=_FULL),
    "groups of 32": _grouped(32, 160, _SMALL),
    "steps": _grouped(32, 96, (5, 9, 14), **_STEPS),
    "plain": _grouped(32, 96, _SMALL, **_BACK),
}

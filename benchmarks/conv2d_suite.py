"""The cases of ``bench_conv2d``, their groups, and the bars that groups are held to.

Ratios are XLA's time by ours: by the fastest of our kernels, each with its default
config, and by the default, which runs where nothing is named or tuned.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from matmul_suite import Bar

from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.problem.conv2d import Direction

RELU = Epilogue(bias="row", activation="relu")
JOINED = Epilogue(bias="row", activation="relu", residual=True)
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))  # sizes and channels of ResNets
SAME = (1, 1)
# Sizes, channels, taps and steps of the depthwise convolutions of EfficientNet-B0, thus
# of MobileNets, and of ConvNeXt-T.
DEPTHWISE = (
    *((112, 32, 3, 1), (112, 96, 3, 2), (56, 144, 3, 1), (28, 240, 3, 2)),
    *((14, 480, 3, 1), (7, 1152, 3, 1), (56, 144, 5, 2), (28, 240, 5, 1)),
    *((14, 672, 5, 1), (7, 1152, 5, 1)),
    *((56, 96, 7, 1), (28, 192, 7, 1), (14, 384, 7, 1), (7, 768, 7, 1)),
)
GROUPED = ((56, 128), (28, 256), (14, 512), (7, 1024))  # of ResNeXt-50 32x4d
WIDE_3X3 = "3x3 of float32"
# What the groups of float32 are of, beside 3 x 3 convolutions of 64 images.
FLOAT32 = (
    *("", ", gradient", ", weights", ", with epilogue"),
    *(", batch 8", ", batch 8, gradient", ", batch 8, weights"),
    *(", stride 2", ", stride 2, gradient", ", U-Net", ", U-Net, gradient"),
)
DIRECTIONS = {"": "forward", " gradient": "input_grad", " weights": "weight_grad"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a problem, and the group that it is judged in."""

    group: str
    problem: Conv2dProblem


def _bars(**limits: float) -> tuple[Bar, ...]:
    limits = {**limits, "default_min": 0.98}
    return tuple(Bar(figure=name, limit=limit) for name, limit in limits.items())


BARS: dict[str, tuple[Bar, ...]] = {
    "3x3": _bars(own_geomean=1.10, own_min=0.95),
    "3x3 gradient": _bars(own_geomean=1.05, own_min=0.95),
    "3x3 with epilogue": _bars(own_geomean=1.30, own_min=0.95),
    **{
        f"3x3{what}, batch {batch}": _bars()
        for batch in (8, 1)
        for what in ("", " gradient", " with epilogue")
    },
    "3x3 weights": _bars(own_geomean=1.10, own_min=0.95),
    "3x3 of stride 2": _bars(own_min=1.4),
    "3x3 of stride 2, gradient": _bars(own_min=1.4),
    "stem": _bars(own_min=5.0),
    "stem, batch 1": _bars(),
    "stem weights": _bars(own_min=2.0),
    "patches": _bars(own_min=10.0),
    "patches, weights": _bars(own_min=6.0),
    **{
        f"{kind}{what}": _bars(own_min=1.5)
        for kind in ("depthwise 3x3", "depthwise 5x5", "depthwise 7x7", "grouped 32x")
        for what in ("", " gradient", " weights")
    },
    "1x1 with epilogue": _bars(),
    "1x1 of stride 2": _bars(),
    "U-Net 3x3": _bars(),
    "U-Net 3x3 gradient": _bars(),
    "1x1 of float32": _bars(),
    **{f"{WIDE_3X3}{what}": _bars() for what in FLOAT32},
}
FIGURES = {
    "own_geomean": "XLA / ours, geometric mean",
    "own_min": "XLA / ours, lowest",
    "default_min": "XLA / default, lowest",
}


def conv(
    batch: int,
    size: int,
    channels: int,
    out: int | None = None,
    *,
    taps: int = 3,
    stride: int = 1,
    pads: tuple[int, int] = SAME,
    **changes: Any,
) -> Conv2dProblem:
    """A square convolution, of bfloat16 unless changed."""
    fields: dict[str, Any] = {
        **{"batch": batch, "height": size, "width": size},
        **{"in_channels": channels, "out_channels": out or channels},
        **{"kernel_height": taps, "kernel_width": taps},
        **{"strides": (stride, stride), "padding": (pads, pads)},
        **dict.fromkeys(("lhs", "rhs", "out"), "bfloat16"),
    }
    return Conv2dProblem(**{**fields, **changes})


def channelwise() -> Iterator[Case]:
    """Depthwise convolutions, and those in 32 groups, in all directions."""
    for (what, direction), (size, channels, taps, stride) in itertools.product(
        DIRECTIONS.items(), DEPTHWISE
    ):
        rest = max(taps - (size % stride or stride), 0)  # as "SAME" pads
        problem = conv(
            *(64, size, channels),
            **{"taps": taps, "stride": stride, "pads": (rest // 2, rest - rest // 2)},
            **{"groups": channels, "direction": direction},
        )
        yield Case(group=f"depthwise {taps}x{taps}{what}", problem=problem)
    for (what, direction), (size, channels) in itertools.product(
        DIRECTIONS.items(), GROUPED
    ):
        problem = conv(64, size, channels, groups=32, direction=direction)
        yield Case(group=f"grouped 32x{what}", problem=problem)


def suite() -> Iterator[Case]:
    """The cases, by groups."""
    yield from _dense()
    yield from channelwise()


def _dense() -> Iterator[Case]:
    for batch in (64, 8, 1):
        of_batch = "" if batch == 64 else f", batch {batch}"
        for size, channels in STAGES:
            plain = conv(batch, size, channels)
            yield Case(group=f"3x3{of_batch}", problem=plain)
            yield Case(
                group=f"3x3 gradient{of_batch}",
                problem=dataclasses.replace(plain, direction="input_grad"),
            )
            for epilogue in (RELU, JOINED):
                yield Case(
                    group=f"3x3 with epilogue{of_batch}",
                    problem=dataclasses.replace(plain, epilogue=epilogue),
                )
    for size, channels in STAGES:
        yield Case(
            group="3x3 weights",
            problem=conv(64, size, channels, direction="weight_grad"),
        )
    for size, channels in STAGES[1:]:
        strided = conv(64, 2 * size, channels, stride=2, pads=(0, 1), epilogue=RELU)
        yield Case(group="3x3 of stride 2", problem=strided)
        gradient: dict[str, Any] = {"direction": "input_grad", "epilogue": Epilogue()}
        yield Case(
            group="3x3 of stride 2, gradient",
            problem=dataclasses.replace(strided, **gradient),
        )
    for batch in (64, 1):
        stem = conv(batch, 224, 3, 64, taps=7, stride=2, pads=(3, 3), epilogue=RELU)
        group = "stem" if batch == 64 else "stem, batch 1"
        yield Case(group=group, problem=stem)
    stem = conv(
        *(64, 224, 3, 64),
        **{"taps": 7, "stride": 2, "pads": (3, 3), "direction": "weight_grad"},
    )
    yield Case(group="stem weights", problem=stem)
    patches = conv(64, 224, 3, 768, taps=16, stride=16, pads=(0, 0))
    yield Case(group="patches", problem=patches)
    yield Case(
        group="patches, weights",
        problem=dataclasses.replace(patches, direction="weight_grad"),
    )
    for size, channels in STAGES:
        narrow = conv(64, size, 4 * channels, channels, taps=1, pads=(0, 0))
        wide = conv(64, size, channels, 4 * channels, taps=1, pads=(0, 0))
        yield Case(
            group="1x1 with epilogue",
            problem=dataclasses.replace(narrow, epilogue=RELU),
        )
        yield Case(
            group="1x1 with epilogue",
            problem=dataclasses.replace(wide, epilogue=JOINED),
        )
    for size, channels in STAGES[1:]:
        yield Case(
            group="1x1 of stride 2",
            problem=conv(
                *(64, 2 * size, 2 * channels, 4 * channels),
                **{"taps": 1, "stride": 2, "pads": (0, 0)},
            ),
        )
    for channels in (320, 640):
        plain = conv(8, 64 if channels == 320 else 32, channels)
        yield Case(group="U-Net 3x3", problem=plain)
        yield Case(
            group="U-Net 3x3 gradient",
            problem=dataclasses.replace(plain, direction="input_grad"),
        )
    yield from of_float32()


def of_float32() -> Iterator[Case]:
    """Products of TF32, which is what XLA multiplies float32 as on these GPUs."""
    directions: dict[str, Direction] = {
        "": "forward",
        ", gradient": "input_grad",
        ", weights": "weight_grad",
    }

    def case(group: str, *shape: int, **changes: Any) -> Case:
        # Not in one call, in which "out" would be the number of channels.
        wide: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "float32")
        problem = dataclasses.replace(conv(*shape, **changes), **wide)
        return Case(group=group, problem=problem)

    for batch, of_batch in ((64, ""), (8, ", batch 8")):
        for what, direction in directions.items():
            for size, channels in STAGES:
                shape = (batch, size, channels)
                yield case(f"{WIDE_3X3}{of_batch}{what}", *shape, direction=direction)
    for size, channels in STAGES:
        for epilogue in (RELU, JOINED):
            yield case(
                f"{WIDE_3X3}, with epilogue", 64, size, channels, epilogue=epilogue
            )
    for what in ("", ", gradient"):
        direction = directions[what]
        for size, channels in STAGES[1:]:
            how: dict[str, Any] = {"stride": 2, "pads": (0, 1), "direction": direction}
            yield case(f"{WIDE_3X3}, stride 2{what}", 64, 2 * size, channels, **how)
        for channels, size in ((320, 64), (640, 32)):
            yield case(
                f"{WIDE_3X3}, U-Net{what}", 8, size, channels, direction=direction
            )
    for size, channels in STAGES[1:]:
        for inputs, outputs, epilogue in (
            (4 * channels, channels, RELU),
            (channels, 4 * channels, JOINED),
        ):
            how = {"taps": 1, "pads": (0, 0), "epilogue": epilogue}
            yield case("1x1 of float32", 64, size, inputs, outputs, **how)

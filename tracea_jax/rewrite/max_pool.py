"""Maxima of windows of images with channels last: ``nn.max_pool`` of flax."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.ops.common import lowering
from tracea_jax.ops.max_pool.primitive import bind, max_pool_p
from tracea_jax.problem.max_pool import Pair
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.product import DTYPES
from tracea_jax.rewrite.view import View, is_static


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolSite:
    """A call of ``max_pool_p``."""

    kernel: Pair
    strides: Pair
    padding: tuple[Pair, Pair]

    def __call__(self, x: Any) -> Any:
        return bind(x, kernel=self.kernel, strides=self.strides, padding=self.padding)


def match_max_pool(view: View, index: int) -> Match | None:
    """The windows at an equation, if they are of pixels."""
    eqn = view.eqns[index]
    x, params = eqn.invars[0], eqn.params
    if x.aval.ndim != 4 or x.aval.dtype.name not in DTYPES or not is_static(x.aval):
        return None
    dilations = (*params["base_dilation"], *params["window_dilation"])
    if any(n != 1 for n in dilations):
        return None
    batch, *kernel, channels = map(int, params["window_dimensions"])
    batch_stride, *strides, channel_stride = map(int, params["window_strides"])
    pads = [(int(low), int(high)) for low, high in params["padding"]]
    if {batch, channels, batch_stride, channel_stride} != {1}:
        return None
    if {pads[0], pads[-1]} != {(0, 0)} or any(n < 0 for pad in pads for n in pad):
        return None
    windows: dict[str, Any] = {
        "kernel": (kernel[0], kernel[1]),
        "strides": (strides[0], strides[1]),
        "padding": (pads[1], pads[2]),
    }
    if not lowering.has_kernel(max_pool_p, [x.aval], **windows):
        return None
    return Match(
        root=index,
        equations=frozenset({index}),
        operands=(x,),
        site=MaxPoolSite(**windows),
    )


MAX_POOL = Rule(
    op="max_pool",
    anchors=frozenset({"reduce_window_max"}),
    match=match_max_pool,
    is_expected=False,  # XLA pools as fast where windows do not overlap
)

"""The methods ``Graph.add_<op>`` as editors and type checkers see them.

They are made of the builders in the records of the ops while a program runs (see
``graph``); nothing here is called. A test compares each with its builder. Callers: type
checkers, through ``graph``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from tracea_jax.typing import Activation


class Adds:
    """For each op of the package its builder's arguments, and how often it runs."""

    def add_matmul(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DTypeLike = "float32",
        out: DTypeLike | None = None,
        batch: int = 1,
        layout: str = "nn",
        precision: PrecisionLike = None,
        bias: bool = False,
        activation: Activation = "none",
        residual: bool = False,
        count: int = 1,
    ) -> None: ...

    def add_gated_matmul(
        self,
        m: int,
        n: int,
        k: int,
        *,
        dtype: DTypeLike = "float32",
        out: DTypeLike | None = None,
        batch: int = 1,
        layout: str = "nn",
        precision: PrecisionLike = None,
        activation: Activation = "silu",
        count: int = 1,
    ) -> None: ...

    def add_conv2d(
        self,
        batch: int,
        height: int,
        width: int,
        in_channels: int,
        kernel_height: int,
        kernel_width: int,
        out_channels: int,
        *,
        dtype: DTypeLike = "float32",
        strides: int | Sequence[int] = (1, 1),
        padding: str | int | Sequence[Sequence[int]] = "SAME",
        dilation: int | Sequence[int] = (1, 1),
        groups: int = 1,
        layout: str = "NHWC",
        bias: bool = False,
        activation: Activation = "none",
        residual: bool = False,
        direction: str = "forward",
        count: int = 1,
    ) -> None: ...

    def add_attention(
        self,
        batch: int,
        q_len: int,
        kv_len: int,
        heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike = "float32",
        kv_heads: int | None = None,
        is_causal: bool = False,
        local_window_size: int | tuple[int, int] | None = None,
        direction: str = "forward",
        saves_lse: bool = False,
        count: int = 1,
    ) -> None: ...

    def add_paged_attention(
        self,
        batch: int,
        pages_per_sequence: int,
        page_size: int,
        heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike = "float32",
        kv_heads: int | None = None,
        pages: int | None = None,
        count: int = 1,
    ) -> None: ...

    def add_elementwise(
        self,
        function: str,
        size: int,
        *,
        dtype: DTypeLike = "float32",
        scalar: str = "none",
        count: int = 1,
    ) -> None: ...

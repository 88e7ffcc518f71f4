"""Problems of attention from plain values, for the graph and the command line.

The call of the op that they stand for says what is asked (``building.asked``).
"""

from __future__ import annotations

import dataclasses
import functools

from jax.typing import DTypeLike

from tracea_jax.catalogue import Argument
from tracea_jax.ops.attention.public import attention
from tracea_jax.ops.common import arguments
from tracea_jax.ops.common.building import asked, check_direction, sizes
from tracea_jax.problem import AttentionProblem

DIRECTIONS = ("forward", "backward")


def build(
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
) -> AttentionProblem:
    """softmax(q k' / sqrt(head_dim)) v for each head, or its gradient.

    Args:
      batch, q_len, heads, head_dim: q is (batch, q_len, heads, head_dim).
      kv_len: k and v are (batch, kv_len, kv_heads, head_dim).
      dtype: of the operands and the result.
      kv_heads: if fewer than heads.
      is_causal, local_window_size: as in ``ops.attention``.
      direction: "forward" or "backward".
      saves_lse: whether it is the forward attention of a training.
    """
    check_direction(direction, *DIRECTIONS)
    q = sizes(batch=batch, q_len=q_len, heads=heads, head_dim=head_dim)
    keys = sizes(kv_len=kv_len, kv_heads=heads if kv_heads is None else kv_heads)
    attend = functools.partial(
        attention, is_causal=is_causal, local_window_size=local_window_size
    )
    kv = (batch, *keys, head_dim)
    problem = asked(attend, dtype, q, kv, kv)
    return dataclasses.replace(problem, direction=direction, saves_lse=saves_lse)


ARGUMENTS = (
    arguments.size("batch", "number of sequences"),
    arguments.size("q_len", "queries of a sequence"),
    arguments.size("kv_len", "keys and values of a sequence"),
    arguments.size("heads", "heads of the queries"),
    arguments.size("head_dim", "entries of a head"),
    Argument("--kv-heads", {"type": arguments.positive, "help": "if fewer than HEADS"}),
    arguments.flag(
        "--causal", dest="is_causal", help="a query sees no keys that come after it"
    ),
    arguments.direction(*DIRECTIONS),
    arguments.flag("--saves-lse", help="as in training, for the gradient"),
)

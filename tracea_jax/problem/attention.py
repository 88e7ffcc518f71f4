"""Scaled dot-product attention, and its gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from tracea_jax.problem.base import Problem
from tracea_jax.problem.epilogue import ITEMSIZE, tuples

Alibi = Literal["distance", "linear"]

# Fields that came later: see ``Problem.to_json``.
_NEW = (
    "saves_lse",
    "mask_block",
    "segments",
    "soft_cap",
    "sinks",
    "value_dim",
    "aligned_at_end",
    "alibi",
    "bias_gradient",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AttentionProblem(Problem):
    """o = softmax(scale * q @ k' + bias, where allowed) @ v, for each head.

    With a cap c the scores are c * tanh((scale * q @ k' + bias) / c). With sinks, each
    head's softmax has one logit more, whose weight multiplies no value. ALiBi is a bias
    that follows from positions.

    Query head h reads key/value head h // (heads / kv_heads).

    Attributes:
      direction: "forward": (q, k, v, ...) -> o; "backward": its gradients with respect
        to q, k, v and the bias (``bias_gradient``), from o and the log-sum-exp of each
        query's scores.
      saves_lse: whether the log-sum-exp is a second result of a forward attention, as
        training needs it for the backward one.
      batch, q_len, kv_len, heads, kv_heads, head_dim: q is (batch, q_len, heads,
        head_dim), k and v are (batch, kv_len, kv_heads, head_dim).
      value_dim: columns of v and o, if they are not head_dim.
      dtype: name of the operands' and the result's dtype.
      bias, mask: shape of the additive bias and of the boolean mask, broadcast to
        (batch, heads, q_len, kv_len), or None.
      mask_block: (queries, keys) of the block that one entry of the mask stands for,
        so that the mask has (..., q_len / queries, kv_len / keys) entries, rounded up;
        None if an entry stands for one score.
      bias_dtype: name of the bias's dtype, if there is one.
      is_causal: whether query i sees keys j <= i only.
      window: (left, right): query i sees keys i - left <= j <= i + right only; None
        for no limit.
      aligned_at_end: whether positions count from the end: the last query stands at the
        last key, of those that the example has, in ``is_causal`` and ``window``.
      segments: whether queries and keys have segment ids: int32 (batch, q_len) and
        (batch, kv_len); a query sees the keys of its own segment only.
      q_lengths, kv_lengths: whether each example has its own number of queries, keys.
      scale: what the scores are multiplied with.
      soft_cap: what bounds the scores, or None.
      sinks: whether each head has a further logit: float32 (heads,).
      alibi: which bias a slope of each head, float32 (heads,), makes of positions:
        "distance": ``-slope |key - query|``; "linear": slope (key - query); None for
        none.
        Where queries see no later keys both are the same, and called "linear".
      bias_gradient: whether a backward pass computes the bias's gradient, too.
    """

    direction: Literal["forward", "backward"] = "forward"
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: str | None = None
    mask: tuple[int, int, int, int] | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    scale: float
    saves_lse: bool = False
    mask_block: tuple[int, int] | None = None
    segments: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    aligned_at_end: bool = False
    alibi: Alibi | None = None
    bias_gradient: bool = False

    op = "attention"
    # Neither lengths nor heads: which form is fastest changes with them, more than
    # once. With few sequences there is too little work for large tiles.
    extents = ("batch",)
    only_between = True

    def __post_init__(self) -> None:
        if self.saves_lse and self.direction != "forward":
            raise ValueError("only a forward attention saves the log-sum-exp")
        if self.bias_gradient and (self.direction != "backward" or not self.bias):
            raise ValueError("only a backward attention has the gradient of its bias")
        if self.mask_block and not self.mask:
            raise ValueError(f"mask_block={self.mask_block} needs a mask")
        if self.value_dim == self.head_dim:  # one problem, one key
            object.__setattr__(self, "value_dim", None)
        looks_back = self.is_causal or (self.window and self.window[1] <= 0)
        if self.alibi and looks_back:
            object.__setattr__(self, "alibi", "linear")

    @property
    def columns(self) -> int:
        """Columns of v and o."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        """Multiply-adds of the matrix products counted twice, masked ones included."""
        scores = 2 * self.batch * self.heads * self.q_len * self.kv_len
        of_keys, of_values = {"forward": (1, 1), "backward": (3, 2)}[self.direction]
        return scores * (of_keys * self.head_dim + of_values * self.columns)

    @property
    def bytes(self) -> int:
        """Fewest bytes moved through memory: operands read, results written."""
        queries = self.batch * self.q_len * self.heads
        keys = self.batch * self.kv_len * self.kv_heads
        passes = {"forward": 1, "backward": 2}[self.direction]
        both = passes * (self.head_dim + self.columns)
        total = (queries + keys) * both * ITEMSIZE.get(self.dtype, 4)
        if self.bias:
            bias = math.prod(self.bias) * ITEMSIZE.get(self.bias_dtype or "", 4)
            total += bias * (1 + self.bias_gradient)
        if self.saves_lse:
            total += self.batch * self.heads * self.q_len * ITEMSIZE["float32"]
        if self.segments:
            ids = self.batch * (self.q_len + self.kv_len)
            total += ids * 4
        return total + (math.prod(self.mask) if self.mask else 0)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        forward = cls(
            batch=2,
            q_len=4096,
            kv_len=4096,
            heads=16,
            kv_heads=16,
            head_dim=128,
            dtype=dtype,
            scale=128**-0.5,
        )
        backward = dataclasses.replace(forward, direction="backward")
        return {"forward": forward, "backward": backward}

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        return {"op": self.op, **{k: v for k, v in data.items() if k not in _NEW or v}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AttentionProblem:
        fields = {k: tuples(v) for k, v in data.items() if k != "op"}
        return cls(**fields)

    def __str__(self) -> str:
        heads = str(self.heads)
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        parts = [
            f"attention {self.batch}x{self.q_len}x{self.kv_len} heads {heads} "
            f"dim {self.head_dim}{f'/{self.value_dim}' if self.value_dim else ''} "
            f"{self.dtype}",
            "" if self.direction == "forward" else self.direction,
            "causal" if self.is_causal else "",
            "" if self.window is None else "window {},{}".format(*self.window),
            f"bias {'x'.join(map(str, self.bias))}" if self.bias else "",
            f"mask {'x'.join(map(str, self.mask))}" if self.mask else "",
            "of {}x{} blocks".format(*self.mask_block) if self.mask_block else "",
            "from the end" if self.aligned_at_end else "",
            "segments" if self.segments else "",
            "query lengths" if self.q_lengths else "",
            "key lengths" if self.kv_lengths else "",
            f"cap {self.soft_cap:g}" if self.soft_cap else "",
            "sinks" if self.sinks else "",
            f"alibi {self.alibi}" if self.alibi else "",
            "&lse" if self.saves_lse else "",
            "&dbias" if self.bias_gradient else "",
        ]
        return " ".join(p for p in parts if p)

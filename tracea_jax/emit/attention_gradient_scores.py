"""Biases and masks in the kernels of attention's gradients.

``tile/gradient_scores.cuh`` has the device's side of it: flags of the Traits, and
arguments behind the kernel's own. Callers: ``attention_backward_kernels`` and
``attention_backward_bias``.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit.attention_sides import Side
from tracea_jax.emit.kernel import Param, Pointer, Scalar, TensorMap
from tracea_jax.problem import AttentionProblem

_POINTERS = {
    "scores_bias": "const void*",
    "alibi_slopes": "const float*",
    "map": "const unsigned*",
    "mask_words": "const unsigned*",
}
_INTEGERS = (
    *("scores_q_len", "scores_kv_len", "ahead"),
    *("map_example", "map_head", "bias_row", "mask_row"),
)
_LONG = ("bias_example", "bias_head", "mask_example", "mask_head")
WORDS = {"kBiased": "bias", "kAlibi": "alibi", "kMapped": "map", "kMaskBits": "mask"}


def moves(problem: AttentionProblem) -> bool:
    """Returns whether anything is added to the products of queries and keys."""
    return problem.bias is not None or problem.alibi is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientScores:
    """Biases and masks of one kernel.

    Attributes:
      problem: the op's problem.
      side: what the kernel owns.
      is_mapped: whether it reads a map of blocks.
    """

    problem: AttentionProblem
    side: Side
    is_mapped: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of operands and buffers."""
        p, side = self.problem, self.side
        there = {
            "bias": p.bias is not None,
            "alibi_slopes": p.alibi is not None,
            side.buffer("map"): self.is_mapped,
            side.buffer("mask_words"): bool(rules.reads_mask(side.problem, side)),
        }
        return tuple(name for name, is_read in there.items() if is_read)

    @property
    def element(self) -> str:
        """The C++ type of an entry of the bias, also of one that is not there."""
        return rules.bias_element(self.problem)

    @property
    def flags(self) -> dict[str, bool]:
        """Boolean constants of the Traits."""
        p, side = self.problem, self.side
        examples, heads, _, keys = p.bias or (1, 1, 1, 1)
        return {
            "kBiased": p.bias is not None,
            "kBiasTiles": rules.biased_by_tiles(p),
            "kBiasExamples": examples > 1,
            "kBiasHeads": heads > 1,
            "kBiasKeys": keys > 1,
            "kAlibi": p.alibi is not None,
            "kAlibiLinear": p.alibi == "linear",
            "kMapped": self.is_mapped,
            "kMaskBits": bool(rules.reads_mask(side.problem, side)),
            "kSpans": p.segments and not self.is_mapped,
        }

    @property
    def parameters(self) -> dict[str, str]:
        """Names and types of the arguments, in the order of the struct."""
        return {
            **_POINTERS,
            **dict.fromkeys(_INTEGERS, "int"),
            **dict.fromkeys(_LONG, "long long"),
            "scores_scale": "float",
        }

    def params(self, operands: tuple[str, ...]) -> tuple[Param, ...]:
        """The arguments of a launch whose kernel has these operands."""
        p, side = self.problem, self.side
        names = {
            "scores_bias": "bias",
            "alibi_slopes": "alibi_slopes",
            "map": side.buffer("map"),
            "mask_words": side.buffer("mask_words"),
        }
        number = {name: i for i, name in enumerate(operands)}
        numbers = {
            "scores_q_len": p.q_len,
            "scores_kv_len": p.kv_len,
            "ahead": p.kv_len - p.q_len if p.aligned_at_end else 0,
            **forward.steps(side.problem, side),
        }
        return (
            *(Pointer(operand=number.get(names[name], -1)) for name in _POINTERS),
            *(Scalar(value=numbers[name]) for name in _INTEGERS),
            *(Scalar(value=numbers[name], dtype="int64") for name in _LONG),
            Scalar(value=p.scale, dtype="float32"),
        )

    def bias_map(self, operands: tuple[str, ...], queries: int) -> TensorMap | None:
        """Boxes of so many queries and 64 keys, if tiles of the bias are copied."""
        if not rules.biased_by_tiles(self.problem):
            return None
        return forward.bias_map(self.problem, operands.index("bias"), queries)

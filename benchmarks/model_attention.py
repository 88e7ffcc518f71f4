"""The attention of well-known models, in the order in which it is tuned.

Prompts and training steps have some 16384 tokens, or one sequence if that is longer;
what decodes has one query of each of several sequences, and lengths of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tracea_jax.problem import AttentionProblem

TOKENS = 16384
LENGTHS = (4096, 8192, 2048, 32768, 1024, 16384, 512)
LONGEST = (65536, 131072)  # of one model, and its gradients only up to the first
DECODED = ((64, 2048), (8, 32768), (16, 4096), (1, 131072), (64, 8192), (16, 1024))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a model.

    Attributes:
      kv_heads: None for as many as ``heads``.
      lengths: tokens of a sequence, the most important first.
    """

    name: str
    heads: int
    kv_heads: int | None = None
    head_dim: int
    value_dim: int | None = None
    is_causal: bool = True
    decodes: bool = False
    lengths: tuple[int, ...] = LENGTHS

    def whole(self, length: int) -> AttentionProblem:
        """All queries of all sequences see all keys, or those before them."""
        return AttentionProblem(
            batch=max(1, TOKENS // length),
            q_len=length,
            kv_len=length,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype="bfloat16",
            scale=self.head_dim**-0.5,
            is_causal=self.is_causal,
        )

    def decoding(self, batch: int, longest: int) -> AttentionProblem:
        whole = dataclasses.replace(self.whole(longest), is_causal=False)
        return dataclasses.replace(whole, batch=batch, q_len=1, kv_lengths=True)


MODELS = (
    Heads(
        name="Llama 3 8B",
        heads=32,
        kv_heads=8,
        head_dim=128,
        decodes=True,
        lengths=(*LENGTHS, *LONGEST),
    ),
    Heads(name="Llama 3 70B", heads=64, kv_heads=8, head_dim=128, decodes=True),
    Heads(name="GPT-2", heads=12, head_dim=64, lengths=(1024, 512)),
    Heads(name="ViT-B", heads=12, head_dim=64, is_causal=False, lengths=(197,)),
    Heads(name="Gemma 7B", heads=16, head_dim=256, decodes=True),
    Heads(name="Gemma 2B", heads=8, kv_heads=1, head_dim=256, decodes=True),
    Heads(name="DeepSeek", heads=16, head_dim=192, value_dim=128),
    Heads(name="Whisper", heads=20, head_dim=64, is_causal=False, lengths=(1500,)),
)


def order(models: tuple[Heads, ...] = MODELS) -> tuple[AttentionProblem, ...]:
    """Every problem once, so that each model has some lengths early."""
    return tuple(dict.fromkeys(_rounds(models)))


def _rounds(models: tuple[Heads, ...]) -> Iterator[AttentionProblem]:
    for i in range(len(LENGTHS) + len(LONGEST)):
        for model in models:
            if i < len(model.lengths):
                whole = model.whole(model.lengths[i])
                yield whole
                if whole.q_len > LONGEST[0]:
                    continue
                yield dataclasses.replace(whole, saves_lse=True)
                yield dataclasses.replace(whole, direction="backward")
            if model.decodes and i < len(DECODED):
                yield model.decoding(*DECODED[i])

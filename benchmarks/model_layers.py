"""The matrix products of well-known models, in the order in which they are tuned.

A product multiplies rows of k features, one for each token, by a weight (k, n). Sizes
are those of the models' published configurations. Each expert of a mixture is a product
of its own, because it gets its own tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tracea_jax.problem import Epilogue, GatedMatmulProblem, GemmProblem, Problem

# Tokens: a prompt, decoding of several sequences and of one, and numbers in between.
ROWS = (4096, 16, 1, 1024, 64, 16384, 256, 128, 512, 32, 2048, 8, 8192)
HEAD_ROWS = (1, 16, 64, 256, 4096)  # heads see few tokens, except in training


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One product of a model.

    Attributes:
      name: of the model, and of the product in it.
      n, k: see the module.
      layout: as in ``GemmProblem``; "nt" for weights that are stored (n, k).
      fused: the epilogue that the model fuses into the product, if there is one.
      is_gated: whether it is one of a gated pair.
      is_head: whether it is the projection to the vocabulary.
    """

    name: str
    n: int
    k: int
    layout: Any = "nn"
    fused: Epilogue | None = None
    is_gated: bool = False
    is_head: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        return HEAD_ROWS if self.is_head else ROWS

    def plain(self, m: int) -> GemmProblem:
        return GemmProblem(m=m, **self._fields)

    def asked(self, m: int) -> Problem | None:
        """The problem with the layer's epilogue; None if the layer has none."""
        if self.is_gated:
            return GatedMatmulProblem(m=m, **self._fields)
        if self.fused is not None:
            return GemmProblem(m=m, **self._fields, epilogue=self.fused)
        return None

    @property
    def _fields(self) -> dict[str, Any]:
        dtypes = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
        return {"n": self.n, "k": self.k, "layout": self.layout, **dtypes}


_BIAS = Epilogue(bias="row")
_GELU = Epilogue(bias="row", activation="gelu")
_EXACT_GELU = Epilogue(bias="row", activation="gelu_exact")
_RESIDUAL = Epilogue(residual=True)
_BIAS_RESIDUAL = Epilogue(bias="row", residual=True)


def _llama(
    name: str, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int
) -> tuple[Layer, ...]:
    """Attention of grouped heads of 128 and a gated MLP, as Llama, Qwen and Mixtral."""
    qkv = (heads + 2 * kv_heads) * 128
    fused = _BIAS if name.startswith("Qwen") else None
    return (
        Layer(name=f"{name} gate/up", n=hidden, k=width, is_gated=True),
        Layer(name=f"{name} down", n=width, k=hidden, fused=_RESIDUAL),
        Layer(name=f"{name} qkv", n=qkv, k=width, fused=fused),
        Layer(name=f"{name} o", n=width, k=heads * 128, fused=_RESIDUAL),
        Layer(name=f"{name} head", n=vocabulary, k=width, is_head=True),
    )


def _classic(name: str, width: int, gelu: Epilogue) -> tuple[Layer, ...]:
    """Attention and an MLP of four times the width, biases everywhere."""
    hidden = 4 * width
    return (
        Layer(name=f"{name} fc1", n=hidden, k=width, fused=gelu),
        Layer(name=f"{name} fc2", n=width, k=hidden, fused=_BIAS_RESIDUAL),
        Layer(name=f"{name} qkv", n=3 * width, k=width, fused=_BIAS),
        Layer(name=f"{name} o", n=width, k=width, fused=_BIAS_RESIDUAL),
    )


LAYERS: tuple[Layer, ...] = (
    *_llama("Llama 3 8B", 4096, 14336, 32, 8, 128256),
    *_llama("Llama 3 70B", 8192, 28672, 64, 8, 128256),
    *_llama("Qwen2.5 7B", 3584, 18944, 28, 4, 152064),
    *_llama("Mixtral 8x7B", 4096, 14336, 32, 8, 32000),
    *_classic("GPT-2", 768, _GELU),
    Layer(name="GPT-2 head", n=50257, k=768, layout="nt", is_head=True),
    *_classic("ViT-L", 1024, _EXACT_GELU),
    Layer(name="ViT-L head", n=1000, k=1024, fused=_BIAS),
    *_llama("Qwen2.5 72B", 8192, 29568, 64, 8, 152064),
)


def order(layers: tuple[Layer, ...] = LAYERS) -> tuple[Problem, ...]:
    """Every problem once, so that each layer has some rows early.

    The plain products come first: all layers with the first number of rows, then all
    with the second, and so on. Products with epilogues follow, large heads come last.
    """
    bodies = tuple(layer for layer in layers if not layer.is_head)
    heads = tuple(layer for layer in layers if layer.is_head)
    found = (
        *_plain(bodies),
        *_asked(bodies),
        *_plain(heads),
    )
    return tuple(dict.fromkeys(found))


def _plain(layers: tuple[Layer, ...]) -> Iterator[Problem]:
    for layer, m in _rounds(layers):
        yield layer.plain(m)


def _asked(layers: tuple[Layer, ...]) -> Iterator[Problem]:
    for layer, m in _rounds(layers):
        if (problem := layer.asked(m)) is not None:
            yield problem


def _rounds(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, int]]:
    longest = max((len(layer.rows) for layer in layers), default=0)
    for i in range(longest):
        yield from ((layer, layer.rows[i]) for layer in layers if i < len(layer.rows))

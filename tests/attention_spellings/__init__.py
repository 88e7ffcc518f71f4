"""Attention as people write it, each spelling with the op call that it must become."""

from __future__ import annotations

from attention_spellings.alibi import ALIBI, NO_ALIBI
from attention_spellings.base import Case
from attention_spellings.biases import BIASES, CAPPED, HEAD_MASKS
from attention_spellings.jax_nn import JAX_NN, JAX_NN_IN_BF16
from attention_spellings.layouts import DTYPES, LAYOUTS, SHARED
from attention_spellings.masks import MASKS, SEGMENTS
from attention_spellings.models import MODELS, RARE_MODELS
from attention_spellings.sinks import DIVIDED_LATE, WITH_SINKS
from attention_spellings.softmaxes import SOFTMAX

__all__ = ["CAPS", "GROUPS", "RARE", "Case"]

GROUPS: dict[str, dict[str, Case]] = {
    "jax.nn": JAX_NN,
    "jax.nn bf16": JAX_NN_IN_BF16,
    "softmax": SOFTMAX,
    "divided late": DIVIDED_LATE,
    "layouts": LAYOUTS,
    "shared heads": SHARED,
    "dtypes": DTYPES,
    "masks": MASKS,
    "segments": SEGMENTS,
    "biases": BIASES,
    "head masks": HEAD_MASKS,
    "models": MODELS,
}

# What few kernels compute: calls where one does.
RARE: dict[str, dict[str, Case]] = {
    "capped": CAPPED,
    "sinks": WITH_SINKS,
    "alibi": ALIBI,
    "no alibi": NO_ALIBI,
    "models": RARE_MODELS,
}

CAPS = {  # of these; the others have none
    ("capped", "capped"): 2,
    ("capped", "capped bfloat16"): 2,
    ("capped", "capped with a bias"): 3,
    ("capped", "as gemma"): 4,
    ("alibi", "capped"): 2,
    ("no alibi", "capped keys"): 2,
    ("models", "gemma local"): 50,
}

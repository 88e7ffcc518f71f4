"""Gradients of attention that tests of attention_backward_sm90 share."""

from __future__ import annotations

from typing import Any

from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.problem import AttentionProblem

USUAL = AttentionBackwardSm90Config(tile_kv=128, block_q=64, tile_q=128, block_kv=64)
LENGTHS = {"q_lengths": True, "kv_lengths": True}
EVERYTHING = {
    **{"window": (300, 7), "is_causal": True, "segments": True},
    **{"sinks": True, **LENGTHS},
}


BIASED: dict[str, Any] = {
    "bias": (1, 12, 1000, 1300),
    "bias_dtype": "bfloat16",
    "bias_gradient": True,
}
TILED: dict[str, Any] = {**BIASED, "kv_len": 1304, "bias": (1, 12, 1000, 1304)}
ALL: dict[str, Any] = {
    **EVERYTHING,
    **TILED,
    "mask": (2, 1, 1000, 1304),
    "soft_cap": 30.0,
    "alibi": "distance",
}


def problem(head_dim: int = 128, **fields: Any) -> AttentionProblem:
    """A backward problem whose lengths no tile divides."""
    usual: dict[str, Any] = {
        "direction": "backward",
        "batch": 2,
        "q_len": 1000,
        "kv_len": 1300,
        "heads": 12,
        "kv_heads": 4,
        "dtype": "bfloat16",
        "scale": head_dim**-0.5,
    }
    return AttentionProblem(head_dim=head_dim, **(usual | fields))

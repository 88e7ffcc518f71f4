"""Problems of attention that tests of several kernels share."""

from __future__ import annotations

from typing import Any

from tracea_jax.device import Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import AttentionProblem, Problem

EVERYTHING: dict[str, Any] = {
    "window": (300, 7),
    "is_causal": True,
    "q_lengths": True,
    "kv_lengths": True,
    "saves_lse": True,
}
EVERY_OPTION: dict[str, Any] = {
    **EVERYTHING,
    "aligned_at_end": True,
    "segments": True,
    "mask": (2, 1, 1000, 1300),
    "bias": (1, 12, 1000, 1300),
    "bias_dtype": "float32",
    "soft_cap": 50.0,
    "sinks": True,
}
# Blocks that tiles divide.
WHOLE: dict[str, Any] = {
    "mask": (1, 12, 8, 11),
    "mask_block": (128, 128),
    "kv_len": 1408,
}


def problem(head_dim: int = 128, **fields: Any) -> AttentionProblem:
    """A forward problem of lengths that divide no tile."""
    usual: dict[str, Any] = {
        "batch": 2,
        "q_len": 1000,
        "kv_len": 1300,
        "heads": 12,
        "kv_heads": 4,
        "dtype": "bfloat16",
        "scale": head_dim**-0.5,
    }
    return AttentionProblem(head_dim=head_dim, **(usual | fields))


def default(problem: Problem, device: Device) -> Choice:
    """The choice if nothing was measured, without the answers that ship."""
    return decide(diagnose(problem, device)).choice

"""Reasons to refuse masks and options of attention that few kernels compute.

Asked by each variant of attention. A kernel that computes one of these asks for the
others, by name. So does a variant that is given a boolean mask in place of what a mask
can say.
"""

from __future__ import annotations

from tracea_jax.problem import AttentionProblem

BY_MASK = ("segments", "aligned_at_end")  # of the extras: what a boolean mask can say


def is_said_by_mask(problem: AttentionProblem) -> bool:
    """True if a variant that reads one entry of a mask a score needs another mask."""
    p = problem
    moved = p.aligned_at_end and (p.is_causal or p.window is not None)
    return p.segments or moved or p.mask_block is not None


def refuses_mask(problem: AttentionProblem) -> str | None:
    """Why a kernel that reads one entry of a mask a score cannot take the mask."""
    if problem.mask_block is None:
        return None
    block = "{}x{}".format(*problem.mask_block)
    return f"a mask of {block} blocks; it reads an entry for each score"


def refuses_extras(problem: AttentionProblem, *computed: str) -> str | None:
    """Why a kernel that computes only these of the extras cannot take the problem."""
    p = problem
    extras = {
        "segments": "it reads no segment ids" if p.segments else None,
        "soft_cap": "it caps no scores" if p.soft_cap else None,
        "sinks": "it has no sinks" if p.sinks else None,
        "alibi": "it computes no ALiBi from slopes" if p.alibi else None,
        "value_dim": (
            f"values of {p.value_dim} columns for keys of {p.head_dim}"
            if p.value_dim
            else None
        ),
        "aligned_at_end": (
            "it counts positions from the start" if p.aligned_at_end else None
        ),
    }
    found = (why for name, why in extras.items() if name not in computed)
    return next((why for why in found if why), None)

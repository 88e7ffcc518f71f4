"""Which masks attention can be asked for and no kernel of today reads.

Asked by each variant of attention. A kernel that reads block maps asks for itself.
"""

from __future__ import annotations

from tracea_jax.problem import AttentionProblem


def refuses_mask(problem: AttentionProblem) -> str | None:
    """Why a kernel that reads one entry of a mask a score cannot take the mask."""
    if problem.mask_block is None:
        return None
    block = "{}x{}".format(*problem.mask_block)
    return f"a mask of {block} blocks; it reads an entry for each score"

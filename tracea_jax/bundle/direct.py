"""Names of single operations, by which a program calls a kernel that a bundle brought.

``kernels/capi/api.cc`` makes the same names of the arrays that a call is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracea_jax.bundle.arrays import View
from tracea_jax.problem import AttentionProblem, Conv2dProblem, GemmProblem, Problem


def name_of(
    problem: Problem, reads: Sequence[View], writes: Sequence[View]
) -> str | None:
    """The name of a call, "matmul nn relu b1 r0: float32[8,64] ...", if it has one.

    Args:
      problem: what is asked.
      reads, writes: the arrays, in the order of the op.
    """
    if (head := _head(problem)) is None:
        return None
    arrays = (f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in (*reads, *writes))
    return f"{head}: {' '.join(arrays)}"


def _head(problem: Problem) -> str | None:
    if isinstance(problem, AttentionProblem):
        plain = AttentionProblem(
            batch=problem.batch,
            q_len=problem.q_len,
            kv_len=problem.kv_len,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            is_causal=problem.is_causal,
            scale=problem.scale,
        )
        kind = "causal" if problem.is_causal else "full"
        return f"attention {kind} {problem.scale:.6g}" if problem == plain else None
    if not isinstance(problem, GemmProblem | Conv2dProblem):
        return None
    epilogue = problem.epilogue
    if epilogue.save_preactivation or epilogue.residual_op != "add":
        return None
    if epilogue.bias not in ("none", "row"):
        return None
    bias, residual = int(epilogue.bias == "row"), int(epilogue.residual)
    tail = f"{epilogue.activation} b{bias} r{residual}"
    if isinstance(problem, GemmProblem):
        return f"matmul {problem.layout} {tail}"
    if problem.direction != "forward" or problem.layout != "nhwc":
        return None
    before = [pad[0] for pad in problem.padding]
    pairs = (problem.strides, problem.dilation, before)
    numbers = " ".join(",".join(map(str, pair)) for pair in pairs)
    return f"conv2d {numbers} {problem.groups} {tail}"

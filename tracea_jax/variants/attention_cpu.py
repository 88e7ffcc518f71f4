"""attention_cpu: flash attention in C++, prebuilt for each CPU ISA.

Here are its configs, heuristic and the problems it expects to win; the kernel is in
kernels/cpu. Caller: the op's record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tracea_jax.device import CPU_ISAS, CpuDevice, Device
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_mask import (
    BY_MASK,
    is_said_by_mask,
    refuses_extras,
)
from tracea_jax.variants.base import Call, CpuCall, Inline
from tracea_jax.variants.cpu import ceil_div, refuses_device, refuses_dtype
from tracea_jax.variants.space import (
    Space,
    check_ranges,
    grid,
    repeated,
    survivors,
)

TARGETS = {
    "forward": "tracea_cpu_attention_v1",
    "backward": "tracea_cpu_attention_gradient_v1",
}
ABI = 2

_WIDEST_HEAD = 256
_UNLIMITED = 1 << 40  # a side of a window that reaches everything


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCpuConfig:
    """Cache blocking; the register tile follows from the ISA.

    Attributes:
      block_q: queries of a task, at most; fewer if threads would be left without a
        task. The queries of all heads that share their keys count together.
      block_kv: keys that are packed at a time. Changes rounding.
      passes: number of passes of the gradient. Two passes can be cut into any number of
        tasks, but compute all weights twice. One pass computes the weights once, and
        has one task for each head of keys. Changes rounding.
    """

    block_q: int
    block_kv: int
    passes: int = 2

    def __str__(self) -> str:
        once = " one pass" if self.passes == 1 else ""
        return f"q {self.block_q} kv {self.block_kv}{once}"


_RANGES = {"block_q": (1, 2048), "block_kv": (1, 1024), "passes": (1, 2)}
_BLOCKS_Q = (64, 128, 256, 512, 1024)
_BLOCKS_KV = (64, 128, 256, 512, 1024)
_FEWEST_FLOPS = 1 << 18  # smaller problems are left to XLA, which fuses them
_UNIT_KV = 64  # the kernel rounds block_kv up to a multiple of this
_QUERY_SHARE = 0.5  # part of L2 for the queries and sums of a task
_TASKS_OF_CORE = 2  # tasks of a core that one pass must give, as they cannot be cut
_HEAD_BYTES = 4 << 20  # bytes of gradients that a task may hold, at most


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCpu:
    """The variant attention_cpu; for its methods see ``variants.base.Variant``."""

    name: str = "attention_cpu"
    config_type: type = AttentionCpuConfig
    sources: tuple[str, ...] = ("cpu/attention",)

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        p = problem
        if reason := refuses_device(device) or refuses_dtype("operands", p.dtype):
            return reason
        if p.bias and (reason := refuses_dtype("a bias", p.bias_dtype)):
            return reason
        if not all((p.batch, p.q_len, p.kv_len, p.heads, p.head_dim)):
            return "there is nothing to compute"
        if reason := refuses_extras(p, *BY_MASK, "alibi"):
            return reason
        if p.head_dim > _WIDEST_HEAD:
            return f"head_dim={p.head_dim}; it takes up to {_WIDEST_HEAD}"
        if p.direction == "backward" and (p.bias or p.alibi):
            return "a bias; its backward pass has no gradient of one"
        return None

    def check(
        self, problem: AttentionProblem, config: AttentionCpuConfig, device: Device
    ) -> None:
        check_ranges(config, _RANGES)
        if (
            config.passes == 1
            and problem.direction == "backward"
            and not has_one_pass(problem, device)
        ):
            raise ValueError("passes=1: with matrix units the gradient takes two")

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        hero = self.heuristic(problem, device)
        columns = grid(
            block_q=sorted({*_BLOCKS_Q, hero.block_q}),
            block_kv=sorted({*_BLOCKS_KV, hero.block_kv}),
            passes=(1, 2) if has_one_pass(problem, device) else (2,),
        )
        effects = _effects(problem, columns["passes"])
        alive, pruned = survivors(repeated(columns, hero, effects))
        columns = {name: values[alive] for name, values in columns.items()}
        return Space(config_type=AttentionCpuConfig, columns=columns, pruned=pruned)

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionCpuConfig:
        assert isinstance(device, CpuDevice)
        # Packed queries and sums are float32.
        fitting = int(_QUERY_SHARE * device.l2_bytes / (8 * problem.head_dim))
        block_q = max(b for b in _BLOCKS_Q[:-1] if b <= max(fitting, _BLOCKS_Q[0]))
        tasks = problem.batch * problem.kv_heads
        held = 8 * problem.kv_len * problem.head_dim
        once = tasks >= _TASKS_OF_CORE * device.cores and held <= _HEAD_BYTES
        passes = 1 if once and has_one_pass(problem, device) else 2
        # Row tiles pass through AMX side by side, except the first and last of a block.
        has_stages = on_amx(problem, device) and problem.direction == "forward"
        block_kv = 512 if has_stages else 256
        return AttentionCpuConfig(block_q=block_q, block_kv=block_kv, passes=passes)

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        return problem.flops >= _FEWEST_FLOPS

    def call(
        self, problem: AttentionProblem, config: AttentionCpuConfig, device: Device
    ) -> Call:
        assert device.arch in CPU_ISAS
        p = problem
        if is_said_by_mask(p) or p.alibi:
            # Unmeasured, it is the problem with a mask whose answer is looked up.
            known = None if config == self.heuristic(p, device) else config
            how = (("implementation", self.name), ("config", known))
            return Inline(rule=self.name, params=how)
        left, right = p.window or (_UNLIMITED, _UNLIMITED)
        return CpuCall(
            target=TARGETS[p.direction],
            attributes=(
                ("abi", ABI),
                ("has_bias", p.bias is not None),
                ("has_mask", p.mask is not None),
                ("has_q_lengths", p.q_lengths),
                ("has_kv_lengths", p.kv_lengths),
                ("scale", np.float64(p.scale)),
                ("is_causal", p.is_causal),
                ("left", left),
                ("right", right),
                ("isa", device.arch),
                ("block_q", config.block_q),
                ("block_kv", config.block_kv),
                ("passes", config.passes),
            ),
        )


def on_amx(problem: AttentionProblem, device: Device) -> bool:
    """Returns whether the problem runs on AMX's tiles, else on vectors."""
    return device.arch == "amx" and problem.dtype == "bfloat16"


def has_one_pass(problem: AttentionProblem, device: Device) -> bool:
    """True if the problem can run in one pass: a gradient without matrix units."""
    return problem.direction == "backward" and not on_amx(problem, device)


def _effects(
    problem: AttentionProblem, passes: np.ndarray
) -> dict[str, Callable[[Any], Any]]:
    """For each field the effect of its values; configs of equal effects run alike.

    Args:
      problem: the problem.
      passes: a column; with one pass, ``block_q`` has no effect.
    """
    rows = problem.q_len * problem.heads // problem.kv_heads
    keys = _UNIT_KV * ceil_div(problem.kv_len, _UNIT_KV)
    return {
        "block_q": lambda block: np.where(passes == 1, rows, np.minimum(block, rows)),
        "block_kv": lambda block: np.minimum(block, keys),
    }


ATTENTION_CPU = AttentionCpu()

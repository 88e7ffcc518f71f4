"""attention_sm80: flash attention by mma.sync, for every NVIDIA GPU since Ampere.

Here are the reasons that refuse problems, the legal configs and the one to use without
measurements; the kernel's text is in ``emit.attention_sm80``. What it computes is what
``attention_sm90`` computes. Caller: the op's record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm80 as emit
from tracea_jax.emit import attention_sm90 as hopper
from tracea_jax.emit.attention_sm80 import AttentionSm80Config
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.attention_mask import refuses_extras
from tracea_jax.variants.attention_sm90 import (
    head_refuses,
    kind_refuses,
    size_refuses,
)
from tracea_jax.variants.attention_steps import (
    map_buffers,
    map_step,
    optional_operands,
)
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_rules,
    first_refusal,
    grid,
    legal_space,
)
from tracea_jax.variants.steps import Launch, Steps

CHOICES: dict[str, tuple[int, ...]] = {
    "tile_q": (64, 128),
    "tile_kv": (32, 48, 64, 96, 128),
    "warps": (4, 8),
    "stages": (2, 3, 4),
}
_COMPUTED = ("segments", "soft_cap", "sinks", "value_dim", "aligned_at_end")
# Of GPUs that were not measured, by capability: bytes of memory and dense operations of
# 16 bits, added in float32, in a picosecond. Of each capability that GPU with least
# operations for a byte: A100 (80 GB), RTX 3090, RTX 4090, RTX 5090 (data sheets).
_SPECS = {
    (8, 0): (2.04, 312.0),
    (8, 6): (0.94, 71.0),
    (8, 9): (1.01, 165.0),
    (12, 0): (1.79, 210.0),
}
# XLA writes and reads scores in float32, and weights in 16 bits.
_SCORE_BYTES = 12
_REACHED = 0.4  # of the operations, by this kernel: a guess, as nothing was measured
_LEAST_GAIN = 1.5
_FEWEST = 1024  # queries, and keys
_MANY_CACHES = 8  # sizes of L2, of which scores find no place in it
# The config whose map of blocks is largest.
_SMALLEST = AttentionSm80Config(tile_q=64, tile_kv=32)
# Scores, weights and sums that a thread has registers for without spilling any: where
# rules on positions alone decide on scores, and where memory has a say.
_PLAIN, _MASKED = 208, 168


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSm80:
    """The variant attention_sm80; for its methods see ``variants.base.Variant``."""

    name: str = "attention_sm80"
    config_type: type = AttentionSm80Config
    sources: tuple[str, ...] = ("cuda/attention_sm80.cuh", "cuda/attention_map.cuh")

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        return (
            device_refuses(device)
            or head_refuses(problem)
            or size_refuses(problem)
            or kind_refuses(problem)
            or _map_refuses(problem)
            or refuses_extras(problem, *_COMPUTED)
        )

    def check(
        self, problem: AttentionProblem, config: AttentionSm80Config, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(_RULES, problem, config, device)

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return legal_space(
            grid(**CHOICES), AttentionSm80Config, _RULES, problem, device
        )

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionSm80Config:
        return next(
            config
            for config in _preferred(problem)
            if first_refusal(_RULES, problem, config, device) is None
        )

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        """Returns whether cuDNN has no kernel and XLA's scores would take long to move.

        On Hopper never: ``attention_sm90`` takes the same problems, and is faster. No
        other GPU was measured. There the default rests on a bound for XLA, which keeps
        scores in memory, and on a guess for this kernel: see ``_gain``.
        """
        if not isinstance(device, CudaDevice) or device.capability not in _SPECS:
            return False
        p = problem
        scores = p.batch * p.heads * p.q_len * p.kv_len
        return (
            min(p.q_len, p.kv_len) >= _FEWEST
            and scores * _SCORE_BYTES > _MANY_CACHES * device.l2_bytes
            and ATTENTION_CUDNN.why_not(p, device) is not None
            and _gain(p, device) >= _LEAST_GAIN
        )

    def call(
        self, problem: AttentionProblem, config: AttentionSm80Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = emit.kernel(problem, config, device)
        if not rules.is_mapped(problem):
            return kernel
        before = map_step(problem, config, device)
        results = ("o", *(("lse",) * problem.saves_lse))
        attend = Launch(
            name="attend",
            kernel=kernel,
            reads=emit.operands(problem, config),
            writes=results,
        )
        return Steps(
            operands=("q", "k", "v", *optional_operands(problem)),
            results=results,
            scratch=tuple(map_buffers(problem, config)),
            steps=(before, attend),
        )


ATTENTION_SM80 = AttentionSm80()


def device_refuses(device: Device) -> str | None:
    """Why it cannot run there."""
    if not isinstance(device, CudaDevice):
        return f"it runs on NVIDIA GPUs; the device is {device.platform}"
    if device.capability < (8, 0):
        return f"it needs sm_80 or newer; the device is {device.arch}"
    return None


def _gain(problem: AttentionProblem, device: CudaDevice) -> float:
    """Least quotient of XLA's time, for all scores, by that of this kernel.

    XLA moves each score at the rate of memory and then multiplies at full speed; the
    kernel does nothing but multiply, at a part of it. Scores that are skipped only add
    to this.
    """
    bytes_rate, rate = _SPECS[device.capability]
    operations = 2 * (problem.head_dim + problem.columns)
    xla = _SCORE_BYTES / bytes_rate + operations / rate
    return xla / (operations / (_REACHED * rate))


def _map_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if math.prod(hopper.buffer_shapes(p, _SMALLEST)["map"]) > INT32_MAX:
        return "the map of a mask would have more than 2^31 - 1 words"
    return None


def _preferred(problem: AttentionProblem) -> tuple[AttentionSm80Config, ...]:
    """Configs, the best first; the last ones fit everywhere."""
    return tuple(
        AttentionSm80Config(tile_q=tile_q, tile_kv=tile_kv, warps=warps, stages=stages)
        for tile_q, tile_kv, warps, stages in (
            (128, 96, 4, 2),
            (128, 64, 4, 3),
            (128, 48, 4, 2),
            (128, 32, 4, 2),
            (64, 64, 4, 2),
            (64, 32, 4, 2),
        )
    )


def _registers(problem: AttentionProblem, config: Any) -> Any:
    """Registers of a thread: scores, rounded weights and sums."""
    scores, sums = config.tile_kv // 2, problem.columns // 2
    return config.bands * (scores + scores // 2 + sums)


def _most_registers(problem: AttentionProblem) -> int:
    p = problem
    is_read = rules.is_mapped(p) or p.kv_lengths or p.q_lengths or p.bias is not None
    return _MASKED if is_read else _PLAIN


_RULES = (
    Rule(
        code="warps",
        refuses=lambda p, c, d: c.bands == 0,
        why=lambda p, c, d: (
            f"tile_q={c.tile_q} leaves {c.warps} warps fewer than 16 queries each"
        ),
    ),
    Rule(
        code="copies",
        refuses=lambda p, c, d: c.tile_kv * emit.UNITS % c.threads != 0,
        why=lambda p, c, d: (
            f"tile_kv={c.tile_kv}: {c.threads} threads cannot copy rows of "
            f"{emit.UNITS} units evenly"
        ),
    ),
    Rule(
        code="smem",
        refuses=lambda p, c, d: emit.smem_bytes(p, c) > d.smem_per_block_bytes,
        why=lambda p, c, d: (
            f"the config takes {emit.smem_bytes(p, c)} bytes of shared memory; a block "
            f"of {d.arch} has {d.smem_per_block_bytes}"
        ),
    ),
    Rule(
        code="results",
        refuses=lambda p, c, d: emit.result_bytes(p, c) > emit.smem_bytes(p, c),
        why=lambda p, c, d: (
            f"results take {emit.result_bytes(p, c)} bytes of shared memory; the "
            f"config has {emit.smem_bytes(p, c)}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: _registers(p, c) > _most_registers(p),
        why=lambda p, c, d: (
            f"scores, weights and sums take {_registers(p, c)} registers of a thread; "
            f"there are {_most_registers(p)}"
        ),
    ),
)

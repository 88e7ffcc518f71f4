"""attention_backward_sm80: the gradients of flash attention on every GPU since Ampere.

Two kernels compute dk and dv, and dq, from the output and the log-sum-exp of whatever
ran forward, as ``attention_backward_sm90`` does: both skip what nobody sees, and
neither adds in memory. Here are the reasons that refuse problems, the legal configs and
the calls; the kernels' text is in ``emit.attention_backward_sm80``. Caller: the op's
record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import attention_backward_rows as rows
from tracea_jax.emit import attention_backward_sm80 as emit
from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit.attention_backward_sm80 import AttentionBackwardSm80Config
from tracea_jax.emit.attention_sides import Side
from tracea_jax.emit.attention_sm80 import UNITS
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_backward_steps import (
    OF_SINKS,
    blind_buffers,
    may_be_blind,
    of_blind,
)
from tracea_jax.variants.attention_mask import refuses_extras
from tracea_jax.variants.attention_sm80 import device_refuses
from tracea_jax.variants.attention_sm90 import head_refuses, size_refuses
from tracea_jax.variants.attention_steps import (
    map_buffers_of,
    map_steps_of,
    optional_operands,
)
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
from tracea_jax.variants.steps import Buffer, Launch, Step, Steps

_WIDEST_HEAD = 128
_LONGEST = 1 << 30  # positions that may be added without overflow
_LEAST_TILE = 64
_NEWER = (10, 0)  # compilers for these need more registers
CHOICES: dict[str, tuple[int, ...]] = {
    "tile_kv": (64, 128),
    "block_q": (16, 32, 64),
    "tile_q": (64, 128),
    "block_kv": (32, 64),
    "warps": (4, 8),
    "stages": (2, 3),
}
# Registers of a thread for sums and scores that there are without spilling any: as a
# rule, where scores are capped, and on sm_120. See ``_of_loop``.
_REGISTERS, _REGISTERS_CAPPED, _REGISTERS_NEWER = 176, 168, 160
_OF_BAND, _OF_STAGE, _OF_PLACES, _OF_CAP, _OF_WORDS = 12, 4, 4, 8, 8
_MANY_SUMS = 32
_WORD = 32  # rows of a block, of which a word of a mask tells


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBackwardSm80:
    """The variant attention_backward_sm80; see ``variants.base.Variant``."""

    name: str = "attention_backward_sm80"
    config_type: type = AttentionBackwardSm80Config
    sources: tuple[str, ...] = (
        "cuda/attention_backward_sm80.cuh",
        "cuda/attention_rows.cuh",
    )

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        if problem.direction != "backward":
            return "it computes gradients only"
        return (
            device_refuses(device)
            or _head_refuses(problem)
            or size_refuses(problem)
            or _tiles_refuse(problem)
            or _kind_refuses(problem)
        )

    def check(
        self,
        problem: AttentionProblem,
        config: AttentionBackwardSm80Config,
        device: Device,
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(_RULES, problem, config, device)

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return legal_space(
            grid(**CHOICES), AttentionBackwardSm80Config, _RULES, problem, device
        )

    def heuristic(
        self, problem: AttentionProblem, device: Device
    ) -> AttentionBackwardSm80Config:
        return next(
            config
            for config in _preferred()
            if first_refusal(_RULES, problem, config, device) is None
        )

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        return False

    def call(
        self,
        problem: AttentionProblem,
        config: AttentionBackwardSm80Config,
        device: Device,
    ) -> Steps:
        assert isinstance(device, CudaDevice)
        p, c = problem, cast("Any", config)
        has_blind = may_be_blind(p)
        sides = (emit.side_of_keys(p, c), emit.side_of_queries(p, c))
        steps: list[Step] = [
            Launch(
                name="prepare",
                kernel=rows.rows_kernel(p, c, device, has_blind),
                reads=sizes.rows_reads(p),
                writes=("rows", *("blind",) * has_blind),
            )
        ]
        if has_blind:
            steps.append(of_blind(p))
        if p.sinks:
            steps.append(OF_SINKS)
        for side in sides:
            steps += map_steps_of(side, device)
            steps.append(
                Launch(
                    name=side.name,
                    kernel=emit.kernel(p, c, device, side, has_blind),
                    reads=emit.reads(side, has_blind),
                    writes=emit.results(side),
                )
            )
        return Steps(
            operands=("q", "k", "v", *optional_operands(p), "o", "lse", "do"),
            results=("dq", "dk", "dv", *("dsinks",) * p.sinks),
            scratch=tuple(_buffers(p, c, sides, has_blind)),
            steps=tuple(steps),
        )


ATTENTION_BACKWARD_SM80 = AttentionBackwardSm80()


def _buffers(
    problem: AttentionProblem,
    config: AttentionBackwardSm80Config,
    sides: tuple[Side, ...],
    has_blind: bool,
) -> Iterator[Buffer]:
    p, c = problem, cast("Any", config)
    yield Buffer(name="rows", shape=sizes.rows_shape(p, c), dtype="float32")
    if has_blind:
        yield from blind_buffers(p, c)
    for side in sides:
        yield from map_buffers_of(side)


def _head_refuses(problem: AttentionProblem) -> str | None:
    if reason := head_refuses(problem):
        return reason
    if problem.head_dim > _WIDEST_HEAD:
        return (
            f"head_dim={problem.head_dim}; it takes multiples of 8 up to {_WIDEST_HEAD}"
        )
    return None


def _tiles_refuse(problem: AttentionProblem) -> str | None:
    p = problem
    if -(-p.kv_len // _LEAST_TILE) * p.kv_heads * p.batch > INT32_MAX:
        return f"the keys have more than 2^31 - 1 tiles of {_LEAST_TILE}"
    smallest = AttentionBackwardSm80Config(
        tile_kv=64, block_q=32, tile_q=64, block_kv=32, warps=4
    )
    for side in (emit.side_of_keys(p, smallest), emit.side_of_queries(p, smallest)):
        if math.prod(forward.buffer_shapes(side.problem, side)["map"]) > INT32_MAX:
            return "the map of a mask would have more than 2^31 - 1 words"
    return None


def _kind_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    computed = ("segments", "sinks", "soft_cap", "aligned_at_end")
    if reason := refuses_extras(p, *computed):
        return reason
    if p.bias:
        return "it computes no gradient of a bias"
    if p.window and max(map(abs, p.window)) > _LONGEST:
        return f"window {p.window} with a side above {_LONGEST}"
    return None


def _preferred() -> Iterator[AttentionBackwardSm80Config]:
    """Configs, the best first; the last one fits everywhere."""
    for tile, block_q, block_kv, warps in (
        *((128, 16, 64, 4), (64, 64, 64, 4), (64, 32, 64, 4), (64, 16, 64, 4)),
    ):
        yield AttentionBackwardSm80Config(
            tile_kv=tile,
            block_q=block_q,
            tile_q=tile,
            block_kv=block_kv,
            warps=warps,
        )


def _uneven(c: Any) -> Any:
    """Returns whether a warp would own no whole band of 16 rows, or more than two."""
    own = 16 * c.warps
    kv, q = c.tile_kv, c.tile_q
    return (kv % own != 0) | (q % own != 0) | (kv > 2 * own) | (q > 2 * own)


def _most_registers(problem: AttentionProblem, device: Any) -> int:
    if device.capability >= _NEWER:
        return _REGISTERS_NEWER
    return _REGISTERS_CAPPED if problem.soft_cap else _REGISTERS


def _of_loop(problem: AttentionProblem, c: Any, d: Any, *, of_keys: bool) -> Any:
    """Registers that the loop over blocks keeps, beside those that it always does.

    Where a map of blocks and positions say together what is seen, each band of a warp
    has bounds of its own, which count where bands have many sums. The kernel of keys,
    which has sums of two products, then has none left for two places in the map beside
    the range of blocks (on sm_120), the place in a ring of three stages, which takes a
    product (elsewhere), and, with a cap, the second words of a mask. Long blocks of
    capped scores leave none for that place either.
    """
    p = problem
    is_newer, is_capped = d.capability >= _NEWER, p.soft_cap is not None
    is_long = is_capped * (c.block_q > _WORD)
    third = _OF_STAGE * (c.stages - 2) * of_keys * (not is_newer)
    if not (rules.is_mapped(p) and _looks_at_positions(p)):
        return third * is_long
    more_bands = (emit.bands(c, of_keys=of_keys) - 1) * (not is_newer)
    bounds = _OF_BAND * more_bands * (emit.sums(p, of_keys=of_keys) // _MANY_SUMS)
    if not of_keys:
        return bounds
    words = _OF_WORDS * (p.mask is not None) * is_long
    places = (_OF_PLACES + _OF_CAP * is_capped) * is_newer
    return words + places + bounds + third


def _looks_at_positions(problem: AttentionProblem) -> bool:
    p = problem
    return rules.window(p) != (None, None) or p.q_lengths or p.kv_lengths


def _registers(problem: AttentionProblem, c: Any, d: Any, *, of_keys: bool) -> Any:
    """Registers of a thread in the kernel of one side; at most ``_most_registers``."""
    kept = emit.registers(problem, c, of_keys=of_keys)
    return kept + _of_loop(problem, c, d, of_keys=of_keys)


def _of_both(measure: Any, *asked: Any) -> tuple[Any, Any]:
    return measure(*asked, of_keys=True), measure(*asked, of_keys=False)


_RULES = (
    Rule(
        code="warps",
        refuses=lambda p, c, d: _uneven(c),
        why=lambda p, c, d: (
            f"tiles of {c.tile_kv} and {c.tile_q} rows for {c.warps} warps; each owns "
            "16 or 32"
        ),
    ),
    Rule(
        code="copies",
        refuses=lambda p, c, d: (
            (np.minimum(c.block_q, c.block_kv) * UNITS % c.threads) != 0
        ),
        why=lambda p, c, d: (
            f"blocks of {c.block_q} and {c.block_kv} rows: {c.threads} threads cannot "
            f"copy rows of {UNITS} units evenly"
        ),
    ),
    Rule(
        code="smem",
        refuses=lambda p, c, d: (
            (emit.smem_bytes(p, c, of_keys=True) > d.smem_per_block_bytes)
            | (emit.smem_bytes(p, c, of_keys=False) > d.smem_per_block_bytes)
        ),
        why=lambda p, c, d: (
            "the kernels take {} and {} bytes of shared memory; a block of {} has "
            "{}".format(
                *_of_both(emit.smem_bytes, p, c), d.arch, d.smem_per_block_bytes
            )
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            np.maximum(*_of_both(_registers, p, c, d)) > _most_registers(p, d)
        ),
        why=lambda p, c, d: (
            "sums, scores and what the loop keeps take {} and {} registers of a thread;"
            " there are {}".format(
                *_of_both(_registers, p, c, d), _most_registers(p, d)
            )
        ),
    ),
)

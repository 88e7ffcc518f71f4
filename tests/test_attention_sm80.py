"""attention_sm80 without a GPU: what it refuses, its parameters, its machine code."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention_problems import EVERY_OPTION, EVERYTHING, problem
from compiled import assert_clean
from gpus import A100, DEVICES, H200, small_gpu
from slow_cases import slow_unless
from spaces import one_of_each

from tracea_jax.device import CpuDevice, CudaDevice
from tracea_jax.dispatch import plan
from tracea_jax.emit import attention_sm80 as emit
from tracea_jax.emit.attention_sm80 import AttentionSm80Config
from tracea_jax.emit.kernel import Kernel, Pointer
from tracea_jax.problem import AttentionProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import Launch, Steps
from tracea_jax.variants.attention_sm80 import ATTENTION_SM80

pytestmark = pytest.mark.once

USUAL = AttentionSm80Config(tile_q=128, tile_kv=64)


# ---- what it takes -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
def test_it_runs_on_every_gpu_since_ampere(device):
    blocks = {"mask": (1, 12, 8, 11), "mask_block": (128, 128)}
    for head_dim, fields in itertools.product(
        (8, 128, 256), ({}, EVERYTHING, {"dtype": "float16"}, EVERY_OPTION, blocks)
    ):
        asked = problem(head_dim, **fields)
        assert ATTENTION_SM80.why_not(asked, device) is None
        config = ATTENTION_SM80.heuristic(asked, device)
        ATTENTION_SM80.check(asked, config, device)
        assert ATTENTION_SM80.space(asked, device).index(config) is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 100}, "head_dim=100; it takes multiples of 8 up to 256"),
        ({"alibi": "linear"}, "it computes no ALiBi from slopes"),
        ({"kv_len": 0}, "there is nothing to compute"),
        ({"direction": "backward"}, "it computes no gradients"),
        ({"scale": -0.1}, "scale=-0.1; it takes scales from 8.67e-19 to 1.05e+06"),
        (
            {"mask": (1, 1, 1 << 24, 1 << 24), "q_len": 1 << 24, "kv_len": 1 << 24},
            "the map of a mask would have more than 2^31 - 1 words",
        ),
    ],
)
def test_what_it_refuses(fields, reason):
    found = ATTENTION_SM80.why_not(problem(**fields), A100)
    assert found and found.startswith(reason)


def test_it_runs_nowhere_else():
    cpu = CpuDevice(name="any", isa="avx2", cores=8)
    assert "NVIDIA" in str(ATTENTION_SM80.why_not(problem(), cpu))
    assert "needs sm_80" in str(ATTENTION_SM80.why_not(problem(), small_gpu(7, 5)))


# ---- configs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head_dim", slow_unless([8, 72, 256], [8, 64, 72, 96, 128, 160, 192, 256])
)
@pytest.mark.parametrize("value_dim", [None, 64, 256])
@pytest.mark.parametrize("fields", [{}, EVERY_OPTION], ids=len)
def test_there_is_a_config_for_every_head(head_dim, value_dim, fields):
    asked = problem(head_dim, value_dim=value_dim, **fields)
    for device in DEVICES:
        config = ATTENTION_SM80.heuristic(asked, device)
        ATTENTION_SM80.check(asked, config, device)
        for legal in ATTENTION_SM80.space(asked, device).configs():
            found = emit.kernel(asked, legal, device).smem_bytes
            assert found <= device.smem_per_block_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_q": 64, "warps": 8}, "tile_q=64 leaves 8 warps fewer than 16 queries"),
        ({"tile_kv": 48, "warps": 8}, "256 threads cannot copy rows of 8 units evenly"),
        ({"tile_kv": 128}, "scores, weights and sums take 320 registers of a thread"),
        ({"tile_kv": 120}, "tile_kv=120 must be one of"),
    ],
)
def test_configs_that_are_not_legal(changes, reason):
    with pytest.raises(ValueError, match=reason):
        ATTENTION_SM80.check(problem(), dataclasses.replace(USUAL, **changes), A100)


def test_shared_memory_limits_the_ring():
    config = AttentionSm80Config(tile_q=64, tile_kv=64, stages=3)
    asked = problem(256)
    ATTENTION_SM80.check(asked, config, A100)
    with pytest.raises(ValueError, match="takes 131072 bytes of shared memory"):
        ATTENTION_SM80.check(asked, config, small_gpu(8, 6))


# ---- its parameters ------------------------------------------------------------------


def operands(asked: AttentionProblem) -> list[int]:
    kernel = emit.kernel(asked, USUAL, A100)
    return [p.operand for p in kernel.params if isinstance(p, Pointer)]


def test_operands_are_numbered_arguments_first():
    none = [-1] * 8
    # q, k, v, o, log-sum-exp, lengths of queries and of keys, segments, sinks, ...
    assert operands(problem()) == [0, 1, 2, 3, -1, *none]
    found = operands(problem(**EVERY_OPTION))
    assert found == [0, 1, 2, 11, 12, 4, 5, 6, 7, 8, 3, 9, 10]


def test_masks_become_a_map_before_the_kernel():
    call = ATTENTION_SM80.call(problem(**EVERY_OPTION), USUAL, A100)
    assert isinstance(call, Steps)
    options = ("q_lengths", "kv_lengths", "q_segments", "kv_segments", "sinks")
    assert call.operands == ("q", "k", "v", "bias", "mask", *options)
    assert [s.name for s in call.steps] == ["map", "attend"]
    assert {b.name: b.shape for b in call.scratch} == {
        "map": (2, 1, 8, 2),  # two words for 21 blocks
        "mask_words": (2, 1, 1000, 21 * 4),
    }
    attend = call.steps[-1]
    assert isinstance(attend, Launch) and attend.updates == {}
    assert isinstance(ATTENTION_SM80.call(problem(), USUAL, A100), Kernel)


def test_lengths_and_heads_share_a_source():
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"batch": 7, "q_len": 77, "kv_len": 99, "heads": 8, "kv_heads": 8},
        {"scale": 0.5},
    )
    sources = {
        emit.kernel(problem(is_causal=True, **fields), USUAL, A100).source
        for fields in kinds
    }
    assert len(sources) == 1


# ---- machine code --------------------------------------------------------------------

# Between them every architecture, head size class and option.
COMPILED: list[tuple[CudaDevice, int, dict[str, Any]]] = [
    (A100, 64, {"is_causal": True, "saves_lse": True}),
    (small_gpu(8, 6), 128, EVERY_OPTION),
    (small_gpu(8, 9), 256, {"dtype": "float16", "is_causal": True}),
    (H200, 128, {"is_causal": True}),
    (small_gpu(12, 0), 72, {"value_dim": 256, **EVERYTHING}),
]


def check_compiles(
    asked: AttentionProblem, config: AttentionSm80Config, device: CudaDevice
) -> None:
    assert_clean(emit.kernel(asked, config, device))


@pytest.mark.nvrtc
@pytest.mark.parametrize(("device", "head_dim", "fields"), COMPILED, ids=str)
def test_it_compiles_without_spilling(device, head_dim, fields):
    asked = problem(head_dim, **fields)
    check_compiles(asked, ATTENTION_SM80.heuristic(asked, device), device)


def test_compiled_kernels_are_of_every_kind():
    assert {d.arch for d, *_ in COMPILED} == {d.arch for d in DEVICES}
    named = set(itertools.chain(*(fields for *_, fields in COMPILED)))
    assert named >= {*EVERY_OPTION, "dtype", "value_dim"}


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True, "saves_lse": True},
    EVERYTHING,
    {"soft_cap": 50.0, "is_causal": True},
    {"bias": (1, 12, 1000, 1300), "bias_dtype": "bfloat16"},
    {"segments": True, "is_causal": True},
    EVERY_OPTION,
)


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("fields", KINDS, ids=len)
def test_every_config_compiles_without_spilling(device, head_dim, fields):
    asked = problem(head_dim, **fields)
    space = ATTENTION_SM80.space(asked, device)
    for config in one_of_each(space, "tile_q", "tile_kv", "warps"):
        check_compiles(asked, config, device)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("kSmemBytes = 65536", "kSmemBytes = 1024", "exactly the shared memory"),
        ("kWarps = 4", "kWarps = 2", "must have all the warps"),
    ],
)
def test_wrong_traits_do_not_compile(right, wrong, message):
    kernel = emit.kernel(problem(), USUAL, A100)
    assert kernel.source.count(right) == 1
    source = kernel.source.replace(right, wrong)
    with pytest.raises(nvrtc.CompileError, match=message):
        nvrtc.compile(dataclasses.replace(kernel, source=source))


# ---- the default ---------------------------------------------------------------------


def test_hopper_has_a_faster_kernel(without_models):
    capped = problem(q_len=4096, kv_len=4096, soft_cap=50.0)
    assert plan(capped, H200).variant == "attention_sm90"
    narrow = problem(96, q_len=4096, kv_len=4096, soft_cap=50.0)
    assert plan(narrow, H200).variant == "xla"  # heads that were not measured


@pytest.mark.parametrize(
    ("fields", "device", "variant"),
    [
        ({"soft_cap": 50.0}, A100, "attention_sm80"),
        ({"soft_cap": 50.0, "is_causal": True}, small_gpu(8, 9), "attention_sm80"),
        ({"sinks": True, "head_dim": 64}, small_gpu(8, 6), "attention_sm80"),
        ({"sinks": True}, small_gpu(8, 6), "xla"),  # its units are too slow
        ({"soft_cap": 50.0, "head_dim": 256}, A100, "xla"),
        ({"soft_cap": 50.0, "q_len": 512}, A100, "xla"),
        ({"soft_cap": 50.0, "batch": 1, "heads": 4}, A100, "xla"),  # L2 has room
        ({"is_causal": True}, A100, "cudnn"),
        ({"segments": True}, A100, "cudnn"),
    ],
    ids=str,
)
def test_the_default_where_nothing_was_measured(fields, device, variant):
    """It is chosen where cuDNN has no kernel, and moving XLA's scores takes longer."""
    asked = problem(**{"q_len": 2048, "kv_len": 2048, **fields})
    assert plan(asked, device).variant == variant

"""attention_decode_sm90 without a GPU: what it takes, its parts, its machine code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from attention_problems import default
from compiled import assert_clean
from device_code import compiles_device_code

from tracea_jax.device import NAMED
from tracea_jax.emit import attention_decode_sm90 as emit
from tracea_jax.emit.attention_decode_sm90 import AttentionDecodeSm90Config, Pages
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar, TensorMap
from tracea_jax.problem import AttentionProblem, PagedAttentionProblem
from tracea_jax.runtime import nvrtc
from tracea_jax.variants import Launch, Steps
from tracea_jax.variants.attention_decode_sm90 import ATTENTION_DECODE_SM90
from tracea_jax.variants.paged_attention_sm90 import PAGED_ATTENTION_SM90

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
WIDE = {"head_dim": 256, "batch": 8, "kv_len": 512, "kv_lengths": True}
USUAL = AttentionDecodeSm90Config(tile_kv=64)
PARTS = dataclasses.replace(USUAL, splits=4)
FROM_END = {
    "q_len": 5,
    "is_causal": True,
    "window": (300, 0),
    "aligned_at_end": True,
    "kv_lengths": True,
    "saves_lse": True,
}


def problem(head_dim: int = 128, **fields: Any) -> AttentionProblem:
    usual: dict[str, Any] = {
        "batch": 3,
        "q_len": 1,
        "kv_len": 5000,
        "heads": 32,
        "kv_heads": 8,
        "dtype": "bfloat16",
        "scale": head_dim**-0.5,
    }
    return AttentionProblem(head_dim=head_dim, **(usual | fields))


def paged(**fields: Any) -> PagedAttentionProblem:
    example = PagedAttentionProblem.examples("bfloat16")[""]
    return dataclasses.replace(example, **fields)


# --- what it takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"q_len": 65}, "65 queries; it takes 64 at most"),
        ({"kv_heads": 1, "heads": 71}, "71 heads share keys; it takes 64 at most"),
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 100}, "head_dim=100; it takes multiples of 8 up to 256"),
        ({"direction": "backward"}, "it computes no gradients"),
        ({"mask": (1, 1, 1, 5000)}, "it reads no mask"),
        ({"q_lengths": True}, "it takes no numbers of queries"),
        ({"scale": -1.0}, "scale=-1.0; it takes scales from"),
        ({"kv_len": 0}, "there is nothing to compute"),
    ],
)
def test_what_it_refuses(fields, reason):
    asked = dataclasses.replace(problem(), **fields)
    found = ATTENTION_DECODE_SM90.why_not(asked, H200)
    assert found and found.startswith(reason)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("fields", [{}, FROM_END, {"batch": 700}], ids=str)
def test_the_usual_config_is_one_of_the_space(head_dim, fields):
    asked = problem(head_dim, **fields)
    assert ATTENTION_DECODE_SM90.why_not(asked, H200) is None
    space = ATTENTION_DECODE_SM90.space(asked, H200)
    assert space.index(ATTENTION_DECODE_SM90.heuristic(asked, H200)) is not None
    for config in space.configs():
        for kernel in emit.kernels(asked, config, H200):
            on_one = config.blocks_per_sm * (kernel.smem_bytes + 1024)
            assert on_one <= H200.smem_per_block_bytes + 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blocks_per_sm": 3}, "a thread"),
        ({"head_dim": 256, "blocks_per_sm": 2}, "needs 3"),
        ({"batch": 900, "splits": 66}, "at most 268435456"),
        ({"splits": 5}, "splits=5 must be one of"),
    ],
)
def test_configs_that_are_not_legal(changes, reason):
    names = {"blocks_per_sm", "splits"} & set(changes)
    config = dataclasses.replace(USUAL, **{n: changes.pop(n) for n in names})
    asked = dataclasses.replace(problem(), **changes)
    with pytest.raises(ValueError, match=reason):
        ATTENTION_DECODE_SM90.check(asked, config, H200)


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"batch": 16, "kv_len": 1024, "kv_lengths": True}, "attention_decode_sm90"),
        ({"batch": 64, "kv_len": 4096}, "cudnn"),
        ({"batch": 64, "kv_len": 512, "kv_lengths": True}, "cudnn"),
        *((WIDE, "attention_decode_sm90"), ({**WIDE, "kv_len": 256}, "cudnn")),
        ({**WIDE, "head_dim": 192}, "cudnn"),  # which was not measured
        (FROM_END, "attention_decode_sm90"),  # which cuDNN has as a mask only
        ({"q_len": 20, "kv_len": 60}, "xla"),
    ],
)
def test_it_is_the_default_where_cudnn_is_no_faster(fields, variant):
    assert default(problem(**fields), NAMED["H100"]).variant == variant


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"batch": 16, "kv_len": 1024}, "attention_decode_sm90"),
        ({"batch": 8, "kv_len": 1 << 15}, "cudnn"),
        ({"batch": 1, "kv_len": 1 << 17}, "cudnn"),
    ],
    ids=str,
)
def test_long_caches_are_left_to_cudnn_where_memory_is_faster(fields, variant):
    sizes = {"heads": 32, "kv_heads": 8, "kv_lengths": True, **fields}
    assert default(problem(**sizes), H200).variant == variant


def test_long_caches_of_few_sequences_are_dealt_out():
    def parts(**fields: Any) -> int:
        return ATTENTION_DECODE_SM90.heuristic(problem(**fields), H200).splits

    assert parts(batch=1, kv_len=1 << 17) == 33  # of 8 heads to 132 x 2 blocks
    assert parts(batch=8, kv_len=1 << 15) == 4
    assert parts(batch=64, kv_len=4096) == 1
    assert parts(batch=16, kv_len=1024) == 1  # a second kernel would not pay
    assert parts(batch=1, kv_len=100) == 1


def test_pages_have_sizes_that_blocks_are_made_of():
    for size in (8, 16, 64, 128, 256):
        assert PAGED_ATTENTION_SM90.why_not(paged(page_size=size), H200) is None
    for size in (4, 24, 192):
        reason = PAGED_ATTENTION_SM90.why_not(paged(page_size=size), H200)
        assert reason and reason.startswith(f"pages of {size} keys; it takes 8, 16")
    assert default(paged(), H200).variant == "paged_attention_sm90"


# --- parameters -----------------------------------------------------------------------


def maps(kernel: Kernel) -> list[TensorMap]:
    return [p for p in kernel.params if isinstance(p, TensorMap)]


def pointers(kernel: Kernel) -> list[int]:
    return [p.operand for p in kernel.params if isinstance(p, Pointer)]


def test_heads_that_share_keys_are_rows_of_one_box():
    (kernel,) = emit.kernels(problem(72, q_len=40), USUAL, H200)
    q, k, v, *few = maps(kernel)
    assert q.dims == (72, 32, 40, 3) and q.box == (64, 4, 16, 1)  # 64 rows
    assert q.strides == (144, 32 * 144, 40 * 32 * 144)
    assert k.dims == v.dims == (72, 5000, 8, 3) and k.box == (64, 64, 1, 1)
    assert [m.box for m in few] == [(64, 16, 1, 1)] * 2
    assert [m.operand for m in few] == [1, 2]
    assert kernel.grid == (3 * 3 * 8, 1, 1)


def test_no_side_of_a_window_is_dropped_at_the_end():
    """Few queries, of whom the last stands at key 4999: a window of 300 limits them."""
    (kernel,) = emit.kernels(problem(**FROM_END), USUAL, H200)
    assert "kHasLeft = true, kHasRight = true" in kernel.source
    assert "kFromEnd = true" in kernel.source
    numbers = [p.value for p in kernel.params if isinstance(p, Scalar)]
    assert numbers[4:6] == [300, 0]


def test_pages_are_dimensions_of_their_own():
    asked = paged(page_size=8, pages=99, pages_per_sequence=5)
    (kernel,) = emit.kernels(asked.gathered, USUAL, H200, Pages(size=8, count=99))
    _, k, *_, few = maps(kernel)
    assert k.dims == (128, 8, 8, 99) and k.box == few.box == (64, 8, 1, 1)
    assert k.strides == (256, 99 * 8 * 256, 8 * 256)
    # o, log-sum-exp, sums, totals, lengths, table of pages
    assert pointers(kernel) == [5, -1, -1, -1, 3, 4]


def test_parts_are_put_together_by_a_second_kernel():
    call = ATTENTION_DECODE_SM90.call(problem(**FROM_END), PARTS, H200)
    assert isinstance(call, Steps)
    attend, combine = call.steps
    assert isinstance(attend, Launch) and isinstance(combine, Launch)
    assert call.operands == attend.reads == ("q", "k", "v", "kv_lengths")
    assert call.results == combine.writes == ("o", "lse")
    assert attend.writes == combine.reads == ("sums", "totals")
    assert call.scratch[0].shape == (3, 5, 32, 4, 128)
    assert pointers(attend.kernel) == [-1, -1, 4, 5, 3, -1]
    assert pointers(combine.kernel) == [0, 1, 2, 3]
    assert attend.kernel.grid == (3 * 8 * 4, 1, 1)
    assert combine.kernel.grid == (3 * 5 * 32, 1, 1)
    whole = ATTENTION_DECODE_SM90.call(problem(), USUAL, H200)
    assert isinstance(whole, Kernel) and pointers(whole) == [3, -1, -1, -1, -1, -1]


def test_blocks_go_on_with_more_parts_where_memory_is_fast():
    many = problem(batch=64, heads=32, kv_heads=8, kv_len=4096, kv_lengths=True)
    few = dataclasses.replace(many, batch=8, kv_len=1 << 15)
    usual = ATTENTION_DECODE_SM90.heuristic
    assert usual(many, H200).persistent and not usual(few, H200).persistent
    assert not usual(many, NAMED["H100"]).persistent


def test_lengths_and_parts_share_a_source():
    kinds: tuple[dict[str, Any], ...] = ({}, {"batch": 7, "kv_len": 99}, {"q_len": 3})
    sources = {
        emit.kernels(problem(**fields), dataclasses.replace(USUAL, splits=n), H200)[
            0
        ].source
        for fields in kinds
        for n in (2, 33)
    }
    assert len(sources) == 1


# --- machine code ---------------------------------------------------------------------


@pytest.mark.nvrtc
def test_the_device_deals_out_every_block_once():
    lines = []
    for count in (0, 1, 2, 3, 7, 16, 1000, 1 << 26):
        for parts in (1, 2, 3, 66):
            used = min(parts, max(1, count // 2))
            ends = np.arange(used + 1, dtype=np.int64) * count // used
            for i in {0, 1, used - 1, used, parts - 1} & set(range(parts)):
                first, last = (ends[i], ends[i + 1]) if i < used else (count, count)
                part = f"key_part({count}, {i}, {parts})"
                equal = f"{part}.first == {first} && {part}.last == {last}"
                lines.append(f'static_assert({equal}, "part {i} of {parts}");')
    assert compiles_device_code("tile/key_parts.cuh", lines)
    with pytest.raises(nvrtc.CompileError, match="part"):
        change = ("static_cast<i64>(count) * (index", "count * (index")
        compiles_device_code("tile/key_parts.cuh", lines, change=change)


COMPILED: list[tuple[int, dict[str, Any], AttentionDecodeSm90Config]] = [
    (128, {"kv_lengths": True}, USUAL),
    (128, {}, AttentionDecodeSm90Config(tile_kv=128, splits=2)),
    (128, {}, AttentionDecodeSm90Config(tile_kv=128, blocks_per_sm=1, splits=2)),
    (128, {}, AttentionDecodeSm90Config(tile_kv=32, blocks_per_sm=3)),
    (64, FROM_END, AttentionDecodeSm90Config(tile_kv=64, blocks_per_sm=3)),
    (72, {"dtype": "float16", **FROM_END}, PARTS),
    (192, {}, AttentionDecodeSm90Config(tile_kv=64, blocks_per_sm=2)),
    (192, FROM_END, AttentionDecodeSm90Config(tile_kv=128, blocks_per_sm=1)),
    (128, FROM_END, USUAL),
    (256, FROM_END, AttentionDecodeSm90Config(tile_kv=128, blocks_per_sm=1, splits=2)),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("head_dim", "fields", "config"), COMPILED, ids=str)
def test_every_kind_of_kernel_compiles_without_spilling(head_dim, fields, config):
    asked = problem(head_dim, **fields)
    ATTENTION_DECODE_SM90.check(asked, config, H200)
    for kernel in emit.kernels(asked, config, H200):
        assert_clean(kernel)


@pytest.mark.nvrtc
@pytest.mark.parametrize("page_size", [8, 256])
def test_kernels_of_pages_compile_without_spilling(page_size):
    call = PAGED_ATTENTION_SM90.call(paged(page_size=page_size), USUAL, H200)
    assert isinstance(call, Kernel)
    assert_clean(call)

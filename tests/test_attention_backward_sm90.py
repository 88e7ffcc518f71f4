"""attention_backward_sm90 without a GPU: what it takes, where it runs, its configs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from attention_gradients import ALL, BIASED, EVERYTHING, LENGTHS, TILED, USUAL, problem
from attention_problems import default
from spaces import one_of_each

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
OURS = "attention_backward_sm90"


# ---- what it takes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"direction": "forward"}, "it computes gradients only"),
        ({"dtype": "float32"}, "operands of dtype float32; it takes bfloat16, float16"),
        ({"head_dim": 264}, "head_dim=264; it takes multiples of 8 up to 256"),
        (
            {
                **{"head_dim": 256, "segments": True, "q_len": 1024, "kv_len": 1024},
                **{"bias": (1, 12, 1024, 1024), "bias_dtype": "bfloat16"},
            },
            "the kernels take 145408 and 234496 bytes of shared memory",
        ),
        (
            {"head_dim": 200, "value_dim": 128},
            "head_dim=200; it takes multiples of 8 up to 192",
        ),
        ({"head_dim": 136}, "value_dim=136; it takes multiples of 8 up to 128"),
        ({"kv_len": 0}, "there is nothing to compute"),
        (
            {"bias": (1, 12, 1000, 1300), "bias_dtype": "float64"},
            "a bias of dtype float64; it reads bfloat16, float16, float32",
        ),
        (
            {"batch": 1 << 8, "heads": 1 << 14, "kv_len": 1 << 16, **BIASED},
            "the scores have more than 2^31 - 1 tiles of 64x64",
        ),
        (
            {"q_len": 1 << 22, "kv_len": 1 << 22, "mask": (2, 12, 1 << 22, 1)},
            "the map of a mask would have more than 2^31 - 1 words",
        ),
        (
            {
                **{"aligned_at_end": True, "is_causal": True, "kv_lengths": True},
                "window": (100, 0),
            },
            "positions from ends that each example has its own of, with a window",
        ),
        ({"window": (1 << 31, 0)}, "window (2147483648, 0) with a side above 10737"),
        (
            {"segments": True, "q_len": (1 << 20) + 1},
            "segments and a length above 1048",
        ),
    ],
)
def test_what_it_refuses(fields, reason):
    found = ATTENTION_BACKWARD_SM90.why_not(problem(**fields), H200)
    assert found and found.startswith(reason)


def test_what_it_takes():
    kinds: tuple[dict[str, Any], ...] = (
        {},
        EVERYTHING,
        {"dtype": "float16", "soft_cap": 30.0},
        ALL,
        {**BIASED, "bias": (1, 1, 1, 1300), "bias_dtype": "float32"},
        {"value_dim": 128, "aligned_at_end": True, "is_causal": True, **LENGTHS},
    )
    for head_dim, fields in itertools.product((8, 64, 128, 192), kinds[-1:]):
        assert (
            ATTENTION_BACKWARD_SM90.why_not(problem(head_dim, **fields), H200) is None
        )
    for head_dim, fields in itertools.product((8, 64, 128, 200, 256), kinds[:-1]):
        asked = problem(head_dim, **fields)
        assert ATTENTION_BACKWARD_SM90.why_not(asked, H200) is None
    cpu = CpuDevice(name="any", isa="avx2", cores=8)
    assert "NVIDIA" in str(ATTENTION_BACKWARD_SM90.why_not(problem(), cpu))


def test_it_is_the_default_where_cudnn_is_slower(without_models):
    assert default(problem(), H200).variant == "cudnn"
    lengths = {"q_len": 1024, "kv_lengths": True}
    assert default(problem(**lengths), H200).variant == "cudnn"  # not measured
    for head_dim, fewest in ((64, 192), (128, 512)):
        for length in (fewest - 1, fewest):
            seen = problem(head_dim, q_len=length, kv_len=length)
            expected = "cudnn" if length < fewest else "attention_backward_sm90"
            assert default(seen, H200).variant == expected
    alone = {"q_len": 256, "kv_len": 256, "kv_heads": 12}
    for batch, is_causal in itertools.product((2, 64), (False, True)):
        few = problem(**alone, batch=batch, is_causal=is_causal)
        expected = "cudnn" if batch == 2 else "attention_backward_sm90"
        assert default(few, H200).variant == expected
    assert default(problem(segments=True), H200).variant == "attention_backward_sm90"
    short = {"is_causal": True, "q_len": 512, "kv_len": 512}
    assert default(problem(**short), H200).variant == "attention_backward_sm90"
    long = {"q_len": 4096, "kv_len": 4096}
    for head_dim, keys in itertools.product((64, 128), (128, 512)):
        near = problem(head_dim, is_causal=True, window=(keys - 1, 0), **long)
        expected = "cudnn" if keys == 128 else "attention_backward_sm90"
        assert default(near, H200).variant == expected
    assert default(problem(**long), H200).variant == "attention_backward_sm90"
    assert (
        default(problem(64, is_causal=True), H200).variant == "attention_backward_sm90"
    )
    assert default(problem(96, is_causal=True), H200).variant == "cudnn"
    ahead = problem(window=(100, 100))
    assert default(ahead, H200).variant == "attention_backward_sm90"
    assert default(problem(q_len=64, segments=True), H200).variant == "cudnn"
    own_masks: dict[str, Any] = {"mask": (2, 1, 1024, 1300), "q_len": 1024}
    for fields in ({**TILED, "segments": True}, own_masks):
        assert default(problem(is_causal=True, **fields), H200).variant == "cudnn"
    one_mask = {**own_masks, "mask": (1, 1, 1024, 1300)}
    for fields in (TILED, one_mask):
        ours = problem(is_causal=True, **fields)
        assert default(ours, H200).variant == "attention_backward_sm90"
    biased: dict[str, Any] = {**BIASED, **long, "bias": (1, 12, 4096, 4096)}
    assert default(problem(**biased), H200).variant == "attention_backward_sm90"
    assert default(problem(96, **biased), H200).variant == "cudnn"
    alibi: dict[str, Any] = {
        "q_len": 4096,
        "kv_len": 4096,
        "alibi": "linear",
        "is_causal": True,
    }
    assert default(problem(**alibi), H200).variant == "attention_backward_sm90"
    plain = {"q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    assert default(problem(256, **plain), H200).variant == "attention_backward_sm90"
    fewer = plain | {"kv_len": 500}
    assert default(problem(256, **fewer), H200).variant == "cudnn"
    assert default(problem(200, **plain), H200).variant == "cudnn"
    short = {**alibi, "kv_len": 512}
    assert default(problem(64, **short), H200).variant == "xla"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "batch", "length", "is_causal", "variant"),
    [
        *((8, 1, 8, 2048, True, OURS), (8, 1, 4, 4096, True, "cudnn")),
        *((8, 1, 4, 2048, True, "cudnn"), (8, 1, 4, 2048, False, OURS)),  # 128 blocks
        *((8, 4, 4, 3000, True, OURS), (8, 1, 32, 511, True, "cudnn")),
        *((8, 8, 1, 1024, True, "cudnn"), (8, 8, 1, 2048, False, OURS)),
    ],
)
def test_wide_heads_must_occupy_the_gpu(
    heads, kv_heads, batch, length, is_causal, variant
):
    sizes = {"heads": heads, "kv_heads": kv_heads, "batch": batch}
    asked = problem(256, q_len=length, kv_len=length, is_causal=is_causal, **sizes)
    assert default(asked, NAMED["H100"]).variant == variant


@pytest.mark.parametrize(
    ("window", "variant"),
    [
        *(((511, 0), OURS), ((1023, 0), OURS), ((500, 0), "cudnn")),
        *(((3000, 0), "cudnn"), ((1023, 1023), "xla")),
    ],
)
def test_windows_of_wide_heads(window, variant):
    sizes = {"heads": 8, "kv_heads": 1, "batch": 4, "q_len": 4096, "kv_len": 4096}
    asked = problem(256, window=window, **sizes)
    assert default(asked, NAMED["H100"]).variant == variant


@pytest.mark.parametrize(
    ("heads", "length", "variant"),
    [(32, 32768, OURS), (64, 8192, "cudnn"), (64, 16384, "cudnn"), (56, 8192, OURS)],
)
def test_long_sequences_of_keys_that_many_heads_share_are_left_to_cudnn(
    heads, length, variant
):
    sizes = {"batch": 1, "heads": heads, "kv_heads": 8}
    asked = problem(q_len=length, kv_len=length, is_causal=True, **sizes)
    assert default(asked, NAMED["H100"]).variant == variant
    many = dataclasses.replace(asked, batch=2)  # whose blocks take more rounds
    expected = OURS if length <= 8192 else variant
    assert default(many, NAMED["H100"]).variant == expected
    narrow = dataclasses.replace(asked, head_dim=64)
    assert default(narrow, NAMED["H100"]).variant == OURS


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "length", "is_causal", "dq"),
    [
        *((64, 32, 2048, False, "beside"), (64, 32, 3000, False, "ordered")),
        *((64, 8, 2048, False, "ordered"), (64, 8, 1024, False, "beside")),
        *((64, 32, 2048, True, "beside"), (64, 32, 4096, True, "ordered")),
        *((64, 16, 2048, True, "beside"), (64, 8, 1024, True, "ordered")),
        *((128, 32, 1024, False, "beside"), (128, 32, 2048, False, "ordered")),
        *((128, 8, 1024, False, "ordered"), (128, 8, 512, False, "beside")),
        *((128, 8, 2048, True, "beside"), (128, 8, 4096, True, "ordered")),
        *((128, 4, 2048, True, "ordered"), (128, 4, 1024, True, "beside")),
        (96, 32, 3000, False, "beside"),
    ],
)
def test_heads_that_share_keys_add_up_dq_from_fewer_of_them_on(
    head_dim, kv_heads, length, is_causal, dq
):
    sizes = {"heads": 32, "kv_heads": kv_heads, "q_len": length, "kv_len": length}
    asked = problem(head_dim, is_causal=is_causal, **sizes)
    assert ATTENTION_BACKWARD_SM90.heuristic(asked, H200).dq == dq


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_many_keys_are_worth_sums_in_memory(head_dim):
    many = {"q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    for fields, dq in (
        ({}, "ordered"),
        ({"is_causal": True}, "ordered"),
        ({"window": (100, 0)}, "beside"),
        ({"window": (512, 0)}, "beside"),
        ({"window": (4095, 0), "kv_len": 8192, "q_len": 8192}, "beside"),
        ({"window": (512, 512)}, "recomputed"),
        ({"segments": True}, "beside"),
        ({"segments": True, "soft_cap": 5.0}, "recomputed"),
        ({"q_len": 512, "kv_len": 512, "is_causal": True}, "beside"),
        ({"soft_cap": 5.0}, "recomputed"),
        ({"kv_len": 512}, "beside"),
        ({"q_len": 512}, "beside"),
        ({"mask": (1, 1, 4096, 4096)}, "recomputed"),
        ({"alibi": "distance"}, "ordered"),
        ({"alibi": "distance", "segments": True}, "recomputed"),
    ):
        asked = problem(head_dim, **(many | fields))
        assert ATTENTION_BACKWARD_SM90.heuristic(asked, H200).dq == dq


def test_a_bias_leaves_room_for_sums_in_memory_beside_wide_heads():
    many = {**BIASED, "q_len": 4096, "kv_len": 4096, "kv_heads": 12}
    many["bias"] = (1, 12, 4096, 4096)
    for head_dim, is_causal, dq in (
        (128, True, "ordered"),
        (128, False, "recomputed"),  # which was faster
        (64, True, "recomputed"),
    ):
        asked = problem(head_dim, **many, is_causal=is_causal)
        assert ATTENTION_BACKWARD_SM90.heuristic(asked, H200).dq == dq


HEAD_DIMS = (8, 72, 128, 256)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**EVERYTHING, "soft_cap": 30.0},
        {"head_dim": 192, "value_dim": 128},
        TILED,
        {**ALL, **BIASED, "kv_len": 1300, "mask": (2, 1, 1000, 1300)},
    ],
    ids=("plain", "everything", "wide keys", "a bias", "all"),
)
def test_the_usual_config_is_one_of_the_space(head_dim, fields):
    asked = problem(**({"head_dim": head_dim} | fields))
    space = ATTENTION_BACKWARD_SM90.space(asked, H200)
    config = ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
    configs = list(space.configs())
    assert config in configs
    for other in configs[:: max(1, len(configs) // 20)]:
        ATTENTION_BACKWARD_SM90.check(asked, other, H200)
        for kernel in ATTENTION_BACKWARD_SM90.call(asked, other, H200).kernels:
            assert kernel.smem_bytes <= H200.smem_per_block_bytes


def test_the_usual_config_is_legal_wherever_the_kernel_runs():
    sizes = (8, 40, 64, 72, 96, 128, 136, 192, 200, 256)
    crowded = {"soft_cap": 30.0, "alibi": "linear", "mask": (1, 1, 1, 1)}
    kinds = ({"is_causal": True}, {"segments": True}, {"soft_cap": 30.0}, crowded)
    found = 0
    for head_dim, value_dim, fields in itertools.product(sizes, sizes, kinds):
        for length in (100, 8192):
            asked = problem(
                head_dim, value_dim=value_dim, q_len=length, kv_len=length, **fields
            )
            if ATTENTION_BACKWARD_SM90.why_not(asked, H200) is None:
                config = ATTENTION_BACKWARD_SM90.heuristic(asked, H200)
                ATTENTION_BACKWARD_SM90.check(asked, config, H200)
                found += 1
    assert found > 100


def test_registers_and_memory_refuse_configs():
    for change, reason in (
        ({"block_q": 80}, "registers"),
        ({"tile_q": 192, "stages_kv": 3, "block_kv": 96}, "shared memory"),
        ({"block_kv": 72}, "block_kv"),
        ({"dq": "ordered", "block_q": 48}, "block_q=64"),
        ({"dq": "atomic", "tile_q": 192}, "no kernel of its own"),
        ({"tile_q": 64, "block_kv": 96}, "two of them"),
        ({"dq": "beside", "tile_q": 192, "block_kv": 64}, "as many threads"),
        ({"block_kv": 48}, "heads above 192, which leave no room"),
        ({"dq": "twice"}, "dq"),
    ):
        with pytest.raises(ValueError, match=reason):
            wrong = dataclasses.replace(USUAL, **change)
            ATTENTION_BACKWARD_SM90.check(problem(), wrong, H200)
    added = dataclasses.replace(USUAL, dq="ordered")
    masked: dict[str, Any] = {"mask": (1, 1, 1000, 1300)}
    for fields in (
        BIASED,
        masked,
        {**TILED, "alibi": "linear"},
        {"alibi": "linear", "segments": True},
        {**TILED, "window": (100, 0)},
    ):
        with pytest.raises(ValueError, match="no registers for a mask"):
            ATTENTION_BACKWARD_SM90.check(problem(**fields), added, H200)
    alibi: dict[str, Any] = {"alibi": "linear", "is_causal": True}
    for fields in (TILED, alibi):
        ATTENTION_BACKWARD_SM90.check(problem(**fields), added, H200)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_of_dq_take_two_stages(dtype, head_dim):
    """Blocks are even or odd by their stage, which a kernel asserts."""
    asked = problem(head_dim, dtype=dtype, kv_lengths=True)
    space = ATTENTION_BACKWARD_SM90.space(asked, H200)
    found = {(c.adds, c.stages_q) for c in one_of_each(space, "dq", "stages_q")}
    assert found == {(False, 2), (False, 3), (True, 2)}

"""The cudnn variant without a GPU: its refusals, its operands, the calls it emits."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from attentions import lengths, qkv, random_mask
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import normal
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax import _compat_cudnn
from tracea_jax.device import NAMED, OtherDevice, local_cpu
from tracea_jax.dispatch import plan
from tracea_jax.ops import attention
from tracea_jax.ops.common.export import export_checks
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN, masking

pytestmark = pytest.mark.usefixtures("without_models")  # rules choose cuDNN

ROOT = pathlib.Path(__file__).resolve().parent.parent
H200, A100 = NAMED["H200"], NAMED["A100"]
BLACKWELL = dataclasses.replace(H200, name="B200", capability=(10, 0))
TURING = dataclasses.replace(A100, name="T4", capability=(7, 5))
PROBLEM = AttentionProblem(
    batch=2,
    q_len=256,
    kv_len=256,
    heads=4,
    kv_heads=2,
    head_dim=128,
    dtype="bfloat16",
    scale=0.1,
)
BIAS = {"bias": (1, 4, 256, 256), "bias_dtype": "bfloat16"}
SINGLE = {"q_len": 1, "kv_len": 1}
BACKWARD = {"direction": "backward"}


# --- what it takes --------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"head_dim": 256},
        {"head_dim": 8, "kv_heads": 4},
        {"q_len": 131, "kv_len": 77},
        {"is_causal": True, "q_len": 512},
        BIAS,
        {**BIAS, "is_causal": True, "mask": (2, 1, 1, 256)},
        {"mask": (2, 1, 1, 256), "q_lengths": True},
        {"kv_lengths": True, "is_causal": True},
        {"window": (64, 0)},
        {"window": (64, 3), "is_causal": True},
        {"window": (300, 300), **BIAS},
        {"q_len": 1},
    ],
)
def test_what_it_takes(changes, direction):
    problem = dataclasses.replace(PROBLEM, direction=direction, **changes)
    assert ATTENTION_CUDNN.why_not(problem, H200) is None


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, local_cpu(), "it runs on NVIDIA GPUs; the device is cpu"),
        ({}, OtherDevice(platform="rocm", name="MI300"), "the device is rocm"),
        ({}, TURING, "needs sm_80 or newer; the device is sm_75"),
        ({"dtype": "float32"}, H200, "operands of dtype float32; it takes bfloat16,"),
        ({"head_dim": 100}, H200, "head_dim=100.*multiples of 8 up to 256"),
        ({"head_dim": 264}, H200, "head_dim=264"),
        ({"head_dim": 136}, A100, "head_dim=136; on sm_80 .* up to 128"),
        ({"head_dim": 192}, BLACKWELL, "head_dim=192; on sm_100 .* up to 128"),
        ({"batch": 0}, H200, "nothing to compute"),
        ({**BIAS, "bias_dtype": "float32"}, H200, "bias of dtype float32"),
        ({**BIAS, **BACKWARD, "kv_len": 255}, H200, "lengths 256 and 255.*even ones"),
        ({"mask": (1, 1, 1, 1), **BACKWARD, "q_len": 9}, H200, "lengths 9 and 256"),
        ({"window": (64, 1)}, H200, "window .64, 1. looks ahead"),
        ({"window": (300, 1)}, H200, "looks ahead"),
        ({"window": (-1, 4)}, H200, "negative side"),
        ({"window": (64, 0), **BIAS}, H200, "a window together with a bias"),
        ({"window": (64, 0), "q_len": 300}, H200, "more queries, 300, than keys"),
        ({**SINGLE, **BACKWARD}, H200, "no backward kernel"),
        ({**SINGLE, "is_causal": True}, H200, "a single query with a causal mask"),
    ],
)
def test_what_it_refuses(changes, device, reason):
    problem = dataclasses.replace(PROBLEM, **changes)
    why_not = ATTENTION_CUDNN.why_not(problem, device)
    assert why_not is not None and re.search(reason, why_not)
    if device.platform == "cuda":  # XLA is always left
        with tracea.options(device="H200" if device is H200 else "A100"):
            assert plan(problem, device).variant == "xla"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 4)])
def test_masks_in_cudnn_s_terms_allow_the_same_keys(lengths, is_causal):
    i, j = (np.arange(n) for n in lengths)
    i = i[:, None]
    for left in range(10):
        for right in range(10):
            allowed = (j >= i - left) & (j <= i + right) & ((j <= i) | (not is_causal))
            problem = dataclasses.replace(
                PROBLEM,
                q_len=lengths[0],
                kv_len=lengths[1],
                window=(left, right),
                is_causal=is_causal,
            )
            try:
                causal, window = masking(problem)
            except ValueError:
                assert not is_causal and right > 0 and not allowed.all()
                continue
            theirs = (j <= i) | (not causal)
            theirs &= j > i - (100 if window is None else window)
            np.testing.assert_array_equal(theirs, allowed)


def test_it_is_the_default_where_it_is_expected_to_win():
    found = plan(PROBLEM, H200)
    assert (found.variant, found.origin) == ("cudnn", "policy")
    small = dataclasses.replace(PROBLEM, q_len=32, kv_len=64)
    assert plan(small, H200).variant == "xla"
    assert plan(small, H200, implementation="tracea").variant == "attention_decode_sm90"
    decoding = dataclasses.replace(PROBLEM, q_len=1, kv_lengths=True)
    assert plan(decoding, H200).variant == "cudnn"
    masked = dataclasses.replace(decoding, mask=(2, 1, 1, 256))
    assert plan(masked, H200).variant == "xla"


MEASURED = ROOT / "benchmarks/results/nvidia_h200/choices_decode.json"
ROWS = [row for row in json.loads(MEASURED.read_text())["rows"] if "error" not in row]


@pytest.mark.parametrize("row", ROWS, ids=[row["text"] for row in ROWS])
def test_of_few_queries_the_default_is_what_was_measured_to_be_faster(row):
    """Between cuDNN and XLA; what ours are compared with, they say."""
    problem = AttentionProblem.from_json(row["problem"])
    runs = ATTENTION_CUDNN.why_not(problem, H200) is None
    theirs = runs and ATTENTION_CUDNN.expects_to_win(problem, H200)
    ratio = row["ratio_cudnn"] if theirs else 1.0
    assert ratio >= 0.97
    gains_much = problem.direction == "forward" and row["ratio_cudnn"] > 1.2
    assert ratio > 1 or not gains_much or problem.bias or problem.mask


# --- what it emits --------------------------------------------------------------------

T = 160
BF16 = [x.astype("bfloat16") for x in qkv(2, T, T, 4, 2, 64)]
EMITTED = {
    "plain": ({}, "Softmax", "NO_MASK", 0),
    "causal": ({"is_causal": True}, "Softmax", "CAUSAL", 0),
    "window": ({"local_window_size": (20, 0)}, "Softmax", "CAUSAL", 21),
    "bias": (
        {"bias": normal(1, 4, 1, T, dtype="bfloat16")},
        "ScaleBiasSoftmax",
        "NO_MASK",
        0,
    ),
    "mask": (
        {"mask": random_mask(2, 1, 1, T), "is_causal": True},
        "ScaleBiasSoftmax",
        "CAUSAL",
        0,
    ),
    "key lengths": (
        {"key_value_seq_lengths": lengths(3, T)},
        "Softmax",
        "PADDING",
        0,
    ),
    "lengths": (
        {
            "query_seq_lengths": lengths(3, T),
            "key_value_seq_lengths": lengths(3, T),
            "is_causal": True,
        },
        "Softmax",
        "PADDING_CAUSAL",
        0,
    ),
}


@pytest.fixture
def for_gpu(monkeypatch):
    """Programs are traced and lowered as on a machine with an H200."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with tracea.options(device="H200"):
        yield


def emitted(f, *args, platforms=("cuda",)):
    """(names, mask types, windows) of the calls of cuDNN that f is lowered to."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()
    text = text.replace(r"\22", "'")
    names = re.findall(r"@__cudnn\$fmha(\w+)", text)
    masks = re.findall(r"'mask_type': '(\w+)'", text)
    windows = re.findall(r"'sliding_window_length': (\d+)", text)
    return names, masks, [int(w) for w in windows]


@pytest.mark.parametrize("case", EMITTED)
def test_what_it_emits(for_gpu, case):
    settings, name, mask, window = EMITTED[case]
    f = functools.partial(attention, **settings)

    def loss(*args):
        return (f(*args).astype("float32") ** 2).sum()

    assert emitted(f, *BF16) == ([name], [mask], [window])
    both = emitted(jax.grad(loss, argnums=(0, 1, 2)), *BF16)
    assert both == ([name, f"{name}Backward"], [mask] * 2, [window] * 2)


def test_no_other_product_is_emitted(for_gpu):
    def gradients(*args):
        loss = lambda *x: attention(*x).astype("float32").sum()  # noqa: E731
        return jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)

    args = [x[None] for x in (*BF16, normal(1, 4, T, T, dtype="bfloat16"))]
    lowered = jax.jit(gradients).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "dot_general" not in text and "ScaleBiasSoftmaxBackward" in text
    assert emitted(gradients, *args)[0] == [
        "ScaleBiasSoftmax",
        "ScaleBiasSoftmaxBackward",
    ]


def test_a_demand_is_enough_on_a_machine_without_a_gpu():
    def loss(*args):
        f = functools.partial(attention, implementation="cudnn")
        return jax.checkpoint(f)(*args).astype("float32").sum()

    with tracea.options(device="H200"):
        assert emitted(jax.grad(loss), *BF16)[0] == ["Softmax", "SoftmaxBackward"]


def test_where_one_pass_is_refused_xla_runs_both(for_gpu):
    odd = [x[:, :-1] for x in BF16]
    bias = normal(1, 1, T - 1, T - 1, dtype="bfloat16")

    def loss(q, k, v):
        return attention(q, k, v, bias).astype("float32").sum()

    assert emitted(loss, *odd)[0] == ["ScaleBiasSoftmax"]
    assert emitted(jax.grad(loss), *odd)[0] == []
    with pytest.raises(tracea.Unsupported, match="needs even ones"):
        with tracea.options(implementation="cudnn"):
            emitted(jax.grad(loss), *odd)


def test_both_platforms_in_one_program(for_gpu):
    f = jax.jit(functools.partial(attention, is_causal=True))
    cudnn = export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")
    checks = [cudnn, *export_checks()]
    program = export.export(f, platforms=["cpu", "cuda"], disabled_checks=checks)(*BF16)
    assert "__cudnn$fmhaSoftmax" in program.mlir_module()
    with pytest.raises(ValueError, match=r"(?s)custom call.*__cudnn\$fmhaSoftmax"):
        export.export(f, platforms=["cuda"])(*BF16)  # JAX promises nothing for it
    found = export.deserialize(program.serialize()).call(*BF16)
    expected = jax.nn.dot_product_attention(*BF16, is_causal=True)
    assert_close(found.astype("float32"), np.asarray(expected, np.float64), 2e-2)


def test_inside_of_shard_map(for_gpu):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    bias = normal(1, 4, T, T, dtype="bfloat16")

    def loss(*args):
        o = attention(*args, key_value_seq_lengths=lengths(17), is_causal=True)
        return jax.lax.psum(o.astype("float32").sum(), "x")

    def local(*args):
        return jax.grad(loss, argnums=(0, 3))(*args)

    specs = (P("x"), P("x"), P("x"), P())
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P("x"), P()))
    assert emitted(f, *BF16, bias)[0] == [
        "ScaleBiasSoftmax",
        "ScaleBiasSoftmaxBackward",
    ]


def test_without_cudnn_it_is_xla_with_a_warning(for_gpu, monkeypatch):
    monkeypatch.setattr(_compat_cudnn, "unavailable", lambda: "cuDNN is on holiday")
    with pytest.warns(UserWarning, match="left to XLA: cuDNN is on holiday"):
        assert emitted(attention, *BF16)[0] == []
    demanded = functools.partial(attention, implementation="cudnn")
    with pytest.raises(
        tracea.Unsupported, match="cannot run here: cuDNN is on holiday"
    ):
        emitted(demanded, *BF16)


def test_jax_has_what_is_needed(monkeypatch):
    assert _compat_cudnn.unavailable() is None
    from jax._src.cudnn import fused_attention_stablehlo as fused

    class Installed:
        version = 90800

        @classmethod
        def cudnn_get_version(cls):
            return cls.version

    monkeypatch.setattr(fused, "cuda_versions", Installed)
    assert _compat_cudnn.unavailable() is None
    for Installed.version in (90400, 91000, 91001):
        assert "too old or broken" in str(_compat_cudnn.unavailable())
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_cuda_lowering", lambda x: x)
    assert "takes x, which is unknown" in str(_compat_cudnn.unavailable())
    monkeypatch.delattr(fused, "_dot_product_attention_fwd_p")
    assert "has no primitive _dot_product_attention_fwd" in str(
        _compat_cudnn.unavailable()
    )

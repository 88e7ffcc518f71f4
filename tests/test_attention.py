"""attention by value: every argument, against its definition and against JAX's own."""

from __future__ import annotations

import dataclasses
import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import CASES, exact, lengths, qkv, random_mask
from jax import export
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close

import tracea_jax as tracea
from tracea_jax.campaign import local_device
from tracea_jax.device import NAMED
from tracea_jax.diagnosis import diagnose
from tracea_jax.dispatch import plan
from tracea_jax.ops import attention
from tracea_jax.ops.attention import workload as bench
from tracea_jax.ops.attention.reference import Spec, reference
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, problem_from_json
from tracea_jax.variants import XLA

pytestmark = pytest.mark.once

theirs = jax.nn.dot_product_attention
IN_BF16 = ("plain", "everything")
# Bits are the same only as long as XLA makes the same code of both.
optimised = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
)


@pytest.mark.parametrize(
    "case", slow_unless(["plain", "mask", "lengths", "window", "everything"], CASES)
)
def test_values_are_those_of_the_definition(case):
    found = attention(*qkv(), **CASES[case], return_residual=True)
    o, lse = exact(*qkv(), **CASES[case])
    assert_close(found[0], o)
    rows = slice(None)
    if "query_seq_lengths" in CASES[case]:  # only the queries that there are
        rows = np.arange(6) < np.asarray(CASES[case]["query_seq_lengths"])[:, None]
    assert_close(found[1][rows], lse[rows], 4e-6)


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_unless(
        [("plain", "float32"), ("lengths", "float32"), ("window", "float32")]
        + [("everything", dtype) for dtype in ("float32", "bfloat16")],
        [*((case, "float32") for case in CASES), *((c, "bfloat16") for c in IN_BF16)],
    ),
)
def test_on_xla_it_is_bit_for_bit_what_jax_computes(case, dtype):
    args = [x.astype(dtype) for x in qkv()]
    settings = {"return_residual": True, **CASES[case]}
    found = optimised(lambda *x: attention(*x, **settings))(*args)
    expected = optimised(lambda *x: theirs(*x, **settings))(*args)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype == dtype
        np.testing.assert_array_equal(x, y)
    if case in IN_BF16:
        alone = optimised(lambda *x: attention(*x, **CASES[case]))(*args)
        np.testing.assert_array_equal(alone, expected[0])


def test_kernels_get_a_log_sum_exp_that_is_not_rounded():
    args = [x.astype("bfloat16") for x in qkv()]
    spec = Spec(scale=1.5, is_causal=True)
    o, lse = jax.jit(functools.partial(reference, spec=spec, lse=jnp.float32))(*args)
    assert o.dtype == "bfloat16" and lse.shape == (2, 4, 6)
    expected = exact(*args, scale=1.5, is_causal=True)
    assert_close(lse.swapaxes(1, 2), expected[1])


@pytest.mark.parametrize("heads", [(3, 3), (5, 1)])
def test_without_a_batch(heads):
    n, kv = heads
    q, k, v = (x[0] for x in qkv(1, 4, 7, n, kv, 3))
    bias, mask = normal(n, 4, 7), random_mask(4, 7)
    o, lse = attention(q, k, v, bias, mask, return_residual=True)
    assert o.shape == (4, n, 3) and lse.shape == (4, n)
    expected = jax.jit(lambda *x: theirs(*x, return_residual=True))(q, k, v, bias, mask)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    assert_close(o, exact(q[None], k[None], v[None], bias, mask)[0][0])


def test_a_batch_may_be_empty_and_numpy_is_welcome():
    q, k, v = (np.asarray(x) for x in qkv(1))
    o = attention(q, k, v, scale=np.float32(0.25), local_window_size=np.int64(3))
    assert_close(o, exact(q, k, v, scale=0.25, local_window_size=3)[0])
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 6, 4, 8)


def test_double_precision_keeps_its_dtype():
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x, np.float64) for x in qkv())
        found = attention(q, k, v, return_residual=True)
        expected = jax.jit(lambda *x: theirs(*x, return_residual=True))(q, k, v)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == "float64"
            np.testing.assert_array_equal(x, y)


def test_a_traced_scale_is_left_to_xla_and_has_a_derivative():
    args = qkv()

    def total(f, scale):
        return (f(*args, scale=scale) ** 2).sum()

    ours, jaxs = (
        jax.jit(jax.grad(functools.partial(total, f)))(0.3) for f in (attention, theirs)
    )
    assert ours == jaxs
    with pytest.raises(ValueError, match="needs a scale that is known"):
        jax.jit(lambda s: attention(*args, scale=s, implementation="cudnn"))(0.3)


# --- precision ------------------------------------------------------------------------


def precisions(f, *args):
    text = jax.jit(f).lower(*args).as_text()
    return text.count("precision = [HIGHEST, HIGHEST]")


def test_precision_is_that_of_both_products():
    args = qkv()
    assert precisions(attention, *args) == 0
    for spelling in ("highest", jax.lax.Precision.HIGHEST, ("highest", "highest")):
        f = functools.partial(attention, precision=spelling)
        assert precisions(f, *args) == 2
    gradient = jax.grad(lambda *x: f(*x).sum(), argnums=(0, 1, 2))
    plain = jax.grad(lambda *x: theirs(*x).sum(), argnums=(0, 1, 2))
    with jax.default_matmul_precision("highest"):
        assert precisions(gradient, *args) == precisions(plain, *args) > 2


def test_the_default_precision_of_the_trace_is_kept():
    def f(*args):
        with jax.default_matmul_precision("highest"):
            return attention(*args)

    assert precisions(f, *qkv()) == 2


def test_precisions_that_cannot_be_honoured_are_refused():
    for precision in (("highest", "default"), "F64_F64_F64_NO"):
        with pytest.raises(ValueError, match="recision"):
            attention(*qkv(), precision=precision)
    q, k, v = (x.astype("bfloat16") for x in qkv())
    assert attention(q, k, v, preferred_element_type="bfloat16").dtype == "bfloat16"
    with pytest.raises(ValueError, match="preferred_element_type=float32 is not possi"):
        attention(q, k, v, preferred_element_type=jnp.float32)


# --- errors ---------------------------------------------------------------------------

Q, K, V = qkv()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": V[:, :4]}, r"value must have key's shape \(2, 5, 2, 8\)"),
        ({"query": Q[:1]}, "query and key must agree in batch and head_dim"),
        ({"query": Q[..., :4]}, "query and key must agree in batch and head_dim"),
        ({"query": Q[:, :, :3]}, "query heads, 3, must be a multiple of .*, 2"),
        ({"value": V.astype("bfloat16")}, "must share a dtype; value is bfloat16"),
        ({"query": Q[None]}, "query must have shape"),
        ({"mask": jnp.zeros((2, 1, 6, 5))}, "mask must be boolean; it is float32"),
        ({"mask": jnp.ones((2, 2, 6, 5), bool)}, "mask must broadcast to .*2, 4, 6, 5"),
        ({"bias": jnp.ones((3, 1, 6, 5))}, "bias must broadcast to .*2, 4, 6, 5"),
        ({"bias": jnp.ones((1, 1, 1, 6, 5))}, "bias must broadcast"),
        (
            {"query_seq_lengths": lengths(1)},
            r"query_seq_lengths must be int32 .*\(2,\)",
        ),
        ({"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths must be int32"),
        ({"local_window_size": (1, 2, 3)}, "must be a number or"),
        (
            {"implementation": "flash"},
            "None or one of tracea, .*attention_sm90, .*cudnn, attention_cpu, xla",
        ),
    ],
)
def test_errors_say_what_came_and_what_is_allowed(changes, message):
    arguments = {"query": Q, "key": K, "value": V, **changes}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)
    with pytest.raises((ValueError, TypeError, AssertionError)):
        theirs(**arguments)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="query must be floating point; it is int32"):
        attention(*(x.astype("int32") for x in qkv()))


@pytest.mark.parametrize("demanded", ["cudnn", "tracea"])
def test_what_cannot_run_here_says_why(demanded):
    q, k, v = qkv(head_dim=264)  # too wide for all of ours
    with pytest.raises(tracea.Unsupported, match="cudnn: it runs on NVIDIA GPUs"):
        attention(q, k, v, implementation=demanded)
    with (
        tracea.options(implementation=demanded),
        pytest.raises(tracea.Unsupported, match="the device is cpu"),
    ):
        jax.grad(lambda q: attention(q, k, v).sum())(q)


# --- problems and tuning --------------------------------------------------------------

SIZES = st.integers(1, 2**20)
SHAPES = st.tuples(SIZES, SIZES, SIZES, SIZES)
BLOCKS = st.none() | st.tuples(SIZES, SIZES)
MASKS = st.just({}) | st.fixed_dictionaries({"mask": SHAPES, "mask_block": BLOCKS})
DIRECTIONS = {
    "forward": {},
    "training": {"saves_lse": True},
    "backward": {"direction": "backward"},
}
PROBLEMS = st.builds(
    lambda direction, mask, **sizes: AttentionProblem(**direction, **mask, **sizes),
    direction=st.sampled_from(list(DIRECTIONS.values())),
    batch=SIZES,
    q_len=SIZES,
    kv_len=SIZES,
    heads=SIZES,
    kv_heads=SIZES,
    head_dim=SIZES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bias=st.none() | SHAPES,
    bias_dtype=st.none() | st.just("float16"),
    mask=MASKS,
    is_causal=st.booleans(),
    window=st.none() | st.tuples(SIZES, SIZES),
    q_lengths=st.booleans(),
    kv_lengths=st.booleans(),
    scale=st.floats(allow_nan=False),
    segments=st.booleans(),
    soft_cap=st.none() | st.floats(0.5, 100),
    sinks=st.booleans(),
    alibi=st.none() | st.sampled_from(["distance", "linear"]),
    value_dim=st.none() | SIZES,
    aligned_at_end=st.booleans(),
)


@hypothesis.given(PROBLEMS)
def test_json_round_trip(problem):
    again = problem_from_json(json.loads(json.dumps(problem.to_json())))
    assert again == problem and hash(again) == hash(problem)
    assert str(again) == str(problem) and "\n" not in str(problem)


def test_answers_from_before_a_field_was_there_keep_their_keys():
    before = {
        "op": "attention",
        "direction": "forward",
        "batch": 2,
        "q_len": 70,
        "kv_len": 66,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "bias": None,
        "bias_dtype": None,
        "mask": [2, 1, 70, 66],
        "is_causal": False,
        "window": None,
        "q_lengths": False,
        "kv_lengths": False,
        "scale": 0.25,
    }
    problem = dataclasses.replace(SMALL, mask=(2, 1, 70, 66))
    assert problem_from_json(before) == problem
    assert json.loads(json.dumps(problem.to_json())) == before


def test_a_training_is_another_problem():
    training = dataclasses.replace(SMALL, saves_lse=True)
    assert training.to_json() == {**SMALL.to_json(), "saves_lse": True}
    assert str(training) == f"{SMALL} &lse"
    assert training.bytes == SMALL.bytes + 2 * 4 * 70 * 4
    with pytest.raises(ValueError, match="only a forward attention saves"):
        dataclasses.replace(training, direction="backward")


def test_masks_of_blocks_are_told_apart():
    mask = dataclasses.replace(SMALL, mask=(1, 1, 2, 2))
    blocks = dataclasses.replace(mask, mask_block=(64, 64))
    assert str(blocks) == f"{mask} of 64x64 blocks"
    for device, kernel in ((local_device(), "attention_cpu"), (NAMED["H200"], "cudnn")):
        narrow = dataclasses.replace(blocks, dtype="bfloat16")
        assert kernel in diagnose(narrow, device).candidates
        narrow = dataclasses.replace(narrow, soft_cap=2.0)
        assert diagnose(narrow, device).reason(kernel) == "it caps no scores"
    small = bench.ragged(blocks)
    assert small.mask == (1, 1, -(-small.q_len // 64), -(-small.kv_len // 64))
    with pytest.raises(ValueError, match="needs a mask"):
        dataclasses.replace(SMALL, mask_block=(64, 64))


SMALL = AttentionProblem(
    batch=2, q_len=70, kv_len=66, heads=4, kv_heads=2, head_dim=16, scale=0.25
)
KINDS = {
    "plain": {},
    "bias": {"bias": (1, 4, 70, 66), "bias_dtype": "float32", "is_causal": True},
    "key bias": {"bias": (2, 1, 1, 66), "bias_dtype": "float32"},
    "mask": {"mask": (2, 1, 70, 66), "window": (9, 4)},
    "lengths": {"q_lengths": True, "kv_lengths": True, "dtype": "bfloat16"},
    "blocks of documents": {
        "mask": (1, 4, 3, 5),
        "mask_block": (32, 16),
        "segments": True,
        "value_dim": 8,
    },
    "capped": {
        "soft_cap": 0.5,
        "sinks": True,
        "bias": (1, 4, 1, 1),
        "bias_dtype": "float32",
    },
    "from the end": {
        "q_len": 50,
        "is_causal": True,
        "aligned_at_end": True,
        "kv_lengths": True,
        "sinks": True,
        "alibi": "distance",
    },
    "alibi": {"alibi": "distance", "soft_cap": 2.0},
}


# A bias that is broadcast is in "capped", and the slopes are in "from the end".
MET_ABOVE = ("key bias", "alibi", "lengths", "mask")


@pytest.mark.parametrize(
    ("kind", "direction"),
    [
        pytest.param(
            *(kind, direction),
            marks=[pytest.mark.slow]
            * bool(i and direction != "backward" or kind in MET_ABOVE),
        )
        for i, kind in enumerate(KINDS)
        for direction in DIRECTIONS
    ],
)
def test_right_results_are_within_the_bound_and_wrong_ones_are_not(kind, direction):
    problem = dataclasses.replace(SMALL, **DIRECTIONS[direction], **KINDS[kind])
    with_bias = direction == "backward" and problem.bias is not None
    problem = dataclasses.replace(problem, bias_gradient=with_bias)
    inputs = bench.operands(problem, seed=0)
    choice = Choice(variant="xla", config=XLA.config_type())
    run = functools.partial(bench.execute, problem=problem, choice=choice)
    results = jax.jit(run)(*inputs)
    shapes = [x.shape for x in inputs]
    o = (*shapes[0][:3], problem.columns)
    backward = [*shapes[:3], problem.bias, (4,) if problem.sinks else None]
    assert [x.shape for x in results] == {
        "forward": [o],
        "training": [o, (2, 4, problem.q_len)],
        "backward": [shape for shape in backward if shape],
    }[direction]

    def error(results):
        return bench.error(problem, local_device(), inputs, results, seed=0)

    assert error(results) <= 0.5
    for i, x in enumerate(results):
        x = np.asarray(x)
        poisoned = x.copy()
        poisoned[(-1,) * x.ndim] = np.nan
        for wrong in (np.roll(x, 1), 1.2 * x, poisoned):
            wrong = jnp.asarray(wrong, x.dtype)
            assert error([*results[:i], wrong, *results[i + 1 :]]) > 1


def test_queries_without_keys_are_no_benchmark():
    problem = dataclasses.replace(SMALL, window=(3, 0))
    with pytest.raises(ValueError, match="without any key"):
        bench.check(problem)
    small = bench.ragged(dataclasses.replace(SMALL, mask=(2, 1, 70, 66), batch=64))
    assert (small.batch, small.heads, small.kv_heads) == (2, 4, 2)
    assert small.mask == (2, 1, small.q_len, small.kv_len)


def test_tuning_measures_what_there_is():
    entry = tracea.tune(SMALL, effort="none", budget_s=1).entry
    assert entry.best.variant in ("attention_cpu", "xla") and entry.best.xla_us


def test_the_forward_attention_of_a_training_is_tuned_as_such():
    q, k, v = qkv(q_len=70, kv_len=66, head_dim=16)

    def loss(q):
        return attention(q, k, v, scale=0.25).sum()

    with tracea.options(implementation="attention_cpu"):  # in place of what XLA runs
        graph = tracea.Graph.from_function(jax.grad(loss), q)
    training = dataclasses.replace(SMALL, saves_lse=True)
    backward = dataclasses.replace(SMALL, direction="backward")
    assert graph == tracea.Graph([training, backward])
    tracea.tune(training, effort="none", budget_s=1)
    assert plan(training, local_device()).origin == "tuned"
    assert plan(SMALL, local_device()).origin == "policy"


def test_symbolic_shapes():
    (b,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in qkv()]

    program = export.export(jax.jit(attention))(*shapes)
    again = export.deserialize(program.serialize())
    assert_close(again.call(*qkv()), exact(*qkv())[0])


def test_float16_runs_on_cpus_too():
    # where jax.nn asks XLA for products that it does not have
    q, k, v = (x.astype("float16") for x in qkv())
    wide = [x.astype("float32") for x in (q, k, v)]
    expected = jax.nn.dot_product_attention(*wide, is_causal=True)
    found = jax.jit(functools.partial(attention, is_causal=True))(q, k, v)
    assert found.dtype == "float16"
    np.testing.assert_allclose(found.astype("float32"), expected, atol=2e-3)
    gradient = jax.grad(lambda q: attention(q, k, v).astype("float32").sum())(q)
    wanted = jax.grad(lambda q: attention(q, *wide[1:]).sum())(wide[0])
    np.testing.assert_allclose(gradient.astype("float32"), wanted, atol=2e-3)

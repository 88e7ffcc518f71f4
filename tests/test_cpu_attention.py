"""attention_cpu through XLA: every ISA, dtype, mask, config and derivative."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import CASES, definition, exact, lengths, qkv, random_mask
from jax.test_util import check_grads
from numerics import normal
from processes import run_forked
from slow_cases import slow_unless
from transforms import assert_close, in_f64

import tracea_jax as tracea
from tracea_jax.device import CPU_ISAS, NAMED, local_cpu
from tracea_jax.dispatch import plan
from tracea_jax.ops import attention
from tracea_jax.ops.attention import workload as bench
from tracea_jax.problem import AttentionProblem
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants import CpuCall
from tracea_jax.variants.attention_cpu import (
    ATTENTION_CPU,
    AttentionCpuConfig,
    has_one_pass,
)
from tracea_jax.variants.cpu import DTYPES

pytestmark = pytest.mark.once

ISAS = CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]
SMALL = AttentionCpuConfig(block_q=40, block_kv=64)  # several blocks, soon
ours = functools.partial(attention, implementation="attention_cpu")
PROBLEM = AttentionProblem(
    batch=2, q_len=70, kv_len=131, heads=4, kv_heads=2, head_dim=24, scale=0.2
)
KINDS = {
    "plain": {},
    "causal": {"is_causal": True, "q_len": 131},
    "window": {"window": (9, 30), "kv_heads": 4},
    "bias": {"bias": (2, 4, 70, 131), "bias_dtype": "float32"},
    "masks": {
        "bias": (1, 4, 1, 131),
        "bias_dtype": "bfloat16",
        "mask": (2, 1, 70, 131),
        "kv_lengths": True,
    },
    "lengths": {"q_lengths": True, "kv_lengths": True, "mask": (1, 4, 1, 131)},
}


def problems(**changes):
    """PROBLEM in each kind and direction that the variant takes."""
    for kind, direction in itertools.product(KINDS, ("forward", "backward")):
        fields = {"direction": direction, **KINDS[kind], **changes}
        problem = dataclasses.replace(PROBLEM, **fields)
        if ATTENTION_CPU.why_not(problem, local_cpu()) is None:
            yield problem


@functools.cache
def operands(problem: AttentionProblem):
    """Random; o and lse are our own forward pass's. Every query is allowed some key."""
    p = problem
    k = (p.batch, p.kv_len, p.kv_heads, p.head_dim)
    inputs = [normal(p.batch, p.q_len, p.heads, p.head_dim, dtype=p.dtype)]
    inputs += [normal(*k, dtype=p.dtype, seed=seed) for seed in (1, 2)]
    if p.bias:
        inputs.append(normal(*p.bias, dtype=p.bias_dtype, seed=3))
    if p.mask:
        inputs.append(random_mask(*p.mask))
    inputs += [lengths(n, n // 2) for n in p.q_lengths * [p.q_len]]
    inputs += [lengths(n, n // 2) for n in p.kv_lengths * [p.kv_len]]
    if p.direction == "forward":
        return inputs
    forward = dataclasses.replace(p, direction="forward")
    o, lse = results(forward, inputs, has_lse=True)
    return [*inputs, o, lse, normal(*o.shape, dtype=p.dtype, seed=4)]


def results(
    problem: AttentionProblem, inputs, config=SMALL, isa=ISAS[-1], has_lse=False
):
    device = dataclasses.replace(local_cpu(), isa=isa)
    ATTENTION_CPU.check(problem, config, device)
    call = ATTENTION_CPU.call(problem, config, device)
    assert isinstance(call, CpuCall)
    count = {"forward": 1, "backward": 3}[problem.direction]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:count]]
    if has_lse:
        lse = (problem.batch, problem.heads, problem.q_len)
        shapes.append(jax.ShapeDtypeStruct(lse, jnp.float32))
    kernel = jax.ffi.ffi_call(call.target, shapes)
    return list(kernel(*inputs, **dict(call.attributes)))


def configs(problem: AttentionProblem, isa=ISAS[-1]):
    """SMALL, for gradients in as many passes as there are."""
    device = dataclasses.replace(local_cpu(), isa=isa)
    passes = (1, 2) if has_one_pass(problem, device) else (2,)
    return [dataclasses.replace(SMALL, passes=p) for p in passes]


def check(problem: AttentionProblem, isa=ISAS[-1]) -> None:
    inputs = operands(problem)
    for config in configs(problem, isa):
        found = results(problem, inputs, config, isa)
        assert bench.error(problem, local_cpu(), inputs, found, 0) <= 1, config


@pytest.mark.parametrize("isa", slow_unless([ISAS[0], ISAS[-1]], ISAS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_isa(isa, dtype):
    for problem in problems(dtype=dtype):
        check(problem, isa=isa)


def space(direction="forward"):
    long = dataclasses.replace(PROBLEM, q_len=4096, kv_len=4096, direction=direction)
    return ATTENTION_CPU.space(long, local_cpu())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_config_at_one_awkward_shape(direction):
    problem = dataclasses.replace(
        PROBLEM, batch=1, q_len=331, kv_len=331, is_causal=True, direction=direction
    )
    inputs = operands(problem)
    for config in space(direction).configs():
        found = results(problem, inputs, config)
        assert bench.error(problem, local_cpu(), inputs, found, 0) <= 1


AWKWARD = (
    *((1, n) for n in (1, 2, 31, 97)),
    *((n, 1) for n in (2, 15, 33)),
    *((n, 65) for n in (13, 14, 15, 64)),
    *((17, n) for n in (15, 16, 17, 32, 63, 64, 129)),
)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_one_config_at_every_awkward_shape(dtype):
    for n, (q_len, kv_len) in enumerate(AWKWARD):
        dim = (1, 3, 8, 31, 32, 33, 96, 256)[n % 8]
        direction = ("forward", "backward")[n // 8 % 2]
        check(
            dataclasses.replace(
                PROBLEM,
                q_len=q_len,
                kv_len=kv_len,
                head_dim=dim,
                dtype=dtype,
                direction=direction,
                scale=dim**-0.5,
            )
        )


@pytest.mark.parametrize(
    "case", slow_unless(["plain", "mask", "lengths", "everything"], CASES)
)
def test_the_op_s_arguments_mean_the_same(case):
    args, settings = qkv(head_dim=12), CASES[case]
    found = ours(*args, **settings, return_residual=True)
    o, lse = exact(*args, **settings)
    assert_close(found[0], o)
    is_real = np.isfinite(lse)
    if "query_seq_lengths" in settings:
        is_real &= (np.arange(6) < settings["query_seq_lengths"][:, None])[..., None]
    assert_close(found[1][is_real], lse[is_real], 4e-6)
    if "bias" in settings:
        return  # its gradient is XLA's
    w = normal(2, 6, 4, 12, seed=3)

    def gradients(f, *x):
        return jax.grad(lambda *y: (f(*y) * w).sum(), argnums=(0, 1, 2))(*x)

    found = gradients(functools.partial(ours, **settings), *args)
    expected = in_f64(
        lambda *x: gradients(lambda *y: definition(*y, **settings)[0], *x), *args
    )
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, 4e-6)


def test_derivatives_of_both_modes():
    settings = {"is_causal": True, "mask": random_mask(2, 1, 6, 5)}
    f = functools.partial(ours, **settings)
    check_grads(f, qkv(), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)
    check_grads(f, qkv(), order=1, modes=["fwd"], atol=1e-2, rtol=1e-2)


def test_vmap_and_jit():
    q, k, v = (jnp.stack([x, 2 * x, -x]) for x in qkv())
    mapped = jax.jit(jax.vmap(ours, in_axes=(0, 0, None)))(q, k, v[0])
    for i in range(3):
        assert_close(mapped[i], np.asarray(ours(q[i], k[i], v[0]), np.float64))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_queries_without_keys_get_xla_s_mean(dtype):
    args = [x.astype(dtype) for x in qkv()]
    none = {"local_window_size": (-3, 9), "key_value_seq_lengths": lengths(4, 2)}
    for f in (
        lambda how, *x: attention(*x, **none, implementation=how),
        lambda how, *x: attention(*x, mask=jnp.zeros((1, 1, 6, 1), bool),
                                  implementation=how),
    ):  # fmt: skip
        found, wanted = (f(how, *args) for how in ("attention_cpu", "xla"))
        np.testing.assert_allclose(
            *(x.astype("float32") for x in (found, wanted)), atol=2e-2, rtol=1e-5
        )
        found, wanted = (
            jax.grad(lambda v, f=f, how=how: f(how, *args[:2], v).sum())(args[2])
            for how in ("attention_cpu", "xla")
        )
        np.testing.assert_allclose(
            *(x.astype("float32") for x in (found, wanted)), atol=2e-2, rtol=2e-2
        )


def test_masks_that_are_biases_stay_finite():
    lowest = np.finfo(np.float32).min
    bias = jnp.where(random_mask(1, 1, 6, 5), 0, lowest).at[0, 0, 2].set(lowest)
    found = ours(*qkv(), bias=bias)
    assert_close(found, np.asarray(attention(*qkv(), bias=bias), np.float64))


def test_not_a_number_stays_one():
    q, k, v = qkv()
    found = ours(q.at[0, 1, 2, 3].set(jnp.nan), k, v)
    wrong = np.isnan(np.asarray(found))
    assert wrong[0, 1, 2].all() and wrong.sum() == q.shape[3]


def test_threads_do_not_change_bits():
    program = """
        import functools, hashlib, jax, numpy as np
        from tracea_jax.ops import attention
        rng = np.random.default_rng(0)
        for dtype in "float32", "bfloat16":
            for heads, length in (1, 300), (3, 170), (16, 70):
                x = rng.normal(size=(3, 1, length, heads, 40)).astype(dtype)
                f = functools.partial(
                    attention, is_causal=True, implementation="attention_cpu"
                )
                y, pull = jax.vjp(f, *x)
                for z in (y, *pull(y)):
                    print(hashlib.sha256(np.asarray(z)).hexdigest())
    """
    one, many = (run_forked(program, NPROC=count) for count in ("1", "5"))
    assert one == many and len(set(one.split())) == 24


def test_a_gradient_has_one_pass_where_its_heads_are_enough_tasks():
    device = dataclasses.replace(local_cpu(), isa="avx512", cores=4)
    few = dataclasses.replace(PROBLEM, direction="backward", batch=3)
    many = dataclasses.replace(few, batch=4)
    found = [ATTENTION_CPU.heuristic(p, device).passes for p in (few, many)]
    assert found == [2, 1]
    long = dataclasses.replace(many, kv_len=1 << 16)  # sums of 12 MiB a head
    assert ATTENTION_CPU.heuristic(long, device).passes == 2
    forward = dataclasses.replace(many, direction="forward")
    assert ATTENTION_CPU.heuristic(forward, device).passes == 2
    amx = dataclasses.replace(device, isa="amx")
    assert ATTENTION_CPU.heuristic(many, amx).passes == 1
    narrow = dataclasses.replace(many, dtype="bfloat16")
    assert ATTENTION_CPU.heuristic(narrow, amx).passes == 2
    once = dataclasses.replace(SMALL, passes=1)
    ATTENTION_CPU.check(narrow, once, device)
    with pytest.raises(ValueError, match="matrix units"):
        ATTENTION_CPU.check(narrow, once, amx)


# --- what it takes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64; it takes float32, bfloat16, float16"),
        ({"bias": (1, 1, 1, 1), "bias_dtype": "int32"}, "a bias of dtype int32"),
        ({"head_dim": 257}, "head_dim=257; it takes up to 256"),
        ({"kv_len": 0}, "nothing to compute"),
        ({"direction": "backward", **KINDS["bias"]}, "no gradient of one"),
    ],
)
def test_what_it_refuses(changes, reason):
    problem = dataclasses.replace(PROBLEM, **changes)
    assert reason in str(ATTENTION_CPU.why_not(problem, local_cpu()))
    assert plan(problem, local_cpu()).variant == "xla"


def test_it_runs_on_cpus():
    assert "runs on CPUs" in str(ATTENTION_CPU.why_not(PROBLEM, NAMED["H200"]))


def test_it_is_the_default_where_it_is_expected_to_win():
    found = plan(PROBLEM, local_cpu())
    assert (found.variant, found.origin) == ("attention_cpu", "policy")
    small = dataclasses.replace(PROBLEM, q_len=5, kv_len=8)
    assert plan(small, local_cpu()).variant == "xla"
    assert plan(small, local_cpu(), implementation="tracea").variant == "attention_cpu"


def test_configs_of_no_difference_are_left_out():
    small = dataclasses.replace(PROBLEM, q_len=60, kv_len=100)
    two = ATTENTION_CPU.space(small, local_cpu()).configs()
    assert ATTENTION_CPU.heuristic(small, local_cpu()) in two
    assert len(two) == 4 < len(space()) <= 64
    small = dataclasses.replace(small, direction="backward")
    every = ATTENTION_CPU.space(small, local_cpu()).configs()
    once = [c for c in every if c.passes == 1]  # whatever block_q is
    assert [c for c in every if c.passes == 2] == list(two)
    assert len(once) == (2 if has_one_pass(small, local_cpu()) else 0)
    with pytest.raises(ValueError, match="block_kv=2048 must be .* from 1 to 1024"):
        tracea.ops.attention(*qkv(), config={"block_q": 1, "block_kv": 2048})


def test_the_handler_refuses_what_is_not_its_own():
    call = ATTENTION_CPU.call(
        dataclasses.replace(PROBLEM, mask=(1, 1, 1, 1)), SMALL, local_cpu()
    )
    assert isinstance(call, CpuCall)

    def run(
        shapes=((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)), mask=(1, 1, 5, 6), **how
    ):
        kernel = jax.ffi.ffi_call(
            call.target, jax.ShapeDtypeStruct(shapes[0], jnp.float32)
        )
        operands = [jnp.zeros(s) for s in shapes]
        attributes = {**dict(call.attributes), **how}
        return jax.block_until_ready(
            kernel(*operands, jnp.ones(mask, bool), **attributes)
        )

    run()
    q, k, _ = (2, 5, 4, 8), (2, 6, 2, 8), ()
    for change, message in (
        ({"isa": "mmx"}, f"isa is 'mmx'.*{', '.join(CPU_ISAS)}"),
        ({"abi": 9}, "abi 9.*clear the compilation cache"),
        ({"block_q": -1}, "block_q=-1 must be 0 or more"),
        ({"passes": 3}, "passes=3; there are 1 or 2"),
        ({"has_mask": False}, "4 operands.*takes 3 operands"),
        ({"has_bias": True}, "4 operands.*takes 5 operands"),
        ({"mask": (1, 3, 5, 6)}, r"mask has shape \(1, 3, 5, 6\).*\(2, 4, 5, 6\)"),
        ({"shapes": (q, (2, 6, 2, 9), k)}, "of the same batch and head_dim"),
        ({"shapes": (q, (2, 6, 3, 8), k)}, "4 heads, no multiple of k's 3"),
        ({"shapes": (q, k, (2, 7, 2, 8))}, r"v has shape \(2, 7, 2, 8\)"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
            run(**change)


def peak_bytes() -> int:
    """The most memory this process had since /proc/self/clear_refs was written to."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_memory_does_not_grow_with_the_square_of_the_length(dtype, direction):
    q, k, v = (normal(1, 16384, 8, 64, seed=i, dtype=dtype) for i in range(3))
    f = functools.partial(ours, is_causal=True)
    if direction == "backward":
        f = jax.grad(lambda *x: ours(*x, is_causal=True).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(f).lower(q, k, v).compile()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = peak_bytes()
    jax.block_until_ready(compiled(q, k, v))
    # Output and, for derivatives, gradients and the cotangent; else some workspace.
    arrays = {"forward": 1, "backward": 5}[direction]
    assert peak_bytes() - before < arrays * q.nbytes + (16 << 20)

"""Special values in attention: kernels of CPUs, and programs that become the op."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import attention_values as values
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_values import Form
from evaluation import evaluated
from numerics import array
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.problem import AttentionProblem
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants import CpuCall
from tracea_jax.variants.attention_cpu import ATTENTION_CPU, AttentionCpuConfig

pytestmark = pytest.mark.once

ISAS = CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]
INF, NAN = np.inf, np.nan

# --- kernels of CPUs ------------------------------------------------------------------

# Sizes that take several tiles and blocks, of which the last ones are not whole.
TILES = Form(q_len=37, kv_len=70, heads=4, kv_heads=2, head_dim=8, scale=0.35)
ONE = Form(q_len=1, kv_len=67, batch=3, heads=6, kv_heads=2, head_dim=7)
KERNEL_FORMS = tuple(
    dataclasses.replace(form, dtype=dtype, mask=mask, bias=bias)
    for form in (TILES, dataclasses.replace(TILES, scale=1.0, head_dim=33), ONE)
    for dtype in ("float32", "bfloat16", "float16")
    for mask in ("none", "causal", "window", "lengths", "keys", "random")
    for bias in (None, (1, form.heads, form.q_len, form.kv_len), (1, 1, form.q_len, 1))
    if mask != "random" or form.q_len > 1
)


def problem(form: Form, direction: Any) -> AttentionProblem:
    mask = {"keys": (form.batch, 1, 1, form.kv_len)}
    mask["random"] = (1, form.heads, form.q_len, form.kv_len)
    return AttentionProblem(
        direction=direction,
        **{
            n: getattr(form, n)
            for n in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
        },
        dtype=form.dtype,
        scale=form.scale,
        bias=form.bias,
        bias_dtype=form.dtype if form.bias else None,
        mask=mask.get(form.mask),
        is_causal=form.mask == "causal",
        window=(2, 1) if form.mask == "window" else None,
        q_lengths=form.mask == "lengths",
        kv_lengths=form.mask == "lengths",
    )


def call(form: Form, direction: Any, isa: str, passes: int, shapes: Any) -> Any:
    device = dataclasses.replace(local_cpu(), isa=isa)
    asked = problem(form, direction)
    assert ATTENTION_CPU.why_not(asked, device) is None
    config = AttentionCpuConfig(block_q=40, block_kv=64, passes=passes)
    made = ATTENTION_CPU.call(asked, config, device)
    assert isinstance(made, CpuCall)
    kernel = jax.ffi.ffi_call(made.target, shapes)
    return functools.partial(kernel, **dict(made.attributes))


@functools.cache
def kernel_results(form: Form, isa: str, passes: int) -> Callable[..., list[Any]]:
    """[o], or [o, dq, dk, dv] without a bias, from the operands and a cotangent."""
    dtype = jnp.dtype(form.dtype)
    like = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in form.shapes.items()}
    lse = jax.ShapeDtypeStruct((form.batch, form.heads, form.q_len), jnp.float32)
    forward = call(form, "forward", isa, passes, [like["q"], lse])
    seen = form.seen()
    more: list[Any] = []
    if form.mask in ("keys", "random"):
        keys = form.mask == "keys"
        more.append(array(seen[:, :1, :1] if keys else seen[:1]))
    if form.mask == "lengths":
        more += [array(n) for n in form.lengths]

    def run(do: Any, *x: Any) -> list[Any]:
        o, sums = forward(*x, *more)
        if form.bias:
            return [o]
        shapes = [like["q"], like["k"], like["v"]]
        backward = call(form, "backward", isa, passes, shapes)
        return [o, *backward(*x, *more, o, sums, do)]

    return jax.jit(run)


def check_kernel(seed: int) -> str:
    """Differences in the program of a seed; empty if there are none."""
    form = KERNEL_FORMS[seed * 131 % len(KERNEL_FORMS)]
    isa = ISAS[seed // 7 % len(ISAS)]
    on_amx = isa == "amx" and form.dtype == "bfloat16"
    passes = 2 if on_amx else 1 + seed % 2
    x, do, words = values.operands(form, seed)
    cotangent = array(do.astype(jnp.dtype(form.dtype)))
    found = kernel_results(form, isa, passes)(cotangent, *values.as_arrays(form, x))
    wrong = ", ".join(values.differences(form, found, x, do))
    return f"{seed}: {form} {isa} {passes}: {words}: {wrong}" if wrong else ""


def test_kernels_have_the_special_values_of_the_formula():
    """The slow test below has two thousand programs."""
    assert not list(filter(None, map(check_kernel, range(24))))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand_programs_with_kernels(first):
    assert not list(filter(None, map(check_kernel, range(first, first + 100))))


def one_row(form: Form, value: float) -> tuple[values.Operands, np.ndarray]:
    """All scores of query 5 of head 0 of example 0 are ``value`` or half of it."""
    x, do, _ = values.operands(form, 0)
    rng = np.random.default_rng(3)
    for name in ("q", "k", "v"):
        x[name] = rng.integers(-2, 3, x[name].shape).astype("float32")
    x["q"][0, 5, 0], x["q"][0, 5, 0, 0] = 0, value
    x["k"][..., 0] = rng.choice([1.0, 0.5], x["k"].shape[:-1])
    return x, rng.integers(-2, 3, do.shape).astype("float32")


@pytest.mark.parametrize("isa", slow_unless([ISAS[0], ISAS[-1]], ISAS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [-INF, INF, NAN, 2.4e38, -2.4e38, 3e38, -3e38])
def test_all_scores_of_a_row(isa, dtype, value):
    form = dataclasses.replace(TILES, dtype=dtype, scale=1.0)
    x, do = one_row(form, value)
    cotangent = array(do.astype(jnp.dtype(dtype)))
    for passes in (1, 2):
        if passes == 1 and isa == "amx" and dtype == "bfloat16":
            continue
        run = kernel_results(form, isa, passes)
        found = run(cotangent, *values.as_arrays(form, x))
        assert not list(values.differences(form, found, x, do))
        is_nan = not np.isfinite(value)
        assert np.isnan(np.asarray(found[0], "float32")[0, 5, 0]).all() == is_nan
        assert np.isnan(np.asarray(found[1], "float32")[0, 5, 0]).all() == is_nan


def test_biases_of_minus_infinity_for_all_keys_are_nan_and_the_lowest_are_not():
    shape = (1, 1, 37, 70)
    form = dataclasses.replace(TILES, bias=shape)
    x, do, _ = values.operands(form, 0)
    rng = np.random.default_rng(4)
    for name in ("q", "k", "v"):
        x[name] = rng.standard_normal(x[name].shape).astype("float32")
    x["bias"] = np.zeros(shape, "float32")
    x["bias"][:, :, 3] = -INF
    x["bias"][:, :, 4] = -values.MAX
    x["bias"][:, :, 6, 1:] = -INF
    (o,) = kernel_results(form, ISAS[-1], 2)(array(do), *values.as_arrays(form, x))
    o = np.asarray(o)
    rows = np.isnan(o).all((0, 2, 3))
    assert rows[3] and not np.isnan(o[:, ~rows]).any() and rows.sum() == 1
    mean = np.repeat(x["v"].mean(1), 2, 1)
    np.testing.assert_allclose(o[:, 4], mean, atol=1e-5)
    np.testing.assert_allclose(o[:, 6], np.repeat(x["v"][:, 0], 2, 1), atol=1e-5)


# --- programs -------------------------------------------------------------------------

Fn = Callable[..., Any]


def by_op(form: Form) -> Fn:
    """``jax.nn.dot_product_attention`` with what it has arguments for."""

    def fn(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        mask = array(form.seen()) if form.mask in ("keys", "random") else None
        q_lengths, kv_lengths = map(array, form.lengths)
        by_lengths = form.mask == "lengths"
        return jax.nn.dot_product_attention(
            *(q, k, v, bias, mask),
            scale=form.scale,
            is_causal=form.mask == "causal",
            local_window_size=(2, 1) if form.mask == "window" else None,
            query_seq_lengths=q_lengths if by_lengths else None,
            key_value_seq_lengths=kv_lengths if by_lengths else None,
        )

    return fn


def by_hand(form: Form, softmax: Fn = jax.nn.softmax, *, adds: bool = False) -> Fn:
    """Scores, what changes them, softmax and values, for heads of their own keys.

    Args:
      form: of the scores.
      softmax: in place of JAX's.
      adds: whether the mask is added to the scores.
    """

    def fn(q: Any, k: Any, v: Any, *more: Any) -> Any:
        rest = dict(zip(form.names[3:], more, strict=True))
        k, v = (jnp.repeat(a, form.heads // form.kv_heads, 2) for a in (k, v))
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type="float32")
        s = s * form.scale
        if "bias" in rest:
            s = s + rest["bias"].astype("float32")
        if form.cap:
            s = form.cap * jnp.tanh(s / form.cap)
        if form.mask == "causal":
            seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
        else:
            seen = array(form.seen())
        if adds:
            s = s + jnp.where(seen, 0.0, form.fill).astype(s.dtype)
        elif form.mask != "none":
            s = jnp.where(seen, s, form.fill)
        if "sinks" in rest:
            logits = jnp.broadcast_to(rest["sinks"][:, None, None], (*s.shape[:-1], 1))
            p = softmax(jnp.concatenate([s, logits], -1))[..., :-1]
        else:
            p = softmax(s)
        return jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), v)

    return fn


def shifted(s: Any) -> Any:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _moved_by(move: Fn) -> Fn:
    return lambda s: jax.nn.softmax(s + move(s, axis=-1, keepdims=True))


# Softmax of scores that are moved by what is the same for all keys of a query.
MOVED = {
    "mean": _moved_by(jnp.mean),
    "minus mean": lambda s: shifted(s - s.mean(-1, keepdims=True)),
    "sum": _moved_by(jnp.sum),
    "minimum": _moved_by(lambda s, **how: -jnp.min(s, **how)),
    "maximum": _moved_by(jnp.max),
    "norm": _moved_by(lambda s, **how: jnp.sqrt(jnp.sum(s * s, **how))),
}
SMALL = Form()
FULL = (1, 4, 6, 5)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A program of a form; ``is_left``: whether its softmax stays as it is written."""

    form: Form
    fn: Fn
    is_left: bool = False


def spellings() -> Iterator[Spelling]:
    for dtype in ("float32", "bfloat16"):
        for mask in ("none", "causal", "window", "lengths", "keys", "random"):
            for bias in (None, FULL, (2, 1, 1, 5)):
                form = dataclasses.replace(SMALL, dtype=dtype, mask=mask, bias=bias)
                yield Spelling(form, by_op(form))
        for mask in ("none", "causal", "keys"):
            for fill in (-1e9, -values.MAX, -INF):
                form = dataclasses.replace(SMALL, dtype=dtype, mask=mask, fill=fill)
                for more in ({}, {"bias": FULL}, {"cap": 3.0}, {"sinks": True}):
                    other = dataclasses.replace(form, **more)
                    yield Spelling(other, by_hand(other))
                yield Spelling(form, by_hand(form, shifted))
                if mask != "none" and fill != -INF:
                    # What is added to NaN or infinity masks nothing.
                    yield Spelling(form, by_hand(form, adds=True), is_left=False)
        for move in MOVED.values():
            for mask, fill in (("none", 0.0), ("causal", -1e9), ("causal", -INF)):
                form = dataclasses.replace(SMALL, dtype=dtype, mask=mask, fill=fill)
                yield Spelling(form, by_hand(form, move), is_left=True)


SPELLINGS = tuple(spellings())


def derived(fn: Fn) -> Fn:
    """[result, gradients of all operands] of (cotangent, *operands)."""

    def both(do: Any, *x: Any) -> list[Any]:
        o, back = jax.vjp(fn, *x)
        return [o, *back(do)]

    return both


def traced(spelling: Spelling, device: str | None) -> tuple[Any, Any]:
    """Jaxprs of a spelling, plain and with calls of ours in its place."""
    x, do, _ = values.operands(spelling.form, 0)
    arrays = values.as_arrays(spelling.form, x)
    cotangent = array(do.astype(jnp.dtype(spelling.form.dtype)))
    plain = jax.make_jaxpr(derived(spelling.fn))(cotangent, *arrays)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_choices())
        if device:
            stack.enter_context(tracea.options(device=device))
        fn = derived(tracea.transform(spelling.fn))
        fast = jax.make_jaxpr(fn)(cotangent, *arrays)
    return plain, fast


def differing(index: int, count: int, device: str | None) -> Iterator[str]:
    """Differences in programs of a spelling; each equation is run for all at once."""
    spelling = SPELLINGS[index]
    form = spelling.form
    made = [values.operands(form, index + k * len(SPELLINGS)) for k in range(count)]
    with np.errstate(all="ignore"):
        stacked = [
            array(np.stack(a))
            for a in zip(
                *(
                    [do.astype(jnp.dtype(form.dtype)), *values.as_arrays(form, x)]
                    for x, do, _ in made
                ),
                strict=True,
            )
        ]
        expected, found = (
            jax.vmap(functools.partial(evaluated, jaxpr))(*stacked)
            for jaxpr in traced(spelling, device)
        )
        results = [[np.asarray(r, "float32") for r in f] for f in (expected, found)]
    for k, (x, do, words) in enumerate(made):
        ours = [r[k] for r in results[1]]
        if all(map(_same, ours, [r[k] for r in results[0]])):
            continue
        if spelling.is_left:
            kinds = [
                [values.kind(r) for r in (y, e[k])]
                for y, e in zip(ours, results[0], strict=True)
            ]
            wrong = "" if all(_same(*pair) for pair in kinds) else "not as written"
        else:
            wrong = ", ".join(values.differences(form, ours, x, do))
        if wrong:
            yield f"spelling {index}, {k}: {form}: {words}: {wrong}"


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("device", [None, "H200"])
def test_programs_keep_special_values(device):
    """The slow test below has twenty thousand for each."""
    for index in (1, 84):
        assert not list(differing(index, 40, device))


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "H200"])
@pytest.mark.parametrize("index", range(len(SPELLINGS)))
def test_twenty_thousand_programs(index, device):
    assert not list(differing(index, 118, device))


@pytest.mark.parametrize("move", MOVED)
@pytest.mark.usefixtures("calls_only")
def test_only_the_maximum_is_a_shift(move):
    """A shift that may be infinite where scores are not is no constant."""
    form = dataclasses.replace(SMALL, mask="causal", fill=-INF)
    fn = by_hand(form, MOVED[move])
    x = values.as_arrays(form, values.operands(form, 9)[0])
    assert "tracea_attention" not in str(jax.make_jaxpr(tracea.transform(fn))(*x))
    as_usual = by_hand(form, lambda s: jax.nn.softmax(s - s.max(-1, keepdims=True)))
    assert "tracea_attention" in str(jax.make_jaxpr(tracea.transform(as_usual))(*x))

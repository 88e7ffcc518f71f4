"""Products whose operands a program converts from narrow integers (w8a16)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import normal
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax import catalogue
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.dispatch import plan
from tracea_jax.policy import decide
from tracea_jax.problem import GatedMatmulProblem, GemmProblem, problem_from_json
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry

pytestmark = pytest.mark.once

H100, CPU = NAMED["H100"], local_cpu()
BF16: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "bfloat16")
WHOLE = GemmProblem(m=512, n=1024, k=2048, **BF16)
STORED = dataclasses.replace(WHOLE, rhs_stored="int8")


@pytest.fixture(autouse=True)
def with_any_toolchain():
    with compiled_elsewhere():
        yield


def weights(*shape: int, dtype: Any = "int8", seed: int = 0) -> jax.Array:
    info = jnp.iinfo(dtype)
    rng = np.random.default_rng([seed, *shape])
    whole = rng.integers(info.min, info.max + 1, shape)
    return jnp.asarray(whole, jnp.int32).astype(dtype)


def after(x, w, s):
    return (x @ w.astype(x.dtype)) * s


def before(x, w, s):
    return x @ ((w.astype(x.dtype) - 1) * s)


def turned(x, w, s):
    return x @ w.T.astype(x.dtype).T * s


def activated(x, w, s):
    return jax.nn.silu(jnp.einsum("md,dn->mn", x, w.astype(x.dtype)) + s)


def grouped(x, w, s):
    """Scales of groups of rows."""
    wide = w.astype(x.dtype).reshape(4, -1, w.shape[1])
    return x @ (wide * s[None, None]).reshape(w.shape)


def gated(x, w, s):
    gate, up = w.astype(x.dtype), (w - 1).astype(x.dtype)
    return jax.nn.silu(x @ gate) * (x @ up)


FORMS = (after, before, turned, activated, grouped, gated)


def site(fn: Any, *shapes: tuple[tuple[int, ...], str]) -> Any:
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    (found,) = tracea.explain(fn, device="H100")(*args).sites
    return found


@pytest.mark.parametrize("fn", FORMS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_such_products_are_problems_of_their_own(fn, dtype):
    shapes = [((64, 256), "bfloat16"), ((256, 128), dtype), ((128,), "bfloat16")]
    found = site(fn, *shapes)
    assert found.problem.rhs_stored == dtype and found.problem.lhs_stored is None
    assert f"rhs from {dtype}" in str(found.problem)
    assert problem_from_json(found.problem.to_json()) == found.problem
    assert found.variant == "xla" and f"converts {dtype} operands" in found.reason


@pytest.mark.parametrize(
    ("stored", "fn"),
    [
        ("bfloat16", lambda x, w, s: x @ w.astype(x.dtype)),
        ("int32", lambda x, w, s: x @ w.astype(x.dtype)),
        ("bool", lambda x, w, s: x @ w.astype(x.dtype)),
        # Sums, and entries that a row chooses, are in memory before the product.
        ("int8", lambda x, w, s: x @ jnp.cumsum(w.astype(x.dtype), 0)),
        ("int8", lambda x, w, s: x @ w.astype(x.dtype)[jnp.argsort(s)][:, :1]),
        # A part of an operand that is not as large as it.
        ("int8", lambda x, w, s: x @ jnp.broadcast_to(w[:1].astype(x.dtype), w.shape)),
    ],
)
def test_other_operands_are_in_memory(stored, fn):
    shapes = [((64, 256), "float32"), ((256, 256), stored), ((256,), "float32")]
    found = site(fn, *shapes)
    assert found.problem.rhs_stored is None
    assert "stored" not in str(found.problem.to_json())


def test_both_operands_and_gradients():
    def loss(x, w):
        y = x.astype("bfloat16") @ w.astype("bfloat16")
        return jnp.sum(jnp.square(y.astype("float32")))

    x, w = weights(64, 128), weights(128, 32)
    explained: Any = tracea.explain(loss, device="H100")(x, w)
    (found,) = explained.sites
    assert (found.problem.lhs_stored, found.problem.rhs_stored) == ("int8", "int8")

    def of_x(x, w):
        return loss(x, w).astype("float32")

    wide = normal(64, 128).astype("bfloat16")
    explained = tracea.explain(jax.grad(of_x), device="H100")(wide, w)
    stored = [
        (s.problem.layout, s.problem.lhs_stored, s.problem.rhs_stored)
        for s in explained.sites
    ]
    assert stored == [("nn", None, "int8"), ("nt", None, "int8")]


def test_answers_of_operands_in_memory_do_not_apply(tmp_path):
    chosen = decide(diagnose(WHOLE, H100)).heroes[0]
    entry = Entry(
        problem=WHOLE.to_json(),
        environment=environment(H100),
        best=Best(**named(WHOLE, chosen, H100), time_us=10.0, xla_us=20.0, ratio=2.0),
    )
    Knowledge(tmp_path).own.record(entry)
    known = Knowledge(tmp_path)
    answer = known.lookup(WHOLE, H100)
    assert answer is not None and answer.choice.variant == chosen.variant
    assert known.lookup(STORED, H100) is None
    near = dataclasses.replace(STORED, m=640)
    assert known.lookup(near, H100) is None  # nor those of other shapes
    with tracea.options(cache_dir=tmp_path):
        assert plan(STORED, H100).variant == "xla"
        assert plan(STORED, H100, implementation="tracea").variant == chosen.variant


def test_their_own_answers_do(tmp_path):
    chosen = decide(diagnose(STORED, H100)).heroes[0]
    best = Best(**named(STORED, chosen, H100), time_us=10.0, xla_us=20.0, ratio=2.0)
    where = {"problem": STORED.to_json(), "environment": environment(H100)}
    Knowledge(tmp_path).own.record(Entry(**where, best=best))
    answer = Knowledge(tmp_path).lookup(STORED, H100)
    assert answer is not None and answer.choice == chosen
    assert Knowledge(tmp_path).lookup(WHOLE, H100) is None


def test_the_default_on_cpus_is_that_of_operands_in_memory():
    for problem in (WHOLE, STORED):
        assert plan(problem, CPU).variant == plan(WHOLE, CPU).variant
    assert STORED.bytes == WHOLE.bytes - WHOLE.n * WHOLE.k


@pytest.mark.parametrize("fn", FORMS)
def test_values_are_those_of_the_program(fn):
    x, w, s = normal(40, 64), weights(64, 48), normal(48, seed=1)
    expected = jax.jit(fn)(x, w, s)
    found = jax.jit(tracea.transform(fn))(x, w, s)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
    batched = jax.vmap(tracea.transform(fn), (0, None, None))(x[None], w, s)
    np.testing.assert_allclose(batched[0], expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("is_gated", slow_unless([False], [False, True]))
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [*itertools.product((None, "int8"), (None, "int8", "int4"))],
)
def test_what_is_tuned_begins_with_the_integers(lhs, rhs, is_gated):
    how: dict[str, Any] = {"m": 33, "n": 40, "k": 65, "lhs_stored": lhs}
    make = GatedMatmulProblem if is_gated else GemmProblem
    problem = make(**how, rhs_stored=rhs)
    bench = catalogue.get(problem.op).bench(problem, CPU)
    names = [x.dtype.name for x in bench._operands(problem, 0)]
    assert names == [lhs or "float32", *[rhs or "float32"] * (1 + is_gated)]
    for name in decide(diagnose(problem, CPU)).heroes:
        result = bench.verify(name, 0)
        assert result.failure is None, result.message

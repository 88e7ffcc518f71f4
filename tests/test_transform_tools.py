"""A transformed function in other tools: jit's methods, pickling, error locations."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import subprocess
from typing import Any

import jax
import numpy as np
import pytest
from calls import arguments, block
from jaxprs import count
from numerics import normal
from processes import forked
from transformed import assert_near

import tracea_jax as tracea
from tracea_jax.campaign import graph_of

# ---- the methods of jitted functions -------------------------------------------------


def powers(x: Any, w: Any, n: int, scale: Any = 1.0) -> Any:
    for _ in range(n):
        x = jax.nn.relu(x @ w)
    return x * scale


def test_a_jitted_function_keeps_its_methods():
    x, w = normal(6, 8), normal(8, 8)
    fast = tracea.transform(jax.jit(powers, static_argnames="n"))
    cases: list[Any] = [((x, w, 2), {}), ((x, w), {"n": 2}), ((x, w, 2, 3.0), {})]
    for args, kwargs in cases:
        expected = powers(*args, **kwargs)
        lowered = fast.lower(*args, **kwargs)
        assert lowered.as_text().count("tracea_cpu_gemm") == 2
        dynamic = [a for a in args if not isinstance(a, int)]
        assert_near(lowered.compile()(*dynamic), expected, 5e-5)
        assert fast.eval_shape(*args, **kwargs).shape == expected.shape
        traced = fast.trace(*args, **kwargs)
        assert "tracea_matmul" in str(traced.jaxpr)
        assert traced.fun_name == "powers"


def test_static_arguments_may_be_numbers_of_numpy():
    x, w = normal(6, 8), normal(8, 8)
    two: Any = np.int32(2)
    for place in (2, -1):
        by_place = jax.jit(lambda x, w, n: powers(x, w, n), static_argnums=place)
        fast = tracea.transform(by_place)
        assert_near(fast(x, w, two - 1), powers(x, w, 1), 5e-5)
        assert_near(fast(x, w, two), powers(x, w, 2), 5e-5)
    named = jax.jit(powers, static_argnames="n")
    assert_near(tracea.transform(named)(x, w, n=two), powers(x, w, 2), 5e-5)
    assert tracea.explain(named)(x, w, two).ops == {"matmul": 2}
    shaped = jax.jit(lambda x, shape: (x @ x.T).reshape(shape), static_argnums=1)
    assert tracea.transform(shaped)(x, (np.int64(4), 9)).shape == (4, 9)


def test_options_of_the_compiler_are_used():
    x, w, b = arguments()
    given: Any = {"xla_backend_optimization_level": 0}
    quickly = jax.jit(block, compiler_options=given)
    fast = tracea.transform(quickly)
    assert_near(fast(x, w, b), block(x, w, b), 5e-5)
    assert_near(jax.grad(lambda w: fast(x, w, b).sum())(w), gradient(x, w, b), 5e-5)
    assert tracea.explain(quickly)(x, w, b).ops == {"matmul": 1}
    wrong = jax.jit(block, compiler_options={"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        tracea.transform(wrong)(x, w, b)


def gradient(x: Any, w: Any, b: Any) -> Any:
    return jax.grad(lambda w: block(x, w, b).sum())(w)


def test_donated_arguments_stay_donated():
    fast = tracea.transform(jax.jit(block, donate_argnames="x"))
    x, w, b = arguments()
    donated = [a.donated for a in jax.tree.leaves(fast.trace(x, w, b).args_info)]
    assert donated == [True, False, False]


def descended(p: Any, x: Any, n: int = 1, *, rate: Any = 0.1) -> Any:
    grads = jax.grad(lambda p: jax.nn.gelu(x @ p["w"] + p["b"]).sum())(p)
    return jax.tree.map(lambda a, g: a - n * rate * g, p, grads), x.sum()


def parameters() -> dict[str, Any]:
    return {"w": normal(8, 8), "b": normal(8)}


def aliases(compiled: Any) -> int:
    """The pairs of a result and an argument that share a buffer."""
    header = compiled.as_text().partition("entry_computation_layout")[0]
    return header.count("may-alias") + header.count("must-alias")


@pytest.mark.parametrize(
    "make",
    [
        lambda: jax.jit(tracea.transform(descended), donate_argnums=0),
        lambda: jax.jit(tracea.transform(descended), donate_argnames="p"),
        lambda: tracea.transform(jax.jit(descended, donate_argnums=0)),
        lambda: tracea.transform(
            jax.jit(descended, donate_argnames="p", static_argnames="n")
        ),
    ],
    ids=["numbers outside", "names outside", "numbers inside", "names inside"],
)
def test_donated_buffers_are_used_again(make):
    x, expected = normal(6, 8), descended(parameters(), normal(6, 8), 2)
    fast = make()
    for _ in range(2):
        p = parameters()
        assert_near(fast(p, x, n=2), expected, 2e-5)
        assert all(leaf.is_deleted() for leaf in p.values()) and not x.is_deleted()
    compiled = fast.lower(parameters(), x).compile()
    assert aliases(compiled) == 2
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * (64 + 8)


def test_donation_is_the_affair_of_the_outermost_jit():
    fast: Any = tracea.transform(jax.jit(descended, donate_argnums=0))
    p, x = parameters(), normal(6, 8)
    expected = descended(p, x)
    assert_near(jax.jit(fast)(p, x), expected, 2e-5)
    with jax.disable_jit():
        assert_near(fast(p, x), expected, 2e-5)
    assert tracea.explain(fast)(p, x).ops == {"matmul": 2}
    assert not any(leaf.is_deleted() for leaf in p.values())
    fast.clear_cache()
    assert_near(fast(p, x), expected, 2e-5)
    assert all(leaf.is_deleted() for leaf in p.values())


def test_clearing_the_cache_traces_again():
    traces = []

    def square(x):
        traces.append(x)
        return x @ x

    f: Any = tracea.transform(jax.jit(square))
    x = normal(4, 4)
    for _ in range(2):
        f(x)
        f.lower(x)
        assert len(traces) == 1
    f.clear_cache()
    f(x)
    assert len(traces) == 2


def test_a_plain_function_has_none_of_them():
    fast = tracea.transform(block)
    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        assert not hasattr(fast, name)


# ---- pickles and copies --------------------------------------------------------------


def test_pickles():
    x, w, b = arguments()
    expected = block(x, w, b)
    fast = tracea.transform(block, ops=["matmul"])
    fast(x, w, b)  # a trace is no part of the pickle
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert count(again, x, w, b) == 1
        assert_near(again(x, w, b), expected, 2e-5)
    none = pickle.loads(pickle.dumps(tracea.transform(block, ops=())))
    assert count(none, x, w, b) == 0


LOAD = """
import pickle, sys
import numpy as np
functions = pickle.load(sys.stdin.buffer)
x, w = np.full((6, 8), 2, np.float32), np.full((8, 8), 0.5, np.float32)
print([float(f(x, w).sum()) for f in functions])
"""


def test_cloudpickle_takes_it_to_another_process():
    cloudpickle = pytest.importorskip("cloudpickle")
    scale = 3.0

    def f(x, w):
        return jax.nn.relu(x @ w) * scale

    class Model:
        @tracea.transform
        def __call__(self, x, w):
            return x @ w - scale

    fast = tracea.transform(f)
    fast(normal(6, 8), normal(8, 8))
    functions = [fast, tracea.transform(lambda x, w: x @ w), Model()]
    functions += [tracea.transform(jax.jit(f)), jax.jit(fast)]
    done = subprocess.run(
        forked(LOAD, strict=False),
        input=cloudpickle.dumps(functions),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [48 * 24, 48 * 8, 48 * 5, 48 * 24, 48 * 24]


# ---- which ops -----------------------------------------------------------------------


def test_one_op_by_its_name():
    x, w, b = arguments()
    assert count(tracea.transform(block, ops="matmul"), x, w, b) == 1
    assert count(tracea.transform(block, ops="conv2d"), x, w, b) == 0
    with pytest.raises(ValueError, match=r"ops=\['gemm'\] must be some of"):
        tracea.transform(block, ops="gemm")
    assert len(tracea.explain(block, ops="matmul")(x, w, b).sites) == 1
    for op, count_of in (("matmul", 1), ("conv2d", 0)):
        graph = tracea.Graph.from_function(block, x, w, b, ops=op)
        for what, args in ((block, (x, w, b)), (graph, ())):
            assert len(graph_of(what, args, ops=op).nodes) == count_of


# ---- the places that errors name -----------------------------------------------------


def branches(x, scale=1.0):
    return x if x.sum() > 0 else x @ x * scale


class Branching:
    def __call__(self, x):
        return branches(x)

    def method(self, x):
        return branches(x)


@functools.wraps(branches)
def wrapped(*args):
    return branches(*args)


CALLED = {
    "function": (branches, branches),
    "jitted": (jax.jit(branches), branches),
    "partial": (functools.partial(branches, scale=2.0), branches),
    "wrapped": (wrapped, branches),
    "method": (Branching().method, Branching.method),
    "object": (Branching(), Branching.__call__),
}


@pytest.mark.parametrize("kind", CALLED)
def test_errors_name_the_file_and_line_of_the_function(kind):
    fn, source = CALLED[kind]
    line = inspect.getsourcelines(source)[1]
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        tracea.transform(fn)(normal(3, 3))
    assert f"{__file__}:{line}" in str(error.value)
    assert "transform.py" not in str(error.value)


def test_a_leaked_value_names_the_users_file():
    leaked = []

    def leak(x):
        leaked.append(x @ x)
        return leaked[0]

    tracea.transform(leak)(normal(3, 3))
    with pytest.raises(jax.errors.UnexpectedTracerError) as error:
        print(leaked[0] + 1)
    assert f"leak at {__file__}" in str(error.value)
    assert "transform.py" not in str(error.value)

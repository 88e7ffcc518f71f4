"""Constants of a trace: which of them a trace treats alike."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracea_jax as tracea
from tracea_jax.call import Constant


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def times(self, x: Any) -> Any:
        return x * self.value

    def __call__(self, x: Any) -> Any:
        return self.times(x)


class Slotted:
    __slots__ = ("never", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Inherited(Slotted):
    __slots__ = "other"


class Alike(Plain):
    """Equal to every other one, whatever it holds."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 0


class Unhashable(Plain):
    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(unsafe_hash=True)
class Thawed:
    value: Any
    note: str = dataclasses.field(default="", compare=False)


def counted(f):
    """The transformed f, and a list that grows whenever it is traced."""
    traces = []

    def g(*args):
        traces.append(args)
        return f(*args)

    return tracea.transform(g), traces


@pytest.mark.parametrize("make", [float, complex, Frozen, lambda v: frozenset([v])])
def test_zeros_of_both_signs_are_two_constants(make):
    def f(x, c):
        (c,) = c if isinstance(c, frozenset) else (getattr(c, "value", c),)
        return jnp.copysign(x, complex(c).real)

    fast, traces = counted(f)
    x = jnp.float32(1)
    found = [float(fast(x, make(c))) for c in (0.0, -0.0, 0.0, -0.0)]
    assert found == [1.0, -1.0, 1.0, -1.0]
    assert len(traces) == 2


@pytest.mark.parametrize("make", [float, lambda v: complex(0, float(v))])
def test_nan_is_traced_once(make):
    fast, traces = counted(lambda x, c: x * c)
    for _ in range(3):
        assert jnp.isnan(fast(jnp.ones(2), make("nan"))).all()
    assert len(traces) == 1


MUTABLE = {
    "plain": Plain,
    "slots": Slotted,
    "inherited slots": Inherited,
    "equal to all": Alike,
    "dataclass": Thawed,
}


@pytest.mark.parametrize("kind", MUTABLE)
def test_an_object_that_has_changed_is_another_constant(kind):
    fast, traces = counted(lambda x, c: x * c.value)
    c, x = MUTABLE[kind](2.0), jnp.float32(3)
    found = []
    for value in (2.0, 5.0, 5.0, 2.0):
        c.value = value
        found.append(float(fast(x, c)))
        found.append(float(jax.jit(lambda x: fast(x, c))(x)))
    assert found == [6.0, 6.0, 15.0, 15.0, 15.0, 15.0, 6.0, 6.0]
    assert len(traces) == 2


def test_what_objects_hold_may_change_too():
    fast, traces = counted(lambda x, c: x * c.value["a"][0].value.sum())
    inner = Plain(np.ones(2))
    c, x = Frozen(types.MappingProxyType({"a": [inner]})), jnp.float32(3)
    with pytest.raises(TypeError, match="Frozen"):
        fast(x, c)  # its hash is that of the mapping
    c = Plain({"a": [inner]})
    assert float(fast(x, c)) == 6.0
    inner.value[1] = 4
    assert float(fast(x, c)) == 15.0
    inner.value = jnp.full(2, 7.0)
    assert float(fast(x, c)) == 42.0
    c.value["a"].insert(0, Unhashable(np.zeros(1)))
    assert float(fast(x, c)) == 0.0
    c.value["a"][0].value[0] = 2
    assert float(fast(x, c)) == 6.0
    assert float(fast(x, c)) == 6.0
    assert len(traces) == 5


@pytest.mark.parametrize(
    "of", [lambda c: c.times, lambda c: functools.partial(Plain.times, c), lambda c: c]
)
def test_what_functions_are_bound_to_may_change(of):
    fast, traces = counted(lambda x, f: f(x))
    c, x = Plain(2.0), jnp.float32(3)
    assert [float(fast(x, of(c))) for _ in range(2)] == [6.0, 6.0]
    c.value = 5.0
    assert float(fast(x, of(c))) == 15.0
    assert len(traces) == 2


def test_a_method_sees_its_object_as_it_is():
    class Layer(Plain):
        @tracea.transform
        def scaled(self, x):
            return x * self.value

    layer = Layer(2.0)
    assert float(layer.scaled(jnp.float32(3))) == 6.0
    layer.value = 5.0
    assert float(layer.scaled(jnp.float32(3))) == 15.0


def test_objects_that_hold_themselves():
    c = Plain(2.0)
    c.me = [c]  # pyright: ignore[reportAttributeAccessIssue]
    fast, traces = counted(lambda x, c: x * c.me[0].value)
    found = []
    for value in (2.0, 2.0, 4.0):
        c.value = value
        found.append(float(fast(jnp.float32(3), c)))
    assert (found, len(traces)) == ([6.0, 6.0, 12.0], 2)


def test_many_objects_that_hold_each_other():
    crowd = [Plain(float(i)) for i in range(60)]
    for one in crowd:
        one.others = crowd  # pyright: ignore[reportAttributeAccessIssue]
    before, again = Constant.of(crowd[0]), Constant.of(crowd[0])
    assert before == again and hash(before) == hash(again)
    crowd[-1].value = -1.0
    assert Constant.of(crowd[0]) != before


def test_a_very_long_chain_of_objects_is_still_a_constant():
    chain = None
    for _ in range(5000):
        chain = Plain(chain)
    assert Constant.of(chain) == Constant.of(chain)
    while chain is not None:  # released one by one, not recursively
        chain = chain.value


class Color(enum.Enum):
    RED = 1


SAME = {
    "functions": lambda: (jax.nn.relu, Plain.times, len, np.sin, jnp.add),
    "types": lambda: (Plain, jnp.float32, np.dtype("int8"), Color.RED),
    "texts and numbers": lambda: ("a", b"b", 3, True, None, 1e308 * 10, 1j),
    "containers": lambda: (frozenset({1, "b"}), range(3)),
    "equal objects": lambda: (Frozen((1, 2.0)), Thawed("a", note=str(object()))),
    "partials": lambda: (functools.partial(jax.nn.gelu, approximate=True),),
    "shardings": lambda: (jax.sharding.SingleDeviceSharding(jax.devices()[0]),),
}


@pytest.mark.parametrize("kind", SAME)
def test_values_that_are_made_again_are_the_same_constant(kind):
    for x, y in zip(SAME[kind](), SAME[kind](), strict=True):
        assert Constant.of(x) == Constant.of(y)
        assert hash(Constant.of(x)) == hash(Constant.of(y))


OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    (0.0, 0j),
    (complex(0.0, -0.0), 0j),
    (float("nan"), float("inf")),
    (Frozen(1), Frozen(1.0)),
    (Frozen((0.0,)), Frozen((-0.0,))),
    (Plain(1), Plain(1)),
    (functools.partial(max, 1), functools.partial(max, 1.0)),
    (frozenset({0.0}), frozenset({-0.0})),
    (lambda: 1, lambda: 1),
]


# Numbered: a function's text holds its address, and every process that runs tests
# must know them by the same names.
@pytest.mark.parametrize("pair", OTHERS, ids=map(str, range(len(OTHERS))))
def test_values_that_a_trace_may_tell_apart_are_other_constants(pair):
    x, y = pair
    assert Constant.of(x) != Constant.of(y)


# --- results --------------------------------------------------------------------------


def test_constants_come_back_as_they_went_in():
    class Thing:
        pass

    thing, x = Thing(), jnp.arange(4.0).reshape(2, 2)

    def f(state, x):
        return {**state, "product": x @ x, "again": [state["f"], x, state["thing"]]}

    state = {
        "f": jax.nn.gelu,
        "thing": thing,
        "name": "relu",
        "rate": 0.5,
        "none": None,
    }
    fast = tracea.transform(f)
    for _ in range(2):  # traced, and from the cache
        got = fast(state, x)
        assert {name: got[name] for name in state} == state
        assert got["again"][0] is jax.nn.gelu and got["again"][2] is thing
        assert got["thing"] is thing and type(got["rate"]) is float
        np.testing.assert_array_equal(got["product"], x @ x)
        np.testing.assert_array_equal(got["again"][1], x)
    other = fast({**state, "f": jax.nn.relu}, x)
    assert other["f"] is jax.nn.relu and other["again"][0] is jax.nn.relu
    # Inside of a trace as well, where the rest is none of its results.
    product = jax.jit(lambda x: fast(state, x)["product"])(x)
    np.testing.assert_array_equal(product, x @ x)
    grads = jax.grad(lambda x: fast(state, x)["product"].sum())(x)
    np.testing.assert_array_equal(grads, jax.grad(lambda x: (x @ x).sum())(x))


def test_what_is_neither_array_nor_argument_is_no_result():
    with pytest.raises(TypeError, match="not a valid JAX type"):
        tracea.transform(lambda x: (x, object()))(jnp.ones(2))
    with pytest.raises(TypeError, match="not a valid JAX type"):
        tracea.transform(jax.jit(lambda x, name: name, static_argnums=1))(
            jnp.ones(2), "text"
        )

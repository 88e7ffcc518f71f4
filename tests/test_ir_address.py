"""Address expressions: the printed text computes the same as the evaluation."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracea_jax.ir.address import LANE, Address

pytestmark = pytest.mark.once

SMALL = st.integers(1, 9)


def extend(children):
    binary = st.sampled_from([operator.add, operator.mul, operator.xor, operator.and_])
    constant = st.sampled_from([operator.floordiv, operator.mod, operator.lshift])
    return st.one_of(
        st.builds(lambda f, a, b: f(a, b), binary, children, children),
        st.builds(lambda f, a, b: f(a, b), binary, SMALL, children),
        st.builds(lambda f, a, b: f(a, b), constant, children, SMALL),
        st.builds(lambda a, b: a >> b, children, SMALL),
    )


EXPRESSIONS = st.recursive(st.just(LANE), extend, max_leaves=4)


@given(EXPRESSIONS, st.integers(0, 31))
def test_the_printed_text_evaluates_to_the_same_number(expression, lane):
    text = expression.cxx("x").replace("u", "").replace("/", "//")
    assert expression(lane) == eval(text, {"x": lane}) % 2**32


def test_lane_name_and_evaluation():
    address = (LANE % 16) * 128 + LANE // 16 * 16
    assert address.cxx("thread") == "(((thread % 16u) * 128u) + ((thread / 16u) * 16u))"
    assert [address(lane) for lane in (0, 1, 16, 31)] == [0, 128, 16, 1936]


def test_arithmetic_is_that_of_a_32_bit_unsigned_integer():
    assert (LANE * 0xFFFFFFFF)(2) == 0xFFFFFFFE
    assert ((LANE << 31) >> 31)(3) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: LANE + -1,
        lambda: LANE * 2**32,
        lambda: LANE >> 32,
        lambda: LANE // 0,
        lambda: LANE % 0,
        lambda: Address("<<", 1, LANE),
        lambda: Address("%", 5, LANE),
        lambda: Address("-", LANE, 1),
    ],
)
def test_what_unsigned_arithmetic_cannot_express_is_refused(make):
    with pytest.raises(ValueError):
        make()

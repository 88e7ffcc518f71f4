"""The reader of ratios finds what it must find, and texts of times can be read."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from report_ratios import checked_text, text_of

from tracea_jax.page import Column, Page, Row, Table, times

pytestmark = pytest.mark.once

TIMES = st.floats(1e-3, 1e9)


@hypothesis.given(TIMES, TIMES)
def test_a_ratio_is_the_quotient_of_the_times_as_printed(slow, fast):
    text = f"{times.microseconds(slow)}, {times.microseconds(fast)}: "
    assert checked_text(text + times.ratio(slow, fast)) == 1
    table = Table(
        columns=(Column("slow us"), Column("fast us"), Column("ratio")),
        rows=(
            Row(
                (
                    times.number(slow),
                    times.number(fast),
                    times.ratio_number(slow, fast),
                )
            ),
        ),
        form="aligned",
    )
    assert checked_text(str(Page((table,)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "plain 100.0 us, transformed 80.0 us: 1.24x",
        "untuned 473.0 us, tuned 860.0 us (0.56x)",
        "plain 100.0 us: 1.00x",  # one time has no ratio
        "1.25x",
        "100.0 us, 80.0 us\n1.25x",  # they are in another line
        "XLA us  ours us  ratio\n 100.0     80.0   1.24",
    ],
)
def test_what_is_no_quotient_is_found(text):
    with pytest.raises(AssertionError, match="is no quotient"):
        checked_text(text)


def test_what_is_read():
    assert checked_text("plain 1.5 ms, ours 500.0 us: 3.00x, 0.33x") == 2
    assert checked_text("matmul 16x24x8 float32 nn: pad 1,1x1,1, 10.0 us") == 0
    table = "problem  XLA us  ours us  ratio\nmatmul 8x8x8  100.0  80.0  1.25\n\nend"
    assert checked_text(table) == 1
    page = "<p>plain 100.0 us<br>a 9.0 us, b 3.0 us: 3.00x</p>"
    assert checked_text(text_of(page)) == 1

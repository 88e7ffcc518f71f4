"""Times and their ratios as text: a ratio is the quotient of the times as printed.

Callers: whatever prints how much faster one program or kernel is than another.
"""

from __future__ import annotations

import math


def number(us: float) -> str:
    """A time in microseconds with enough digits: "1234.5", "4.50", "0.0123"."""
    return f"{us:.1f}" if us >= 10 or us == 0 else f"{us:#.3g}"


def microseconds(us: float) -> str:
    """ "1234.5 us"."""
    return f"{number(us)} us"


def quotient(slow_us: float, fast_us: float) -> float:
    """Quotient of two times, of the numbers that are printed."""
    slow, fast = float(number(slow_us)), float(number(fast_us))
    return slow / fast if fast else math.inf


def ratio(slow_us: float, fast_us: float) -> str:
    """ "1.25x", the quotient of both times as printed."""
    return ratio_number(slow_us, fast_us) + "x"


def ratio_number(slow_us: float, fast_us: float) -> str:
    """ "1.25", for a column of a table."""
    value = quotient(slow_us, fast_us)
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"

"""The race of whole programs: what is kept of the sites, by times that are given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from program_races import OPS

from tracea_jax.campaign import keep
from tracea_jax.campaign.keep import Undecided
from tracea_jax.tuning.measure import Race

pytestmark = pytest.mark.once

BOTH = {"matmul": ["product"], "conv2d": ["convolution"]}


def field(times: dict[Any, Any], held: list | None = None):
    """Races with these times in every round; of a tuple, each in its turn."""

    def rounds(us):
        turns = us if isinstance(us, tuple) else (us,)
        return tuple(itertools.islice(itertools.cycle(turns), 24))

    def race(racers):
        if held is not None:
            held.append(list(racers))
        known = {r: times[r] for r in racers}
        failed = {r: us for r, us in known.items() if isinstance(us, Exception)}
        return Race(
            times_us={r: rounds(us) for r, us in known.items() if r not in failed},
            repeats=dict.fromkeys(racers, 1),
            failures=failed,
        )

    return race


def decide(race, classes):
    """The decision for a program with these classes of sites, and no other op."""
    return keep.decide(race, classes, classes)


def test_a_program_that_wins_with_every_site_keeps_all():
    held = []
    times = {None: 100.0, (): 80.0}
    decision = decide(field(times, held), {"matmul": ["a", "b"]})
    assert decision.kept.without == () and decision.kept.ratio == pytest.approx(1.25)
    assert decision.every == decision.kept
    assert held == [[None, ()]]  # one op: without it the program is plain


def test_a_loss_behind_a_gain_is_found():
    times = {None: 100.0, (): 80.0, ("conv2d",): 60.0, ("matmul",): 120.0}
    kept = decide(field(times), BOTH).kept
    assert kept.without == ("conv2d",) and kept.time_us == pytest.approx(60.0)
    assert kept.ratio == pytest.approx(100 / 60)


def test_ops_are_left_greedily():
    ops = {op: [f"{op} 1"] for op in "abc"}
    times = {None: 100.0, (): 130.0, ("a",): 110.0, ("b",): 115.0, ("c",): 140.0}
    times |= {("a", "b"): 90.0, ("a", "c"): 120.0}
    assert decide(field(times), ops).kept.without == ("a", "b")


def test_classes_of_sites_race_only_while_the_program_loses():
    times = {None: 100.0, (): 110.0, ("big",): 90.0, ("small",): 112.0}
    assert decide(field(times), {"matmul": ["big", "small"]}).kept.without == ("big",)
    times[()] = 99.0
    assert decide(field(times), {"matmul": ["big", "small"]}).kept.without == ()


def test_classes_of_an_op_that_is_left_do_not_race():
    held = []
    times: dict[Any, Any] = {None: 100.0, (): 130.0}
    times |= {("conv2d",): 110.0, ("matmul",): 150.0}
    times |= {("conv2d", "big"): 105.0, ("conv2d", "small"): 108.0}
    times = {r and tuple(sorted(r)): us for r, us in times.items()}
    many = {"matmul": ["big", "small"], "conv2d": ["x", "y", "z"]}
    assert decide(field(times, held), many).kept.without == ("conv2d", "matmul")
    assert {name for racers in held for r in racers for name in r or ()} == {
        *("conv2d", "matmul", "big", "small")
    }


def test_few_of_many_classes_race():
    held = []
    names = [f"class {i}" for i in range(50)]
    times = {None: 100.0, (): 120.0, **{(name,): 121.0 for name in names}}
    decide(field(times, held), {"matmul": names})
    assert max(map(len, held)) == 2 + 8


def test_what_loses_in_every_form_is_left_as_written():
    times = {None: 100.0, (): 120.0, ("conv2d",): 110.0, ("matmul",): 104.0}
    decision = decide(field(times), BOTH)
    assert decision.kept.without == ("conv2d", "matmul")
    assert decision.kept.ratio == 1.0 and decision.leaves_all
    assert decision.kept.time_us == pytest.approx(100.0)
    assert decision.every is not None and decision.every.ratio == pytest.approx(1 / 1.2)


@pytest.mark.parametrize(
    ("plain", "ours", "is_kept"),
    [
        (100.0, 100.5, False),  # slower than no noise explains
        (100.0, (97.0, 105.0, 101.0), True),  # within the noise
        ((108.0, 92.0, 100.0), (95.0, 111.0, 103.0), False),  # more than any may lose
    ],
)
def test_noise_is_no_loss_but_only_so_far(plain, ours, is_kept):
    kept = decide(field({None: plain, (): ours}), {"matmul": ["product"]}).kept
    assert (kept.without == ()) == is_kept
    assert kept.ratio >= 0.985


def test_what_is_kept_its_plain_and_every_site_ran_in_one_race():
    """The machine slows down between the races."""
    slowness = iter(range(1, 9))
    times = {None: 100.0, (): 120.0, ("conv2d",): 60.0, ("matmul",): 130.0}

    def race(racers):
        slower = next(slowness)
        return field({r: slower * us for r, us in times.items()})(racers)

    decision = decide(race, BOTH)
    kept, every = decision.kept, decision.every
    assert every is not None and kept.without == ("conv2d",)
    assert kept.plain_us == every.plain_us
    assert every.time_us / kept.time_us == pytest.approx(2.0)


def test_what_won_by_chance_loses_its_last_race():
    held = []
    times = {None: 100.0, (): 120.0, ("conv2d",): 60.0, ("matmul",): 130.0}

    def race(racers):
        held.append(racers)
        us = 110.0 if len(held) > 2 else 60.0
        return field({**times, ("conv2d",): us})(racers)

    assert decide(race, BOTH).leaves_all
    assert held[-1] == [None, ("conv2d",), ()]


def test_luck_leaves_no_site():
    """Half a percent is no reason, nor is what lies within the noise."""
    times: dict[Any, Any] = {None: 100.0, (): 80.0}
    times |= {("conv2d",): 79.7, ("matmul",): 95.0}
    assert decide(field(times), BOTH).kept.without == ()
    times[("conv2d",)] = (60.0, 98.0, 80.0)
    assert decide(field(times), BOTH).kept.without == ()


def test_what_fails_is_left():
    broken = RuntimeError("no memory")
    times: dict[Any, Any] = {None: 100.0, (): broken}
    times |= {("conv2d",): 90.0, ("matmul",): broken}
    decision = decide(field(times), BOTH)
    assert decision.kept.without == ("conv2d",) and decision.every is None
    times[("conv2d",)] = broken
    kept = decide(field(times), BOTH).kept
    assert kept.without == ("conv2d", "matmul")
    with pytest.raises(Undecided, match="plain JAX fails: no memory"):
        decide(field({None: broken, (): 1.0}), {"matmul": ["product"]})


def test_the_end_of_the_time_keeps_what_is_known():
    def race(racers):
        if len(racers) > 2:
            raise TimeoutError("the budget was used up")
        return field({None: 100.0, (): 120.0})(racers)

    assert decide(race, dict.fromkeys(OPS, ["one"])).kept.without == tuple(sorted(OPS))
    with pytest.raises(Undecided, match="budget"):
        decide(lambda racers: race([*racers, None]), BOTH)

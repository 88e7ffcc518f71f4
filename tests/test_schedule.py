"""Which problem of a graph is searched next, when searches end, and their costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tracea_jax import roofline
from tracea_jax.device import NAMED, CpuDevice, OtherDevice
from tracea_jax.problem import AttentionProblem, GemmProblem
from tracea_jax.tuning import schedule
from tracea_jax.tuning.progress import TuningError
from tracea_jax.tuning.schedule import Job

pytestmark = pytest.mark.once


class Clock:
    """Seconds that pass only when a task works."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@dataclasses.dataclass(eq=False)
class Task:
    """A tuning that follows a script.

    Attributes:
      gains: expected gain after each batch; the last one stays.
      us: best time after each batch; the last one stays. Before, it is the default's.
      batches: after which the search is over.
      batch_s, finish_s: what they take; a bounded race no more than is left for it.
      hook: called with "step" or "finish" before anything happens.
    """

    name: str
    clock: Clock
    order: list[str]
    gains: tuple[float, ...] = (0.5,)
    us: tuple[float, ...] = (100.0,)
    untuned_us: float | None = None
    batches: float = math.inf
    batch_s: float = 1.0
    finish_s: float = 0.5
    prepare_s: float = 0.0
    hook: Callable[[str], None] = lambda what: None
    done: int = 0
    stop: str | None = None
    finishes: list[float | None] = dataclasses.field(default_factory=list)

    @property
    def expected_gain(self) -> float:
        return self._now(self.gains) if self.done else math.inf

    @property
    def best_us(self) -> float | None:
        return self._now(self.us) if self.done else None

    @property
    def default_us(self) -> float | None:
        return self.untuned_us

    @property
    def evals(self) -> int:
        return 8 * self.done

    def step(self, *, limit_s: float = math.inf) -> bool:
        assert limit_s > 0
        self.order.append(self.name)
        self.clock.s += self.batch_s
        self.hook("step")
        self.done += 1
        return self.done < self.batches

    def finish(self, *, bounded_s: float | None = None) -> str:
        self.order.append(f"{self.name}!")
        bound_s = math.inf if bounded_s is None else bounded_s + self.prepare_s
        self.clock.s += min(self.finish_s, bound_s)
        self.hook("finish")
        self.finishes.append(bounded_s)
        return f"entry of {self.name}"

    def _now(self, values: tuple[float, ...]) -> float:
        return values[min(self.done, len(values)) - 1]


class Graph:
    """Tasks a, b, c, ... on one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.order: list[str] = []
        self.jobs: list[Job] = []

    def add(self, *, count: float = 1, floor_us: float | None = None, **task) -> Task:
        made = Task("abcdefghij"[len(self.jobs)], self.clock, self.order, **task)
        self.jobs.append(Job(task=made, count=count, floor_us=floor_us))
        return made

    def run(self, **how) -> list[schedule.Outcome]:
        return list(schedule.run(self.jobs, clock=self.clock, **how))

    @property
    def batches(self) -> str:
        return "".join(name for name in self.order if "!" not in name)


def test_everyone_gets_a_batch_before_anyone_gets_a_second():
    graph = Graph()
    for us in (1.0, 1e6, 3.0, 5.0):
        graph.add(us=(us,), batches=3)
    graph.run()
    assert sorted(graph.batches[:4]) == list("abcd")
    assert graph.batches[4:6] == "bb"


def test_most_batches_go_where_most_time_can_be_saved():
    graph = Graph()
    graph.add(us=(100.0,), gains=(0.2,), count=1)
    graph.add(us=(100.0,), gains=(0.2,), count=30)  # runs more often
    graph.add(us=(9000.0,), gains=(0.2,), count=1)  # takes longer
    graph.add(us=(9000.0,), gains=(0.2,), floor_us=8990.0)  # is at the roofline
    graph.add(us=(9000.0,), gains=(1e-5,))  # has converged
    graph.run(budget_s=60.0)
    counts = {name: graph.batches.count(name) for name in "abcde"}
    assert counts["c"] > 10 * max(counts[name] for name in "abde")


def test_the_search_follows_the_expected_gains():
    """The job with the least expected gain yields to those with more."""
    graph = Graph()
    graph.add(gains=(0.5, 0.45, 0.4, 0.05), batches=6)
    graph.add(gains=(0.3, 0.2, 0.01))
    graph.run()
    assert graph.batches == "ab" + "aaa" + "bb" + "aa" + "b"


def test_a_graph_that_promises_little_ends_after_two_batches_say_so():
    graph = Graph()
    small = graph.add(us=(1.0,), gains=(0.4,))  # promises much of nearly nothing
    large = graph.add(us=(1000.0,), gains=(0.3, 0.1, 0.005))
    outcomes = graph.run()
    assert (small.done, large.done) == (1, 4)
    assert [o.stop for o in outcomes] == ["converged"] * 2
    assert small.stop == large.stop == "converged"  # as entries tell
    assert [o.entry for o in outcomes] == ["entry of a", "entry of b"]


def test_one_problem_decides_itself_when_it_has_converged():
    graph = Graph()
    only = graph.add(gains=(1e-9,), batches=5)
    (outcome,) = graph.run()
    assert only.done == 5 and outcome.stop == ""


def test_nothing_ends_while_a_problem_is_unknown():
    graph = Graph()
    graph.add(gains=(1e-9,))
    graph.add(gains=(math.inf, math.inf, math.inf, 1e-9))
    graph.run()
    assert graph.batches.count("b") >= 4


def test_a_search_that_is_over_is_raced_at_once():
    graph = Graph()
    graph.add(batches=1, us=(500.0,), untuned_us=500.0)
    graph.add(batches=3)
    graph.run()
    assert graph.order == ["a", "a!", "b", "b", "b", "b!"]


@hypothesis.given(
    tasks=st.lists(
        st.tuples(
            st.floats(0.01, 3.0),  # batch_s
            st.floats(0.01, 2.0),  # finish_s
            st.floats(1.0, 1e4),  # us
            st.integers(1, 9),  # batches
        ),
        min_size=2,
        max_size=8,
    ),
    budget_s=st.floats(0.5, 60.0),
)
def test_the_budget_is_respected(tasks, budget_s):
    graph = Graph()
    for batch_s, finish_s, us, batches in tasks:
        graph.add(batch_s=batch_s, finish_s=finish_s, us=(us,), batches=batches)
    outcomes = graph.run(budget_s=budget_s)
    # What is under way is brought to its end.
    slack = max(t[0] for t in tasks) + max(t[1] for t in tasks)
    assert graph.clock.s <= 1.1 * budget_s + slack + schedule.BOUNDED_S
    assert len(outcomes) == len(tasks)
    assert any(o.entry for o in outcomes)
    assert all(o.stop == "budget" for o in outcomes if o.entry is None)
    for job, outcome in zip(graph.jobs, outcomes, strict=True):
        if isinstance(job.task, Task) and outcome.entry:
            assert outcome.entry.endswith(job.task.name)


def test_time_for_the_races_is_kept_back():
    """With equal races, as the first one shows, all are unhurried."""
    graph = Graph()
    for batches in (1, *[math.inf] * 4):
        graph.add(batches=batches, batch_s=0.5, finish_s=3.0)
    outcomes = graph.run(budget_s=40.0)
    assert graph.clock.s <= 40.0 and graph.clock.s > 36.0
    tasks = [job.task for job in graph.jobs]
    assert all(isinstance(t, Task) and t.finishes == [None] for t in tasks)
    assert [o.stop for o in outcomes] == ["", *["budget"] * 4]


def test_where_time_is_short_races_are_too():
    graph = Graph()
    tasks = [graph.add(batch_s=0.5, finish_s=4.0) for _ in range(10)]
    outcomes = graph.run(budget_s=12.0)
    assert graph.clock.s <= 12.0
    assert all(o.entry for o in outcomes)
    assert all(t.finishes != [None] for t in tasks)


def test_when_time_is_over_the_most_important_problem_was_tuned():
    graph = Graph()
    for us in (10.0, 1000.0, 100.0):
        graph.add(untuned_us=us, batch_s=5.0, finish_s=4.0, prepare_s=2.0)
    outcomes = graph.run(budget_s=6.0)
    assert graph.order == ["b", "b!"]
    assert [o.entry for o in outcomes] == [None, "entry of b", None]
    assert [o.stop for o in outcomes] == ["budget"] * 3


def test_equal_tasks_are_scheduled_equally():
    def order():
        graph = Graph()
        for us in (5.0, 5.0, 7.0, 5.0):
            graph.add(us=(us, us * 0.9), gains=(0.3, 0.2, 0.1), batches=6)
        graph.run(budget_s=30.0)
        return graph.order

    assert order() == order()
    assert order()[:4] == ["a", "b", "c", "d"]  # ties go by the order of the jobs


def test_ctrl_c_races_what_was_measured():
    graph = Graph()
    first = graph.add(untuned_us=30.0)
    second = graph.add(untuned_us=20.0)
    third = graph.add(untuned_us=10.0)

    def interrupt(what: str) -> None:
        if what == "step" and first.done == 1:
            raise KeyboardInterrupt

    first.hook = second.hook = interrupt
    second.gains = (0.0,)
    outcomes = graph.run()
    assert [o.stop for o in outcomes] == ["interrupted"] * 3
    assert [o.entry for o in outcomes] == ["entry of a", None, None]
    assert first.finishes == [schedule.BOUNDED_S] and not third.order.count("c!")


def test_after_ctrl_c_no_race_begins_later_than_two_seconds():
    graph, pressed = Graph(), []
    tasks = [graph.add(finish_s=9.0, prepare_s=0.9, batches=9) for _ in range(8)]

    def interrupt(what: str) -> None:
        if what == "step" and all(task.done for task in tasks[:-1]):
            pressed.append(graph.clock.s)
            raise KeyboardInterrupt

    tasks[-1].hook = interrupt
    outcomes = graph.run(budget_s=1000.0)
    longest_s = 0.9 + schedule.BOUNDED_S / 7
    assert graph.clock.s - pressed[0] <= schedule.INTERRUPTED_S + longest_s
    assert {o.stop for o in outcomes} == {"interrupted"}
    assert 0 < sum(o.entry is not None for o in outcomes) < 7


def test_ctrl_c_before_anything_was_measured_still_gives_one_answer():
    graph = Graph()
    only = graph.add()
    presses = []

    def interrupt(what: str) -> None:
        if not presses:
            presses.append(what)
            raise KeyboardInterrupt

    only.hook = interrupt
    (outcome,) = graph.run()
    assert outcome.entry == "entry of a" and outcome.stop == "interrupted"


def test_a_second_ctrl_c_ends_at_once():
    graph = Graph()
    task = graph.add()

    def interrupt(what: str) -> None:
        raise KeyboardInterrupt

    task.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        graph.run()
    assert task.order == ["a", "a!"]


@pytest.mark.parametrize("where", ["step", "finish"])
def test_a_problem_that_cannot_be_tuned_costs_only_itself(where):
    graph = Graph()
    broken = graph.add(batches=2)
    graph.add(batches=2)

    def fail(what: str) -> None:
        if what == where:
            raise TuningError("nothing could be run")

    broken.hook = fail
    failed, other = graph.run()
    assert failed.entry is None and failed.failure == "nothing could be run"
    assert other.entry == "entry of b" and other.failure == ""


def test_the_only_problem_that_cannot_be_tuned_is_an_error():
    graph = Graph()
    task = graph.add(batches=1)

    def fail(what: str) -> None:
        raise TuningError("nothing could be run")

    task.hook = fail
    with pytest.raises(TuningError, match="nothing could be run"):
        graph.run()


def test_the_time_of_each_is_told():
    graph = Graph()
    graph.add(batches=3, batch_s=2.0, finish_s=0.25)
    graph.add(batches=1, batch_s=1.0, finish_s=0.5)
    assert [o.seconds for o in graph.run()] == [6.25, 1.5]


# --- the bound ------------------------------------------------------------------------


def test_the_roofline_is_the_larger_of_computing_and_moving():
    h200 = NAMED["H200"]
    bf16: Any = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
    square = GemmProblem(m=4096, n=4096, k=4096, **bf16)
    assert roofline.floor_us(square, h200) == pytest.approx(2 * 4096**3 / 989e6)
    thin = GemmProblem(m=8, n=4096, k=4096, **bf16)
    moved = 2 * (8 * 4096 * 2 + 4096**2)
    assert roofline.floor_us(thin, h200) == pytest.approx(moved / 4.8e6)
    wide = GemmProblem(m=4096, n=4096, k=4096)
    floor, wide_floor = (roofline.floor_us(p, h200) for p in (square, wide))
    assert floor and wide_floor and wide_floor > 1.9 * floor


def test_the_roofline_of_what_is_not_known():
    problem = AttentionProblem(
        batch=1, q_len=8, kv_len=8, heads=2, kv_heads=2, head_dim=4, scale=0.5
    )
    assert roofline.floor_us(problem, OtherDevice(platform="tpu", name="tpu")) is None
    unknown = dataclasses.replace(NAMED["H200"], name="NVIDIA X1")
    assert roofline.floor_us(problem, unknown) is None
    one = CpuDevice(name="cpu", isa="avx2", cores=1)
    four = dataclasses.replace(one, cores=4)
    slow, fast = (roofline.floor_us(problem, d) for d in (one, four))
    assert slow and fast and slow == pytest.approx(4 * fast)

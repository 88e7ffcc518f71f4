"""Pipeline algebra: it survives random schedules, and its mutants do not."""

import functools

import pytest

from tracea_jax.ir.copy_schedules import run_async_copy
from tracea_jax.ir.pipeline import (
    BARRIER,
    NONE,
    AsyncCopyRing,
    Ring,
    SyncRequirement,
    wait,
)
from tracea_jax.ir.ring_schedules import (
    RingProtocol,
    TurnProtocol,
    run_ring,
    run_turns,
)
from tracea_jax.ir.schedules import Barrier, Hazard

pytestmark = pytest.mark.once

STAGES = range(1, 9)
SEEDS = range(40)


def caught(run):
    """The messages of the hazards that ``run(seed)`` meets over all seeds."""
    messages = []
    for seed in SEEDS:
        try:
            run(seed)
        except Hazard as hazard:
            messages.append(str(hazard))
    return messages


def test_ring_of_three_stages():
    ring, steps = Ring(stages=3), range(8)
    assert [ring.stage(k) for k in steps] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [ring.consumer_parity(k) for k in steps] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [ring.producer_parity(k) for k in steps] == [1, 1, 1, 0, 0, 0, 1, 1]
    assert ring.drain(5) == ((2, 0), (0, 1), (1, 1))


def test_arrivals():
    ring = Ring(stages=4)
    assert ring.full_arrivals() == 1
    assert ring.empty_arrivals(consumers=2) == 2
    assert ring.empty_arrivals(consumers=2, cluster=2) == 4


def test_a_fresh_barrier_has_completed_parity_1():
    barrier = Barrier(2)
    assert barrier.passes(1) and not barrier.passes(0)
    barrier.arrive(expect_bytes=1)
    barrier.arrive()
    assert not barrier.passes(0)  # bytes are still pending
    with pytest.raises(Hazard, match="more than 2 arrivals"):
        barrier.arrive()
    barrier.complete_bytes(1)
    assert barrier.passes(0) and not barrier.passes(1)


def test_bytes_may_complete_before_they_are_expected():
    barrier = Barrier(1)
    barrier.complete_bytes(1)
    assert not barrier.passes(0)
    barrier.arrive(expect_bytes=1)
    assert barrier.passes(0)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("stages", STAGES)
def test_ring_survives_random_schedules(stages, cluster):
    for seed in SEEDS:
        protocol = RingProtocol(
            ring=Ring(stages=stages),
            steps=seed % (3 * stages) + 1,
            consumers=1 + seed % 3,
            cluster=cluster,
            release_lag=seed % min(stages, 3),
        )
        run_ring(protocol, seed)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("stages", STAGES)
def test_consumers_that_take_turns_survive_random_schedules(stages, cluster):
    for seed in SEEDS:
        tile_steps = seed % (3 * stages) + 1
        protocol = RingProtocol(
            ring=Ring(stages=stages),
            steps=tile_steps * (1 + seed % 5),
            cluster=cluster,
            release_lag=seed % min(stages, 3),
            tile_steps=tile_steps,
        )
        run_ring(protocol, seed)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_tile_begun_out_of_turn_is_caught(stages):
    steps = 2 * stages  # the second tile begins two rounds after the first
    protocol = RingProtocol(
        ring=Ring(stages=stages),
        steps=4 * steps,
        tile_steps=steps,
        waits_for_turn=False,
    )
    messages = caught(functools.partial(run_ring, protocol))
    assert any("reads the data of step" in message for message in messages)


@pytest.mark.parametrize("tile_steps", [(0,) * 9, (1,) * 9, (2, 0, 0, 0, 1) * 3])
def test_every_warp_sees_its_turns(tile_steps):
    for seed in SEEDS:
        run_turns(TurnProtocol(tile_steps=tile_steps), seed)


def test_a_turn_that_ends_before_all_warps_saw_it_is_caught():
    protocol = TurnProtocol(tile_steps=(0,) * 9, meets=False)
    messages = caught(functools.partial(run_turns, protocol))
    assert any("deadlock" in message for message in messages)


class FreshProducerWaits(Ring):
    """The producer forgets that a fresh stage is free."""

    __slots__ = ()

    def producer_parity(self, k):
        return self.consumer_parity(k)


class ConstantParity(Ring):
    """The consumer's parity does not flip when the ring wraps."""

    __slots__ = ()

    def consumer_parity(self, k):
        return 0


class ParityOfTheStep(Ring):
    """Parities flip at every step instead of every round."""

    __slots__ = ()

    def consumer_parity(self, k):
        return k % 2


class OwnConsumersOnly(Ring):
    """Empty barriers count the consumers of one block of the cluster only."""

    __slots__ = ()

    def empty_arrivals(self, *, consumers, cluster=1):
        return consumers


@pytest.mark.parametrize(
    "mutant, stages, cluster",
    [
        *((FreshProducerWaits, stages, 1) for stages in STAGES),
        *((ConstantParity, stages, 1) for stages in STAGES),
        *((ParityOfTheStep, stages, 1) for stages in STAGES if stages > 1),
        *((OwnConsumersOnly, stages, 2) for stages in STAGES),
    ],
)
def test_a_wrong_ring_is_caught(mutant, stages, cluster):
    ring = mutant(stages=stages)
    protocol = RingProtocol(ring=ring, steps=3 * stages, cluster=cluster)
    assert caught(functools.partial(run_ring, protocol))


@pytest.mark.parametrize("stages", STAGES)
def test_a_consumer_that_holds_every_stage_deadlocks(stages):
    ring = Ring(stages=stages)
    protocol = RingProtocol(ring=ring, steps=3 * stages, release_lag=stages)
    messages = caught(functools.partial(run_ring, protocol))
    assert len(messages) == len(SEEDS)
    assert all("deadlock" in message for message in messages)


@pytest.mark.parametrize("stages", STAGES)
def test_a_cluster_that_does_not_drain_reaches_into_an_exited_block(stages):
    ring = Ring(stages=stages)
    protocol = RingProtocol(ring=ring, steps=4, cluster=2, drains=False)
    messages = caught(functools.partial(run_ring, protocol))
    assert any("exited" in message for message in messages)


def test_programs():
    a, b, one = (
        AsyncCopyRing(stages=4, form="A"),
        AsyncCopyRing(stages=4, form="B"),
        AsyncCopyRing(stages=1),
    )
    assert a.program == (wait(2), BARRIER, NONE, "load", "compute")
    assert b.program == (BARRIER, "load", wait(3), BARRIER, "compute")
    assert one.program == (BARRIER, "load", NONE, BARRIER, "compute")


@pytest.mark.parametrize("stages", STAGES)
def test_load_and_compute_stages_never_meet(stages):
    ring = AsyncCopyRing(stages=stages)
    for k in range(5 * stages):
        distance = (ring.load_stage(k) - ring.compute_stage(k)) % stages
        assert distance == (stages - 1) % stages
        assert ring.load_stage(k) == ring.compute_stage(k + ring.prologue)


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("stages", STAGES)
def test_async_copy_survives_random_schedules(stages, form):
    ring = AsyncCopyRing(stages=stages, form=form)
    for seed in SEEDS:
        run_async_copy(
            ring, steps=1 + seed % (2 * stages + 2), seed=seed, threads=2 + seed % 2
        )


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("stages", STAGES)
def test_every_requirement_of_a_program_is_needed(stages, form):
    """A wait for one group less, or no barrier, is caught."""
    ring = AsyncCopyRing(stages=stages, form=form)
    for i, operation in enumerate(ring.program):
        if isinstance(operation, SyncRequirement) and operation != NONE:
            weaker = NONE if operation == BARRIER else wait(operation.groups_behind + 1)
            program = (*ring.program[:i], weaker, *ring.program[i + 1 :])
            assert caught(
                lambda seed, program=program: run_async_copy(
                    ring, steps=2 * stages + 3, seed=seed, program=program
                )
            ), f"{operation} is not needed"


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("stages", STAGES)
def test_empty_groups_of_the_tail_are_needed(stages, form):
    messages = caught(
        lambda seed: run_async_copy(
            AsyncCopyRing(stages=stages, form=form),
            steps=2 * stages + 3,
            seed=seed,
            commits_empty=False,
        )
    )
    assert bool(messages) == (stages >= (3 if form == "A" else 2))


def test_impossible_values():
    for make in (Ring, AsyncCopyRing):
        with pytest.raises(ValueError, match="stages=0 must be at least 1"):
            make(stages=0)
    with pytest.raises(ValueError, match="form='C' must be 'A' or 'B'"):
        AsyncCopyRing(stages=2, form="C")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="groups_behind=-1"):
        wait(-1)
    with pytest.raises(ValueError, match="groups_behind=1 with kind='barrier'"):
        SyncRequirement(kind="barrier", groups_behind=1)

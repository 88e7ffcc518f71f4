"""Phase algebra of asynchronous pipelines over a ring of shared-memory stages.

Step k uses stage k mod N, in round k div N. Two mechanisms:

* ``Ring`` (TMA): a full and an empty mbarrier for each stage; waits name a parity.
* ``AsyncCopyRing`` (cp.async): every step commits one group; waits count groups.

kernels/cuda/tile/pipeline.cuh is the same algebra; ``schedules`` runs both under random
schedules. (PTX ISA, "mbarrier", "cp.async.wait_group".)
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Full and empty mbarriers of N stages.

        producer, step k:  wait empty[stage], expect bytes on full[stage], copy
        consumer, step k:  wait full[stage], read, arrive on empty[stage]

    A wait for parity p passes once the barrier's phase of parity p is complete. On a
    fresh barrier parity 1 passes at once: every stage starts free, so the first N steps
    of the producer are the prologue and need no code of their own.
    """

    stages: int

    def __post_init__(self) -> None:
        _check_stages(self.stages)

    def stage(self, k: int) -> int:
        """k mod N."""
        return k % self.stages

    def consumer_parity(self, k: int) -> int:
        """Parity of full[stage] saying that step k's data has arrived: round mod 2."""
        return k // self.stages % 2

    def producer_parity(self, k: int) -> int:
        """Parity of empty[stage] saying that its previous data has been read."""
        return self.consumer_parity(k) ^ 1

    def full_arrivals(self) -> int:
        """Arrivals of one phase of a full barrier: the producer; bytes count apart."""
        return 1

    def empty_arrivals(self, *, consumers: int, cluster: int = 1) -> int:
        """Arrivals of one phase of an empty barrier.

        One elected arrival of every consumer in *every* block of the cluster: a
        multicast writes into all of them, so none may still be reading.
        """
        return consumers * cluster

    def drain(self, steps: int) -> tuple[tuple[int, int], ...]:
        """(stage, parity) of the producer's last waits on the empty barriers.

        A block of a cluster may exit only after them: until then a peer may still
        arrive on its barriers.
        """
        ahead = range(steps, steps + self.stages)
        return tuple((self.stage(k), self.producer_parity(k)) for k in ahead)


def turn_parity(tile: int) -> int:
    """The parity that consumer ``tile`` mod 2 waits for before it multiplies its tile.

    Two consumers take tiles in turn, and a barrier of each completes a phase when it
    has waited for the last step of one. This is the parity of the other's phase for the
    tile before; on a fresh barrier it passes at once. Until then the ring may be more
    than a round behind the tile's first step, and a full barrier's parity says too
    little.
    """
    return (tile + 1) // 2 % 2 ^ 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequirement:
    """Synchronization of a thread before the next part of a step.

    Attributes:
      kind: "none"; "wait" for this thread's own copy groups; "barrier" of all threads.
      groups_behind: of a wait: how many of the youngest groups may stay in flight.
    """

    kind: Literal["none", "wait", "barrier"]
    groups_behind: int = 0

    def __post_init__(self) -> None:
        if self.groups_behind < 0 or (self.groups_behind and self.kind != "wait"):
            raise ValueError(
                f"groups_behind={self.groups_behind} with kind={self.kind!r}; a wait "
                "takes at least 0, the others 0"
            )


NONE = SyncRequirement(kind="none")
BARRIER = SyncRequirement(kind="barrier")


def wait(groups_behind: int) -> SyncRequirement:
    """Wait until at most ``groups_behind`` of the thread's groups are in flight."""
    return SyncRequirement(kind="wait", groups_behind=groups_behind)


Operation = Literal["load", "compute"] | SyncRequirement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCopyRing:
    """A cp.async pipeline of N stages, as the program of one step.

    ====  ==================================================  =======================
    form  step k                                              groups in flight
    ====  ==================================================  =======================
    A     wait, barrier, load k + N - 1, compute k            N - 2 when it computes
    B     barrier, load k + N - 1, wait, barrier, compute k   N - 1 when it computes
    ====  ==================================================  =======================

    The prologue loads steps 0 .. N - 2. Every step commits exactly one group, *also an
    empty one* when there is nothing left to load: the waits count groups. The barrier
    of form A both publishes the data of step k and protects the stage freed at k - 1.
    With N = 1 the load is a plain copy: barrier, load, barrier, compute.
    """

    stages: int
    form: Literal["A", "B"] = "A"

    def __post_init__(self) -> None:
        _check_stages(self.stages)
        if self.form not in ("A", "B"):
            raise ValueError(f"form={self.form!r} must be 'A' or 'B'")

    def compute_stage(self, k: int) -> int:
        """The stage read at step k: k mod N."""
        return k % self.stages

    def load_stage(self, k: int) -> int:
        """The stage filled at step k, for step k + N - 1; not the one read if N > 1."""
        return (k + self.prologue) % self.stages

    @property
    def prologue(self) -> int:
        """Groups committed before step 0."""
        return self.stages - 1

    @property
    def before_load(self) -> SyncRequirement:
        """Protection of the stage about to be filled from those still reading it."""
        return NONE if self.form == "A" and self.stages > 1 else BARRIER

    @property
    def before_compute(self) -> SyncRequirement:
        """Completion of this thread's own part of step k's data."""
        if self.stages == 1:
            return NONE
        return wait(self.stages - 2 if self.form == "A" else self.stages - 1)

    @property
    def program(self) -> tuple[Operation, ...]:
        """One step in order; a barrier makes all threads' parts visible to all."""
        complete = (self.before_compute, BARRIER)
        if self.form == "A" and self.stages > 1:
            return (*complete, self.before_load, "load", "compute")
        return (self.before_load, "load", *complete, "compute")


def _check_stages(stages: int) -> None:
    if stages < 1:
        raise ValueError(f"{stages=} must be at least 1")

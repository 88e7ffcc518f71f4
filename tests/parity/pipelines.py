"""Claims about stages, parities and arrivals of pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from parity.proof import Case
from tracea_jax.ir.pipeline import AsyncCopyRing, Ring, turn_parity

MAX_STAGES = 8


def pipeline_cases() -> Iterator[Case]:
    """Stage and parities over several wraps, arrival counts, and cp.async waits."""
    for stages in range(1, MAX_STAGES + 1):
        yield from _ring_cases(stages)
    ring = Ring(stages=1)
    yield Case(
        name="empty_arrivals",
        expression="tracea::empty_arrivals(n / 2 + 1, n % 2 + 1)",
        expected=tuple(
            ring.empty_arrivals(consumers=consumers, cluster=cluster)
            for consumers in (1, 2, 3)
            for cluster in (1, 2)
        ),
    )
    yield Case(
        name="turn_parity",
        expression="tracea::turn_parity(n)",
        expected=tuple(turn_parity(tile) for tile in range(9)),
    )
    yield Case(
        name="full_arrivals",
        expression="tracea::full_arrivals() + n",
        expected=(ring.full_arrivals(),),
    )
    for stages in range(2, MAX_STAGES + 1):
        yield from _async_copy_cases(stages)


def _ring_cases(stages: int) -> Iterator[Case]:
    ring, steps = Ring(stages=stages), range(4 * stages + 3)
    states = {
        "at": f"tracea::PipelineState<{stages}>::at(n)",
        "advanced": f"advanced<{stages}>(n)",
        "skipped": f"skipped<{stages}>(n)",
    }
    members = {
        "stage_idx": ring.stage,
        "consumer_parity()": ring.consumer_parity,
        "producer_parity()": ring.producer_parity,
    }
    for (how, state), (member, function) in itertools.product(
        states.items(), members.items()
    ):
        yield Case(
            name=f"ring_{stages}_{how}_{member.removesuffix('()')}",
            expression=f"{state}.{member}",
            expected=tuple(function(k) for k in steps),
        )


def _async_copy_cases(stages: int) -> Iterator[Case]:
    rings = [AsyncCopyRing(stages=stages, form=form) for form in ("A", "B")]
    steps = range(2 * stages + 1)
    device = f"tracea::AsyncCopyPipeline<{stages}>"
    waits = tuple(ring.before_compute.groups_behind for ring in rings)
    yield Case(
        name=f"async_copy_{stages}_waits",
        expression=f"n ? {device}::kGroupsBehindB : {device}::kGroupsBehindA",
        expected=waits,
    )
    yield Case(
        name=f"async_copy_{stages}_prologue",
        expression=f"{device}::kPrologueGroups + n",
        expected=(rings[0].prologue,),
    )
    for stage in ("compute_stage", "load_stage"):
        yield Case(
            name=f"async_copy_{stages}_{stage}",
            expression=f"{device}::{stage}(n)",
            expected=tuple(getattr(rings[0], stage)(k) for k in steps),
        )

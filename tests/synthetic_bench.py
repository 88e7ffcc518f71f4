"""A bench whose candidates take time on a clock of its own, and fail as told.

Nothing here measures real time, so every decision of the tuner can be predicted.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

from tracea_jax import policy, variants
from tracea_jax.device import CpuDevice, Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.policy import Choice, Decision
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure, tuner
from tracea_jax.tuning.answers.answer import Answer
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.lab import local
from tracea_jax.tuning.store import records
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import (
    environment,
    environment_key,
    problem_key,
)
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.gemm_cpu import GemmCpuConfig
from tracea_jax.variants.space import Space

DEVICE = CpuDevice(name="synthetic processor", isa="avx2", cores=4)
PROBLEM = GemmProblem(m=96, n=80, k=64)


def config(kc: int, nc: int = 512, tasks: int = 2) -> GemmCpuConfig:
    return GemmCpuConfig(kc=kc, nc=nc, tasks=tasks)


def choice(kc: int, nc: int = 512, tasks: int = 2) -> Choice:
    return Choice(variant="gemm_cpu", config=config(kc, nc, tasks))


XLA = Choice(variant="xla", config=variants.XLA.heuristic(PROBLEM, DEVICE))
HERO = choice(1)


def decision(size: int) -> Decision:
    """The hero (kc 1), XLA, and configs with kc 2, 3, ... of equal standing."""
    return Decision(
        choice=HERO,
        heroes=(HERO, XLA),
        spaces={
            "gemm_cpu": Space.of(*(config(kc) for kc in range(1, size + 1))),
            "xla": Space.of(XLA.config),
        },
        reason="synthetic",
    )


class Clock:
    """Time in nanoseconds that passes only when someone works."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def work(self, us: float) -> None:
        self.ns += round(us * 1e3)


@dataclasses.dataclass
class Bench:
    """Candidates with given times.

    Attributes:
      times_us: time of one execution; ``default_us`` for choices that are not named.
      noise: standard deviation of a slice, as a fraction; drawn from a fixed seed.
      wrong: choices with wrong results; nan: with NaN results; unrepeatable: whose
        results differ from run to run.
      broken: choices that do not compile; crashing: that fail when they run.
      cold_us: time of the first execution after a flush; as any other, if not named.
      flush_us: time that a flush takes.
      burden: by how much an execution takes longer, at a time in seconds.
      kernel_us: kernel times; empty if the device does not tell them.
      hook: called at each step with "prepare", "run", "verify" or "kernels" and the
        choice.
    """

    clock: Clock
    times_us: dict[Choice, float]
    default_us: float = 100.0
    noise: float = 0.0
    compile_us: float = 1000.0
    wrong: frozenset[Choice] = frozenset()
    nan: frozenset[Choice] = frozenset()
    unrepeatable: frozenset[Choice] = frozenset()
    broken: frozenset[Choice] = frozenset()
    crashing: frozenset[Choice] = frozenset()
    cold_us: dict[Choice, float] = dataclasses.field(default_factory=dict)
    flush_us: float = 0.0
    burden: Callable[[float, Choice], float] = lambda now_s, choice: 1.0
    kernel_us: dict[Choice, float] = dataclasses.field(default_factory=dict)
    hook: Callable[[str, Choice], None] = lambda step, choice: None

    def __post_init__(self) -> None:
        self.random = random.Random(1)
        self.executed: dict[Choice, int] = {}
        self.choices: dict[Any, Choice] = {}
        self.prepared: list[Choice] = []
        self.flushes = 0
        self.is_cold = False

    def flush(self) -> None:
        self.flushes += 1
        self.is_cold = True
        self.clock.work(self.flush_us)

    def prepare(self, choice: Choice) -> measure.Run:
        self.hook("prepare", choice)
        self.prepared.append(choice)
        self.clock.work(self.compile_us)
        if choice in self.broken:
            raise ValueError("no such instruction")

        def run(repeats: int) -> None:
            self.hook("run", choice)
            if choice in self.crashing:
                raise RuntimeError("illegal address")
            self.executed[choice] = self.executed.get(choice, 0) + repeats
            factor = max(1 + self.noise * self.random.gauss(0, 1), 0.1)
            factor *= self.burden(self.clock.ns * 1e-9, choice)
            time_us = self.time_us(choice)
            if self.is_cold:
                extra_us = self.cold_us.get(choice, time_us) - time_us
                self.clock.work(extra_us * factor)
                self.is_cold = False
            self.clock.work(repeats * time_us * factor)

        self.choices[run] = choice
        return run

    def kernel_times(
        self, runs: Mapping[Any, measure.Run], rounds: int
    ) -> dict[Any, list[float]]:
        if not self.kernel_us:
            return {}
        choices = {racer: self.choices[run] for racer, run in runs.items()}
        for choice in choices.values():
            self.hook("kernels", choice)
        noise = [1 + self.noise * self.random.gauss(0, 1) for _ in range(rounds)]
        return {r: [self.kernel_us[c] * x for x in noise] for r, c in choices.items()}

    def time_us(self, choice: Choice) -> float:
        return self.times_us.get(choice, self.default_us)

    def verify(self, choice: Choice) -> measure.Verification:
        self.hook("verify", choice)
        error = 1e-6
        if choice in self.wrong:
            error = 0.5
        if choice in self.nan:
            error = float("nan")
        return measure.Verification(
            max_rel_error=error,
            tolerance=1e-3,
            ok=error < 1e-3,
            repeatable=choice not in self.unrepeatable,
        )


def timing(clock: Callable[[], int], **changes: float) -> measure.Timing:
    return dataclasses.replace(measure.Timing(clock=clock), **changes)


def local_lab(bench: Bench, **changes: Any) -> local.LocalLab:
    """A lab that measures on the bench's clock."""
    return local.LocalLab(
        lambda problem, device: bench, DEVICE, timing(bench.clock, **changes)
    )


def tune(
    bench: Bench,
    directory: pathlib.Path | None = None,
    *,
    size: int = 12,
    problem: GemmProblem = PROBLEM,
    **search,
) -> Entry:
    """Tunes over ``decision(size)`` on the bench's clock."""
    search.setdefault("timing", timing(bench.clock))
    tuning = tuner.Tuning(
        problem,
        diagnose(problem, DEVICE),
        decision(size),
        local.LocalLab(lambda problem, device: bench, DEVICE, search["timing"]),
        search.pop("knowledge", None) or Knowledge(directory),
        DEVICE,
        **search,
    )
    return tuner.finished(tuning)


def default_decision() -> Decision:
    """The policy's decision for ``PROBLEM`` on ``DEVICE``."""
    return policy.decide(diagnose(PROBLEM, DEVICE))


# Records to put into a cache.


def entry(best=None, *, problem=PROBLEM, written="2026-01-01", observations=()):
    best = best or choice(8)
    return Entry(
        problem=problem.to_json(),
        environment=environment(DEVICE),
        best=Best(
            **named(problem, best, DEVICE),
            time_us=10.0,
            xla_us=15.0,
            ratio=1.5,
        ),
        observations=records.union(observations),
        written=written,
    )


def measured(kc, time_us=10.0, repeats=5):
    name = named(PROBLEM, choice(kc), DEVICE)
    return Observation(**name, time_us=time_us, repeats=repeats)


def failed(kc, kind="wrong_result"):
    name = named(PROBLEM, choice(kc), DEVICE)
    return Observation(**name, failure=kind, message="bad")


def file_of(directory: pathlib.Path, problem=PROBLEM) -> pathlib.Path:
    key = environment_key(DEVICE)
    return (
        directory
        / "tuned"
        / key
        / problem.op
        / f"{problem_key(problem.to_json())}.json"
    )


def found(knowledge: Knowledge, problem=PROBLEM, device: Device = DEVICE) -> Answer:
    answer = knowledge.lookup(problem, device)
    assert answer is not None
    return answer


def why_missed(knowledge: Knowledge, problem=PROBLEM) -> str:
    assert knowledge.lookup(problem, DEVICE) is None
    reason = knowledge.why_missed(problem, DEVICE)
    assert reason is not None
    return reason

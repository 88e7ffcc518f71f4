"""Tunings that follow a script: times of configs, and what was done with them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import synthetic_bench as synthetic

from tracea_jax import knowledge
from tracea_jax.device import local_cpu
from tracea_jax.options import current
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.lab import local
from tracea_jax.tuning.store.code import roots_hash
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation, union
from tracea_jax.variants.gemm_cpu import GEMM_CPU

CPU = local_cpu()
SMALL = GemmProblem(m=16, n=24, k=8)
LARGE = GemmProblem(m=64, n=96, k=8)  # as deep: one default for both
DEFAULT = dataclasses.asdict(GEMM_CPU.heuristic(SMALL, CPU))
CONFIGS = [DEFAULT, *({"kc": kc, "nc": 64, "tasks": 2} for kc in (320, 384))]


class Scripted:
    """A tuning that measures three configs, the default first, and XLA.

    Its times are those of ``Scripts``, ten microseconds more on cold caches. It records
    them like a real one.
    """

    def __init__(self, scripts, problem, device, settings, observe, progress, **search):
        self.scripts, self.problem, self.search = scripts, problem, search
        self.knowledge, self.device = knowledge.known(settings), device
        self.observe, self.progress = observe, progress
        self.seen: list[Observation] = []
        self.evals = self.compiles = 0
        self.legal = len(CONFIGS)
        self.stop: str | None = None
        self.expected_gain = math.inf

    @property
    def tried(self):
        return self.evals

    @property
    def best_us(self):
        return min((o.time_us for o in self.seen if o.time_us), default=None)

    @property
    def times(self):
        return self.scripts.times.get(self.problem, (30.0, 20.0, 10.0))

    @property
    def default_us(self):
        return self.times[0] if self.seen else None

    @property
    def xla_us(self):
        return self.scripts.xla_us

    def step(self, *, limit_s=math.inf):
        self.scripts.order.append(self.problem)
        self.scripts.hook(self.problem)
        if not self.seen:
            self._see("xla", {}, self.scripts.xla_us)
        self._see("gemm_cpu", CONFIGS[self.evals], self.times[self.evals])
        self.evals += 1
        self.compiles += 1
        self.expected_gain = 0.5
        return self.evals < 3

    def finish(self, *, bounded_s=None):
        self.scripts.finished.append(self.problem)
        timed = [(o.time_us, o) for o in self.seen if o.time_us]
        untuned = next((us for us, o in timed if o.config == DEFAULT), None)
        us, best = min(timed, key=lambda pair: pair[0], default=(1.0, None))
        entry = Entry(
            problem=self.problem.to_json(),
            environment=environment(self.device),
            best=Best(
                variant=best.variant if best else "xla",
                config=best.config if best else {},
                code=best.code if best else "",
                time_us=us,
                xla_us=self.scripts.xla_us,
                cold_us=us + 10,
                xla_cold_us=self.scripts.xla_us + 10,
                origin="search",
                goal=self.search["goal"],
            ),
            observations=union(self.seen),
            tuner={
                "stop": self.stop or "complete",
                "legal": self.legal,
                "tried": self.tried,
                "evals": self.evals,
                "untuned": {
                    "time_us": untuned,
                    "cold_us": untuned and untuned + 10,
                },
            },
            written=f"2026-01-01T00:00:{next(self.scripts.clock):02}.000000+00:00",
        )
        if self.progress:
            self.progress(phase="done", done=1, total=1, best_us=us, message="gemm_cpu")
        return self.knowledge.own.record(entry)

    def _see(self, variant, config, time_us):
        failed = {"failure": "compile_error", "message": "no"}
        cold_us = time_us and time_us + 10
        measured = {"time_us": time_us, "cold_us": cold_us, "repeats": 5}
        how: dict[str, Any] = failed if time_us is None else measured
        if variant == "gemm_cpu":
            how["code"] = roots_hash(GEMM_CPU.sources, self.device)
        self.seen.append(Observation(variant=variant, config=config, **how))
        self.observe(self.seen[-1])
        if self.progress:
            done = self.evals + 1
            self.progress(
                phase="search", done=done, total=3, best_us=self.best_us, message="c"
            )


class Scripts:
    """Times of each problem's configs, and what the tunings did."""

    def __init__(self):
        self.times: dict = {}
        self.xla_us = 100.0
        self.order: list = []
        self.finished: list = []
        self.made: list[Scripted] = []
        self.hook = lambda problem: None
        self.clock = itertools.count()
        self.bench = synthetic.Bench(synthetic.Clock(), {})

    def tuning(self, problem, device, *, settings, lab, observe, progress, **search):
        made = Scripted(self, problem, device, settings, observe, progress, **search)
        self.made.append(made)
        return made

    def open_lab(self, device, problem, *, settings):
        timing = synthetic.timing(self.bench.clock)
        return local.LocalLab(lambda problem, device: self.bench, device, timing)


def answer(problem):
    knowledge.refresh(current())
    found = knowledge.known(current()).lookup(problem, CPU)
    return found and (found.choice.variant, dataclasses.asdict(found.choice.config))

"""One problem tuned several times from nothing: do the answers agree, are they good?

    python bench_tuning.py [--times 10] [--size M N K] [--dtype float32] [--goal GOAL]

Every tuning has an empty cache and its own seed. Then the answers of all tunings race
in turns with the default, XLA, and the best configs of a recorded table of the space,
if there is one (``record_space.py``).

Answers are compared as the tuner compares them, by the rounds in which the machine was
quiet (``tuning.measure.race``). Comparisons by all rounds and by cold executions are
recorded too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import common
import recorded_spaces

import tracea_jax as tracea
from tracea_jax import policy
from tracea_jax.campaign import local_device
from tracea_jax.campaign.rows import Trial
from tracea_jax.diagnosis import diagnose
from tracea_jax.knowledge import open_lab
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.search.candidates import config_json
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

COMPILES = 32  # compilations after which a search is judged
RACE = measure.Timing(
    rounds=401, max_rounds=1, cold_rounds=101, race_s=60.0, race_limit_s=120.0
)


def tuned(problem: GemmProblem, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One tuning: its answer, and the course of its search."""
    with tempfile.TemporaryDirectory() as directory:
        with tracea.options(cache_dir=directory):
            report = tracea.tune(problem, goal=args.goal, effort=args.effort, seed=seed)
    best, (row,) = report.entry.best, report.rows
    return {
        "seed": seed,
        "variant": best.variant,
        "config": best.config,
        "origin": best.origin,
        "evals": row.evals,
        "compiles": row.compiles,
        "seconds": row.seconds,
        "stop": row.stop,
        "recorded": recorded_fraction(problem, row.trials),
    }


def recorded_fraction(problem: GemmProblem, trials: Sequence[Trial]) -> float | None:
    """The recorded best time divided by the best of the first ``COMPILES`` configs."""
    (table,) = tables_of(problem) or (None,)
    if table is None:
        return None
    pairs = zip(table.configs, table.times_us, strict=True)
    times = {str(dataclasses.asdict(config)): us for config, us in pairs}
    first = dict.fromkeys(str(t.config) for t in trials if t.variant == GEMM_SM90.name)
    seen = [times[name] for name in list(first)[:COMPILES] if name in times]
    return float(table.times_us.min() / min(seen))


def tables_of(problem: GemmProblem) -> list[recorded_spaces.Measured]:
    """The recorded table of the problem on this device, if there is one."""
    if local_device().name != "NVIDIA H200":
        return []
    return [t for t in recorded_spaces.read_space() if t.problem == problem]


def best_of_table(problem: GemmProblem, count: int) -> list[Choice]:
    """The fastest recorded configs of the problem; none without a table of it."""
    return [
        Choice(variant=GEMM_SM90.name, config=table.configs[i])
        for table in tables_of(problem)
        for i in table.times_us.argsort()[:count]
    ]


def raced(problem: GemmProblem, choices: list[Choice]) -> measure.Race:
    device = local_device()
    lab = open_lab(device, problem, timing=RACE)
    try:
        return lab.race(problem, tuple(dict.fromkeys(choices)))
    finally:
        lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--size", type=int, nargs=3, default=(1024, 1024, 1024))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--effort", default="default")
    parser.add_argument("--goal", default="latency")
    common.add_arguments(parser)
    args = parser.parse_args()
    m, n, k = args.size
    dtype = args.dtype
    problem = GemmProblem(m=m, n=n, k=k, lhs=dtype, rhs=dtype, out=dtype)
    device = local_device()
    tunings = [tuned(problem, seed, args) for seed in range(args.times)]
    answers = [
        legal_choice(t["variant"], t["config"], problem, device) for t in tunings
    ]
    choices = [a for a in answers if isinstance(a, Choice)]
    decision = policy.decide(diagnose(problem, device))
    known = best_of_table(problem, 3)
    race = raced(problem, [*choices, *decision.heroes, *known])
    default = decision.choice
    fastest = min((*choices, *known), key=race.median_us)
    for tuning, choice in zip(tunings, choices, strict=True):
        tuning["by_fastest"] = race.ratio(choice, fastest)
        tuning["by_default"] = race.ratio(choice, default)
        tuning["by_fastest_cold"] = race.ratio(choice, fastest, "cold")
        tuning["by_default_cold"] = race.ratio(choice, default, "cold")
        times = race.times_us
        tuning["by_fastest_all"] = common.median_ratio(times, choice, fastest)
        tuning["by_default_all"] = common.median_ratio(times, choice, default)
        print(
            f"seed {tuning['seed']}: {choice}, {tuning['evals']} evaluations "
            f"({tuning['compiles']} compiled), {tuning['seconds']:.0f} s, "
            f"{tuning['by_fastest']:.4f} of the fastest, "
            f"{tuning['by_default']:.4f} of the default"
            + (
                f", F({COMPILES}) {tuning['recorded']:.4f}"
                if tuning["recorded"]
                else ""
            )
        )
    slowest = max(t["by_fastest"] for t in tunings)
    summary = {
        "problem": problem.to_json(),
        "text": str(problem),
        "effort": args.effort,
        "goal": args.goal,
        "fastest": {"variant": fastest.variant, "config": config_json(fastest)},
        "is_recorded_best": fastest in known,
        "slowest_by_fastest": slowest,
        "slowest_by_default": max(t["by_default"] for t in tunings),
        "mean_evals": statistics.fmean(t["evals"] for t in tunings),
        "rounds": race.rounds,
        "quiet_rounds": len(race.quiet_us(default)),
        "times_us": {str(c): race.median_us(c) for c in race.times_us},
    }
    rows = [{**summary, "tunings": tunings}]
    print(f"slowest answer {slowest:.4f} of the fastest")
    print(common.save(f"tuning_{m}x{n}x{k}_{dtype}", rows, args))


if __name__ == "__main__":
    main()

"""The tuner on recorded spaces: python benchmarks/bench_tuner.py [--kernel-tuner FILE]

Every method replays every space, for a number of seeds, and is scored by F(n), the time
of the space's best config by that of the best of n evaluated ones (failures count as
evaluations). No device is needed. ``--kernel-tuner`` names an interpreter that has
kernel_tuner, in an environment of its own; its strategies run with default options.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import common
import numpy as np
import replay
from replay import Method, Recorded

COUNTS = (8, 16, 24, 32, 48, 64, 96)
UNSEEN = 1000  # the first seed that was not used while the search was developed
LIMIT = 256  # evaluations at most when the search stops by itself
STRATEGIES = (
    "adaptive_tabu_greywolf",
    "hybrid_vndx",
    "dual_annealing",
    "simulated_annealing",
    "pso",
    "firefly_algorithm",
    "random_sample",
    "genetic_algorithm",
    "diff_evo",
    "bayes_opt",
    "mls",
    "greedy_ils",
)

SHOWN = ("ours", "ours, analytic model", "random", "best of kernel_tuner")

Scores = dict[str, np.ndarray]  # by space: F (seeds, counts)
Row = dict[str, Any]


def main() -> None:
    args = arguments()
    spaces = replay.load(args.spaces)
    if not spaces:
        sys.exit(f"no recorded spaces (*.csv.gz) in {args.spaces}; see --spaces")
    rows: list[Row] = []
    for name, method in methods(args).items():
        report(rows, name, replayed(name, method, spaces, args.seeds))
    if args.kernel_tuner:
        for name, scores in kernel_tuner(args, spaces).items():
            report(rows, f"kernel_tuner {name}", scores)
        report(rows, "best of kernel_tuner", best_of(rows, "kernel_tuner "))
    for space in [s for s in spaces if s.name == "gemm_rtx3090"]:
        seeded = replay.tuned(log_prior=replay.clblast_sgemm)
        name = "ours, analytic model"
        report(rows, name, replayed(name, seeded, [space], args.seeds), mean=False)
    rows += stopping(spaces, args.seeds)
    print(tables(rows, spaces))
    where = common.environment(args.commit)
    path = (args.out or common.RESULTS) / "replay" / "tuner.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    parser.add_argument("--spaces", type=pathlib.Path, default=replay.directory())
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ablations", action="store_true", help="also without parts")
    parser.add_argument("--kernel-tuner", metavar="PYTHON", help="compare with it")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    return parser.parse_args()


def methods(args: argparse.Namespace) -> dict[str, Method]:
    ours = replay.tuned()

    def fresh(space: Recorded, seed: int, evaluations: int) -> Any:
        return ours(space, UNSEEN + seed, evaluations)

    always: dict[str, Method] = {
        "ours": ours,
        "ours, fresh seeds": fresh,
        "random": replay.random,
    }
    return {**always, **(replay.ablations() if args.ablations else {})}


def replayed(
    name: str, method: Method, spaces: list[Recorded], seeds: int
) -> dict[str, np.ndarray]:
    """Scores of a method; random search, being cheap, gets 15 times as many seeds."""
    start, scores = time.perf_counter(), {}
    for space in spaces:
        orders = (
            method(space, seed, COUNTS[-1])
            for seed in range(seeds * (15 if name == "random" else 1))
        )
        scores[space.name] = scored(space, [space.times[order] for order in orders])
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return scores


def scored(space: Recorded, runs: list[np.ndarray]) -> np.ndarray:
    """F(1), F(2), ... of each run, from its times in order."""
    last = COUNTS[-1]
    return np.array(
        [space.fractions(run, last)[[n - 1 for n in COUNTS]] for run in runs]
    )


def kernel_tuner(args: argparse.Namespace, spaces: list[Recorded]) -> dict[str, Scores]:
    """Scores of kernel_tuner's strategies, replayed by an interpreter that has it."""
    job = {
        "spaces": {
            space.name: {
                "columns": {k: v.tolist() for k, v in space.columns.items()},
                "times": [None if np.isnan(t) else float(t) for t in space.times],
            }
            for space in spaces
        },
        "strategies": list(args.strategies),
        "seeds": args.seeds,
        "evaluations": COUNTS[-1],
    }
    start = time.perf_counter()
    script = pathlib.Path(__file__).with_name("replay_kernel_tuner.py")
    done = subprocess.run(
        [args.kernel_tuner, str(script)],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(f"kernel_tuner: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line for line in lines if "times" in line]

    def runs(strategy: str, space: Recorded) -> list[np.ndarray]:
        key = (strategy, space.name)
        chosen = [f["times"] for f in found if (f["strategy"], f["space"]) == key]
        return [np.array(times, dtype=np.float64) for times in chosen]

    return {
        name: {space.name: scored(space, runs(name, space)) for space in spaces}
        for name in args.strategies
    }


def stopping(spaces: list[Recorded], seeds: int) -> list[Row]:
    """When the search stops by itself, and the best config it has found by then."""
    rows = []
    for space in spaces:
        orders = [replay.search(space, s, budget=LIMIT)[0] for s in range(seeds)]
        counts = [len(order) for order in orders]
        found = [space.fractions(space.times[o], LIMIT)[-1] for o in orders]
        rows.append(
            {
                "method": "ours, stopping by itself",
                "space": space.name,
                "evaluations": float(np.mean(counts)),
                "evaluations_p90": float(np.quantile(counts, 0.9)),
                "fraction": float(np.mean(found)),
                "lowest": float(np.min(found)),
            }
        )
    return rows


def report(rows: list[Row], method: str, scores: Scores, mean: bool = True) -> None:
    """Adds a row for each space, and one for their mean."""
    groups = {name: score[None] for name, score in scores.items()}
    if mean:
        fewest = min(len(score) for score in scores.values())
        groups["mean"] = np.stack([score[:fewest] for score in scores.values()])
    for name, samples in groups.items():
        low, high = zip(
            *(replay.interval(samples[..., i]) for i in range(len(COUNTS))), strict=True
        )
        rows.append(
            {
                "method": method,
                "space": name,
                "seeds": samples.shape[1],
                "fraction": _by_count(samples.mean(axis=(0, 1))),
                "low": _by_count(low),
                "high": _by_count(high),
            }
        )


def best_of(rows: list[Row], prefix: str) -> Scores:
    """The best of several methods, chosen separately for each space and count."""
    chosen = [r for r in rows if r["method"].startswith(prefix)]
    spaces = {r["space"] for r in chosen if r["space"] != "mean"}

    def best(space: str) -> list[float]:
        found = [r["fraction"] for r in chosen if r["space"] == space]
        return [max(f[str(n)] for f in found) for n in COUNTS]

    return {space: np.array([best(space)]) for space in sorted(spaces)}


def tables(rows: list[Row], spaces: list[Recorded]) -> str:
    """The mean of every method, ours and random for each space, and the stops."""
    names = [space.name for space in spaces]
    head = ("method", *map(str, COUNTS), "lowest space at 64")
    body = [
        (r["method"], *_numbers(r["fraction"]), _lowest(rows, r["method"], names))
        for r in rows
        if r["space"] == "mean"
    ]
    detail = [
        (f"{r['space']}: {r['method']}", *_numbers(r["fraction"]), "")
        for name in names
        for r in rows
        if r["space"] == name and "fraction" in r and "seeds" in r
        if r["method"] in SHOWN
    ]
    stops = [r for r in rows if "evaluations" in r]
    keys = ("evaluations", "evaluations_p90", "fraction", "lowest")
    ended = [(r["space"], *(f"{r[k]:.3g}" for k in keys)) for r in stops]
    means = (f"{np.mean([r[k] for r in stops]):.3g}" for k in keys)
    return "\n\n".join(
        [
            common.table(head, [*body, *detail]),
            common.table(("stopping by itself", *keys), [*ended, ("mean", *means)]),
        ]
    )


def _lowest(rows: list[Row], method: str, names: list[str]) -> str:
    own = [r for r in rows if r["method"] == method and r["space"] in names]
    return f"{min(r['fraction']['64'] for r in own):.3f}"


def _numbers(fraction: dict[str, float]) -> list[str]:
    return [f"{fraction[str(n)]:.3f}" for n in COUNTS]


def _by_count(values: Any) -> dict[str, float]:
    return {str(n): round(float(v), 4) for n, v in zip(COUNTS, values, strict=True)}


if __name__ == "__main__":
    main()

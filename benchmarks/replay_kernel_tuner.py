"""Replays recorded spaces with kernel_tuner's strategies; run by ``bench_tuner.py``.

It needs an interpreter with kernel_tuner and nothing of this project. A job comes as
JSON on standard input, {"spaces": {name: {"columns": {parameter: [value, ...]},
"times": [time or null, ...]}}, "strategies": [...], "seeds": n, "evaluations": n}; one
line of JSON goes out for each run, {"space", "strategy", "seed", "times": [...]}: times
of the configs in the order of their first evaluation, null for those that failed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import pathlib
import random
import sys
import tempfile
import warnings
from typing import Any

import kernel_tuner
import numpy as np
from constraint import FunctionConstraint
from kernel_tuner.runners.simulation import SimulationRunner

Job = dict[str, Any]


def main() -> None:
    warnings.simplefilter("ignore")
    job = json.load(sys.stdin)
    print(json.dumps({"version": importlib.metadata.version("kernel_tuner")}))
    for name, space in job["spaces"].items():
        with tempfile.TemporaryDirectory() as directory:
            cache = pathlib.Path(directory, "recorded.json")
            keys = write_cache(space, cache)
            for strategy in job["strategies"]:
                for seed in range(job["seeds"]):
                    times = run(space, keys, cache, strategy, seed, job["evaluations"])
                    line = {"space": name, "strategy": strategy, "seed": seed}
                    print(json.dumps({**line, "times": times}), flush=True)


def write_cache(space: Job, path: pathlib.Path) -> dict[str, float | None]:
    """Writes the recorded space as a cache file; returns its times by config."""
    names = list(space["columns"])
    configs = list(zip(*space["columns"].values(), strict=True))
    keys = [",".join(map(str, config)) for config in configs]
    lines = {
        key: {
            **dict(zip(names, config, strict=True)),
            **({"__error__": "RuntimeFailedConfig"} if time is None else {}),
            "time": "RuntimeFailedConfig" if time is None else time,
            **dict.fromkeys(("compile_time", "verification_time"), 0.0),
            **dict.fromkeys(("benchmark_time", "strategy_time"), 0.0),
            "framework_time": 0.0,
            "timestamp": "2025-01-01 00:00:00+00:00",
        }
        for key, config, time in zip(keys, configs, space["times"], strict=True)
    }
    header = {
        "device_name": "recorded",
        "kernel_name": "recorded",
        "problem_size": 1,
        "tune_params_keys": names,
        "tune_params": {n: sorted(set(space["columns"][n])) for n in names},
        "objective": "time",
    }
    path.write_text(json.dumps({**header, "cache": lines}))
    return dict(zip(keys, space["times"], strict=True))


def run(
    space: Job,
    times: dict[str, float | None],
    cache: pathlib.Path,
    strategy: str,
    seed: int,
    evaluations: int,
) -> list[float | None]:
    """One replay with the strategy's default options."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the strategies draw from the global state)
    names = list(space["columns"])
    with recorded_order() as order, contextlib.redirect_stdout(io.StringIO()):
        kernel_tuner.tune_kernel(
            "recorded",
            "recorded",
            1,
            [],
            {n: sorted(set(space["columns"][n])) for n in names},
            restrictions=[
                FunctionConstraint(lambda *c: ",".join(map(str, c)) in times)
            ],
            strategy=strategy,
            strategy_options={"max_fevals": evaluations},
            cache=str(cache),
            simulation_mode=True,
            lang="CUDA",
            quiet=True,
        )
    return [times[key] for key in order][:evaluations]


@contextlib.contextmanager
def recorded_order():
    """Lists the configs that the simulation visits, in order of their first visit."""
    order: dict[str, None] = {}
    original = SimulationRunner.run

    @functools.wraps(original)
    def watched(self, parameter_space, tuning_options):
        configs = list(parameter_space)
        results = original(self, configs, tuning_options)
        for config in configs:
            key = ",".join(map(str, config))
            if key in self.visited_results:
                order.setdefault(key)
        return results

    SimulationRunner.run = watched
    try:
        yield order
    finally:
        SimulationRunner.run = original


if __name__ == "__main__":
    main()

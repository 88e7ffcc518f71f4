"""Fits the constants of gemm_sm90's analytic model to recorded times.

    python benchmarks/fit_model.py [--held-out] [DIRECTORY ...]

Directories hold tuning entries, one JSON file a problem; without any, the shipped ones
are used. The recorded table of whole spaces (``recorded_spaces.py``) always takes part.
Prints the constants, then for each problem how well the model ranks the measured
configs and how much slower than the best the heuristic's choice is. ``--held-out`` adds
both for a model that was fitted to the problems of other shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from observed import DEVICE, SHIPPED, Observed, Parameters, read, read_table
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from tracea_jax.variants.gemm_sm90 import choose, preferred
from tracea_jax.variants.gemm_sm90_model import CONSTANTS, Constants
from tracea_jax.variants.gemm_sm90_space import of_columns

# Known values of the hardware, and how much a constant may differ from each (log).
PRIOR: dict[str, tuple[float, float]] = {
    "cycles_per_us": (1800, 0.05),
    "macs_per_us": (3.6e8, 0.1),
    "smem_rows_per_cycle": (1.1, 0.3),
    "latency_cycles": (800, 0.3),
    "pair_latency_cycles": (100, 0.5),
    "drain_cycles": (110, 0.3),
    "tile_cycles": (600, 0.2),
    "epilogue_bytes_per_cycle": (10, 0.4),
    "store_bytes_per_cycle": (20, 0.5),
    "activation_cycles": (10, 0.4),
    "l2_bytes_per_us": (1.2e7, 0.2),
    "neighbours": (8, 0.4),
    "unshared": (0.3, 0.5),
    "memory_bytes_per_us": (4e6, 0.02),
    "edge_bytes_per_us": (2e6, 0.5),
    "launch_us": (4, 0.4),
    "pair_us": (0.5, 0.4),
    "refill_overlap": (12, 0.3),
    "overlap": (4, 0.3),
}
# The table has times of kernels alone, which ran too few in a row to reach the power
# limit.
TABLE_PRIOR: dict[str, tuple[float, float]] = {
    "kernel_us": (2, 0.3),  # replaces launch_us
    "coolness": (1.15, 0.1),  # a factor of macs_per_us
}
# Prior deviations of log factors: LEVEL of the error that all configs of a problem have
# in common, TABLE_LEVEL of the same for a table's problem, as clocks follow the length
# of a kernel, and WARMTH of the time that a race's hotter device adds.
LEVEL = 0.05
TABLE_LEVEL = 0.1
WARMTH = 0.03


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Parameters, and for each problem the log factor by which racing raised times."""

    parameters: Parameters
    warmth: np.ndarray


def fit(observed: Sequence[Observed]) -> Fit:
    """Penalised least squares on log time.

    log time = log model(parameters) + level[problem] + warmth[problem] raced + noise

    For given parameters, levels and warmths are the solution of a linear problem. The
    residuals are the part of the errors outside of the space that they span.
    """
    prior = PRIOR | TABLE_PRIOR
    centre = np.log([value for value, _ in prior.values()])
    spread = np.array([sd for _, sd in prior.values()])
    bases = [_nuisance_basis(o) for o in observed]

    def residuals(logs: np.ndarray) -> np.ndarray:
        parameters = _parameters(logs)
        outside = []
        for o, (basis, _) in zip(observed, bases, strict=True):
            error = _error(o, parameters)
            outside.append(error - basis @ (basis.T @ error))
        return np.concatenate([*outside, (logs - centre) / spread])

    logs = least_squares(residuals, centre, x_scale=spread, ftol=1e-5).x
    parameters = _parameters(logs)
    warmth = [
        np.linalg.solve(triangle, basis.T @ _error(o, parameters))[1]
        for o, (basis, triangle) in zip(observed, bases, strict=True)
    ]
    return Fit(parameters=parameters, warmth=np.array(warmth))


def _nuisance_basis(o: Observed) -> tuple[np.ndarray, np.ndarray]:
    """QR factors of the effects of a problem's level and warmth, priors included."""
    effects = np.stack([np.ones(len(o.raced)), o.raced], axis=1)
    level = TABLE_LEVEL if o.table else LEVEL
    weighted = effects * o.weights()[:, None]
    q, r = np.linalg.qr(np.vstack([weighted, np.diag([1 / level, 1 / WARMTH])]))
    return q, r


def _error(o: Observed, parameters: Parameters) -> np.ndarray:
    """Weighted log of observed over modelled times; zeros for level and warmth."""
    error = (np.log(o.time_us) - o.log_model(parameters)) * o.weights()
    return np.concatenate([error, np.zeros(2)])


def _parameters(logs: np.ndarray) -> Parameters:
    values = dict(zip(PRIOR | TABLE_PRIOR, np.exp(logs).tolist(), strict=True))
    own = {name: values.pop(name) for name in TABLE_PRIOR}
    return Parameters(constants=Constants(**values), **own)


def report(observed: Sequence[Observed], fitted: Fit, held_out: bool) -> None:
    """One line for each problem, then the means of the tables and of the entries."""
    print(LEGEND)
    print(f"{'problem':<58} {'n':>4} " + " ".join(f"{c:>6}" for c in COLUMNS[held_out]))
    rows = []
    for o, warmth in zip(observed, fitted.warmth, strict=True):
        row = _row(o, fitted.parameters, warmth)
        if held_out:
            others = fit([x for x in observed if _shape(x) != _shape(o)])
            rank, _, _, _, hero = _row(o, others.parameters, warmth)
            row += [rank, hero]
        rows.append(row)
        print(f"{str(o.problem)[7:]:<58} {len(o.time_us):>4} {_text(row)}", flush=True)
    for table in (True, False):
        of_kind = [r for o, r in zip(observed, rows, strict=True) if o.table == table]
        if of_kind:
            name = "mean of the tables" if table else "mean of the entries"
            print(f"{name:<63} {_text(np.mean(of_kind, axis=0))}")


LEGEND = """
rank   Spearman's correlation of modelled and measured times, less what racing added
raw    the same with the times as measured
level  measured over modelled time, mean
top    measured time of the model's least over the best measured, less one
hero   the same of the heuristic's choice, for entries of what was observed
other  rank and hero by a model fitted to problems of other shapes
"""
COLUMNS = {
    False: ("rank", "raw", "level", "top", "hero"),
    True: ("rank", "raw", "level", "top", "hero", "other", "other"),
}


def _row(o: Observed, parameters: Parameters, warmth: float) -> list[float]:
    modelled, raw = o.log_model(parameters), np.log(o.time_us)
    time = raw - warmth * o.raced
    excess = np.expm1(time - time.min())
    return [
        _spearman(modelled, time),
        _spearman(modelled, raw),
        float(np.exp(np.mean(raw - modelled))),
        float(excess[modelled.argmin()]),
        float(excess[_hero(o, parameters, modelled)]),
    ]


def _hero(o: Observed, parameters: Parameters, modelled: np.ndarray) -> int:
    """The index of the heuristic's choice under these constants."""
    if not o.table:
        return preferred(of_columns(o.space.columns), np.exp(modelled))
    index = o.space.index(choose(o.problem, DEVICE, parameters.constants))
    assert index is not None, "a table holds every legal config"
    return index


def _shape(o: Observed) -> tuple[int, int, int]:
    return o.problem.m, o.problem.n, o.problem.k


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    result: Any = spearmanr(a, b)
    return float(result.statistic)


def _text(row: Iterable[float]) -> str:
    return " ".join(f"{value:6.3f}" for value in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", nargs="*", type=pathlib.Path, default=[SHIPPED])
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    entries = [o for directory in arguments.directory for o in read(directory)]
    if not entries:
        parser.error(f"no observations of gemm_sm90 in {arguments.directory}")
    observed = read_table() + entries
    fitted = fit(observed)
    print(f"{sum(len(o.time_us) for o in observed)} observations\n")
    print(f"{'constant':<26} {'assumed':>10} {'fitted':>10} {'in use':>10}")
    for name, (assumed, _) in (PRIOR | TABLE_PRIOR).items():
        found = getattr(fitted.parameters.constants, name, None)
        found = found or getattr(fitted.parameters, name)
        in_use = getattr(CONSTANTS, name, float("nan"))
        values = (assumed, found, in_use)
        print(f"{name:<26} " + " ".join(f"{v:10.4g}" for v in values))
    report(observed, fitted, arguments.held_out)


if __name__ == "__main__":
    main()

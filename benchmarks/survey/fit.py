"""Fits a device's model to the rows of a survey, and prints what it would cost.

    python benchmarks/survey/fit.py benchmarks/survey/rows \\
        --out tracea_jax/data/models --results benchmarks/results
    python benchmarks/survey/fit.py --shipped H100 --op conv2d

Rows are files or folders of ``benchmarks/survey/rows``. Every figure of the tables is
of problems whose families the trees never saw. The same rows give the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import portfolio
import scipy.optimize
import threadpoolctl
from cases import Case, shipped, surveyed
from regret import (
    Outcome,
    Summary,
    covered,
    lines,
    margins,
    nested,
    outcomes_of,
    summaries,
)
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import GroupKFold

from tracea_jax import variants
from tracea_jax.device import NAMED, Device
from tracea_jax.model import features, trees
from tracea_jax.model.model import (
    OURS,
    PEERS,
    XLA,
    Kind,
    Model,
    OpModel,
    Regressor,
    device_kind,
    reference_of,
    reference_us,
)
from tracea_jax.survey import rows

TUNED = pathlib.Path(__file__).parents[2] / "tracea_jax/data/tuned"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How trees are fitted; chosen by held-out regret.

    Attributes:
      members: of an ensemble, each fitted to another sample of the families.
      trees, rate, least_rows, penalty: of boosting.
      edges: of a feature, at most.
      folds: into which the families are split.
    """

    members: int = 4
    trees: int = 120
    rate: float = 0.08
    least_rows: int = 8
    penalty: float = 5.0
    edges: int = 63
    folds: int = 6


# Features, target, error, case and place; see ``Samples``.
Row = tuple[dict[str, Any], float, float, int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Measured times of one group, a peer's or ours, as numbers.

    Attributes:
      names: of the features.
      values: (rows, features), NaN where a row lacks one.
      target: logarithm of the time over its reference, see ``model.model``.
      error: standard error of each target.
      case, place: of each row its case, and its place in ``Case.measured``.
    """

    names: tuple[str, ...]
    values: np.ndarray
    target: np.ndarray
    error: np.ndarray
    case: np.ndarray
    place: np.ndarray


def samples_of(cases: Sequence[Case], overhead_us: float) -> dict[str, Samples]:
    """The samples of each group that has any."""
    rows: dict[str, list[Row]] = {}
    for number, case in enumerate(cases):
        shared = features.of_problem(case.problem, case.device)
        over_us = _references(case, overhead_us)
        for name, places in _legal(case).items():
            group = name if name in PEERS else OURS
            if group not in over_us:
                continue
            configs = [case.measured[place].choice.config for place in places]
            own = _of_configs(case, name, configs)
            for i, place in enumerate(places):
                measured = case.measured[place]
                numbers = {
                    n: float(v if np.ndim(v) == 0 else v[i]) for n, v in own.items()
                }
                target = math.log(measured.time_us / over_us[group])
                row = ({**shared, **numbers}, target, measured.error, number, place)
                rows.setdefault(group, []).append(row)
    return {group: _samples(own) for group, own in sorted(rows.items())}


def _references(case: Case, overhead_us: float) -> dict[str, float]:
    """The times that those of each group are relative to; none without XLA's."""
    peers = _peers(case)
    if XLA not in peers:
        return {}
    return {
        **dict.fromkeys(PEERS, peers[XLA]),
        XLA: reference_us(case.problem, case.device, overhead_us),
        OURS: peers[reference_of(peers)],
    }


def _peers(case: Case) -> dict[str, float]:
    """Times of the peers that were measured."""
    measured = {m.choice.variant: m.time_us for m in case.measured}
    return {name: measured[name] for name in PEERS if name in measured}


def _legal(case: Case) -> dict[str, list[int]]:
    """Places in ``Case.measured`` of the choices that may run, by variant."""
    found: dict[str, list[int]] = {}
    for place, measured in enumerate(case.measured):
        choice = measured.choice
        variant = variants.get(case.problem.op, choice.variant)
        if variant.why_not(case.problem, case.device) is None:
            if variants.is_legal(variant, case.problem, choice.config, case.device):
                found.setdefault(choice.variant, []).append(place)
    return found


def _of_configs(case: Case, name: str, configs: Sequence[Any]) -> dict[str, Any]:
    """Features of configs of a variant."""
    if name in PEERS:
        return {}
    variant = variants.get(case.problem.op, name)
    space = variants.described(variant, case.problem, configs, case.device)
    own = features.of_space(case.problem, case.device, name, space)
    return {**own, **features.of_reference(reference_of(_peers(case)))}


def _samples(rows: Sequence[Row]) -> Samples:
    every = sorted({name for numbers, *_ in rows for name in numbers})
    values = np.array([[r[0].get(name, np.nan) for name in every] for r in rows])
    differs = [len(np.unique(column)) > 1 for column in values.T]
    names = [name for name, kept in zip(every, differs, strict=True) if kept]
    return Samples(
        names=tuple(names),
        values=values[:, differs],
        target=np.array([r[1] for r in rows]),
        error=np.array([r[2] for r in rows]),
        case=np.array([r[3] for r in rows]),
        place=np.array([r[4] for r in rows]),
    )


def edges_of(values: np.ndarray, most: int) -> np.ndarray:
    """Edges between the values of a feature: between all, or as many by quantiles."""
    known = np.sort(values[~np.isnan(values)])
    distinct = np.unique(known)
    if len(distinct) > most + 1:
        places = np.linspace(0, len(known) - 1, most + 2)[1:-1].astype(int)
        distinct = np.unique(known[places])
    edges = (distinct[:-1] + distinct[1:]) / 2
    # Missing values are above all edges, and so are not the largest value's equals.
    return np.append(edges, distinct[-1]) if np.isnan(values).any() else edges


def steps_of(samples: Samples, edges: Sequence[np.ndarray]) -> np.ndarray:
    columns = zip(edges, samples.values.T, strict=True)
    return np.stack([np.searchsorted(e, column) for e, column in columns], axis=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Samples as steps, with the families that they belong to."""

    samples: Samples
    edges: tuple[np.ndarray, ...]
    steps: np.ndarray
    family: np.ndarray

    @classmethod
    def of(cls, samples: Samples, family: np.ndarray, settings: Settings) -> Group:
        edges = tuple(edges_of(c, settings.edges) for c in samples.values.T)
        return cls(
            samples=samples,
            edges=edges,
            steps=steps_of(samples, edges),
            family=family[samples.case],
        )

    def fitted(self, rows: np.ndarray, settings: Settings) -> trees.Ensemble:
        """The ensemble that these rows teach."""
        steps, target = self.steps[rows], self.samples.target[rows]
        weight = weights(self.samples.error[rows])
        models: list[Any] = []
        for member in range(settings.members):
            random = np.random.default_rng(member)
            drawn = random.exponential(size=self.family.max() + 1)
            model = HistGradientBoostingRegressor(
                max_iter=settings.trees,
                learning_rate=settings.rate,
                max_leaf_nodes=trees.MOST_LEAVES,
                min_samples_leaf=settings.least_rows,
                l2_regularization=settings.penalty,
                early_stopping=False,
                random_state=member,
            )
            with threadpoolctl.threadpool_limits(1):  # sums have one order
                model.fit(
                    steps, target, sample_weight=weight * drawn[self.family[rows]]
                )
            models.append(model)
        return trees.ensemble(
            [_trees_of(model) for model in models],
            [float(np.ravel(model._baseline_prediction)[0]) for model in models],
            self.samples.names,
            self.edges,
        )

    def predicted(self, ensemble: trees.Ensemble, rows: np.ndarray) -> np.ndarray:
        """(2, rows) mean and spread of the members."""
        names, values = self.samples.names, self.samples.values[rows]
        seen = ensemble.predict(dict(zip(names, values.T, strict=True)), len(values))
        return np.stack([seen.mean(axis=0), seen.std(axis=0)])


def _trees_of(model: Any) -> list[trees.Tree]:
    nodes = [own[0].nodes for own in model._predictors]
    return [
        trees.Tree(
            feature=n["feature_idx"],
            step=np.floor(n["num_threshold"]).clip(0),
            left=n["left"],
            right=n["right"],
            value=n["value"],
            is_leaf=n["is_leaf"].astype(bool),
        )
        for n in nodes
    ]


def held_out(group: Group, settings: Settings) -> np.ndarray:
    """(2, rows) mean and spread for each row, by trees that never saw its family."""
    found = np.full((2, len(group.samples.target)), np.nan)
    folds = min(settings.folds, len(np.unique(group.family)))
    for learned, asked in GroupKFold(folds).split(group.steps, None, group.family):
        ensemble = group.fitted(learned, settings)
        found[:, asked] = group.predicted(ensemble, asked)
    return found


def weights(error: np.ndarray) -> np.ndarray:
    """Less for what was measured with a larger error than most."""
    return 1 / (1 + (error / max(float(np.median(error)), 1e-9)) ** 2)


def uncertainty(
    errors: np.ndarray, spread: np.ndarray, measured: np.ndarray
) -> tuple[float, float]:
    """Noise and gain under which errors of held-out problems were likeliest.

    Args:
      errors: of predictions.
      spread: of the members.
      measured: standard errors of the times, which are no errors of predictions.
    """

    def unlikelihood(logs: np.ndarray) -> float:
        noise, gain = np.exp(logs)
        variance = noise**2 + (gain * spread) ** 2 + measured**2
        return float(np.mean(np.log(variance) + errors**2 / variance))

    start = np.log([errors.std() + 1e-3, 1.0])
    found = scipy.optimize.minimize(unlikelihood, start, method="Nelder-Mead")
    noise, gain = np.exp(found.x)
    return float(f"{noise:.4g}"), float(f"{gain:.4g}")


def fit_op(
    cases: Sequence[Case], settings: Settings, source: str
) -> tuple[OpModel, dict[str, dict[str, Summary]]]:
    """The model of an op, and the summaries of held-out problems."""
    overhead_us = min(m.time_us for case in cases for m in case.measured)
    names = sorted({case.family for case in cases})
    family = np.array([names.index(case.family) for case in cases])
    regressors: dict[str, Regressor] = {}
    guesses: dict[tuple[int, int], tuple[float, float]] = {}
    for name, samples in samples_of(cases, overhead_us).items():
        group = Group.of(samples, family, settings)
        mean, spread = held_out(group, settings)
        noise, gain = uncertainty(samples.target - mean, spread, samples.error)
        everything = np.arange(len(samples.target))
        ensemble = group.fitted(everything, settings)
        regressors[name] = Regressor(trees=ensemble, noise=noise, gain=gain)
        sigma = np.hypot(noise, gain * spread)
        for row in everything.tolist():
            place = (int(samples.case[row]), int(samples.place[row]))
            guesses[place] = (float(mean[row]), float(sigma[row]))
    guesses = _referred(cases, guesses)
    outcomes = outcomes_of(cases, guesses)
    ours = {m.choice.variant for case in cases for m in case.measured} - {*PEERS}
    model = OpModel(
        regressors=regressors,
        overhead_us=overhead_us,
        kinds={},
        reach=_reach(cases),
        variants=frozenset(ours),
        facts={
            "problems": len(cases),
            "rows": source,
            "settings": dataclasses.asdict(settings),
            "scikit-learn": importlib.metadata.version("scikit-learn"),
            "versions": [
                dict(run) for run in sorted({case.versions for case in cases})
            ],
        },
    )
    ratios = nested(outcomes, _folds(outcomes, settings))
    kinds = covered(outcomes, ratios)
    found = summaries(outcomes, ratios, kinds)
    facts = {
        kind: {name: dataclasses.asdict(summary) for name, summary in own.items()}
        for kind, own in found.items()
    }
    portfolios = portfolio.of_kinds(cases, model)
    known = margins(outcomes)
    made = {
        kind: Kind(margin=known[kind], portfolio=portfolios[kind], facts=facts[kind])
        for kind in sorted(kinds)
    }
    others = {k: facts[k] for k in sorted(facts) if k and k not in kinds}
    about = {**model.facts, "held out": facts[""], "without": others}
    if not made:  # of what decides nothing, only the facts are kept
        model = dataclasses.replace(model, regressors={}, reach={})
    return dataclasses.replace(model, kinds=made, facts=about), found


def _referred(
    cases: Sequence[Case], guesses: Mapping[tuple[int, int], tuple[float, float]]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Guesses of each case relative to its reference, as ``Model.predict`` has them."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for number, case in enumerate(cases):
        peers = _peers(case)
        if XLA not in peers:
            continue
        known = [i for i in range(len(case.measured)) if (number, i) in guesses]
        places = {case.measured[i].choice.variant: i for i in known}
        found |= {(number, i): guesses[number, i] for i in known}
        reference = number, places[reference_of(peers)]
        over, sigma = guesses[reference]
        found[number, places[XLA]] = -over, sigma  # of cuDNN relative to XLA
        found[reference] = 0.0, 0.0
    return found


def _folds(outcomes: Sequence[Outcome], settings: Settings) -> list[int]:
    """The fold of each outcome; families stay together."""
    families = [o.case.family for o in outcomes]
    count = min(settings.folds, len({*families}))
    found = [0] * len(outcomes)
    if count > 1:
        split = GroupKFold(count).split(families, None, families)
        for fold, (_, own) in enumerate(split):
            for i in own:
                found[i] = fold
    return found


def _reach(cases: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """The least and greatest value of each feature of the problems."""
    found: dict[str, tuple[float, float]] = {}
    for case in cases:
        numbers = features.of_problem(case.problem, case.device)
        for name, value in numbers.items():
            low, high = found.get(name, (value, value))
            found[name] = (min(low, value), max(high, value))
    return dict(sorted(found.items()))


def read(arguments: argparse.Namespace) -> list[Case]:
    found = [case for path in arguments.rows for case in surveyed(path)]
    if arguments.shipped:
        name = NAMED[arguments.shipped].name
        seen = shipped(TUNED)
        found += [case for case in seen if case.device.name == name]
    return [
        c
        for c in found
        if (not arguments.op or c.problem.op in arguments.op)
        and all(m.error <= arguments.most_error for m in c.measured)
    ]


def digest(cases: Sequence[Case]) -> str:
    """A hash of what was measured."""
    return hashlib.sha256("\n".join(map(repr, cases)).encode()).hexdigest()[:12]


def fit(cases: Sequence[Case], settings: Settings) -> dict[str, Model]:
    """The models of all kinds of devices that there are cases of; prints tables."""
    made: dict[str, Model] = {}
    for kind in sorted({device_kind(case.device) for case in cases}):
        ops: dict[str, OpModel] = {}
        own = [case for case in cases if device_kind(case.device) == kind]
        for op in sorted({case.problem.op for case in own}):
            chosen = [case for case in own if case.problem.op == op]
            ops[op], found = fit_op(chosen, settings, digest(chosen))
            errors = {n: (r.noise, r.gain) for n, r in ops[op].regressors.items()}
            print(f"{kind} {op}, (noise, gain): {errors}")
            print("\n".join(lines(found, functools.partial(_rule, ops[op]))))
        made[kind] = Model(device=kind, ops=ops)
    return made


def _rule(op: OpModel, kind: str) -> str:
    """How problems of a kind are decided, in words."""
    return f"margin {op.kinds[kind].margin:.2f}" if kind in op.kinds else "(as today)"


def report(model: Model, device: Device) -> dict[str, Any]:
    """The regret of a model on held-out problems, as ``survey_tables`` shows it."""
    ops: dict[str, Any] = {}
    runs: list[Mapping[str, str]] = []
    for name, op in model.ops.items():
        decided = {kind: own.facts for kind, own in op.kinds.items()}
        every = {**decided, **op.facts["without"]}
        ops[name] = {
            "all": op.facts["held out"],
            "decided": sorted(decided),
            "kinds": {kind: every[kind] for kind in sorted(every)},
        }
        runs += op.facts["versions"]
    return {"device": device.name, "versions": dict(runs[-1]), "ops": ops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", type=pathlib.Path)
    parser.add_argument("--op", action="append", help="only these ops")
    parser.add_argument("--shipped", choices=NAMED, help="shipped answers of a GPU")
    parser.add_argument(
        "--most-error",
        type=float,
        default=float("inf"),
        help="leave out problems with a time of a larger relative error",
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for the models")
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder for tables' results"
    )
    for field in dataclasses.fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    arguments = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    cases = read(arguments)
    for kind, model in fit(cases, settings).items():
        data = model.to_bytes()
        print(f"{kind}: {len(data)} bytes")
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{kind}.npz").write_bytes(data)
        if arguments.results is not None:
            device = next(c.device for c in cases if device_kind(c.device) == kind)
            folder = arguments.results / rows.slug(device)
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report(model, device), indent=1)
            (folder / "survey.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()

"""Judges a model on a GPU without a survey.

    python benchmarks/survey/elsewhere.py H100 --results benchmarks/results

The problems are those with tuned answers of that GPU in the package, which have times
of XLA, of the choice of the rules, and of a few others. Prints the ratios of the model
that serves the GPU, see ``tracea_jax.model.shipped``, and those of the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from cases import Case, shipped
from fit import TUNED
from regret import Summary, lines, outcomes_of

from tracea_jax import variants
from tracea_jax.device import NAMED
from tracea_jax.model.model import PEERS, Model
from tracea_jax.model.shipped import serving, surveyed_for
from tracea_jax.survey import rows


def guesses_of(
    cases: Sequence[Case], model: Model
) -> dict[tuple[int, int], tuple[float, float]]:
    """(number of the case, place) -> the predicted time of a choice, and its sigma."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for number, case in enumerate(cases):
        if not model.covers(case.problem, case.device):
            continue
        places: dict[str, list[int]] = {}
        for place, measured in enumerate(case.measured):
            name, config = measured.choice.variant, measured.choice.config
            own = variants.get(case.problem.op, name)
            is_known = name in PEERS or model.knows(case.problem.op, name)
            if is_known and variants.is_legal(own, case.problem, config, case.device):
                places.setdefault(name, []).append(place)
        if not places.keys() & {*PEERS}:
            continue
        spaces = {
            name: variants.described(
                variants.get(case.problem.op, name),
                case.problem,
                [case.measured[place].choice.config for place in own],
                case.device,
            )
            for name, own in places.items()
        }
        predicted = model.predict(case.problem, case.device, spaces)
        for name, seen in predicted.items():
            times = zip(places[name], seen.log_us, seen.sigma, strict=True)
            found |= {(number, i): (float(us), float(sigma)) for i, us, sigma in times}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("device", choices=tuple(NAMED))
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder for the table's results"
    )
    args = parser.parse_args()
    device = NAMED[args.device]
    surveyed, model = surveyed_for(device), serving(device)
    if surveyed is None or model is None:
        parser.error(f"no model serves {device}")
    cases = [case for case in shipped(TUNED) if case.device.name == device.name]
    outcomes = outcomes_of(cases, guesses_of(cases, model))
    ops: dict[str, dict[str, Summary]] = {}
    for op in sorted({o.case.problem.op for o in outcomes}):
        own = [o for o in outcomes if o.case.problem.op == op]
        every = {
            "model": [o.at(model.margin(o.case.problem)) for o in own],
            "today": [o.today for o in own],
            "oracle": [o.oracle for o in own],
        }
        made = {name: Summary.of(ratios) for name, ratios in every.items()}
        ops[op] = {name: of for name, of in made.items() if of is not None}
    print("\n".join(lines(ops, lambda op: "")))
    if args.results is not None:
        found = {
            "device": device.name,
            "surveyed": surveyed.name,
            "ops": {
                op: {name: dataclasses.asdict(of) for name, of in own.items()}
                for op, own in ops.items()
            },
        }
        folder = args.results / rows.slug(device)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=1)
        (folder / "survey_elsewhere.json").write_text(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Judges a model on a GPU without a survey: python benchmarks/survey/elsewhere.py H100

The problems are those with tuned answers of that GPU in the package, which have times
of XLA, of the choice of the rules, and of a few others. Prints the ratios of the model
that serves the GPU, see ``tracea_jax.model.shipped``, and those of the rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cases import Case, shipped
from fit import TUNED
from regret import Summary, outcomes_of

from tracea_jax import variants
from tracea_jax.device import NAMED
from tracea_jax.model.model import PEERS, Model
from tracea_jax.model.shipped import serving


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
    args = parser.parse_args()
    device = NAMED[args.device]
    if (model := serving(device)) is None:
        parser.error(f"no model serves {device}")
    cases = [case for case in shipped(TUNED) if case.device.name == device.name]
    outcomes = outcomes_of(cases, guesses_of(cases, model))
    print(f"{'':8} cases  ours  geomean  <0.97  <0.90  worst")
    for op in sorted({o.case.problem.op for o in outcomes}):
        own = [o for o in outcomes if o.case.problem.op == op]
        rules = {
            "model": [o.at(model.margin(o.case.problem)) for o in own],
            "rules": [o.today for o in own],
            "fastest": [o.oracle for o in own],
        }
        for name, ratios in rules.items():
            print(f"{name:8} {Summary.of(ratios)}  {op}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

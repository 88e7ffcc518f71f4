"""Interpolated answers against measured ones; no device is needed.

    python benchmarks/bench_interpolation.py [--device H200] [--clearly 1.0 1.04 1.1]

Each shipped answer is left out in turn. ``answers.interpolate`` makes an answer to its
problem from the others, and the time of that choice is looked up in the race of the
answer left out. A config that did not race there counts as the best config of its
variant that did, so the ratios are upper bounds. Neighbours among the models' layers
are far apart, by four times the rows; problems in practice mostly have nearer ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator

from tracea_jax import knowledge
from tracea_jax.device import Device, named
from tracea_jax.problem import problem_from_json
from tracea_jax.tuning.answers import interpolate
from tracea_jax.tuning.answers.answer import Answer, Question
from tracea_jax.tuning.answers.neighbours import NEAREST, Nearby
from tracea_jax.tuning.answers.times import Timed, timed
from tracea_jax.tuning.store.entries import Store

Pair = tuple[Answer, tuple[Timed, ...]]  # the interpolated answer, the measured times


def pairs(device: Device) -> Iterator[Pair]:
    """For each shipped answer of a device, the one interpolated from the others."""
    shipped = Store(knowledge.SHIPPED, read_only=True)
    for name, head in shipped.heads():
        entry = shipped.read(name, complete=True)
        if entry is None or head.environment.device != device.name:
            continue
        problem = problem_from_json(entry.problem)
        readers = (("shipped", shipped),)
        nearby = Nearby(readers, name.environment, name.op, device)
        near = [n for n in nearby.of(problem, NEAREST + 1) if n.problem != problem]
        question = Question.about(problem, device)
        answer = interpolate.answer(question, near[:NEAREST])
        if answer is not None:
            yield answer, timed(entry.best, entry.observations)


def ratio(answer: Answer, times: tuple[Timed, ...]) -> float | None:
    """XLA's time divided by the choice's, or an upper bound of it."""
    config = dataclasses.asdict(answer.choice.config)
    own = [t for t in times if t.variant == answer.choice.variant]
    known = [t for t in own if t.config == config] or own
    xla = [t for t in times if t.variant == "xla"]
    return xla[0].time_us / known[0].time_us if xla and known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="H200", help="whose answers")
    parser.add_argument(
        "--clearly", type=float, nargs="*", default=[1, 1.02, 1.04, 1.1]
    )
    args = parser.parse_args()
    device = named(args.device)
    interpolate.CLEARLY = 0.0  # keeps answers of any promise, to judge them below
    made = list(pairs(device))
    print(
        f"{len(made)} answers; how many are a kernel of ours, and of these XLA / ours"
    )
    print("promised  ours  mean  below 0.98  lowest  mean of all")
    for clearly in args.clearly:
        ours = [
            found
            for answer, times in made
            if answer.choice.variant != "xla" and (answer.ratio or 0.0) >= clearly
            if (found := ratio(answer, times)) is not None
        ]
        mean = statistics.geometric_mean(ours)
        overall = mean ** (len(ours) / len(made))
        below = sum(r < 0.98 for r in ours)
        print(
            f"{clearly:8.2f} {len(ours):5} {mean:5.3f} {below:11} {min(ours):7.3f} "
            f"{overall:12.4f}"
        )


if __name__ == "__main__":
    main()

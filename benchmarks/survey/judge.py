"""Judges a frozen model on problems of seeds that no survey has used.

    python benchmarks/survey/judge.py plan --device H200 --out DIR
    python benchmarks/survey/judge.py run DIR --minutes 9
    python benchmarks/survey/judge.py report DIR [--results benchmarks/results]

``plan`` needs no GPU: it draws problems, chooses for each the peers, the choice of
today's rule (``policy.unmodelled``) and the model's (``policy.decide``), and compiles
their kernels into ``DIR``. ``run`` measures them on the device, appending rows to
``DIR/rows``, and goes on where it ended before. ``report`` prints a table of both rules
against the best peer of the same process. A rule that runs what the best peer runs has
the ratio 1; elsewhere a ratio is under a bar only if its 95 % interval is. A problem
whose only peer is the choice of both rules counts with 1 and is not measured. With
``--results`` the table is a results file, too; ``judged`` has the judgements of models
that shipped, rows compressed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regret import BARS, is_under

from tracea_jax import policy
from tracea_jax.device import NAMED, Device
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model.model import PEERS, Model
from tracea_jax.options import local_device, options
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.survey import ahead, rows
from tracea_jax.survey.problems import Numbered
from tracea_jax.survey.run import OPS, measurer, survey, wanted

SEEDS = (6001, 6002, 6003, 6004)  # of no row of the surveys, nor of a judgement
COUNT = 300
RULES = ("today", "model")
JUDGED = "judged.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Chooses what is measured of a problem, and remembers for whom.

    Attributes:
      device: it need not be here.
      model: the frozen one; None for the model that ships for the device.
      chosen: the choices of each rule, by problem.
    """

    device: Device
    model: Model | None = None
    chosen: dict[str, dict[str, Choice]] = dataclasses.field(default_factory=dict)

    def choices(self, numbered: Numbered) -> tuple[Choice, ...]:
        """The peers and the choice of each rule."""
        with compiled_elsewhere():
            diagnosis = diagnose(numbered.problem, self.device)
            today = policy.unmodelled(diagnosis)
            found = policy.decide(diagnosis, self.model)
        rules: dict[str, Choice] = dict(
            zip(RULES, (today.choice, found.choice), strict=True)
        )
        self.chosen[_key(numbered)] = rules
        peers = [c for c in today.heroes if c.variant in PEERS]
        return tuple(dict.fromkeys((*peers, *rules.values())))


def fresh(
    ops: Sequence[str], seeds: Sequence[int], platform: str
) -> Iterator[Numbered]:
    """The problems of all seeds in turns, without an end."""
    each = [wanted(tuple(ops), seed, platform) for seed in seeds]
    return itertools.chain.from_iterable(zip(*each, strict=True))


def plan(
    judge: Judge, numbered: Sequence[Numbered], out: pathlib.Path, about: Any
) -> ahead.Planner:
    """Writes what will be measured; the planner has the kernels that it needs."""
    planner = ahead.Planner(judge.device, choose=judge.choices)
    every = [planner.planned(n) for n in numbered]
    ahead.write(out, [p for p in every if len(p.choices) > 1])
    same = [p for p in every if len(p.choices) == 1]
    text = {
        "about": about,
        "chosen": {k: _data(v) for k, v in judge.chosen.items()},
        "same": [
            [_group(p.numbered.problem), str(p.numbered.problem), p.choices[0].variant]
            for p in same
        ],
    }
    (out / JUDGED).write_text(json.dumps(text, sort_keys=True))
    return planner


def run(directory: pathlib.Path, device: Device, minutes: float) -> Any:
    """Measures what the plan has, and nothing else."""
    planned = tuple(ahead.read(directory, device.platform))
    known = {p.numbered for p in planned}
    measure = measurer(device, planned)
    return survey(
        directory / "rows",
        device,
        budget_s=60 * minutes,
        plan=planned,
        measure_all=lambda left: measure(itertools.takewhile(known.__contains__, left)),
        tell=lambda p: print(f"{p.done:5d} {p.left_s:5.0f} s left  {p.problem}"),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The time of the best peer over that of a rule's choice.

    Attributes:
      problem: whose.
      variant: of the choice.
      log: logarithm of the ratio.
      error: its standard error.
    """

    problem: str
    variant: str
    log: float
    error: float


def ratios(directory: pathlib.Path) -> tuple[dict[str, dict[str, list[Ratio]]], int]:
    """The ratios of each group of problems and rule, and how many rows lack one."""
    judged = json.loads((directory / JUDGED).read_text())
    chosen = judged["chosen"]
    found: dict[str, dict[str, list[Ratio]]] = {}
    lacking = 0
    for name, problem, variant in judged["same"]:
        ratio = Ratio(problem=problem, variant=variant, log=0.0, error=0.0)
        for of in found.setdefault(name, {r: [] for r in RULES}).values():
            of.append(ratio)
    for file in sorted((directory / "rows").rglob("*.jsonl*")):
        for row in rows.read(file):
            rules = chosen.get(f"{row.problem['op']} {row.seed} {row.index}")
            own = {r: _ratio(row, rules[r]) for r in RULES} if rules else {}
            lacking += not own or None in own.values()
            if own and None not in own.values():
                group = found.setdefault(_group(row.asked), {r: [] for r in RULES})
                for rule, ratio in own.items():
                    group[rule].append(ratio)  # type: ignore[reportArgumentType]
    return dict(sorted(found.items())), lacking


def _ratio(row: rows.Row, choice: Mapping[str, Any]) -> Ratio | None:
    """None if no peer was measured, or the choice was not."""
    peers = [t for name in PEERS for t in row.times_of(name)]
    own = [
        t
        for t in row.times_of(choice["variant"])
        if json.loads(json.dumps(dict(t.choice.config))) == choice["config"]
    ]
    if not peers or not own:
        return None
    best = min(peers, key=lambda t: t.time_us)
    is_same = best.choice == own[0].choice
    return Ratio(
        problem=str(row.asked),
        variant=own[0].choice.variant,
        log=math.log(best.time_us / own[0].time_us),
        error=0.0 if is_same else math.hypot(best.spread, own[0].spread),
    )


def _group(problem: Problem) -> str:
    direction = getattr(problem, "direction", None)
    return f"{problem.op} {direction}" if direction else problem.op


def report(directory: pathlib.Path) -> list[str]:
    """The table: of each group and rule, how often it loses, and its geomean."""
    found, lacking = ratios(directory)
    head = f"{'':38} cases  ours  geomean  <0.97  <0.90  worst"
    text = [head]
    for name, of in found.items():
        text += [_line(name, rule, own) for rule, own in of.items()]
    for name, of in found.items():
        worst = sorted(of["model"], key=lambda r: r.log)[:5]
        text += [
            f"{name}: {math.exp(r.log):.3f} +- {r.error:.3f} {r.variant}: {r.problem}"
            for r in worst
            if is_under(r.log, r.error, BARS[0])
        ]
    about = json.loads((directory / JUDGED).read_text())["about"]
    return [*text, f"{lacking} rows lack a peer or a choice; {about}"]


def saved(directory: pathlib.Path, results: pathlib.Path) -> pathlib.Path:
    """Writes the table as a results file of the device, and returns its path."""
    found, lacking = ratios(directory)
    files = sorted((directory / "rows").rglob("*.jsonl*"))
    measured = [row for file in files for row in rows.read(file)]
    summary = {
        "device": measured[0].device["name"],
        "seeds": sorted({row.seed for row in measured}),
        "lacking": lacking,
        "groups": {
            name: {rule: _summary(own) for rule, own in of.items()}
            for name, of in found.items()
        },
    }
    path = results / files[0].parent.name / "survey_judged.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    return path


def _summary(own: Sequence[Ratio]) -> dict[str, Any]:
    logs = [r.log for r in own]
    under = [sum(is_under(r.log, r.error, bar) for r in own) / len(own) for bar in BARS]
    return {
        "problems": len(own),
        "ours": sum(r.variant not in PEERS for r in own) / len(own),
        "geomean": math.exp(math.fsum(logs) / len(logs)),
        "under": under,
        "worst": math.exp(min(logs)),
    }


def _line(name: str, rule: str, own: Sequence[Ratio]) -> str:
    of = _summary(own)
    return (
        f"{name:30} {rule:7} {of['problems']:5d} {of['ours']:5.0%} "
        f"{of['geomean']:8.3f} {of['under'][0]:6.1%} {of['under'][1]:6.1%} "
        f"{of['worst']:6.2f}"
    )


def _key(numbered: Numbered) -> str:
    return f"{numbered.problem.op} {numbered.seed} {numbered.index}"


def _data(chosen: Mapping[str, Choice]) -> dict[str, Any]:
    return {
        rule: {"variant": c.variant, "config": dataclasses.asdict(c.config)}
        for rule, c in chosen.items()
    }


def _report(args: argparse.Namespace) -> int:
    print("\n".join(report(args.directory)))
    if args.results:
        print(saved(args.directory, args.results))
    return 0


def _planned(args: argparse.Namespace) -> int:
    device = NAMED[args.device] if args.device else local_device()
    model = about = None
    if args.model:
        data = args.model.read_bytes()
        model = Model.from_bytes(data)
        about = f"model {args.model.name}, sha256 {hashlib.sha256(data).hexdigest()}"
    drawn = fresh(args.op, args.seed, device.platform)
    numbered = list(itertools.islice(drawn, args.count))
    planner = plan(Judge(device=device, model=model), numbered, args.out, about)
    print(f"{len(numbered)} problems, {len(planner.kernels)} kernels", flush=True)
    if args.only_plan:
        return 0
    found = ahead.compile_all(planner.kernels.values(), args.out, args.workers)
    print("\n".join([*found.failed[:20], f"{len(found.failed)} kernels failed"]))
    return 0


def _run(args: argparse.Namespace) -> int:
    for path in (args.directory, *args.directory.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)  # kernels of others do not count
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others measure
    with options(cache_dir=args.directory):
        print(run(args.directory, local_device(), args.minutes))
    print("\n".join(report(args.directory)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    own = commands.add_parser("plan", help="what to measure; compiles kernels")
    own.add_argument("--device", choices=tuple(NAMED), help="by default this machine's")
    own.add_argument("--model", type=pathlib.Path, help="by default the shipped one")
    own.add_argument("--seed", type=int, nargs="+", default=SEEDS)
    own.add_argument("--count", type=int, default=COUNT, help="of problems")
    own.add_argument("--op", nargs="+", default=OPS, help="all by default")
    own.add_argument("--workers", type=int, default=2, help="that compile")
    own.add_argument("--only-plan", action="store_true", help="compile nothing")
    own.add_argument("--out", type=pathlib.Path, required=True)
    own.set_defaults(do=_planned)
    own = commands.add_parser("run", help="measures what was planned")
    own.add_argument("directory", type=pathlib.Path)
    own.add_argument("--minutes", type=float, default=9.0)
    own.set_defaults(do=_run)
    own = commands.add_parser("report", help="prints the table")
    own.add_argument("directory", type=pathlib.Path)
    own.add_argument("--results", type=pathlib.Path, help="directory of results")
    own.set_defaults(do=_report)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())

"""Makes the tuned answers that ship with the package.

    python benchmarks/tune_layers.py --out DIRECTORY [--effort quick] [--budget-s 500]

Tunes the cases of ``bench_matmul`` and the products of well-known models on this
machine (a CPU: the cases of ``bench_cpu``), or races attention and convolutions of
models (``--what``), the most important first, until the time is over. After every
few problems the answers are written to ``DIRECTORY/<environment>/`` in the layout of
``tracea_jax/data/tuned``: copy the content of DIRECTORY into that folder. Answers that
``bench_matmul`` has found already are taken from its results (``--results``). Races
write each answer when it is found, and nothing else; ``ship_answers`` binds them.

A problem is not tuned again if it has an answer in the cache of this machine, in the
installed package, or in a directory that an earlier run wrote (``--from``). So a run on
another machine of the same kind can continue an earlier one. Two GPUs share the work
with ``--part 0/2`` and ``--part 1/2``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import attention_duels
import attention_groups
import attention_process
import common
import convolution_answers
import cpu_suite
import model_attention
import model_convolutions
from matmul_suite import suite
from model_layers import order

from tracea_jax import knowledge
from tracea_jax.campaign import local_device
from tracea_jax.device import Device
from tracea_jax.options import current as options
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.runtime import trust
from tracea_jax.tuning import tuner
from tracea_jax.tuning.answers.legality import current, current_best, legal_choice
from tracea_jax.tuning.store import exchange
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment, environment_key
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Best, Entry, Observation

KEPT = 6  # observations of an entry that ships, besides XLA's
TOGETHER = 16  # problems that one child process tunes


def wanted(platform: str, what: str = "products") -> tuple[Problem, ...]:
    """The problems to tune, the most important first."""
    if what == "attention":
        return model_attention.order()
    if what == "convolutions":
        return model_convolutions.order()
    if platform != "cuda":
        return tuple(case.problem for case in cpu_suite.suite(quick=False))
    cases = [case.problem for case in suite(quick=False)]
    return tuple(dict.fromkeys([*cases, *order()]))


def left(problems: Sequence[Problem], device: Device) -> list[Problem]:
    """The problems without an answer of their own."""
    known = knowledge.known(options())
    answers = {p: known.lookup(p, device) for p in problems}
    return [p for p, a in answers.items() if a is None or not a.is_exact]


def tune_all(problems: Sequence[Problem], args: argparse.Namespace) -> Iterator[str]:
    """Tunes problems until the time is over; reports after every few of them.

    Problems whose share of the time was too short get a second turn in the time left.
    """
    end = time.monotonic() + args.budget_s
    while problems and end - time.monotonic() >= args.each_s:
        failed = yield from _turn(problems, end, args)
        problems = failed if len(failed) < len(problems) else []


def race_all(problems: Sequence[Problem], args: argparse.Namespace) -> Iterator[str]:
    """Races the likely configs of attention or convolutions until the time is over."""
    device, store = local_device(), Store(options().directory / "tuned")
    raced = _RACES[args.what](problems, device, args.budget_s)
    for i, (problem, found) in enumerate(raced):
        if isinstance(found, str):
            yield f"  not {problem}: {found}"
            continue
        exchange.merge(store, [found])
        publish(args.out, found)  # a run that is ended early has these
        yield f"{i + 1} of {len(problems)} {problem}: {found.best}"
    knowledge.refresh(options())


def _race_attention(
    problems: Sequence[Any], device: Device, budget_s: float
) -> Iterator[tuple[Problem, Entry | str]]:
    with contextlib.closing(attention_process.Apart()) as racer:
        settled = functools.partial(attention_duels.settled, device=device)
        yield from attention_groups.entries(problems, device, budget_s, racer, settled)


_RACES: dict[str, Any] = {
    "attention": _race_attention,
    "convolutions": convolution_answers.entries,
}


def _turn(
    problems: Sequence[Problem], end: float, args: argparse.Namespace
) -> Generator[str, None, list[Problem]]:
    """Tunes each problem once while time lasts; returns those without an answer."""
    failed: dict[Problem, str] = {}
    for start in range(0, len(problems), TOGETHER):
        few = problems[start : start + TOGETHER]
        left_s = end - time.monotonic()
        if left_s < args.each_s:
            break
        each_s = max(args.each_s, left_s / (len(problems) - start))
        missed = common.tune_together(
            few,
            budget_s=min(left_s, each_s * len(few)),
            effort=args.effort,
            goal=args.goal,
        )
        failed |= missed
        count = export(args.out, local_device())
        done = start + len(few) - len(failed)
        yield f"{done} of {len(problems)} tuned, {count} answers, {left_s:.0f} s left"
        yield from (f"  not {problem}: {why}" for problem, why in missed.items())
    return list(failed)


# --- what ships -----------------------------------------------------------------------


def export(directory: pathlib.Path, device: Device) -> int:
    """Writes all answers of this machine; returns their number.

    Shipped answers of the same environment are included, so that the directory can
    replace the shipped one. Only files that ship are written, no locks.
    """
    entries = list(known(device))
    for entry in entries:
        publish(directory, entry)
    return len(entries)


def publish(directory: pathlib.Path, entry: Entry) -> None:
    """Writes an entry as it ships."""
    place = Store(directory).path(Name.of(entry.problem, entry.environment.key))
    place.parent.mkdir(parents=True, exist_ok=True)
    trust.write_atomically(place, slim(entry).to_bytes(), mode=0o644)
    described = json.dumps(entry.environment.to_json(), indent=1) + "\n"
    environment = place.parent.parent / "environment.json"
    trust.write_atomically(environment, described.encode(), mode=0o644)


def known(device: Device) -> Iterator[Entry]:
    """The entries whose answers hold on the device, this machine's before shipped ones.

    Observations of kernels that have changed since are left out.
    """
    here = environment_key(device)
    stores = (Store(options().directory / "tuned"), Store(knowledge.SHIPPED, True))
    seen: set[Name] = set()
    for store in stores:
        for name in store.names():
            if name.environment != here or name in seen:
                continue
            entry = store.read(name, complete=True)
            if entry is not None and (held := of_today(entry, device)) is not None:
                seen.add(name)
                yield held


def of_today(entry: Entry, device: Device) -> Entry | None:
    """An entry without times of other kernels; None if its answer is one of these."""
    problem = problem_from_json(entry.problem)
    best = current_best(entry.best, problem, device)
    if best is None:
        return None
    seen = current(entry.observations, problem, device)
    return dataclasses.replace(entry, best=best, observations=seen)


def slim(entry: Entry) -> Entry:
    """The entry with only those observations from which other shapes are answered."""
    raced = [o for o in entry.observations if o.extra.get("protocol") == "race"]
    ours = sorted(
        (o for o in raced if o.variant != "xla" and o.time_us is not None),
        key=lambda o: (o.time_us, o.identity),
    )
    kept = [*ours[:KEPT], *(o for o in raced if o.variant == "xla")]
    return dataclasses.replace(
        entry,
        best=_rounded(entry.best),
        observations=tuple(sorted(map(_brief, kept), key=lambda o: o.identity)),
        verified={k: v for k, v in entry.verified.items() if k != "message"},
    )


def _brief(observation: Observation) -> Observation:
    return dataclasses.replace(_rounded(observation), extra={"protocol": "race"})


def _rounded(record: Any) -> Any:
    """A dataclass with its times rounded to five digits, more than are precise."""
    fields = ("time_us", "cold_us", "xla_us", "xla_cold_us", "ratio")
    fields += ("kernel_us", "xla_kernel_us")
    found = {name: getattr(record, name, None) for name in fields}
    return dataclasses.replace(
        record, **{k: float(f"{v:.5g}") for k, v in found.items() if v is not None}
    )


def raced(results: pathlib.Path, device: Device) -> int:
    """Puts the answers that ``bench_matmul`` raced into the cache; their number.

    An answer is the fastest kernel of ours if it won its race, else XLA.
    """
    entries = []
    for row in json.loads(results.read_text())["rows"]:
        if row.get("ratio_own") is None:
            continue
        problem = problem_from_json(row["problem"])
        choice = legal_choice(row["variant"], row["config"], problem, device)
        if isinstance(choice, str):
            continue  # of another version
        own = Observation(
            **named(problem, choice, device),
            time_us=row["own_us"],
            extra={"protocol": "race"},
        )
        xla = Observation(
            variant="xla", config={}, time_us=row["xla_us"], extra={"protocol": "race"}
        )
        chosen = own if row["ratio_own"] > 1 else xla
        best = Best(
            variant=chosen.variant,
            config=chosen.config,
            code=chosen.code,
            time_us=chosen.time_us,
            xla_us=row["xla_us"],
            ratio=row["ratio_own"] if chosen is own else 1.0,
            origin="search" if chosen is own else "xla",
            goal="throughput",
        )
        entries.append(
            Entry(
                problem=problem.to_json(),
                environment=environment(device),
                best=best,
                observations=tuple(sorted((own, xla), key=lambda o: o.identity)),
                verified=_judged(row) if chosen is own else {},
                tuner={"version": tuner.VERSION, "effort": "quick"},
                written=_now(),
            )
        )
    exchange.merge(Store(options().directory / "tuned"), entries)
    knowledge.refresh(options())
    return len(entries)


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """The benchmark's verdict on the correctness of a result."""
    error = row["error_of_bound"]
    return {"ok": error <= 1.0, "max_rel_error": error, "tolerance": 1.0}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def take(directories: Iterable[pathlib.Path]) -> int:
    """Puts answers of earlier runs into this machine's cache; returns their number."""
    entries = [
        entry
        for directory in directories
        for store in [Store(directory, read_only=True)]
        for name in store.names()
        if (entry := store.read(name, complete=True)) is not None
    ]
    exchange.merge(Store(options().directory / "tuned"), entries)
    knowledge.refresh(options())
    return len(entries)


def share(problems: Sequence[Any], args: argparse.Namespace) -> list[Problem]:
    """This run's part of the problems."""
    part, parts = args.part
    if args.what == "convolutions":
        return list(convolution_answers.share(problems, part, parts))
    return list(problems[part::parts])


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    found = int(part), int(parts)
    if not 0 <= found[0] < found[1]:
        raise ValueError(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--from", dest="earlier", type=pathlib.Path, nargs="*", default=[]
    )
    parser.add_argument(
        "--results", type=pathlib.Path, help="of bench_matmul, whose answers to take"
    )
    parser.add_argument(
        "--what", default="products", choices=("products", *_RACES), help="to tune"
    )
    parser.add_argument("--effort", default="quick", help="of tuning each problem")
    parser.add_argument("--goal", default="throughput", help="of tuning")
    parser.add_argument("--budget-s", type=float, default=500.0, help="for everything")
    parser.add_argument(
        "--each-s", type=float, default=4.0, help="least for a problem, on average"
    )
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="of N; I is 0 to N - 1",
    )
    parser.add_argument("--again", action="store_true", help="what has answers, too")
    parser.add_argument("--list", action="store_true", help="only tell what is left")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a child measures
    if args.what == "attention":  # which compiles while it runs: nothing is captured
        flags = (os.environ.get("XLA_FLAGS", ""), "--xla_gpu_enable_command_buffer=")
        os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    device = local_device()
    if args.results:
        print(f"{raced(args.results, device)} answers taken from results")
    if args.earlier:
        print(f"{take(args.earlier)} answers taken from earlier runs")
    problems = wanted(device.platform, args.what)
    problems = problems if args.again else left(problems, device)
    problems = share(problems, args)
    if args.list:
        print("\n".join(map(str, problems)))
        return
    tune = race_all if args.what in _RACES else tune_all
    for text in tune(problems, args):
        print(text, flush=True)
    if args.what in _RACES:
        return  # each answer was written when it was found
    rest = len(left(problems, device))
    print(f"{export(args.out, device)} answers in {args.out}; {rest} problems are left")


if __name__ == "__main__":
    main()

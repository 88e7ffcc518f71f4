"""Plans a survey of a GPU that is not here: python benchmarks/survey/plan.py --out DIR

Draws problems, chooses what will be measured, and compiles the kernels into ``DIR``,
which then is the cache directory (``TRACEA_CACHE_DIR``) and the ``--plan`` of
``run.py`` on the machine with the GPU. Prints how many kernels each op needs.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import time

from tracea_jax.device import NAMED
from tracea_jax.survey import ahead
from tracea_jax.survey.run import OPS, wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=tuple(NAMED), default="H100")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=1000, help="of problems")
    parser.add_argument("--op", nargs="+", default=OPS, help="all by default")
    parser.add_argument("--workers", type=int, default=2, help="that compile")
    parser.add_argument("--only-plan", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    planner, plan, start = ahead.Planner(NAMED[args.device]), [], time.monotonic()
    needed = dict.fromkeys(args.op, 0)
    drawn = wanted(tuple(args.op), args.seed, "cuda")
    for i, numbered in enumerate(itertools.islice(drawn, args.count), 1):
        before = len(planner.kernels)
        plan.append(planner.planned(numbered))
        needed[numbered.problem.op] += len(planner.kernels) - before
        if i % 50 == 0:
            ahead.write(args.out, plan)
            print(f"{i} problems, {len(planner.kernels)} kernels", flush=True)
    ahead.write(args.out, plan)
    for op, kernels in needed.items():
        own = [p for p in plan if p.numbered.problem.op == op]
        choices = sum(len(p.choices) for p in own)
        print(f"{op}: {len(own)} problems, {choices} choices, {kernels} kernels")
    print(f"planned in {time.monotonic() - start:.0f} s", flush=True)
    if args.only_plan:
        return 0
    start, done = time.monotonic(), itertools.count(1)

    def tell() -> None:
        if (number := next(done)) % 50 == 0:
            seconds = time.monotonic() - start
            print(f"{number} compiled, {seconds:.0f} s", flush=True)

    found = ahead.compile_all(planner.kernels.values(), args.out, args.workers, tell)
    print("\n".join(found.failed[:20]))
    seconds = time.monotonic() - start
    print(f"{found.kernels} kernels, {len(found.failed)} failed, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A survey of this machine: python benchmarks/survey/run.py --minutes 10

Draws problems, measures our kernels and their peers, and appends rows to
``rows/<device>/<op>.jsonl``. A later call goes on where an earlier one ended, however
that ended. ``--isa`` surveys a CPU as if it had a narrower instruction set, for our
kernels and for XLA.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

ROWS = pathlib.Path(__file__).parent / "rows"
# XLA's names of the instruction sets that our kernels are built for.
XLA_ISAS = {"avx2": "AVX2", "avx512": "AVX512", "avx512_bf16": "AVX512_BF16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--op", nargs="+", help="ops to survey; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--isa", choices=tuple(XLA_ISAS), help="of the CPU, at most")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="I from 0")
    parser.add_argument("--most", type=int, help="problems, at most")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS, help="directory")
    args = parser.parse_args()
    if args.isa:  # before JAX is loaded
        os.environ["TRACEA_CPU_ISA"] = args.isa
        flags = (
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_cpu_max_isa={XLA_ISAS[args.isa]}",
        )
        os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    from tracea_jax.options import local_device
    from tracea_jax.survey.run import OPS, Part, survey

    index, _, of = args.part.partition("/")
    found = survey(
        args.out,
        local_device(),
        budget_s=60 * args.minutes,
        ops=args.op or OPS,
        seed=args.seed,
        part=Part(index=int(index), of=int(of or 1)),
        most=args.most,
        tell=lambda p: print(
            f"{p.done:5d} {p.left_s:5.0f} s left  {p.problem}", flush=True
        ),
    )
    print(found)
    return 130 if found.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())

"""A survey of this machine: python benchmarks/survey/run.py --minutes 10

Draws problems, measures our kernels and their peers, and appends rows to
``rows/<device>/<op>.jsonl``. A later call goes on where an earlier one ended, however
that ended. ``--isa`` surveys a CPU as if it had a narrower instruction set, for our
kernels and for XLA. ``--gpus 0,1`` surveys a part of the problems on each of several
GPUs, and puts their rows together.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROWS = pathlib.Path(__file__).parent / "rows"
# XLA's names of the instruction sets that our kernels are built for.
XLA_ISAS = {"avx2": "AVX2", "avx512": "AVX512", "avx512_bf16": "AVX512_BF16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--op", nargs="+", help="ops to survey; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--isa", choices=tuple(XLA_ISAS), help="of the CPU, at most")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", default="0/1", metavar="I/N", help="I from 0")
    which.add_argument("--gpus", metavar="I,J", help="numbers of GPUs, as CUDA's")
    parser.add_argument("--most", type=int, help="problems, at most")
    parser.add_argument(
        "--plan", type=pathlib.Path, help="directory that plan.py made, for a GPU"
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROWS, help="directory")
    args = parser.parse_args()
    if args.gpus:
        return on_gpus(args.gpus.split(","), args.out, sys.argv[1:])
    if args.isa:  # before JAX is loaded
        os.environ["TRACEA_CPU_ISA"] = args.isa
        flags = (
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_cpu_max_isa={XLA_ISAS[args.isa]}",
        )
        os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others measure
    from tracea_jax.options import local_device
    from tracea_jax.survey import ahead
    from tracea_jax.survey.run import OPS, Part, survey

    index, _, of = args.part.partition("/")
    part = Part(index=int(index), of=int(of or 1))
    planned = ahead.read(args.plan) if args.plan else ()
    found = survey(
        args.out,
        local_device(),
        budget_s=60 * args.minutes,
        ops=args.op or OPS,
        seed=args.seed,
        part=part,
        most=args.most,
        plan=tuple(p for p in planned if part.has(p.numbered)),
        tell=lambda p: print(
            f"{p.done:5d} {p.left_s:5.0f} s left  {p.problem}", flush=True
        ),
    )
    print(found)
    return 130 if found.interrupted else 0


def on_gpus(gpus: Sequence[str], out: pathlib.Path, arguments: Sequence[str]) -> int:
    """Surveys parts of the problems in a process for each GPU.

    Args:
      gpus: values of ``CUDA_VISIBLE_DEVICES``.
      out: directory of the rows; that of a part is below it meanwhile.
      arguments: of this program.

    Returns:
      The first exit status that is not 0, if any.
    """
    from tracea_jax.survey import rows

    out.mkdir(parents=True, exist_ok=True)
    there = [file.relative_to(out) for file in sorted(out.rglob("*.jsonl"))]
    with tempfile.TemporaryDirectory(dir=out) as directory:
        parts = [pathlib.Path(directory) / str(i) for i in range(len(gpus))]
        for part in parts:
            for file in there:  # so that no problem is measured twice
                (part / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(out / file, part / file)
        started = [
            _part(i, len(gpus), gpu, parts[i], arguments) for i, gpu in enumerate(gpus)
        ]
        try:
            ends = [process.wait() for process in started]
        except KeyboardInterrupt:  # they were interrupted, too, and keep their rows
            ends = [process.wait() for process in started]
        for part in parts:
            for file in sorted(part.rglob("*.jsonl")):
                rows.write(out / file.relative_to(part), rows.read(file))
    return next((end for end in ends if end), 0)


def _part(
    index: int, of: int, gpu: str, out: pathlib.Path, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A process that surveys a part of the problems on one GPU."""
    words, left = iter(arguments), []
    for word in words:
        if word in ("--gpus", "--out"):
            next(words)
        elif not word.startswith(("--gpus=", "--out=")):
            left.append(word)
    return subprocess.Popen(
        [sys.executable, __file__, *left, "--part", f"{index}/{of}", "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
    )


if __name__ == "__main__":
    sys.exit(main())

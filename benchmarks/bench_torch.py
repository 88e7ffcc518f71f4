"""ResNet-18 of PyTorch, its convolutions on ours, beside torch's own, on this CPU.

    python benchmarks/bench_torch.py [--batch 8] [--size 224] [--out DIRECTORY]

A row is a kind of run (inference, or the gradients of all parameters) and a dtype. Both
sides are the same model in ``torch.channels_last``, with random weights and inputs, and
run in turns. A ratio is torch's time divided by ours.
"""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import torch
from torch_models import ResNet18

from tracea_jax.interop import torch as interop

_KINDS = ("inference", "gradients")


def call(model: Any, x: Any, kind: str) -> Callable[[], None]:
    """A run of the model."""

    def infer() -> None:
        with torch.inference_mode():
            model(x)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return infer if kind == "inference" else step


def row(kind: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    last = {"memory_format": torch.channels_last}
    model = ResNet18().train(kind == "gradients").to(getattr(torch, dtype)).to(**last)
    x = torch.randn(args.batch, 3, args.size, args.size)
    x = x.to(getattr(torch, dtype)).contiguous(**last)
    ours = interop.patch_conv2d(copy.deepcopy(model))
    calls = {"tracea": call(ours, x, kind), "torch": call(model, x, kind)}
    for run in calls.values():
        run()
    report = interop.layers(ours)
    times = common.race(calls, args.rounds)
    return {
        "kind": kind,
        "dtype": dtype,
        "batch": args.batch,
        "size": args.size,
        "replaced": report.replaced,
        "convolutions": len(report.layers),
        "tracea_ms": statistics.median(times["tracea"]) / 1e3,
        "torch_ms": statistics.median(times["torch"]) / 1e3,
        "ratio": common.median_ratio(times, "torch", "tracea"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    rows = [row(kind, dtype, args) for dtype in args.dtypes for kind in _KINDS]
    head = ("run", "dtype", "tracea ms", "torch ms", "torch / tracea")
    texts = [
        (r["kind"], r["dtype"])
        + tuple(f"{r[n]:.4g}" for n in ("tracea_ms", "torch_ms", "ratio"))
        for r in rows
    ]
    print(common.table(head, texts))
    more = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    more["load"] = os.getloadavg()[1]  # of everything on the machine, ourselves too
    print(common.save("torch", rows, args, **more))


if __name__ == "__main__":
    main()

"""conv2d against XLA on a GPU: python benchmarks/bench_conv2d.py [--only GROUP ...]

Sides race in turns: XLA's convolution with the same epilogue written in jnp; each of
our kernels with its default config; and the default, which a call without
``implementation`` runs untuned and which may be XLA. Inputs are random normal, times
those of kernels.

Results are saved after every case. With ``--only``, the rows of other groups stay as
they are, if device, versions and commit are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp

from tracea_jax import dispatch, variants
from tracea_jax.campaign import local_device
from tracea_jax.ops.conv2d import workload
from tracea_jax.ops.conv2d.primitive import conv2d_p
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue

RELU = Epilogue(bias="row", activation="relu")
JOINED = Epilogue(bias="row", activation="relu", residual=True)
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))  # sizes and channels of ResNets
SAME = (1, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    group: str
    problem: Conv2dProblem


def conv(
    batch: int,
    size: int,
    channels: int,
    out: int | None = None,
    *,
    taps: int = 3,
    stride: int = 1,
    pads: tuple[int, int] = SAME,
    **changes: Any,
) -> Conv2dProblem:
    """A square convolution of bfloat16."""
    fields: dict[str, Any] = {
        **{"batch": batch, "height": size, "width": size},
        **{"in_channels": channels, "out_channels": out or channels},
        **{"kernel_height": taps, "kernel_width": taps},
        **{"strides": (stride, stride), "padding": (pads, pads)},
        **dict.fromkeys(("lhs", "rhs", "out"), "bfloat16"),
    }
    return Conv2dProblem(**{**fields, **changes})


def suite() -> Iterator[Case]:
    """The cases, by groups."""
    for batch in (64, 8, 1):
        of_batch = "" if batch == 64 else f", batch {batch}"
        for size, channels in STAGES:
            plain = conv(batch, size, channels)
            yield Case(group=f"3x3{of_batch}", problem=plain)
            yield Case(
                group=f"3x3 gradient{of_batch}",
                problem=dataclasses.replace(plain, direction="input_grad"),
            )
            for epilogue in (RELU, JOINED):
                yield Case(
                    group=f"3x3 with epilogue{of_batch}",
                    problem=dataclasses.replace(plain, epilogue=epilogue),
                )
    for size, channels in STAGES:
        yield Case(
            group="3x3 weights",
            problem=conv(64, size, channels, direction="weight_grad"),
        )
    for size, channels in STAGES[1:]:
        strided = conv(64, 2 * size, channels, stride=2, pads=(0, 1), epilogue=RELU)
        yield Case(group="3x3 of stride 2", problem=strided)
        gradient: dict[str, Any] = {"direction": "input_grad", "epilogue": Epilogue()}
        yield Case(
            group="3x3 of stride 2, gradient",
            problem=dataclasses.replace(strided, **gradient),
        )
    for batch in (64, 1):
        stem = conv(batch, 224, 3, 64, taps=7, stride=2, pads=(3, 3), epilogue=RELU)
        yield Case(group="stem", problem=stem)
    stem = conv(
        *(64, 224, 3, 64),
        **{"taps": 7, "stride": 2, "pads": (3, 3), "direction": "weight_grad"},
    )
    yield Case(group="stem weights", problem=stem)
    patches = conv(64, 224, 3, 768, taps=16, stride=16, pads=(0, 0))
    yield Case(group="patches", problem=patches)
    yield Case(
        group="patches, weights",
        problem=dataclasses.replace(patches, direction="weight_grad"),
    )
    for size, channels in STAGES:
        narrow = conv(64, size, 4 * channels, channels, taps=1, pads=(0, 0))
        wide = conv(64, size, channels, 4 * channels, taps=1, pads=(0, 0))
        yield Case(
            group="1x1 with epilogue",
            problem=dataclasses.replace(narrow, epilogue=RELU),
        )
        yield Case(
            group="1x1 with epilogue",
            problem=dataclasses.replace(wide, epilogue=JOINED),
        )
    for size, channels in STAGES[1:]:
        yield Case(
            group="1x1 of stride 2",
            problem=conv(
                *(64, 2 * size, 2 * channels, 4 * channels),
                **{"taps": 1, "stride": 2, "pads": (0, 0)},
            ),
        )
    for channels in (320, 640):
        plain = conv(8, 64 if channels == 320 else 32, channels)
        yield Case(group="U-Net 3x3", problem=plain)
        yield Case(
            group="U-Net 3x3 gradient",
            problem=dataclasses.replace(plain, direction="input_grad"),
        )


# --- the sides ------------------------------------------------------------------------


def default(*inputs: jax.Array, problem: Conv2dProblem) -> list[jax.Array]:
    """The problem as the op plans it."""
    size = {
        "forward": None,
        "input_grad": (problem.height, problem.width),
        "weight_grad": (problem.kernel_height, problem.kernel_width),
    }[problem.direction]
    return conv2d_p.bind(
        *inputs,
        direction=problem.direction,
        strides=problem.strides,
        padding=problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        layout=problem.layout,
        size=size,
        out=jnp.dtype(problem.out),
        precision=None,
        epilogue=problem.epilogue,
        implementation=None,
        config=None,
    )


def choices(problem: Conv2dProblem) -> Iterator[Choice]:
    """XLA, then the default config of each kernel that can serve the problem."""
    device = local_device()
    for variant in sorted(variants.of("conv2d"), key=lambda v: v.name != "xla"):
        if variant.why_not(problem, device) is None:
            config = variant.heuristic(problem, device)
            yield Choice(variant=variant.name, config=config)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A row: times and ratios of every side, and errors of the default."""
    problem, device = case.problem, local_device()
    inputs = workload.operands(problem, seed=1)
    calls: dict[str, Any] = {}
    texts: dict[str, str] = {}

    def add(name: str, function: Any) -> None:
        compiled = jax.jit(function).lower(*inputs).compile()
        calls[name] = functools.partial(compiled, *inputs)

    for choice in choices(problem):
        texts[choice.variant] = str(choice.config)
        run = functools.partial(workload.execute, problem=problem, choice=choice)
        add(choice.variant, run)
    add("default", functools.partial(default, problem=problem))
    times = common.race(calls, rounds)
    medians = {name: statistics.median(of_side) for name, of_side in times.items()}
    kernels = [n for n in calls if n not in ("xla", "default")]
    best = min(kernels, key=lambda name: medians[name], default=None)
    results = list(calls["default"]())
    return {
        "group": case.group,
        "problem": problem.to_json(),
        "text": str(problem),
        "times_us": medians,
        "configs": texts,
        "plan": dispatch.plan(problem, device).variant,
        "best": best,
        "ratio": None if best is None else common.median_ratio(times, "xla", best),
        "ratio_default": common.median_ratio(times, "xla", "default"),
        "tflops": problem.flops / medians[best or "xla"] * 1e-6,
        "error": workload.error(problem, device, inputs, results, 0),
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the printed table."""
    best = row["best"]
    ours = "-" if best is None else f"{row['times_us'][best]:.1f}"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return (
        row["text"],
        f"{best} {row['configs'].get(best, '')}",
        f"{row['times_us']['xla']:.1f}",
        ours,
        f"{row['tflops']:.0f}",
        ratio,
        f"{row['ratio_default']:.2f}",
    )


HEAD = ("problem", "kernel", "XLA us", "ours us", "TF", "XLA/ours", "XLA/default")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="groups")
    parser.add_argument("--rounds", type=int, default=7)
    common.add_arguments(parser)
    args = parser.parse_args(arguments)
    wanted = [c for c in suite() if not args.only or c.group in args.only]
    groups = {case.group for case in wanted}
    kept = common.saved("conv2d", args) if args.only else []
    rows = [row for row in kept if row["group"] not in groups]
    for case in wanted:
        try:
            rows.append(measure(case, args.rounds))
        except Exception as e:  # whatever a kernel does must not end the run
            print(f"{case.problem}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            continue
        print("  ".join(cells(rows[-1])), flush=True)
        common.save("conv2d", rows, args)
    print(common.table(HEAD, [cells(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

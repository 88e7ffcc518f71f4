"""Causal ring attention over several devices against one, forward and gradients.

    python benchmarks/ring_attention.py              two GPUs, 16384 tokens each
    python benchmarks/ring_attention.py --small      a trial on CPU devices

Prints a table: wall-clock milliseconds of a call (the median of rounds in turns, of
several calls in a row, as a training loop dispatches its steps), the rate in terms of
the scores that a causal mask leaves, and the speed against one device with the whole
sequence. Results are compared with that device's first. Exits with 1 if they differ by
more than rounding, or if the best ring on GPUs is below ``--bar`` times the rate of one
device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__" and "--small" in sys.argv:  # before JAX is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import common
from sharded_tables import of_ring

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS = 4  # in a row
ALLOWED = 2e-2  # of the largest entry: a few units of bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One row of the table.

    Attributes:
      name: of the row.
      call: runs it.
      devices: how many it runs on.
      tokens: of the sequence; 0 where nothing is computed.
      is_ring: whether it is ours on several devices, with results to compare.
      order: of its results.
    """

    name: str
    call: Callable[[], Any]
    devices: int
    tokens: int
    is_ring: bool = False
    order: str = "contiguous"

    @property
    def flops(self) -> float:
        """Of the forward pass and the gradients, without hidden scores."""
        return 3.5 * 2 * self.tokens**2 * HEADS * HEAD_DIM


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    common.add_arguments(parser)
    parser.add_argument("--tokens", type=int, help="of each device")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bar", type=float, default=1.85, help="of the best ring")
    parser.add_argument("--small", action="store_true", help="on CPU devices")
    args = parser.parse_args()
    tokens = args.tokens or (64 if args.small else 16384)
    bar = 0.0 if args.small else args.bar
    sys.exit(run(list(programs(tokens, args.devices)), bar, args))


def run(programs: list[Program], bar: float, args: argparse.Namespace) -> int:
    """Prints the table and saves its rows; 1 if a check failed, else 0."""
    began = time.perf_counter()
    failures = compared(programs)
    print(f"compiled and compared in {time.perf_counter() - began:.0f} s", flush=True)
    rows = list(measured(programs, raced(programs, args.rounds)))
    if args.out or not args.small:
        print(common.save("ring_attention", rows, args))
    print(f"\n{HEADS}/{KV_HEADS} heads of {HEAD_DIM}, bfloat16, causal\n")
    head = "program", "devices", "tokens", "ms", "Tflop/s", "times one device"
    print(common.table(head, [of_ring(row) for row in rows]))
    ratios = {row["program"]: row["ratio"] for row in rows if row["is_ring"]}
    best = max(ratios, key=lambda name: ratios[name])
    if ratios[best] < bar:
        failures.append(f"the bar is {bar}")
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{best}: {ratios[best]:.2f} times the rate of one device")
    return 1 if failures else 0


def measured(
    programs: list[Program], times: dict[str, list[float]]
) -> Iterator[dict[str, Any]]:
    """A row for each program, from its milliseconds in every round."""
    alone = times[programs[0].name]
    for program in programs:
        ms = times[program.name]
        ratio = rate = None
        if program.tokens:
            rate = program.flops / statistics.median(ms) / 1e9
            if program.devices > 1:
                pairs = zip(alone, ms, strict=True)
                ratio = statistics.median(one / many for one, many in pairs)
        yield {
            "program": program.name,
            "is_ring": program.is_ring,
            "devices": program.devices,
            "tokens": program.tokens,
            "ms": statistics.median(ms),
            "tflops": rate,
            "ratio": ratio,
        }


def compared(programs: list[Program]) -> list[str]:
    """Runs each program once; what is wrong with the results of rings."""
    import jax

    from tracea_jax.ops import zigzag

    wrong = list[str]()
    expected = programs[0].call()
    for program in programs[1:]:
        found = jax.block_until_ready(program.call())
        if program.is_ring:
            if program.order == "zigzag":
                devices = program.devices
                found = [zigzag(x, devices, inverse=True) for x in found]
            error = worst(found, expected)
            print(f"{program.name}: error {error:.1e} of the largest entry")
            if not error < ALLOWED:
                wrong.append(f"{program.name} has an error of {error:.1e}")
    return wrong


def worst(found: Any, expected: Any) -> float:
    """The largest difference of any result, in parts of its largest entry."""
    import numpy as np

    def error(x: Any, y: Any) -> float:
        x, y = (np.asarray(a).astype(np.float32) for a in (x, y))
        return float(np.abs(x - y).max() / np.abs(y).max())

    return max(error(x, y) for x, y in zip(found, expected, strict=True))


def raced(programs: list[Program], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a call of each program in every round."""
    times = {program.name: list[float]() for program in programs}
    for i in range(rounds):
        first = i % len(programs)
        for program in programs[first:] + programs[:first]:
            start = time.perf_counter()
            common.repeating(program.call)(CALLS)
            seconds = (time.perf_counter() - start) / CALLS
            times[program.name].append(1e3 * seconds)
    return times


def programs(tokens: int, devices: int) -> Iterator[Program]:
    """The rows; the first is one device with the whole sequence."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from tracea_jax.ops import attention, zigzag

    total = tokens * devices
    mesh = Mesh(jax.devices()[:devices], ("x",), axis_types=(AxisType.Auto,))
    spec = P(None, "x")
    split = NamedSharding(mesh, spec)
    operands = tuple(
        jax.random.normal(jax.random.key(i), (1, total, heads, HEAD_DIM), "bfloat16")
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))
    )
    placed = {
        "contiguous": jax.device_put(operands, split),
        "zigzag": jax.device_put([zigzag(x, devices) for x in operands], split),
    }
    whole = functools.partial(attention, is_causal=True)

    def both(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        def step(q: Any, k: Any, v: Any, do: Any) -> Any:
            o, gradients = jax.vjp(f, q, k, v)
            return o, *gradients(do)

        jit: Any = jax.jit
        return jit(step, **how)

    def ring(name: str, order: Any, **options: Any) -> Program:
        local = functools.partial(whole, axis_name="x", sequence_order=order)
        shard_map: Any = jax.shard_map
        f = shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        step = both(f, compiler_options=options)
        return Program(
            name=f"ring, {name}",
            call=functools.partial(step, *placed[order]),
            devices=devices,
            tokens=total,
            is_ring=True,
            order=order,
        )

    def sent(q: Any, k: Any, v: Any, do: Any) -> Any:
        """Messages of a ring: keys and values twice, and sums of their gradients."""
        pairs = [(r, (r + 1) % devices) for r in range(devices)]
        grads = [x.astype("float32") for x in (k, v)]
        messages = [k, v, k, v, *grads]
        for _ in range(devices - 1):
            messages = [jax.lax.ppermute(x, "x", pairs) for x in messages]
        return messages

    alone = both(whole)
    own = [x[:, :tokens] for x in operands]
    for name, arrays in (("one device", operands), ("one device, its own tokens", own)):
        length = arrays[0].shape[1]
        call = functools.partial(alone, *arrays)
        yield Program(name=name, call=call, devices=1, tokens=length)
    yield ring("zigzag order", "zigzag")
    yield ring("contiguous order", "contiguous")
    if jax.default_backend() != "cpu":
        hiding = {"xla_gpu_enable_latency_hiding_scheduler": True}
        yield ring("zigzag order, latency hiding", "zigzag", **hiding)
    yield Program(
        name="queries split, keys gathered",
        call=functools.partial(both(whole, out_shardings=split), *placed["contiguous"]),
        devices=devices,
        tokens=total,
    )
    f = jax.jit(jax.shard_map(sent, mesh=mesh, in_specs=spec, out_specs=spec))
    yield Program(
        name="messages of a ring alone",
        call=functools.partial(f, *placed["contiguous"]),
        devices=devices,
        tokens=0,
    )


if __name__ == "__main__":
    main()

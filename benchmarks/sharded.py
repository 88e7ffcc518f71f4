"""Training steps sharded over two GPUs by ``jit``: plain against transformed.

    python benchmarks/sharded.py            # on two GPUs, about two minutes
    python benchmarks/sharded.py --small    # small programs on two CPU devices

A block of Llama 3 8B's sizes (forward and gradients) and a step of GPT-2 124M (a scan
over layers, fused weights of q, k and v, a tied head, Adam with float32 moments), both
in bfloat16, on one device and on two: data parallel, tensor parallel, and FSDP. Each
row has the kernels in the program, the bytes that a device sends and the milliseconds
of a step (wall clock, median, plain and ours in turns).

Errors are those of the loss and the gradients (the largest of their relative root mean
squares) against the plain program in float32 with products of the highest precision.
The two sum up in other orders, so that ours may have the error of plain and that of one
rounding more.

Communication costs both the same, so that ours on two devices should take half of ours
on one, and what plain takes on two beyond half of plain on one; the bar allows 3 %
more. Exits with 1 if a row misses something.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
if __name__ == "__main__" and "--small" in sys.argv:  # before JAX is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import common
import jax
import jax.numpy as jnp
import numpy as np
from device_work import communication
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tracea_jax as tracea

Tree = Any
DTYPE = jnp.bfloat16
ALLOWED = 1.03  # of the time that the bar names


# --- programs -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training step, and how its state may be split.

    Attributes:
      name: of the rows.
      init: ``init(key)`` makes the state and the batch.
      step: ``step(state, batch)``; its results are the loss, and arrays like the state.
      gradients: which part of these results errors are measured of.
      tensor: how tensor parallelism splits arrays, by their names.
      weights: how FSDP does.
    """

    name: str
    init: Callable[[jax.Array], tuple[Tree, jax.Array]]
    step: Callable[[Tree, jax.Array], tuple[jax.Array, Tree]]
    gradients: Callable[[Tree], Tree]
    tensor: Mapping[str, P]
    weights: Mapping[str, P]


def _normal(shapes: Mapping[str, tuple[int, ...]], key: jax.Array) -> Tree:
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def llama(small: bool) -> Program:
    """A block: RMS norms, grouped queries, a gated MLP; the loss is a mean square."""
    width, heads, kv, head, hidden, batch, tokens = (
        (128, 8, 4, 16, 256, 4, 64) if small else (4096, 32, 8, 128, 14336, 4, 2048)
    )

    def norm(x: jax.Array, g: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
        return (y * scale).astype(x.dtype) * g

    def loss(p: Tree, x: jax.Array) -> jax.Array:
        h = norm(x, p["norm_1"])
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], -1, head) for n in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(*h.shape[:2], -1) @ p["o"]
        h = norm(x, p["norm_2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return jnp.square(x.astype(jnp.float32)).mean()

    shapes = {
        "q": (width, heads * head),
        "k": (width, kv * head),
        "v": (width, kv * head),
        "o": (heads * head, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "norm_1": (width,),
        "norm_2": (width,),
    }
    columns, rows = P(None, "model"), P("model", None)

    def init(key: jax.Array) -> tuple[Tree, jax.Array]:
        x = jax.random.normal(jax.random.fold_in(key, 1), (batch, tokens, width))
        params = {
            name: (1 + 0.1 * w if w.ndim == 1 else w * len(w) ** -0.5).astype(DTYPE)
            for name, w in _normal(shapes, key).items()
        }
        return params, x.astype(DTYPE)

    return Program(
        name="Llama 8B block",
        init=init,
        step=jax.value_and_grad(loss),
        gradients=lambda grads: grads,
        tensor={
            **dict.fromkeys(("q", "k", "v", "gate", "up"), columns),
            **dict.fromkeys(("o", "down"), rows),
        },
        weights={n: P("data") for n, s in shapes.items() if len(s) == 2},
    )


def gpt2(small: bool) -> Program:
    """All of GPT-2, initialised as it is, with the cross entropy of the next token."""
    width, heads, layers, vocabulary, batch, tokens = (
        (64, 4, 2, 256, 8, 32) if small else (768, 12, 12, 50304, 16, 1024)
    )

    def norm(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        centered = y - y.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
        return (centered * scale).astype(x.dtype) * g + b

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        h = norm(x, p["norm_1"], p["norm_1_bias"])
        qkv = jnp.einsum("btd,dce->btce", h, p["qkv"]) + p["qkv_bias"]
        q, k, v = (
            qkv[:, :, i].reshape(*x.shape[:2], heads, width // heads) for i in range(3)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + (y.reshape(x.shape) @ p["o"] + p["o_bias"])
        h = norm(x, p["norm_2"], p["norm_2_bias"])
        h = jax.nn.gelu(h @ p["up"] + p["up_bias"])
        return x + (h @ p["down"] + p["down_bias"]), None

    of_layers = {
        "norm_1": (layers, width),
        "norm_1_bias": (layers, width),
        "qkv": (layers, width, 3, width),
        "qkv_bias": (layers, 3, width),
        "o": (layers, width, width),
        "o_bias": (layers, width),
        "norm_2": (layers, width),
        "norm_2_bias": (layers, width),
        "up": (layers, width, 4 * width),
        "up_bias": (layers, 4 * width),
        "down": (layers, 4 * width, width),
        "down_bias": (layers, width),
    }
    shapes = {
        **of_layers,
        "tokens": (vocabulary, width),
        "positions": (tokens, width),
        "norm": (width,),
        "norm_bias": (width,),
    }

    def loss(p: Tree, ids: jax.Array) -> jax.Array:
        x = p["tokens"][ids] + p["positions"]
        x, _ = jax.lax.scan(layer, x, {n: p[n] for n in of_layers})
        x = norm(x, p["norm"], p["norm_bias"])
        scores = jax.nn.log_softmax((x @ p["tokens"].T).astype(jnp.float32)[:, :-1])
        return -jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean()

    def step(state: Tree, ids: jax.Array) -> tuple[jax.Array, Tree]:
        value, grads = jax.value_and_grad(loss)(state["params"], ids)
        return value, _adam(state, grads)

    def init(key: jax.Array) -> tuple[Tree, jax.Array]:
        params = {}
        for name, x in _normal(shapes, key).items():
            if name in ("norm", "norm_1", "norm_2"):
                x = jnp.ones_like(x)
            elif "bias" in name or "norm" in name:
                x = jnp.zeros_like(x)
            else:
                x *= 0.02 / ((2 * layers) ** 0.5 if name in ("o", "down") else 1)
            params[name] = x.astype(DTYPE)
        zeros = {n: jnp.zeros(s) for n, s in shapes.items()}
        ids = jax.random.randint(key, (batch, tokens), 0, vocabulary)
        return {"params": params, "first": zeros, "second": zeros}, ids

    return Program(
        name="GPT-2 124M step",
        init=init,
        step=step,
        gradients=lambda state: state["first"],
        tensor={
            "qkv": P(None, None, None, "model"),
            "qkv_bias": P(None, None, "model"),
            "o": P(None, "model"),
            "up": P(None, None, "model"),
            "up_bias": P(None, "model"),
            "down": P(None, "model"),
        },
        weights={
            **dict.fromkeys(("qkv", "o", "up", "down"), P(None, "data")),
            "tokens": P("data"),
            "positions": P("data"),
        },
    )


def _adam(state: Tree, grads: Tree) -> Tree:
    """The next state, with moments in float32."""
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], wide)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], wide)
    params = jax.tree.map(
        lambda p, m, v: (p - 1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype),
        state["params"],
        first,
        second,
    )
    return {"params": params, "first": first, "second": second}


PROGRAMS = (llama, gpt2)


# --- layouts --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices along "data" and "model", and which of a program's splits is used."""

    name: str
    shape: tuple[int, int]
    splits: str | None = None

    def shardings(self, program: Program) -> tuple[Tree, NamedSharding]:
        """Those of the state and of the batch."""
        count = self.shape[0] * self.shape[1]
        devices = np.array(jax.devices()[:count]).reshape(self.shape)
        mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        specs = getattr(program, self.splits) if self.splits else {}

        def of(path: Any, _: Any) -> NamedSharding:
            return NamedSharding(mesh, specs.get(path[-1].key, P()))

        state, _ = jax.eval_shape(program.init, jax.random.key(0))
        state = jax.tree_util.tree_map_with_path(of, state)
        return state, NamedSharding(mesh, P("data"))


ONE = Layout(name="one device", shape=(1, 1))
LAYOUTS = (
    ONE,
    Layout(name="DP", shape=(2, 1)),
    Layout(name="TP", shape=(1, 2), splits="tensor"),
    Layout(name="FSDP", shape=(2, 1), splits="weights"),
)


# --- measuring ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One compiled step.

    Attributes:
      kernels: names and numbers of the kernels of ours in its text.
      sent: bytes that a device sends in a run; None where its text does not say.
      moved: by which collectives, or what the text does not say.
      error: of its results.
      ms: medians of the times of each round.
    """

    kernels: Mapping[str, int]
    sent: int | None
    moved: str
    error: float
    ms: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A program under a layout, on GPUs or, to try it, on others."""

    program: str
    layout: str
    is_gpu: bool
    plain: Side
    ours: Side

    def misses(self, one: Row) -> list[str]:
        """What is worse than it should be, given the row of one device."""
        plain, ours = self.plain, self.ours
        sent = [math.inf if x.sent is None else x.sent for x in (ours, plain)]
        found = {
            # Some parts of a problem may be XLA's, as plans are those of the parts.
            "kernels": bool(one.ours.kernels) and not ours.kernels,
            "bytes": sent[0] == math.inf or sent[0] > sent[1],
            "values": not ours.error <= plain.error + float(jnp.finfo(DTYPE).eps) / 2,
            # Times of devices that share cores say nothing.
            "time": self is not one and self.is_gpu and ours.ms > self.bar(one),
        }
        return [name for name, is_missed in found.items() if is_missed]

    def bar(self, one: Row) -> float:
        """The most milliseconds that ours may take."""
        communication_ms = self.plain.ms - one.plain.ms / 2
        return ALLOWED * (one.ours.ms / 2 + communication_ms)


def exact(program: Program, arrays: tuple[Tree, jax.Array]) -> Tree:
    """Loss and gradients of the plain program in float32, on the first device."""
    wide = jax.tree.map(
        lambda x: x.astype("float32") if jnp.issubdtype(x.dtype, jnp.floating) else x,
        arrays,
    )
    with jax.default_matmul_precision("highest"):
        loss, results = jax.jit(program.step)(*wide)
    return loss, program.gradients(results)


@jax.jit
def _error(found: Tree, right: Tree) -> jax.Array:
    def of(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.linalg.norm((x.astype(y.dtype) - y).ravel()) / jnp.linalg.norm(y)

    return jnp.stack(jax.tree.leaves(jax.tree.map(of, found, right))).max()


def kernels(text: str) -> dict[str, int]:
    """Names and numbers of the kernels of ours in a compiled program's text."""
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="(tracea_\w+)"', line):
            name = re.search(r'\bentry = "([^"]+)"', line)
            found[name[1] if name else target[1]] += 1
    return dict(found)


def _sent(text: str) -> tuple[int | None, str]:
    try:
        moved = communication(text)
    except ValueError as e:
        return None, str(e)
    return sum(c.sent for c in moved), " ".join(map(str, moved)) or "-"


def compiled(
    pool: ThreadPoolExecutor, program: Program, layout: Layout, arrays: Tree
) -> tuple[Tree, dict[str, Any]]:
    """Arguments on their devices, and each side's program, to be waited for."""
    shardings = layout.shardings(program)
    args = jax.device_put(arrays, shardings)
    scalar = NamedSharding(shardings[1].mesh, P())
    out = scalar, shardings[0]
    sides = {"plain": program.step, "ours": tracea.transform(program.step)}
    lowered = {
        name: jax.jit(step, out_shardings=out).lower(*args)
        for name, step in sides.items()
    }
    return args, {n: pool.submit(program.compile) for n, program in lowered.items()}


def measured(
    program: Program,
    layout: Layout,
    args: Tree,
    sides: Tree,
    right: Tree,
    rounds: int,
    texts: pathlib.Path | None,
) -> Row:
    """The row of a layout.

    Args:
      program, layout: which.
      args: of the step, on their devices.
      sides: the compiled programs, to be waited for.
      right: loss and gradients in float32.
      rounds: in which each side runs once.
      texts: a directory for the compiled programs' texts.
    """
    programs = {name: future.result() for name, future in sides.items()}
    shardings = layout.shardings(program)
    scalar = NamedSharding(shardings[1].mesh, P())
    right = jax.device_put(right, (scalar, program.gradients(shardings[0])))
    errors = {}
    for name, c in programs.items():
        loss, results = c(*args)
        errors[name] = float(_error((loss, program.gradients(results)), right))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, c in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(c(*args))
            times[name].append(1e3 * (time.perf_counter() - start))

    def side(name: str) -> Side:
        text = programs[name].as_text()
        if texts:
            path = texts / common.slug(f"{program.name} {layout.name} {name}")
            path.with_suffix(".txt").write_text(text)
        sent, moved = _sent(text)
        return Side(
            kernels=kernels(text),
            sent=sent,
            moved=moved,
            error=errors[name],
            ms=statistics.median(times[name]),
        )

    return Row(
        program=program.name,
        layout=layout.name,
        is_gpu=jax.default_backend() == "gpu",
        plain=side("plain"),
        ours=side("ours"),
    )


def rows(
    program: Program, jobs: int, rounds: int, texts: pathlib.Path | None
) -> Iterator[Row]:
    """Those of one program, as they are measured; all are compiled side by side."""
    arrays = jax.jit(program.init)(jax.random.key(0))
    with ThreadPoolExecutor(jobs) as pool:
        made = [compiled(pool, program, layout, arrays) for layout in LAYOUTS]
        right = exact(program, arrays)
    for layout, (args, sides) in zip(LAYOUTS, made, strict=True):
        yield measured(program, layout, args, sides, right, rounds, texts)


def line(row: Row, one: Row) -> tuple[str, ...]:
    plain, ours = row.plain, row.ours
    sent = plain.sent, ours.sent
    bar = "-" if row is one else f"{row.bar(one):.2f}"
    return (
        row.program,
        row.layout,
        str(sum(ours.kernels.values())),
        " / ".join("?" if s is None else f"{s / 2**20:.1f}" for s in sent),
        f"{plain.ms:.2f} / {ours.ms:.2f}",
        f"{plain.ms / ours.ms:.2f}",
        bar,
        f"{plain.error:.1e} / {ours.error:.1e}",
        ", ".join(row.misses(one)) or "-",
    )


HEAD = (
    "program",
    "layout",
    "kernels",
    "MiB sent, plain / ours",
    "ms, plain / ours",
    "ratio",
    "bar ms",
    "error, plain / ours",
    "misses",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--small", action="store_true", help="on two CPU devices")
    parser.add_argument(
        "--only",
        default="",
        help="programs with this in their name; the rows of others stay, if they are "
        "of the same device, versions and commit",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--jobs", type=int, default=8, help="programs compiled at once")
    parser.add_argument("--texts", type=pathlib.Path, help="for the compiled programs")
    args = parser.parse_args()
    if args.texts:
        args.texts.mkdir(parents=True, exist_ok=True)
    start, lines, saved, missed = time.monotonic(), [], [], False
    wanted = "tracea" if args.small else None  # small products deserve no kernel
    with tracea.options(implementation=wanted):
        for make in PROGRAMS:
            program = make(args.small)
            if args.only.lower() not in program.name.lower():
                continue
            one: Row | None = None
            for row in rows(program, args.jobs, args.rounds, args.texts):
                one = one or row
                lines.append(line(row, one))
                missed |= bool(row.misses(one))
                print(f"[{time.monotonic() - start:.0f} s] {row}", flush=True)
                figures = {"bar_ms": row.bar(one), "misses": row.misses(one)}
                saved.append({**dataclasses.asdict(row), **figures})
    if args.out or not args.small:
        measured_now = {row["program"] for row in saved}
        earlier = common.saved("sharded", args) if args.only else []
        saved += [row for row in earlier if row["program"] not in measured_now]
        print(common.save("sharded", saved, args))
    print(common.table(HEAD, lines))
    sys.exit(int(missed))


if __name__ == "__main__":
    main()

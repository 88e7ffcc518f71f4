"""A layer of Llama 8B compiled for many devices: what one device computes and sends.

    python benchmarks/sharded_layers.py [--out DIRECTORY]

Forward pass and gradients, compiled as they are written and transformed, for 64 and 256
devices of XLA's CPU backend, in float32. No array is made and nothing is run: rows
count what compiled programs do, and none is a measured time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
if __name__ == "__main__":  # before JAX is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "256"}

import common
import jax
import jax.numpy as jnp
import numpy as np
from device_work import measured
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tracea_jax as tracea

DEVICES = (64, 256)
TENSOR = 8  # devices of tensor parallelism
WIDTH, HEAD, HEADS, KV_HEADS, HIDDEN, LENGTH = 4096, 128, 32, 8, 14336, 4096
BATCH = 256
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a mesh, and what is split over them.

    Attributes:
      name: of the row.
      data, model: devices along each axis.
      splits_weights: over "data" too, as in FSDP.
      splits_sequence: the positions of one long example over "data", in place of
        examples.
    """

    name: str
    data: int
    model: int = 1
    splits_weights: bool = False
    splits_sequence: bool = False


def layouts(devices: int) -> tuple[Layout, ...]:
    groups = devices // TENSOR
    return (
        Layout("DP", devices),
        Layout("FSDP", devices, splits_weights=True),
        Layout(f"DP x TP={TENSOR}", groups, TENSOR),
        Layout(f"FSDP x TP={TENSOR}", groups, TENSOR, splits_weights=True),
        Layout("SP", devices, splits_sequence=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for devices in DEVICES:
        for layout in layouts(devices):
            rows.append(row(devices, layout))
            print(rows[-1], flush=True)
    print(common.save("sharded_layers", rows, args))


def row(devices: int, layout: Layout) -> dict[str, Any]:
    """The counts of one device, and how many different problems its kernels solve."""
    plain, ours = (compiled(layout, wrap) for wrap in (lambda f: f, tracea.transform))
    return {
        "devices": devices,
        "layout": layout.name,
        "plain": measured(plain).as_row(),
        "ours": {**measured(ours).as_row(), "problems": problems(ours)},
    }


def problems(text: str) -> int:
    """The number of different problems that the kernels of a program solve."""
    call = re.compile(
        r'custom_call_target=("tracea_\w+", operand_layout_constraints=.*?\}\})'
        r".*?(trans_lhs.*)?$",
        re.MULTILINE,
    )
    return len(set(call.findall(text)))


def compiled(layout: Layout, wrap: Wrap) -> str:
    """The text of one device's program."""
    devices = np.array(jax.devices()[: layout.data * layout.model])
    mesh = Mesh(devices.reshape(layout.data, layout.model), ("data", "model"))

    def abstract(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    parameters = {name: abstract(*how) for name, how in weights(layout).items()}
    shape, spec = (max(BATCH, layout.data), LENGTH, WIDTH), P("data")
    if layout.splits_sequence:
        shape, spec = (1, 32 * LENGTH, WIDTH), P(None, "data")
    gradients = {name: x.sharding for name, x in parameters.items()}
    step = jax.jit(
        wrap(jax.value_and_grad(loss)),
        out_shardings=(NamedSharding(mesh, P()), gradients),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return step.lower(parameters, abstract(shape, spec)).compile().as_text() or ""


def weights(layout: Layout) -> dict[str, tuple[tuple[int, ...], P]]:
    """The shape of each parameter, and how it is split."""
    over = "data" if layout.splits_weights else None
    columns, rows = P(over, "model"), P("model", over)
    return {
        "q": ((WIDTH, HEADS * HEAD), columns),
        "k": ((WIDTH, KV_HEADS * HEAD), columns),
        "v": ((WIDTH, KV_HEADS * HEAD), columns),
        "o": ((HEADS * HEAD, WIDTH), rows),
        "gate": ((WIDTH, HIDDEN), columns),
        "up": ((WIDTH, HIDDEN), columns),
        "down": ((HIDDEN, WIDTH), rows),
        "norm_1": ((WIDTH,), P()),
        "norm_2": ((WIDTH,), P()),
    }


def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The mean square of a layer's output."""
    h = norm(x, p["norm_1"])
    q, k, v = ((h @ p[n]).reshape(*h.shape[:2], -1, HEAD) for n in ("q", "k", "v"))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(*h.shape[:2], -1) @ p["o"]
    h = norm(x, p["norm_2"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return jnp.square(x).mean()


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5) * scale


if __name__ == "__main__":
    main()

"""A layer of Llama 8B compiled for many devices: collectives, and work of one device.

    python benchmarks/sharded_layers.py 64 256

Prints a Markdown table of a training step's forward and backward pass: what a device
sends, what it computes, and how many different problems its kernels solve. No array is
made and nothing is run: the devices are those of XLA's CPU backend, in float32, so the
counts are those of compiled programs, and no row is a measured time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Devices along "data" and "model", and what is split over which."""

    name: str
    data: int
    model: int
    weights: bool  # also over "data", as in FSDP
    sequence: bool  # the second dimension over "data", and not the batch


def layouts(devices: int) -> tuple[Layout, ...]:
    tensor = 8
    return (
        Layout("DP", devices, 1, False, False),
        Layout("FSDP", devices, 1, True, False),
        Layout(f"DP x TP={tensor}", devices // tensor, tensor, False, False),
        Layout(f"FSDP x TP={tensor}", devices // tensor, tensor, True, False),
        Layout("SP", devices, 1, False, True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("devices", nargs="+", type=int, help="devices of one program")
    parser.add_argument("--small", action="store_true", help="a thousandth of its size")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(max(arguments.devices))
    print(
        "| devices | layout | kernels | left to XLA | Gflop a device | MB sent, plain "
        "| MB sent, ours | collectives of ours |"
    )
    print("|" + "---|" * 8)
    for devices in arguments.devices:
        for layout in layouts(devices):
            print(row(devices, layout, arguments.small), flush=True)


def row(devices: int, layout: Layout, small: bool) -> str:
    """One line of the table."""
    from device_work import COLLECTIVES, measured

    import tracea_jax as tracea

    plain, ours = (
        compiled(layout, small, wrap) for wrap in (lambda f: f, tracea.transform)
    )
    before, after = measured(plain), measured(ours)
    kinds = " ".join(f"{COLLECTIVES[c.kind]} {c.arrays}" for c in after.collectives)
    cells = (
        devices,
        layout.name,
        f"{after.calls} of {problems(ours)} problems",
        after.left,
        f"{after.flops / 1e9:.1f}",
        f"{before.sent / 1e6:.0f}",
        f"{after.sent / 1e6:.0f}",
        kinds or "-",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def problems(text: str) -> int:
    """Number of different problems that the kernels of a device solve."""
    import re

    call = re.compile(
        r'custom_call_target=("tracea_\w+", operand_layout_constraints=.*?\}\})'
        r".*?(trans_lhs.*)?$",
        re.MULTILINE,
    )
    return len(set(call.findall(text)))


def compiled(layout: Layout, small: bool, wrap) -> str:
    """The program of one device, forward and backward."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    scale = 8 if small else 1
    width, head, heads, kv, hidden = 4096 // scale, 128 // scale, 32, 8, 14336 // scale
    batch, length = max(256, layout.data), 4096 // scale
    if layout.sequence:
        batch, length = 1, 32 * 4096 // scale
    devices = np.array(jax.devices()[: layout.data * layout.model])
    mesh = Mesh(devices.reshape(layout.data, layout.model), ("data", "model"))
    over = "data" if layout.weights else None
    columns, rows = P(over, "model"), P("model", over)
    shapes = {
        "q": ((width, heads * head), columns),
        "k": ((width, kv * head), columns),
        "v": ((width, kv * head), columns),
        "o": ((heads * head, width), rows),
        "gate": ((width, hidden), columns),
        "up": ((width, hidden), columns),
        "down": ((hidden, width), rows),
        "norm_1": ((width,), P()),
        "norm_2": ((width,), P()),
    }

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(
            shape, "float32", sharding=NamedSharding(mesh, spec)
        )

    def norm(x, g):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g

    def loss(p, x):
        h = norm(x, p["norm_1"])
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], -1, head) for n in ("q", "k", "v"))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(*h.shape[:2], -1) @ p["o"]
        h = norm(x, p["norm_2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return jnp.square(x).mean()

    params = {name: abstract(*shape) for name, shape in shapes.items()}
    spec = P(None, "data") if layout.sequence else P("data")
    out = {name: NamedSharding(mesh, spec) for name, (_, spec) in shapes.items()}
    step = jax.jit(
        wrap(jax.value_and_grad(loss)),
        out_shardings=(NamedSharding(mesh, P()), out),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return (
        step.lower(params, abstract((batch, length, width), spec)).compile().as_text()
    )


if __name__ == "__main__":
    main()

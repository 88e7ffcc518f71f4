"""Whole models on our ops against plain ``jax.jit``.

    python benchmarks/bench_models.py [--only NAME] [--effort quick] [--out DIRECTORY]

On a GPU: a block of Llama 3 8B's sizes (width 4096, 32/8 heads, MLP 14336, 2 x 4096
tokens, bfloat16), forward, and forward with gradients of parameters and input; and
value and gradients of a gelu MLP's loss (4 layers with bias, width 4096, 8192 rows,
bfloat16) with respect to its parameters, by ``tracea.transform`` and written with
``tracea.ops``.

On a CPU, in float32 and in bfloat16: a block of Llama 3.2 1B's sizes (width 2048, 32/8
heads, MLP 8192, 512 tokens) and a block of ResNet-50's first stage (8 images of 56 x 56
x 256, batch normalisation with running statistics), both as above; and the MLP's step
with width 1024 and 1024 rows.

All functions are compiled by ``jax.jit``; models are plain JAX, attention by
``jax.nn.dot_product_attention`` with its defaults. Every problem of our side is tuned
first, unless the effort is "none". All sides run in turns. Times are sums of kernel
times on a GPU and wall-clock times on a CPU; ``wall_ratio`` is a ratio of wall-clock
times on both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

import tracea_jax as tracea
from tracea_jax.campaign import local_device, tune
from tracea_jax.demo.language_model import LanguageModel
from tracea_jax.demo.residual_block import ResidualBlock
from tracea_jax.device import CudaDevice
from tracea_jax.explain import explain
from tracea_jax.transform import transform
from tracea_jax.tuning import measure

Function = Callable[..., Any]

LLAMA_3_8B = LanguageModel(
    batch=2,
    tokens=4096,
    layers=1,
    vocabulary=128256,
    width=4096,
    hidden=14336,
    heads=32,
    kv_heads=8,
    dtype="bfloat16",
)
LLAMA_3_2_1B = dataclasses.replace(
    LLAMA_3_8B, batch=1, tokens=512, width=2048, hidden=8192
)
RESNET_50 = ResidualBlock(batch=8, size=56, channels=256, narrow=64, dtype="bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """x -> gelu(x w + b), layer after layer; the loss is the mean squared error."""

    layers: int
    width: int
    batch: int
    dtype: str

    def inputs(self) -> tuple[Any, jax.Array, jax.Array]:
        """Random parameters, rows and targets; the weights keep activations' size."""
        keys = jax.random.split(jax.random.key(0), 2 * self.layers + 2)
        scale = (2 / self.width) ** 0.5

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return jax.random.normal(key, shape).astype(self.dtype)

        parameters = [
            (
                (scale * normal(w, self.width, self.width)).astype(self.dtype),
                normal(b, self.width),
            )
            for w, b in zip(keys[0:-2:2], keys[1:-2:2], strict=True)
        ]
        x, target = (normal(k, self.batch, self.width) for k in keys[-2:])
        return parameters, x, target

    @staticmethod
    def plain_layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w + b)

    @staticmethod
    def op_layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return tracea.ops.matmul(x, w, bias=b, activation="gelu")

    def loss(
        self, layer: Function, parameters: Any, x: jax.Array, target: jax.Array
    ) -> jax.Array:
        for w, b in parameters:
            x = layer(x, w, b)
        return jnp.square((x - target).astype(jnp.float32)).mean()


GELU_MLP = Mlp(layers=4, width=4096, batch=8192, dtype="bfloat16")
SMALL_MLP = dataclasses.replace(GELU_MLP, width=1024, batch=1024)
CPU_DTYPES = ("float32", "bfloat16")
Model = LanguageModel | ResidualBlock | Mlp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One race: a plain function, and the same on our ops in one or several ways.

    Attributes:
      name: name of the row, followed by the key in ``ours`` if the key is not empty.
      model: text for the row about the model of the function.
      plain, ours, inputs: the functions and their arguments.
      bar: the lowest ratio that is good enough, if there is a bar.
    """

    name: str
    model: Model
    plain: Function
    ours: dict[str, Function]
    inputs: tuple[Any, ...]
    bar: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--effort", default="quick", help="of tuning, or none")
    parser.add_argument("--goal", default="latency", help="of tuning")
    parser.add_argument("--budget-s", type=float, default=120.0, help="for each case")
    parser.add_argument("--tune", nargs="*", help="ops; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    # Each result file holds one run, so some cases go to a file of their own.
    name = f"models_{common.slug(args.only)}" if args.only else "models"
    rows, path = [], None
    for case in cases(isinstance(local_device(), CudaDevice)):
        if args.only is None or args.only in case.name:
            rows += measured(case, args)
            path = common.save(name, rows, args)
    head = ("case", "ours us", "plain us", "ratio", "wall", "error", "plain error")
    body = [
        (r["name"], f"{r['ours_us']:.1f}", f"{r['plain_us']:.1f}")
        + (f"{r['ratio']:.2f}", f"{r['wall_ratio']:.2f}")
        + (f"{r['error']:.1e}", f"{r['plain_error']:.1e}")
        for r in rows
    ]
    print(common.table(head, body))
    print(path)


def cases(gpu: bool) -> Iterator[Case]:
    """The cases to measure; the inputs of a case are made when it is asked for."""
    if gpu:
        yield from _language(LLAMA_3_8B, "block")
        yield training(GELU_MLP, bar=1.08)
        return
    for dtype in CPU_DTYPES:
        yield from _language(_as(LLAMA_3_2_1B, dtype), f"Llama block, {dtype},")
    for dtype in CPU_DTYPES:
        yield from _residual(_as(RESNET_50, dtype), f"ResNet block, {dtype},")
    for dtype in CPU_DTYPES:
        yield training(_as(SMALL_MLP, dtype), name=f"gelu MLP, {dtype}, step")


def _as(model: Any, dtype: str) -> Any:
    return dataclasses.replace(model, dtype=dtype)


def _language(model: LanguageModel, name: str) -> Iterator[Case]:
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (model.batch, model.tokens, model.width)
    x = jax.random.normal(keys[1], shape).astype(model.dtype)
    return block(name, model, model.block, model.layer_parameters(keys[0]), x)


def _residual(model: ResidualBlock, name: str) -> Iterator[Case]:
    return block(name, model, model.forward, *model.inputs())


def block(
    name: str, model: Model, function: Function, parameters: Any, x: jax.Array
) -> Iterator[Case]:
    """A block of equal input and output: forward, and with the gradients of both."""

    def step(function: Function) -> Function:
        def both(parameters: Any, x: jax.Array, ct: jax.Array) -> Any:
            y, pull = jax.vjp(function, parameters, x)
            return y, pull(ct)

        return both

    ours, ct = transform(function), jax.random.normal(jax.random.key(1), x.shape)
    yield Case(
        name=f"{name} forward",
        model=model,
        plain=function,
        ours={"": ours},
        inputs=(parameters, x),
    )
    yield Case(
        name=f"{name} forward+backward",
        model=model,
        plain=step(function),
        ours={"": step(ours)},
        inputs=(parameters, x, ct.astype(x.dtype)),
    )


def training(model: Mlp, bar: float | None = None, name: str = "gelu MLP step") -> Case:
    """The loss and its gradients: plain, transformed, and written with our op."""

    def loss(layer: Function) -> Function:
        return lambda parameters, x, y: model.loss(layer, parameters, x, y)

    ours = {"transform": transform(loss(Mlp.plain_layer)), "ops": loss(Mlp.op_layer)}
    return Case(
        name=name,
        model=model,
        plain=jax.value_and_grad(loss(Mlp.plain_layer)),
        ours={name: jax.value_and_grad(function) for name, function in ours.items()},
        inputs=model.inputs(),
        bar=bar,
    )


def measured(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of our ways to run the case: tuned, checked, timed in a race."""
    inputs = case.inputs
    how = {"effort": args.effort, "goal": args.goal, "ops": args.tune}
    for function in case.ours.values() if args.effort != "none" else ():
        budget_s = args.budget_s / len(case.ours)
        print(tune(function, *inputs, **how, budget_s=budget_s))
    sides = {**case.ours, "plain": case.plain}
    calls = {name: jax.jit(function) for name, function in sides.items()}
    errors = _errors(calls, case.plain, inputs)
    bound = {n: (lambda f=f: f(*inputs)) for n, f in calls.items()}
    times = common.race(bound, args.rounds)
    wall = measure.race(
        {n: common.repeating(f) for n, f in bound.items()}, measure.Timing()
    )
    rows = []
    for name, function in case.ours.items():
        explanation = explain(function)(*inputs)
        print(explanation)
        row = {
            "name": f"{case.name}, {name}" if name else case.name,
            "model": dataclasses.asdict(case.model),
            "effort": args.effort,
            "ours_us": statistics.median(times[name]),
            "plain_us": statistics.median(times["plain"]),
            "ratio": common.median_ratio(times, "plain", name),
            "wall_ours_us": wall.median_us(name),
            "wall_plain_us": wall.median_us("plain"),
            "wall_ratio": wall.ratio("plain", name),
            "error": errors[name],
            "plain_error": errors["plain"],
            "sites": [
                {"problem": str(s.problem), "variant": s.plan.variant}
                for s in explanation.sites
                if s.problem and s.plan
            ],
        }
        rows.append(row if case.bar is None else {**row, "bar": case.bar})
    return rows


def _errors(calls: dict[str, Any], plain: Any, inputs: Any) -> dict[str, float]:
    """The largest error of any result, divided by the exact result's root mean square.

    The exact result is that of the plain function in float32, with products of the
    highest precision.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.map(np.asarray, jax.jit(plain)(*wide))
    return {
        name: max(
            float(np.abs(np.asarray(x, np.float32) - y).max() / np.sqrt((y**2).mean()))
            for x, y in zip(
                jax.tree.leaves(call(*inputs)), jax.tree.leaves(exact), strict=True
            )
        )
        for name, call in calls.items()
    }


if __name__ == "__main__":
    main()

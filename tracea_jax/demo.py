"""The demo: a transformer's MLP block, tuned and run on this machine.

    y = gelu(x @ w1 + b1) @ w2 + b2 + x

Both products are tuned, the block runs under jit and is compared with float64, and the
table shows each product and the block against what jit makes of the plain code.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import ops, variants
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.tune import local_device, tune
from tracea_jax.tuning import measure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens, model width, hidden width and dtype of the block."""

    tokens: int
    width: int
    hidden: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.width} -> {self.hidden}, {self.dtype}"


# GPT-2's layers on a CPU; Llama 3 8B's on a GPU.
SIZES = {
    "cpu": Sizes(tokens=512, width=768, hidden=3072, dtype="float32"),
    "cuda": Sizes(tokens=4096, width=4096, hidden=14336, dtype="bfloat16"),
}

Parameters = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds."""

    what: str
    ours_us: float
    xla_us: float
    ratio: float
    choice: str
    origin: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo found; ``print`` it.

    Attributes:
      device, sizes: where and what.
      rows: each product, then the block; ratio is XLA's time by ours.
      error, plain_error: largest error of the block against float64, relative to the
        largest result, with our ops and in plain JAX.
    """

    device: Device
    sizes: Sizes
    rows: tuple[Row, ...]
    error: float
    plain_error: float

    @property
    def ok(self) -> bool:
        """Whether our block is as accurate as its dtype lets it be."""
        unit = float(jnp.finfo(self.sizes.dtype).eps)
        return self.error <= max(2 * self.plain_error, 8 * unit)

    def __str__(self) -> str:
        head = ("", "ours us", "XLA us", "XLA/ours", "choice", "origin")
        body = [
            (r.what, f"{r.ours_us:.1f}", f"{r.xla_us:.1f}", f"{r.ratio:.2f}", r.choice)
            + (r.origin,)
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        table = [
            "  ".join(
                cell.rjust(w) if 0 < i < 4 else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [head, *body]
        ]
        verdict = "correct" if self.ok else "WRONG"
        return "\n".join(
            [
                f"MLP block on {self.device}",
                f"{self.sizes}",
                "",
                *table,
                "",
                f"error against float64: {self.error:.2e} ({verdict}); "
                f"plain JAX: {self.plain_error:.2e}",
            ]
        )


def demo(progress: Any = None, budget_s: float = 60.0) -> Outcome:
    """Tunes and runs the block on JAX's default device.

    Args:
      progress: as in ``tracea.tune``.
      budget_s: seconds of search for each of the two products.
    """
    device = local_device()
    sizes = SIZES.get(device.platform, SIZES["cpu"])
    first, second = problems(sizes)
    entries = [
        tune(problem, effort="quick", budget_s=budget_s, progress=progress)
        for problem in (first, second)
    ]
    x, params = inputs(sizes)
    ours, plain = jax.jit(block), jax.jit(plain_block)
    result, plain_result = ours(x, *params), plain(x, *params)
    exact = block_f64(x, *params)
    race = measure.race(
        {"ours": _repeating(ours, x, params), "xla": _repeating(plain, x, params)},
        measure.Timing(),
        on_round=functools.partial(_tell, progress),
    )
    rows = [
        Row(
            what=what,
            ours_us=entry.best.time_us or float("nan"),
            xla_us=entry.best.xla_us or float("nan"),
            ratio=entry.best.ratio or float("nan"),
            choice=_choice(problem, entry),
            origin="tuned",
        )
        for what, problem, entry in zip(
            ("gelu(x@w1+b1)", "h@w2+b2+x"), (first, second), entries, strict=True
        )
    ]
    rows.append(
        Row(
            what="block",
            ours_us=race.median_us("ours"),
            xla_us=race.median_us("xla"),
            ratio=race.ratio("xla", "ours"),
            choice="-",
            origin="measured",
        )
    )
    return Outcome(
        device=device,
        sizes=sizes,
        rows=tuple(rows),
        error=relative_error(result, exact),
        plain_error=relative_error(plain_result, exact),
    )


def problems(sizes: Sizes) -> tuple[GemmProblem, GemmProblem]:
    """The block's two products as the op will meet them."""
    dtypes: Any = {"lhs": sizes.dtype, "rhs": sizes.dtype, "out": sizes.dtype}
    return (
        GemmProblem(
            m=sizes.tokens,
            n=sizes.hidden,
            k=sizes.width,
            epilogue=Epilogue(bias="row", activation="gelu"),
            **dtypes,
        ),
        GemmProblem(
            m=sizes.tokens,
            n=sizes.width,
            k=sizes.hidden,
            epilogue=Epilogue(bias="row", residual=True),
            **dtypes,
        ),
    )


def inputs(sizes: Sizes, seed: int = 0) -> tuple[jax.Array, Parameters]:
    """Tokens and parameters at the scale of a trained model's."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = [
        (sizes.tokens, sizes.width),
        (sizes.width, sizes.hidden),
        (sizes.hidden,),
        (sizes.hidden, sizes.width),
        (sizes.width,),
    ]
    x, *params = (
        (jax.random.normal(key, shape) / np.sqrt(shape[0] if i % 2 else 1)).astype(
            sizes.dtype
        )
        for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
    )
    w1, b1, w2, b2 = params
    return x, (w1, b1, w2, b2)


def block(x, w1, b1, w2, b2):
    """The block on our ops."""
    h = ops.matmul(x, w1, bias=b1, activation="gelu")
    return ops.matmul(h, w2, bias=b2, residual=x)


def plain_block(x, w1, b1, w2, b2):
    """The block as people write it."""
    h = jax.nn.gelu(x @ w1 + b1)
    return h @ w2 + b2 + x


def block_f64(x, w1, b1, w2, b2) -> np.ndarray:
    """The first tokens of the block in float64, on the host."""
    x, w1, b1, w2, b2 = (np.asarray(a).astype(np.float64) for a in (x, w1, b1, w2, b2))
    x = x[:64]
    z = x @ w1 + b1
    h = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    return h @ w2 + b2 + x


def relative_error(result: jax.Array, exact: np.ndarray) -> float:
    error = np.abs(np.asarray(result[: len(exact)]).astype(np.float64) - exact)
    return float(error.max() / np.abs(exact).max())


def _choice(problem: GemmProblem, entry: Any) -> str:
    variant = variants.get(problem.op, entry.best.variant)
    config = variants.config_from_json(variant, entry.best.config)
    return str(Choice(variant=variant.name, config=config))


def _tell(progress: Any, done: int, total: int) -> None:
    if progress is not None:
        progress(
            phase="block", done=done, total=max(done, total), best_us=None, message=""
        )


def _repeating(call: Any, x: jax.Array, params: Parameters) -> measure.Run:
    def run(count: int) -> None:
        for _ in range(count - 1):
            call(x, *params)
        jax.block_until_ready(call(x, *params))

    return run

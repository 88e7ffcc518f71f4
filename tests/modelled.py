"""Problems of every op at awkward sizes, and a small model of products."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.model import features, trees
from tracea_jax.model.model import Kind, Model, OpModel, Regressor
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)

AMX = CpuDevice(name="cpu", isa="amx", cores=2, l2_bytes=2 << 20, l3_bytes=64 << 20)
H200 = NAMED["H200"]
DEVICES = (AMX, dataclasses.replace(AMX, isa="avx2", l3_bytes=0), H200)
SIZES = (0, 1, 7, 8, 64, 509)


def products(rng: random.Random) -> GemmProblem | GatedMatmulProblem:
    dtype = rng.choice(("float32", "bfloat16"))
    sizes = {name: rng.choice(SIZES) for name in ("m", "n", "k")}
    fields = {**sizes, **dict.fromkeys(("lhs", "rhs", "out"), dtype)}
    layout = rng.choice(("nn", "nt", "tn", "tt"))
    if rng.random() < 0.3:
        return GatedMatmulProblem(layout=layout, **fields)
    epilogue = rng.choice((Epilogue(), Epilogue(bias="row", activation="gelu")))
    return GemmProblem(layout=layout, epilogue=epilogue, **fields)


def convolutions(rng: random.Random) -> Conv2dProblem:
    groups = rng.choice((1, 1, 3))
    names = ("batch", "height", "width", "kernel_height", "kernel_width")
    sizes: dict[str, Any] = {name: rng.choice((1, 2, 7, 13)) for name in names}
    return Conv2dProblem(
        direction=rng.choice(("forward", "input_grad", "weight_grad")),
        **sizes,
        in_channels=groups * rng.choice((1, 8, 61)),
        out_channels=groups * rng.choice((1, 8, 61)),
        groups=groups,
        strides=(rng.choice((1, 3)), 1),
        dilation=(1, rng.choice((1, 2))),
    )


def attentions(rng: random.Random) -> AttentionProblem:
    kv_heads = rng.choice((1, 3))
    return AttentionProblem(
        direction=rng.choice(("forward", "backward")),
        batch=rng.choice(SIZES[:4]),
        q_len=rng.choice(SIZES),
        kv_len=rng.choice(SIZES),
        heads=kv_heads * rng.choice((1, 5)),
        kv_heads=kv_heads,
        head_dim=rng.choice((8, 61, 128)),
        is_causal=rng.random() < 0.5,
        window=rng.choice((None, (3, 5), (1 << 40, 0))),
        scale=1.0,
    )


DRAWS = (products, convolutions, attentions)


def drawn(count: int, seed: int = 0, draws=DRAWS) -> list[Problem]:
    rng = random.Random(seed)
    return [rng.choice(draws)(rng) for _ in range(count)]


def stump(name: str, edge: float, low: float, high: float) -> trees.Ensemble:
    """Two members that both tell the values of one feature apart."""
    tree = trees.Tree(
        feature=np.zeros(3, int),
        step=np.zeros(3, int),
        left=np.array([1, 0, 0]),
        right=np.array([2, 0, 0]),
        value=np.array([0.0, low, high]),
        is_leaf=np.array([False, True, True]),
    )
    return trees.ensemble([[tree], [tree]], [0.0, 0.1], [name], [np.array([edge])])


ANYTHING = (-math.inf, math.inf)


def op_model(kinds: dict[str, Kind], ours: set[str], problems, device) -> OpModel:
    def regressor(*of: float) -> Regressor:
        return Regressor(trees=stump("flops", *of), noise=0.05, gain=2.0)

    names = {n for p in problems for n in features.of_problem(p, device)}
    return OpModel(
        regressors={
            "xla": regressor(20.0, 0.0, 1.0),
            "ours": regressor(20.0, 1.0, -1.0),  # relative to XLA
        },
        overhead_us=2.5,
        kinds=kinds,
        reach=dict.fromkeys(sorted(names), ANYTHING),
        variants=frozenset(ours),
        facts={"problems": 7},
    )


def of_products(margin: float = 1.0, **portfolio) -> Model:
    """Covers float32 products without an epilogue on a CPU with AMX."""
    plain = GemmProblem(m=1, n=1, k=1)
    kind = Kind(margin=margin, portfolio=portfolio, facts={})
    kinds = {features.kind(plain): kind}
    return Model(
        device="cpu-amx", ops={"matmul": op_model(kinds, {"gemm_cpu"}, [plain], AMX)}
    )

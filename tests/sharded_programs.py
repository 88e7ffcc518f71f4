"""Training steps in plain JAX, and the ways in which people spread them over devices.

A step takes ``(state, batch)`` and returns the loss and the next state: parameters and
the moments of Adam. Parameters have names of their layer, images are NHWC, and every
weight's last two dimensions are what a product contracts and what it gives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_work import Measured, measured
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any
Step = Callable[[Tree, Tree], tuple[jax.Array, Tree]]

# As in `jit`, of programs whose values and collectives matter, and not their speed.
COMPILER = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A model with its loss.

    Attributes:
      name: of tests and tables.
      loss: ``loss(params, inputs, targets)``, a mean over the batch.
      params: float32 arrays of NumPy, by name.
      inputs, targets: the first dimension is the batch.
      tensor: how tensor parallelism splits parameters; each device has all of others.
      calls: kernels of ours in the program of one device.
      left: products that XLA computes there.
      second: what the second dimension of a batch is, if a layout may split it.
    """

    name: str
    loss: Callable[..., jax.Array]
    params: Mapping[str, np.ndarray]
    inputs: np.ndarray
    targets: np.ndarray
    tensor: Mapping[str, P]
    calls: int
    left: int = 0
    second: str | None = None

    @functools.cached_property
    def batch(self) -> Tree:
        return self.inputs, self.targets

    @functools.cached_property
    def state(self) -> Tree:
        """Parameters, and moments as after some steps: no gradient is near to zero."""
        moments = {n: _normal(*p.shape, seed=7) for n, p in self.params.items()}
        first = {n: 1e-3 * m for n, m in moments.items()}
        second = {n: 1e-3 + np.square(1e-2 * m) for n, m in moments.items()}
        return dict(self.params), first, second

    @property
    def step(self) -> Step:
        return functools.partial(adam_step, self.loss)


def adam_step(loss: Callable[..., jax.Array], state: Tree, batch: Tree) -> Any:
    params, first, second = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-2 * m / (jnp.sqrt(v) + 1e-6), params, first, second
    )
    return value, (params, first, second)


# --- layouts --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a step is spread over the axes "data" and "model" of a mesh.

    Attributes:
      shape: devices of each axis.
      split: the dimension of a batch over "data", if there is one.
      tensor: whether parameters are split over "model", as their program says.
      weights: whether parameters of rank 2 and more are also split over "data".
      second: what the second dimension has to be, if it is the one split.
    """

    name: str
    shape: tuple[int, int]
    split: int | None = 0
    tensor: bool = False
    weights: bool = False
    second: str | None = None

    def fits(self, program: Program) -> bool:
        return self.second in (None, program.second)

    def mesh(self, axis_type: Any = AxisType.Auto) -> Mesh:
        devices = np.array(jax.devices()[: math.prod(self.shape)]).reshape(self.shape)
        return Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)

    def specs(self, program: Program) -> tuple[Tree, Tree]:
        """Those of the state and of the batch."""
        params = {name: self._spec(program, name) for name in program.params}
        return (params, params, params), tuple(map(self._batch_spec, program.batch))

    def _batch_spec(self, x: np.ndarray) -> P:
        """One label of an image has no second dimension."""
        if self.split is None or self.split >= x.ndim:
            return P()
        return P(*[None] * self.split, "data")

    def _spec(self, program: Program, name: str) -> P:
        shape = program.params[name].shape
        given = program.tensor.get(name, P()) if self.tensor else P()
        spec = [*given, *[None] * (len(shape) - len(given))]
        if self.weights and len(shape) >= 2:
            for i in range(len(shape) - 2, len(shape)):
                if spec[i] is None and shape[i] % self.shape[0] == 0:
                    spec[i] = "data"
                    break
        return P(*spec)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="DP", shape=(8, 1)),
        Layout(name="TP", shape=(1, 4), split=None, tensor=True),
        Layout(name="DPxTP", shape=(2, 4), tensor=True),
        Layout(name="FSDP", shape=(8, 1), weights=True),
        Layout(name="FSDPxTP", shape=(2, 4), tensor=True, weights=True),
        Layout(name="SP", shape=(8, 1), split=1, second="sequence"),
        Layout(name="rows", shape=(8, 1), split=1, second="rows"),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A step that is compiled for several devices."""

    compiled: Any
    state: Tree
    batch: Tree

    @property
    def work(self) -> Measured:
        return measured(self.compiled.as_text())

    def __call__(self) -> Tree:
        """The loss and the next state, as arrays of NumPy."""
        return jax.tree.map(np.asarray, self.compiled(self.state, self.batch))


def _shardings(program: Program, layout: Layout) -> tuple[Tree, Tree]:
    mesh = layout.mesh()
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        layout.specs(program),
        is_leaf=lambda s: isinstance(s, P),
    )


def placed(program: Program, layout: Layout) -> tuple[Tree, Tree]:
    """The state and the batch on the devices of a layout."""
    return jax.device_put((program.state, program.batch), _shardings(program, layout))


def lowered(step: Step, program: Program, layout: Layout) -> tuple[Any, Tree, Tree]:
    """``jit`` of a step, its state and its batch; the next state has its shardings."""
    mesh = layout.mesh()
    of_state, _ = _shardings(program, layout)
    state, batch = placed(program, layout)
    jitted = jax.jit(
        step,
        out_shardings=(NamedSharding(mesh, P()), of_state),
        compiler_options=COMPILER,
    )
    return jitted.lower(state, batch), state, batch


def spread(step: Step, program: Program, layout: Layout) -> Spread:
    program_of_devices, state, batch = lowered(step, program, layout)
    return Spread(program_of_devices.compile(), state, batch)


def alone(step: Step, program: Program) -> Spread:
    """The same on one device."""
    jitted = jax.jit(step, compiler_options=COMPILER)
    state, batch = jax.device_put((program.state, program.batch), jax.devices()[0])
    return Spread(jitted.lower(state, batch).compile(), state, batch)


# --- layers ---------------------------------------------------------------------------


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape).astype(np.float32)


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Products of these keep the size of what they multiply; vectors are near to 1."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        fan_in = (
            math.prod(shape[:-1]) if len(shape) == 4 else shape[max(-2, -len(shape))]
        )
        x = _normal(*shape, seed=i + 1)
        found[name] = 1 + 0.1 * x if len(shape) == 1 else x / np.float32(fan_in**0.5)
    return found


def _tokens(batch: int, length: int, vocabulary: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocabulary, (batch, length)).astype(np.int32)


def _labels(batch: int, classes: int) -> np.ndarray:
    return _tokens(batch, 1, classes, 1)[:, 0]


def _rms_norm(x: jax.Array, g: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g


def _layer_norm(x: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * g + b


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, labels[..., None], -1).mean()


def _heads(x: jax.Array, width: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, width)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    return y.reshape(*y.shape[:-2], -1)


_COLUMNS, _ROWS = P(None, "model"), P("model", None)


# --- programs -------------------------------------------------------------------------


def _mlp() -> Program:
    batch, width, hidden = 64, 32, 128

    def loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ p["up"] + p["up_bias"])
        return jnp.square(h @ p["down"] + p["down_bias"] - y).mean()

    return Program(
        name="mlp",
        loss=loss,
        params=_weights(
            up=(width, hidden),
            up_bias=(hidden,),
            down=(hidden, width),
            down_bias=(width,),
        ),
        inputs=_normal(batch, width),
        targets=_normal(batch, width, seed=1),
        calls=5,
        tensor={"up": _COLUMNS, "up_bias": P("model"), "down": _ROWS},
    )


def _llama() -> Program:
    """A block: RMS norms, grouped queries, rotary positions, a gated MLP."""
    batch, length, width, heads, kv, head, hidden = 8, 32, 64, 8, 4, 16, 128

    def rotated(x: jax.Array) -> jax.Array:
        rates = 10.0 ** -(np.arange(head // 2) / 4.0)
        angles = (np.arange(length)[:, None, None] * rates).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], -1
        )

    def loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        h = _rms_norm(x, p["norm_1"])
        q, k, v = (_heads(h @ p[name], head) for name in ("q", "k", "v"))
        x = x + _attended(rotated(q), rotated(k), v, causal=True) @ p["o"]
        h = _rms_norm(x, p["norm_2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return jnp.square(x - y).mean()

    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), _COLUMNS)
    return Program(
        name="llama",
        loss=loss,
        params=_weights(
            norm_1=(width,),
            q=(width, heads * head),
            k=(width, kv * head),
            v=(width, kv * head),
            o=(heads * head, width),
            norm_2=(width,),
            gate=(width, hidden),
            up=(width, hidden),
            down=(hidden, width),
        ),
        inputs=_normal(batch, length, width),
        targets=_normal(batch, length, width, seed=1),
        calls=23,
        tensor={**columns, "o": _ROWS, "down": _ROWS},
        second="sequence",
    )


def _gpt2() -> Program:
    """Two layers in a scan, q, k and v in one product, a head tied to the embedding."""
    batch, length, width, heads, layers, vocabulary = 8, 32, 64, 8, 2, 256

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        h = _layer_norm(x, p["norm_1"], p["norm_1_bias"])
        qkv = jnp.einsum("btd,dce->btce", h, p["qkv"]) + p["qkv_bias"]
        q, k, v = (_heads(qkv[:, :, i], width // heads) for i in range(3))
        x = x + (_attended(q, k, v, causal=True) @ p["o"] + p["o_bias"])
        h = _layer_norm(x, p["norm_2"], p["norm_2_bias"])
        h = jax.nn.gelu(h @ p["up"] + p["up_bias"])
        return x + (h @ p["down"] + p["down_bias"]), None

    def loss(p: Tree, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = p["tokens"][tokens] + p["positions"]
        x, _ = jax.lax.scan(layer, x, {n: p[n] for n in stacked})
        x = _layer_norm(x, p["norm"], p["norm_bias"])
        return _cross_entropy(x @ p["tokens"].T, labels)

    of_layers = _weights(
        norm_1=(layers, width),
        norm_1_bias=(layers, width),
        qkv=(layers, width, 3, width),
        qkv_bias=(layers, 3, width),
        o=(layers, width, width),
        o_bias=(layers, width),
        norm_2=(layers, width),
        norm_2_bias=(layers, width),
        up=(layers, width, 4 * width),
        up_bias=(layers, 4 * width),
        down=(layers, 4 * width, width),
        down_bias=(layers, width),
    )
    stacked = tuple(of_layers)
    shared = _weights(
        tokens=(vocabulary, width),
        positions=(length, width),
        norm=(width,),
        norm_bias=(width,),
    )
    return Program(
        name="gpt2",
        loss=loss,
        params={**of_layers, **shared},
        inputs=_tokens(batch, length, vocabulary, 1),
        targets=_tokens(batch, length, vocabulary, 2),
        calls=17,
        tensor={
            "tokens": _ROWS,
            "qkv": P(None, None, None, "model"),
            "qkv_bias": P(None, None, "model"),
            "o": P(None, "model", None),
            "up": P(None, None, "model"),
            "up_bias": P(None, "model"),
            "down": P(None, "model", None),
        },
        second="sequence",
    )


def _vit() -> Program:
    """A block over patches of images, and classes of the mean of its tokens."""
    batch, size, patch, width, heads, classes = 8, 32, 4, 64, 8, 10
    side = size // patch

    def loss(p: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = images.reshape(-1, side, patch, side, patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, patch * patch * 3)
        x = x @ p["patch"] + p["patch_bias"] + p["positions"]
        h = _layer_norm(x, p["norm_1"], p["norm_1_bias"])
        q, k, v = (_heads(h @ p[name], width // heads) for name in ("q", "k", "v"))
        x = x + _attended(q, k, v, causal=False) @ p["o"]
        h = _layer_norm(x, p["norm_2"], p["norm_2_bias"])
        h = jax.nn.gelu(h @ p["up"] + p["up_bias"])
        x = x + (h @ p["down"] + p["down_bias"])
        return _cross_entropy(x.mean(1) @ p["head"], labels)

    columns = dict.fromkeys(("q", "k", "v", "up"), _COLUMNS)
    return Program(
        name="vit",
        loss=loss,
        params=_weights(
            patch=(patch * patch * 3, width),
            patch_bias=(width,),
            positions=(side * side, width),
            norm_1=(width,),
            norm_1_bias=(width,),
            q=(width, width),
            k=(width, width),
            v=(width, width),
            o=(width, width),
            norm_2=(width,),
            norm_2_bias=(width,),
            up=(width, 4 * width),
            up_bias=(4 * width,),
            down=(4 * width, width),
            down_bias=(width,),
            head=(width, classes),
        ),
        inputs=_normal(batch, size, size, 3),
        targets=_labels(batch, classes),
        calls=25,
        tensor={**columns, "up_bias": P("model"), "o": _ROWS, "down": _ROWS},
        second="rows",
    )


def _resnet() -> Program:
    """A stem, a residual block, a block that halves the image, and a classifier."""
    batch, size, width, classes = 8, 32, 16, 10

    def convolved(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def normed(p: Tree, name: str, x: jax.Array) -> jax.Array:
        mean = x.mean((0, 1, 2))
        var = jnp.square(x - mean).mean((0, 1, 2))
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        return x * p[f"{name}_scale"] + p[f"{name}_bias"]

    def block(p: Tree, name: str, x: jax.Array, stride: int) -> jax.Array:
        h = convolved(x, p[f"{name}_1"], stride)
        h = jax.nn.relu(normed(p, f"{name}_1", h))
        h = normed(p, f"{name}_2", convolved(h, p[f"{name}_2"]))
        if stride > 1:
            x = convolved(x, p[f"{name}_skip"], stride)
        return jax.nn.relu(x + h)

    def loss(p: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(normed(p, "stem", convolved(images, p["stem"])))
        x = block(p, "same", x, 1)
        x = block(p, "half", x, 2)
        return _cross_entropy(x.mean((1, 2)) @ p["head"], labels)

    def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}_scale": (channels,), f"{name}_bias": (channels,)}

    inner = ("same_1", "half_1")
    outputs = P(None, None, None, "model")
    channels = {f"{name}_{what}" for name in inner for what in ("scale", "bias")}
    return Program(
        name="resnet",
        loss=loss,
        params=_weights(
            stem=(3, 3, 3, width),
            **norm("stem", width),
            same_1=(3, 3, width, width),
            **norm("same_1", width),
            same_2=(3, 3, width, width),
            **norm("same_2", width),
            half_1=(3, 3, width, 2 * width),
            **norm("half_1", 2 * width),
            half_2=(3, 3, 2 * width, 2 * width),
            **norm("half_2", 2 * width),
            half_skip=(1, 1, width, 2 * width),
            head=(2 * width, classes),
        ),
        inputs=_normal(batch, size, size, 3),
        targets=_labels(batch, classes),
        calls=15,
        left=5,  # of few channels
        tensor={
            **dict.fromkeys(inner, outputs),
            **dict.fromkeys(("same_2", "half_2"), P(None, None, "model", None)),
            **dict.fromkeys(channels, P("model")),
        },
        second="rows",
    )


def _cross_entropies() -> Program:
    """A large vocabulary behind one product, split over "model" where that is split."""
    batch, width, vocabulary = 64, 32, 2048

    def loss(p: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        return _cross_entropy(x @ p["head"].T, labels)

    return Program(
        name="cross_entropy",
        loss=loss,
        params=_weights(head=(vocabulary, width)),
        inputs=_normal(batch, width),
        targets=_labels(batch, vocabulary),
        calls=2,
        tensor={"head": _ROWS},
    )


# Built when a test needs them.
PROGRAMS: Mapping[str, Callable[[], Program]] = {
    name: functools.cache(make)
    for name, make in {
        "mlp": _mlp,
        "llama": _llama,
        "gpt2": _gpt2,
        "vit": _vit,
        "resnet": _resnet,
        "cross_entropy": _cross_entropies,
    }.items()
}

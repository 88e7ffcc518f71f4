"""Attention of operands with special values, and what may become of them.

A form says which scores there are: masks, biases, caps, sinks. A seed gives operands
with infinities, NaN, zeros of both signs, and numbers that are tiny or huge. Results
and gradients are judged by readings of the formula, which differ in what the
documentation leaves open:

* whether a pair of weight zero is added to a sum, where zero times infinity is NaN;
* how small a weight may become before it is zero;
* whether masked keys count where all scores that are seen are below the fill;
* by which of two sums a query's gradient is centred.

Each element must be of the kind (finite, NaN, either infinity) that a reading gives it.
Elements whose sums come close to overflow, or depend on whether subnormal numbers are
zeros, are left out; numbers are compared where rounding does not decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from numerics import array

MAX = float(np.finfo(np.float32).max)
TINY = 2e-37  # times a usual scale it may be subnormal
JAX_FILL = -0.7 * MAX
SPECIAL = (
    *(0.0, -0.0, 1e-40, 1e-38, -1e-38, 2.4e38, -2.4e38, 3e38, -1e20, 1e10),
    *(np.inf, -np.inf, np.nan, np.inf, -np.inf, np.nan),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Attention without its operands.

    Attributes:
      dtype, batch, q_len, kv_len, heads, kv_heads, head_dim, scale: as in the op.
      mask: of "none", "causal", "window", "lengths", "keys" and "random".
      fill: of masked scores.
      bias: its shape, or None.
      cap: the soft cap, or None.
      sinks: whether there is one for each head.
    """

    dtype: str = "float32"
    batch: int = 2
    q_len: int = 6
    kv_len: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    scale: float = 0.5
    mask: str = "none"
    fill: float = JAX_FILL
    bias: tuple[int, int, int, int] | None = None
    cap: float | None = None
    sinks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        bias = ("bias",) if self.bias else ()
        return ("q", "k", "v", *bias, *(("sinks",) if self.sinks else ()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        k = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        found: dict[str, Any] = {
            "q": (self.batch, self.q_len, self.heads, self.head_dim),
            "k": k,
            "v": k,
            "bias": self.bias,
            "sinks": (self.heads,),
        }
        return {name: found[name] for name in self.names}

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys of each example, where the mask is "lengths"."""
        part = np.arange(self.batch) % 2 == 0
        return (
            np.where(part, -(-2 * self.q_len // 3), self.q_len).astype(np.int32),
            np.where(part, self.kv_len, -(-self.kv_len // 2)).astype(np.int32),
        )

    def seen(self) -> np.ndarray:
        """(batch, heads, q_len, kv_len): which keys a query sees."""
        i, j = np.arange(self.q_len)[:, None], np.arange(self.kv_len)[None]
        allowed = np.ones((self.batch, self.heads, self.q_len, self.kv_len), bool)
        rng = np.random.default_rng(self.kv_len)
        match self.mask:
            case "causal":
                allowed &= j <= i
            case "window":
                allowed &= (i - 2 <= j) & (j <= i + 1)
            case "lengths":
                allowed &= (j < self.lengths[1][:, None, None])[:, None]
                allowed &= (i < self.lengths[0][:, None, None])[:, None]
            case "keys":
                keys = rng.random((self.batch, 1, 1, self.kv_len)) < 0.7
                keys[..., 0] = True
                allowed &= keys
            case "random":
                any_of = rng.random((1, self.heads, self.q_len, self.kv_len)) < 0.6
                any_of[:, :, 0] = False  # a query that sees nothing
                allowed &= any_of
            case _:
                pass
        return allowed


Operands = dict[str, np.ndarray]


@np.errstate(all="ignore")
def operands(form: Form, seed: int) -> tuple[Operands, np.ndarray, str]:
    """Operands in float32, exact in the form's dtype, a cotangent, what is special."""
    rng = np.random.default_rng(seed)
    x = {n: rng.standard_normal(s).astype("float32") for n, s in form.shapes.items()}
    cotangent = rng.standard_normal(form.shapes["q"]).astype("float32")
    value = SPECIAL[rng.integers(len(SPECIAL))]
    b, h, c = (int(rng.integers(n)) for n in (form.batch, form.heads, form.head_dim))
    i, j = int(rng.integers(form.q_len)), int(rng.integers(form.kv_len))
    keys = x["k"][:, :, h // (form.heads // form.kv_heads), c]
    words = []
    kind = rng.integers(8)
    if kind < 3:  # all scores of a query are one infinity, or large
        x["q"][b, i, h, c] = value
        some = rng.random(keys.shape) * 0.9 + 0.1
        keys[:] = some if kind < 2 else rng.choice([0.5, 1.0], keys.shape)
        words.append(f"a query's scores {value}")
    elif kind == 3:
        x["k"][b, j, :, c] = value
        x["q"][b, :, :, c] = np.abs(x["q"][b, :, :, c]) % 0.9 + 0.1
        words.append(f"a key's scores {value}")
    elif kind == 4 and form.bias:
        x["bias"][..., int(rng.integers(form.bias[2])), :] = value
        words.append(f"a query's biases {value}")
    elif kind == 5 and form.sinks:
        x["sinks"][h] = value
        words.append(f"a sink {value}")
    else:
        for _ in range(rng.integers(1, 4)):
            name = form.names[int(rng.integers(len(form.names)))]
            value = SPECIAL[rng.integers(len(SPECIAL))]
            at = tuple(
                int(rng.integers(n)) if rng.random() < 0.8 else slice(None)
                for n in x[name].shape
            )
            x[name][at] = value
            words.append(f"{name} {value}")
    if rng.random() < 0.15:
        value = (np.inf, -np.inf, np.nan, 0.0)[rng.integers(4)]
        cotangent[b, i, h, c] = value
        words.append(f"cotangent {value}")
    rounded = {
        n: _rounded(a, "float32" if n == "sinks" else form.dtype) for n, a in x.items()
    }
    return rounded, _rounded(cotangent, form.dtype), ", ".join(words)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype("float32")


def as_arrays(form: Form, x: Operands) -> list[Any]:
    """The operands as JAX has them."""
    return [
        array(a.astype("float32" if n == "sinks" else jnp.dtype(form.dtype)))
        for n, a in x.items()
    ]


# --- readings -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the formula is read.

    Attributes:
      skips: whether pairs of weight zero are left out of sums.
      hides: whether masked keys have no weight if a query sees any key.
      centred: whether gradients are centred by the sum of do o, else of p dp.
      flush: weights below are zero.
      pairs: whether what a masked pair adds to gradients is multiplied by its weight of
        zero, and not left out.
      fill: of masked scores, if it is not the form's.
    """

    skips: bool = False
    pairs: bool = False
    fill: float | None = None
    hides: bool = False
    centred: bool = False
    flush: float = 0.0


READINGS = (
    Reading(),
    Reading(hides=True),
    Reading(hides=True, centred=True),
    Reading(skips=True, hides=True),
    Reading(skips=True, hides=True, centred=True),
    Reading(skips=True, hides=True, centred=True, flush=1e-30),
    Reading(skips=True, centred=True),
    Reading(hides=True, centred=True, pairs=True),
    Reading(fill=JAX_FILL),
    Reading(fill=JAX_FILL, skips=True),
)


@np.errstate(all="ignore")
def read(form: Form, how: Reading, x: Operands, do: np.ndarray) -> list[np.ndarray]:
    """[o, dq, dk, dv (, dbias) (, dsinks)] in float32."""
    group = form.heads // form.kv_heads
    q, do = (a.transpose(0, 2, 1, 3)[:, :, :, None] for a in (x["q"], do))
    k, v = (
        np.repeat(x[n], group, 2).transpose(0, 2, 1, 3)[:, :, None] for n in ("k", "v")
    )  # (batch, heads, queries, keys, columns)
    seen = form.seen()
    s, slope = _scores(form, (q * k).sum(-1), x)
    any_seen = seen.any(-1, keepdims=True)
    fill = np.float32(form.fill if how.fill is None else how.fill)
    fill = np.where(any_seen & how.hides, -np.inf, fill)
    s = np.where(seen, s, fill)
    top = s.max(-1, keepdims=True)
    sinks = x["sinks"][:, None, None] if form.sinks else np.float32(-np.inf)
    top = np.maximum(top, sinks) if form.sinks else top
    of_sink = np.exp(sinks - top) if form.sinks else 0
    w = np.exp(s - top)
    hidden = ~seen & any_seen & how.hides
    w = np.where(hidden, 0, w)
    total = w.sum(-1, keepdims=True) + of_sink
    p = np.where(hidden, 0, w / total)
    p = np.where(p < _least(form, how), 0, p)

    def product(weights: np.ndarray, rows: Any) -> np.ndarray:
        terms = weights[..., None] * rows
        return np.where(weights[..., None] == 0, 0, terms) if how.skips else terms

    o = product(p, v).sum(3)
    inside = np.ones((form.batch, 1, form.q_len, 1), bool)
    if form.mask == "lengths":
        inside = np.arange(form.q_len)[:, None] < form.lengths[0][:, None, None, None]
    o, do = (
        np.where(inside, a, 0) if how.skips else a * inside for a in (o, do[:, :, :, 0])
    )
    dp = (do[:, :, :, None] * v).sum(-1)
    pdp = product(p, dp[..., None])[..., 0]
    delta = pdp.sum(-1, keepdims=True)
    if how.centred:
        delta = (do * _rounded(o, form.dtype)).sum(-1, keepdims=True)
    ds = product(p, (dp - delta)[..., None])[..., 0]
    if how.pairs:
        ds = ds * slope
    else:  # the derivative of a choice is zero where it was not taken
        ds = (
            np.where(seen, ds * slope, 0)
            if how.hides
            else np.where(seen, ds, 0) * slope
        )
    scaled = ds * np.float32(form.scale)
    dq = product(scaled, k).sum(3)
    dk, dv = product(scaled, q).sum(2), product(p, do[:, :, :, None]).sum(2)
    of_keys = [
        a.reshape(form.batch, form.kv_heads, group, form.kv_len, -1).sum(2)
        for a in (dk, dv)
    ]
    found = [a.transpose(0, 2, 1, 3) for a in (o, dq, *of_keys)]
    if form.bias:
        axes = tuple(i for i, n in enumerate(form.bias) if n == 1)
        found.append(ds.sum(axes, keepdims=True))
    if form.sinks:
        found.append(-(of_sink / total * delta).sum((0, 2, 3)))
    return [_rounded(a, form.dtype) for a in found[:4]] + found[4:]


def _scores(form: Form, s: np.ndarray, x: Operands) -> tuple[np.ndarray, Any]:
    """The scores before the mask, and their derivative by what a cap bounds."""
    s = s * np.float32(form.scale)
    if form.bias:
        s = s + x["bias"]
    if not form.cap:
        return s, np.float32(1)
    bounded = np.tanh(s / np.float32(form.cap))
    return np.float32(form.cap) * bounded, 1 - bounded**2


def _least(form: Form, how: Reading) -> float:
    return 1e-4 if how.flush and form.dtype == "float16" else how.flush


# --- what cannot be said --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unsure:
    """(batch, heads, queries) or (batch, heads) of which some elements are not judged.

    Attributes:
      rows: queries whose scores or results are close to overflow.
      heads: with gradients that are.
      rough: queries whose weights depend on roundings.
      rough_heads: with gradients that do.
    """

    rows: np.ndarray
    heads: np.ndarray
    rough: np.ndarray
    rough_heads: np.ndarray


@np.errstate(all="ignore")
def unsure(form: Form, x: Operands, do: np.ndarray) -> Unsure:
    group = form.heads // form.kv_heads
    of_q = [a.transpose(0, 2, 1, 3) for a in (x["q"], do)]
    of_k = [np.repeat(x[n], group, 2).transpose(0, 2, 1, 3) for n in ("k", "v")]
    q, do, k, v = (np.where(np.isfinite(a), np.abs(a), 0) for a in (*of_q, *of_k))
    largest = 6e4 if form.dtype == "float16" else MAX
    sizes = np.einsum("bhtc,bhsc->bhts", q.astype(np.float64), k.astype(np.float64))
    bias = np.zeros((1, 1, 1, 1))
    if form.bias:
        bias = np.where(np.isfinite(x["bias"]), np.abs(x["bias"]), 0).astype(np.float64)
    whole = sizes * form.scale + bias
    seen = form.seen()
    near = (np.maximum(sizes, whole) > 0.99 * MAX) & seen
    rough = (whole > 1e3) & seen
    near |= _meet(of_q[0], of_k[0]) & seen
    rough |= (_tiny(q, k) > 1e-3) & seen
    sums = v.astype(np.float64).sum(2)[:, :, None]
    rows = near.any(-1) | (sums > 0.5 * largest).any(-1)
    dp = np.einsum("bhtc,bhsc->bhts", do.astype(np.float64), v.astype(np.float64))
    top_k, top_q, top_v = (a.max((2, 3)) for a in (k, q, v))
    much = np.maximum(dp.max((2, 3)), 1) * np.maximum(top_k, np.maximum(top_q, 1))
    heads = rows.any(-1) | (much > 1e-3 * largest) | (top_v > 1e-2 * largest)
    heads |= (_meet(of_q[1], of_k[1])).any((2, 3))
    rough = rough.any(-1)
    rough_heads = rough.any(-1) | (top_v > 100) | (do.max((2, 3)) > 100)
    return Unsure(rows, heads, rough, rough_heads)


@np.errstate(all="ignore")
def limited(
    form: Form, x: Operands, doubt: Unsure, *, results: float, gradients: float
) -> Unsure:
    """Leaves out more, which kernels do not promise.

    Args:
      form, x: the attention.
      doubt: what is left out anyway.
      results: queries whose largest score, or sink, has a larger magnitude are left
        out, and those whose scores are all -inf if a mask hides other keys.
      gradients: likewise, heads with such a query; also those with an infinity or NaN
        in a key.
    """
    q, k = (x[n].transpose(0, 2, 1, 3)[:, :, :, None] for n in ("q", "k"))
    k = np.repeat(k.swapaxes(2, 3), form.heads // form.kv_heads, 1)
    seen = form.seen()
    scores, _ = _scores(form, (q * k).sum(-1), x)
    top = np.where(seen, scores, -np.inf).max(-1)
    hidden = (top == -np.inf) & seen.any(-1) & ~seen.all(-1)
    if form.sinks:
        top = np.maximum(top, x["sinks"][:, None])
    far, large = (np.isfinite(top) & (np.abs(top) > n) for n in (results, gradients))
    rows = doubt.rows | far | hidden
    heads = doubt.heads | (rows | large).any(-1) | ~np.isfinite(k).all((2, 3, 4))
    return dataclasses.replace(doubt, rows=rows, heads=heads)


def _meet(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether a number that may be subnormal meets one that is not finite."""

    def some(small: np.ndarray, large: np.ndarray, spec: str) -> np.ndarray:
        tiny = ((small != 0) & (np.abs(small) < TINY)).astype("float32")
        return np.einsum(spec, tiny, (~np.isfinite(large)).astype("float32")) > 0

    return some(a, b, "bhtc,bhsc->bhts") | some(b, a, "bhsc,bhtc->bhts")


def _tiny(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The size of products with a factor that may be subnormal."""
    small = [np.where(a < TINY, a, 0).astype(np.float64) for a in (q, k)]
    wide = [a.astype(np.float64) for a in (q, k)]
    spec = "bhtc,bhsc->bhts"
    return np.einsum(spec, small[0], wide[1]) + np.einsum(spec, wide[0], small[1])


# --- judging --------------------------------------------------------------------------


def kind(x: np.ndarray) -> np.ndarray:
    """1 and -1 for infinities, 2 for NaN, 0 for other numbers."""
    return np.where(np.isnan(x), 2, np.where(np.isinf(x), np.sign(x), 0))


def differences(
    form: Form,
    found: list[Any],
    x: Operands,
    do: np.ndarray,
    doubt: Unsure | None = None,
) -> Iterator[str]:
    """Differences from all readings: the result, how, and in how many elements.

    Args:
      form, x, do: the attention, its operands, the cotangent.
      found: o, and gradients if any.
      doubt: what is left out; by default what ``unsure`` finds.
    """
    readings = [
        np.stack(r) for r in zip(*(read(form, h, x, do) for h in READINGS), strict=True)
    ]
    doubt = doubt or unsure(form, x, do)
    names = (
        ["o", "dq", "dk", "dv"] + ["dbias"] * bool(form.bias) + ["dsinks"] * form.sinks
    )
    for name, y, expected in zip(names, found, readings, strict=False):
        y = np.asarray(y, "float32")
        skip, loose = _left_out(form, name, doubt)
        kinds, own = kind(expected), kind(y)
        if form.cap and name != "o":
            # Where a cap is flat, its slope is zero or a rounding: times infinity it is
            # NaN or infinite.
            kinds, own = ((a != 0) for a in (kinds, own))
        wrong = ~((kinds == own).any(0) | skip)
        lost = wrong & (kind(y) == 0)
        made = wrong & (kinds == 0).all(0)
        for word, which in (
            ("lost", lost),
            ("made", made),
            ("kind", wrong ^ lost ^ made),
        ):
            if which.any():
                yield f"{name} {word} {int(which.sum())}"
        off = _beyond(form, y, expected) & ~wrong & ~skip & ~loose
        if off.any():
            yield f"{name} value {int(off.sum())}"


def _left_out(form: Form, name: str, doubt: Unsure) -> tuple[Any, Any]:
    """Elements that are not judged, and those whose numbers are not compared."""

    def of_keys(heads: np.ndarray) -> np.ndarray:
        parts = heads.reshape(form.batch, form.kv_heads, -1)
        return parts.any(2)[:, None, :, None]

    heads, rough = doubt.heads, doubt.rough_heads
    match name:
        case "o":
            rows = (doubt.rows, doubt.rough)
            skip, loose = (a.swapaxes(1, 2)[..., None] for a in rows)
            return skip, loose
        case "dq":
            return heads[:, None, :, None], rough[:, None, :, None]
        case "dk" | "dv":
            return of_keys(heads), of_keys(rough)
        case _:
            return np.asarray(heads.any()), np.asarray(rough.any())


@np.errstate(all="ignore")
def _beyond(form: Form, y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Whether finite numbers are outside of what the readings are, and roundings."""
    unit = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[form.dtype]
    finite = np.isfinite(expected)
    low = np.where(finite, expected, np.inf).min(0)
    high = np.where(finite, expected, -np.inf).max(0)
    usual = np.abs(np.where(finite, expected, 0))
    usual = np.where(usual < 100, usual, 0).max()
    allowed = unit * (8 * max(usual, 1) + np.where(finite, np.abs(expected), 0).max(0))
    return (kind(y) == 0) & ((y < low - allowed) | (y > high + allowed))

"""Attention in float64 on the host, for some queries and keys: how errors are judged.

With u the roundoff of what is stored (results, and probabilities that enter a product),
w that of products and D the magnitude of what was summed:

    |error| <= u |exact| + (4 u + 4 w max(scale |q| |k|)) D
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracea_jax.problem import AttentionProblem

Arrays = dict[str, np.ndarray]
_TINY = 2.0**-24  # least float16 number: smaller probabilities and gradients are lost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Unit roundoffs: of stored numbers, and of products."""

    storage: float
    products: float

    def worst(self, found: Any, exact: Any, magnitude: Any, scores: float) -> float:
        """The largest error, in units of the bound."""
        relative = 4 * self.storage + 4 * self.products * scores
        bound = self.storage * np.abs(exact) + relative * magnitude + _TINY
        return float((np.abs(_f64(found) - exact) / bound).max(initial=0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some queries against some keys of one head, in float64.

    Attributes:
      q, k, v: operands, (rows, head_dim) or (keys, head_dim).
      scores: what softmax is taken of; -inf where a key is forbidden.
      magnitude: the largest sum of magnitudes in a score.
      slope: derivative of the scores by what they would be without a soft cap.
      sink: the logit that belongs to no key; -inf if there is none.
      inside: (rows,): whether a query is one of its example's own.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    magnitude: float
    slope: np.ndarray | float
    sink: float
    inside: np.ndarray


def block(
    p: AttentionProblem, x: Arrays, b: int, h: int, rows: Any, keys: Any
) -> Block:
    """The block of head h of example b."""
    group = h // (p.heads // p.kv_heads)
    q, k, v = (
        _f64(a)
        for a in (x["q"][b, rows, h], x["k"][b, keys, group], x["v"][b, keys, group])
    )
    scores = p.scale * (q @ k.T)
    magnitude = abs(p.scale) * (np.abs(q) @ np.abs(k.T))
    if p.bias:
        bias = _f64(_part(x["bias"], b, h, rows, keys))
        scores, magnitude = scores + bias, magnitude + np.abs(bias)
    if p.alibi:
        ahead = keys[None, :] - rows[:, None] - _start(p, x, b)
        ahead = -np.abs(ahead) if p.alibi == "distance" else ahead
        alibi = float(x["alibi_slopes"][h]) * ahead
        scores, magnitude = scores + alibi, magnitude + np.abs(alibi)
    slope = 1.0
    if p.soft_cap:
        bounded = np.tanh(scores / p.soft_cap)
        scores, slope = p.soft_cap * bounded, 1 - bounded**2
    allowed, inside = _allowed(p, x, b, h, rows, keys)
    return Block(
        q=q,
        k=k,
        v=v,
        scores=np.where(allowed, scores, -np.inf),
        magnitude=float(np.where(allowed, magnitude, 0).max(initial=0)),
        slope=slope,
        sink=float(x["sinks"][h]) if p.sinks else -np.inf,
        inside=inside,
    )


def _allowed(
    p: AttentionProblem, x: Arrays, b: int, h: int, rows: Any, keys: Any
) -> tuple[np.ndarray, np.ndarray]:
    q_len = x["q_lengths"][b] if p.q_lengths else p.q_len
    kv_len = x["kv_lengths"][b] if p.kv_lengths else p.kv_len
    i, j = rows[:, None] + _start(p, x, b), keys[None, :]
    allowed = np.broadcast_to(j < kv_len, (len(rows), len(keys)))
    if p.is_causal:
        allowed = allowed & (j <= i)
    if p.window:
        allowed = allowed & (j >= i - p.window[0]) & (j <= i + p.window[1])
    if p.mask:
        of_q, of_k = p.mask_block or (1, 1)
        allowed = allowed & _part(x["mask"], b, h, rows // of_q, keys // of_k)
    if p.segments:
        own, theirs = x["q_segments"][b, rows], x["kv_segments"][b, keys]
        allowed = allowed & (own[:, None] == theirs)
    return allowed, rows < q_len


def _start(p: AttentionProblem, x: Arrays, b: int) -> int:
    """The position of an example's first query."""
    q_len = x["q_lengths"][b] if p.q_lengths else p.q_len
    kv_len = x["kv_lengths"][b] if p.kv_lengths else p.kv_len
    return int(kv_len) - int(q_len) if p.aligned_at_end else 0


def _part(a: np.ndarray, b: int, h: int, rows: Any, keys: Any) -> np.ndarray:
    """Rows and keys of an array that broadcasts to (batch, heads, q_len, kv_len)."""
    own = a[b if a.shape[0] > 1 else 0, h if a.shape[1] > 1 else 0]
    own = own[rows] if own.shape[0] > 1 else own
    return own[:, keys] if own.shape[1] > 1 else own


def forward_error(
    p: AttentionProblem, x: Arrays, o: np.ndarray, units: Units, seed: int
) -> float:
    """The largest error of the output in the sampled heads and rows."""
    rows, keys = _sample(p.q_len, seed), np.arange(p.kv_len)
    worst = 0.0
    for b in _ends(p.batch):
        for h in _ends(p.heads):
            part = block(p, x, b, h, rows, keys)
            top = np.maximum(part.scores.max(1, keepdims=True), part.sink)
            weights = np.exp(part.scores - top)
            weights /= weights.sum(1, keepdims=True) + np.exp(part.sink - top)
            weights *= part.inside[:, None]
            exact, magnitude = weights @ part.v, weights @ np.abs(part.v)
            found = o[b, rows, h]
            worst = max(worst, units.worst(found, exact, magnitude, part.magnitude))
    return worst


def lse_error(
    p: AttentionProblem, x: Arrays, lse: np.ndarray, products: float, seed: int
) -> float:
    """The largest error of the float32 log-sum-exp in the sampled heads and rows.

    It is a sum over all keys, of roundings that are independent: the square root of
    their number is allowed.
    """
    units = Units(storage=2.0**-24, products=products)
    rows, keys = _sample(p.q_len, seed), np.arange(p.kv_len)
    worst = 0.0
    for b in _ends(p.batch):
        for h in _ends(p.heads):
            part = block(p, x, b, h, rows, keys)
            keys_only = np.logaddexp.reduce(part.scores, axis=1)
            exact = np.logaddexp(keys_only, part.sink)[part.inside]
            found = lse[b, h, rows][part.inside]
            summed = np.sqrt(p.kv_len)
            worst = max(worst, units.worst(found, exact, summed, part.magnitude))
    return worst


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Probabilities and gradients of the scores of a block, with magnitudes.

    Attributes:
      part: the block.
      do: (rows, head_dim), the cotangent.
      p, ds: probabilities, and gradients of the scores before cap and scale.
      ds_magnitude: of what was summed in ds.
    """

    part: Block
    do: np.ndarray
    p: np.ndarray
    ds: np.ndarray
    ds_magnitude: np.ndarray


def gradients(
    p: AttentionProblem, x: Arrays, b: int, h: int, rows: Any, keys: Any
) -> Gradients:
    """As the backward pass gets them from the stored output and log-sum-exp."""
    part = block(p, x, b, h, rows, keys)
    inside = part.inside[:, None]
    do = np.where(inside, _f64(x["do"][b, rows, h]), 0)
    o, lse = _f64(x["o"][b, rows, h]), _f64(x["lse"][b, h, rows])
    shift = np.where(part.inside, lse, 0)[:, None]
    weights = np.exp(np.where(inside, part.scores - shift, -np.inf))
    delta = (do * o).sum(1, keepdims=True)
    sizes = np.abs(do) @ np.abs(part.v.T) + np.abs(do * o).sum(1, keepdims=True)
    return Gradients(
        part=part,
        do=do,
        p=weights,
        ds=weights * (do @ part.v.T - delta) * part.slope,
        ds_magnitude=weights * sizes,
    )


def backward_error(
    p: AttentionProblem, x: Arrays, found: list[np.ndarray], units: Units, seed: int
) -> float:
    """The largest error of the gradients in the sampled heads, rows and keys."""
    dq, dk, dv, *others = found
    worst = 0.0
    groups = p.heads // p.kv_heads
    rows, keys = np.arange(p.q_len), np.arange(p.kv_len)
    some_rows, some_keys = _sample(p.q_len, seed), _sample(p.kv_len, seed)
    for b in _ends(p.batch):
        for h in _ends(p.kv_heads):
            g = gradients(p, x, b, h * groups, some_rows, keys)
            exact, size = p.scale * g.ds @ g.part.k, g.ds_magnitude @ np.abs(g.part.k)
            close = dq[b, some_rows, h * groups], exact, abs(p.scale) * size
            worst = max(worst, units.worst(*close, g.part.magnitude))
            heads = range(h * groups, (h + 1) * groups)
            all_g = [gradients(p, x, b, n, rows, some_keys) for n in heads]
            size = sum(g.ds_magnitude.T @ np.abs(g.part.q) for g in all_g)
            exact = p.scale * sum(g.ds.T @ g.part.q for g in all_g)
            scores = max(g.part.magnitude for g in all_g)
            close = dk[b, some_keys, h], exact, abs(p.scale) * size
            worst = max(worst, units.worst(*close, scores))
            exact = sum(g.p.T @ g.do for g in all_g)
            size = sum(g.p.T @ np.abs(g.do) for g in all_g)
            worst = max(worst, units.worst(dv[b, some_keys, h], exact, size, scores))
    if p.bias_gradient:
        worst = max(worst, _bias_error(p, x, others[0], units, seed))
    return max(worst, _sinks_error(p, x, others[-1], units)) if p.sinks else worst


def _bias_error(
    p: AttentionProblem, x: Arrays, dbias: np.ndarray, units: Units, seed: int
) -> float:
    """The largest error of a bias's gradient in some rows, or in some keys."""
    batch, heads, own_rows, own_keys = dbias.shape
    rows, keys = np.arange(p.q_len), np.arange(p.kv_len)
    if own_rows > 1:
        rows = _sample(p.q_len, seed)[:8]
    elif own_keys > 1:
        keys = _sample(p.kv_len, seed)[:8]
    elif not p.sinks and not p.soft_cap:
        return 0.0  # softmax does not depend on what is added to all scores
    axes = tuple(a for a, own in enumerate((own_rows, own_keys)) if own == 1)
    b, h = batch - 1, heads - 1
    terms = [
        gradients(p, x, i, j, rows, keys)
        for i in (range(p.batch) if batch == 1 else (b,))
        for j in (range(p.heads) if heads == 1 else (h,))
    ]
    exact = sum(g.ds.sum(axes, keepdims=True) for g in terms)
    size = sum(g.ds_magnitude.sum(axes, keepdims=True) for g in terms)
    scores = max(g.part.magnitude for g in terms)
    return units.worst(_part(dbias, b, h, rows, keys), exact, size, scores)


def _sinks_error(
    p: AttentionProblem, x: Arrays, found: np.ndarray, units: Units
) -> float:
    """The largest error of the gradients of the sinks."""
    rows, keys = np.arange(p.q_len), np.arange(1)
    worst = 0.0
    for h in _ends(p.heads):
        exact = size = scores = 0.0
        for b in range(p.batch):
            part = block(p, x, b, h, rows, keys)
            weights = np.exp(part.sink - _f64(x["lse"][b, h]))[part.inside]
            terms = (_f64(x["do"][b, :, h]) * _f64(x["o"][b, :, h]))[part.inside]
            exact -= weights @ terms.sum(1)
            size += weights @ np.abs(terms).sum(1)
            scores = max(scores, part.magnitude)
        worst = max(worst, units.worst(found[h], exact, size, scores))
    return worst


def _ends(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _sample(count: int, seed: int) -> np.ndarray:
    """A random index of every band of 64, the first and the last."""
    starts = np.arange(0, count, 64)
    rng = np.random.default_rng(seed)
    picked = np.minimum(starts + rng.integers(0, 64, starts.size), count - 1)
    return np.unique([*picked, 0, count - 1])


def _f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)

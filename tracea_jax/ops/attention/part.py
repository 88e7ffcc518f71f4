"""The gradient of attention to a part of the keys, in jnp.

With the log-sum-exp of all scores of a query, and the output for all of its keys, the
weights of some keys are exact without the others:

    p = exp(s - lse)    ds = p (do v' - rowsum(do o))    dq = ds k    dk = ds' q
    dv = p' do

Kernels compute the gradients of attention from just these operands, so they compute
those of a part too. The reference of ``attention_backward`` does not: it makes the
softmax anew, of the keys that it has. Caller: the primitives.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.reference import Spec, matmul_precision, supported
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.typed import einsum


def backward_reference(*operands: Any, spec: Spec, **_: Any) -> list[Any]:
    """Gradients of q, k, v from these, optional..., o, lse and the cotangent of o.

    o and lse are those of all keys; a query that sees none of the part has the
    cotangent 0. Of the optional operands, there are segment ids at most.
    """
    primals, (o, lse, do) = spec.split(operands)
    x = {**spec.named(primals), "o": o, "lse": lse, "do": do}

    def compute(x: dict[str, Any]) -> list[Any]:
        with matmul_precision(spec.precision):
            return _gradients(spec, x)

    return supported(compute, x)


def _gradients(spec: Spec, x: dict[str, Any]) -> list[Any]:
    q, k, v, o, do = (x[name] for name in ("q", "k", "v", "o", "do"))
    wide = promoted(q.dtype, jnp.float32)
    grouped = (*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2])
    queries, cotangent = (a.reshape(*grouped, a.shape[3]) for a in (q, do))
    scores = definition.scores_of(spec, x).astype(wide)
    p = jnp.exp(scores - x["lse"][..., None])
    mask = definition.visible(spec, x)
    if mask is not None:
        p = jnp.where(mask, p, 0)
    dp = einsum("BTKGD,BSKD->BKGTS", cotangent, v, preferred_element_type=wide)
    delta = (do.astype(wide) * o.astype(wide)).sum(-1).swapaxes(1, 2)
    ds = p * (dp.reshape(p.shape) - delta[..., None]) * spec.scale
    if spec.soft_cap is not None:
        ds = ds * (1 - (scores / spec.soft_cap) ** 2)
    p, ds = (a.astype(q.dtype).reshape(dp.shape) for a in (p, ds))
    dq = einsum("BKGTS,BSKD->BTKGD", ds, k, preferred_element_type=wide)
    dk = einsum("BKGTS,BTKGD->BSKD", ds, queries, preferred_element_type=wide)
    dv = einsum("BKGTS,BTKGD->BSKD", p, cotangent, preferred_element_type=wide)
    grads = dq.reshape(q.shape), dk, dv
    return [g.astype(q.dtype) for g in grads]

"""The primitives of attention, and what JAX's transformations make of them.

    attention:          q, k, v, optional... -> o (, lse)
    attention_tangent:  q, k, v, optional..., o, lse, tangents of q, k, v (, bias)
                        (, sinks) -> tangent of o
    attention_backward: q, k, v, optional..., o, lse, cotangent of o
                        -> gradients of q, k, v (, bias) (, sinks)
    attention_part_backward: the same, where k and v are a part of the keys that o and
                        lse are of, without gradients of bias and sinks

q is (batch, q_len, heads, head_dim), k (batch, kv_len, kv_heads, head_dim), v like k,
but maybe with other columns, which o then has. What ``Spec.optional`` names follows:
bias and boolean mask, of rank 4 and broadcast to (batch, heads, q_len, kv_len), int32
lengths (batch,), int32 segment ids (batch, q_len) and (batch, kv_len), and float32
sinks and ALiBi slopes (heads,). lse, the log-sum-exp of a query's scores and its sink,
is (batch, heads, q_len): the layout that kernels read it in.

The tangent is linear in its last operands, and its transpose is the backward pass, so
that kernels serve reverse mode while forward mode works too. Where XLA runs the
attention anyway, the reference is differentiated instead: then nothing is computed
twice. Second derivatives are those of the reference, and so are the first ones where
slopes have a tangent. The gradient of a part, which ``ring`` alone binds, has no
derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracea_jax import dispatch
from tracea_jax.faults import NotDifferentiable, NotLinear
from tracea_jax.ops.attention import by_mask, cudnn, part
from tracea_jax.ops.attention import reference as references
from tracea_jax.ops.attention.reference import Spec, problem_of, reference
from tracea_jax.ops.attention.sharding import rule
from tracea_jax.ops.common import by_reference, jax_rules, lowering, remat
from tracea_jax.ops.common.typed import (
    Arrays,
    Aval,
    Batched,
    Cotangents,
    Differentiated,
    Dims,
    Operand,
    Params,
    Primitive,
    Tangents,
    Zero,
    ad,
    jit,
    lax,
    linear_transpose,
    mlir,
)

_LSE = jnp.dtype("float32")  # of what the backward pass is given


attention_p = lowering.primitive("tracea_attention", reference)
attention_tangent_p = lowering.primitive(
    "tracea_attention_tangent", references.tangent_reference
)
attention_backward_p = lowering.primitive(
    "tracea_attention_backward", references.backward_reference
)
attention_part_backward_p = lowering.primitive(
    "tracea_attention_part_backward", part.backward_reference
)

PLANNED = (
    lowering.register(
        "attention",
        attention_p,
        problem_of,
        reference,
        sharding=functools.partial(rule, attention_p, backward=False),
        cudnn=cudnn.forward,
        attention_cpu=functools.partial(by_mask.call, attention_p),
    ),
    lowering.register(
        "attention",
        attention_backward_p,
        functools.partial(problem_of, direction="backward"),
        references.backward_reference,
        sharding=functools.partial(rule, attention_backward_p, backward=True),
        cudnn=cudnn.backward,
        attention_cpu=functools.partial(by_mask.call, attention_backward_p),
    ),
    lowering.register(
        "attention",
        attention_part_backward_p,
        functools.partial(problem_of, direction="backward"),
        part.backward_reference,
        cudnn=cudnn.backward,
        attention_cpu=functools.partial(by_mask.call, attention_part_backward_p),
    ),
)
mlir.register_lowering(
    attention_tangent_p,
    mlir.lower_fun(references.tangent_reference, multiple_results=True),
)
by_reference.register(attention_tangent_p, references.tangent_reference)


def bind(*operands: Any, **params: Any) -> list[Any]:
    """The attention primitive's results."""
    return lowering.bound(attention_p, reference, operands, params)


def bind_part_backward(*operands: Any, spec: Spec, **how: Any) -> list[Any]:
    """Gradients of q, k, v from a part of the keys; ``how`` is as of ``bind``."""
    how["implementation"] = _gradients_of(how["implementation"])
    which: Params = {"bias_gradient": False, "sinks_gradient": False}
    return _aligned(attention_part_backward_p, *operands, spec=spec, **which, **how)


def _aligned(primitive: Primitive, *operands: Any, **params: Any) -> list[Any]:
    return primitive.bind(*lowering.align_varying_axes(operands), **params)


# --- derivatives ----------------------------------------------------------------------

# The layers of a model share one trace of the reference.
_traced_once = jit(reference, static_argnames=("spec", "lse"), inline=True)


def _left_to_xla(
    primals: Sequence[Any],
    *,
    spec: Spec,
    implementation: str | None,
    bias_gradient: bool,
    **_: Any,
) -> bool:
    """Returns whether XLA would run the attention of a training or its backward pass.

    If only one of them, a mixture would compute the scores once more than XLA alone.
    """
    params: Params = {"spec": spec, "implementation": implementation, "config": None}
    params |= {"lse": _LSE, "bias_gradient": bias_gradient}
    try:
        return any(
            lowering.left_to_xla(primitive, primals, **params)
            for primitive in (attention_p, attention_backward_p)
        )
    except dispatch.Unsupported:
        return False  # what was demanded cannot run here; lowering says so, if it comes


def _jvp(
    primals: Arrays, tangents: Tangents, *, lse: Any, **params: Any
) -> Differentiated:
    of = dict(zip(params["spec"].names, tangents, strict=True))
    moves = {name for name, tangent in of.items() if not isinstance(tangent, Zero)}
    bends, biases = "alibi_slopes" in moves, "bias" in moves
    if bends or _left_to_xla(primals, bias_gradient=biases, **params):
        f = functools.partial(_traced_once, spec=params["spec"], lse=lse)
        outs, (do, *_) = references.jvp(f, primals, tangents)
    else:
        # The same primitive as without derivatives, with what the backward pass needs.
        o, residual = bind(*primals, lse=_LSE, **params)
        how: Params = {**params, "config": None}
        do = _tangent(primals, o, residual, tangents, **how)
        outs = [o] if lse is None else [o, residual.astype(lse)]
    # As in jax.nn, the log-sum-exp has no derivative.
    zeros = [Zero(jax.typeof(x).to_tangent_aval()) for x in outs[1:]]
    return outs, [do, *zeros]


def _differentiable(*operands: Any, **params: Any) -> list[Any]:
    """The reference, whose log-sum-exp has no derivative."""
    o, *residual = reference(*operands, **params)
    return [o, *map(lax.stop_gradient, residual)]


def _tangent(
    primals: Arrays,
    o: jax.Array,
    lse: jax.Array,
    tangents: Tangents,
    *,
    spec: Spec,
    **how: Any,
) -> jax.Array:
    of = dict(zip(spec.names, tangents, strict=True))
    which = {
        f"{name}_gradient": name in of and not isinstance(of[name], Zero)
        for name in ("bias", "sinks")
    }
    active = [ad.instantiate_zeros(of[n]) for n in references.differentiated(**which)]
    operands = (*primals, o, lse, *active)
    return _aligned(attention_tangent_p, *operands, spec=spec, **which, **how)[0]


def _tangent_transpose(
    cts: Tangents,
    *operands: Operand,
    spec: Spec,
    bias_gradient: bool,
    sinks_gradient: bool,
    **how: Any,
) -> Cotangents:
    (ct,) = cts
    primals, (o, lse, *active) = spec.split(operands)
    names = references.differentiated(
        bias_gradient=bias_gradient, sinks_gradient=sinks_gradient
    )
    of = dict(zip(names, active, strict=True))
    linear = {name for name, x in of.items() if ad.is_undefined_primal(x)}
    grads: dict[str, Any] = {}
    if isinstance(ct, Zero):
        grads = {name: Zero(of[name].aval) for name in linear}
    else:
        which: Params = {"bias_gradient": "bias" in linear}
        which["sinks_gradient"] = "sinks" in spec.optional  # it costs next to nothing
        how["implementation"] = _gradients_of(how["implementation"])
        found = _aligned(
            attention_backward_p, *primals, o, lse, ct, spec=spec, **which, **how
        )
        grads = dict(zip(references.differentiated(**which), found, strict=True))
    known = [None] * (len(operands) - len(active))
    return [*known, *(grads[name] if name in linear else None for name in names)]


_GRADIENTS_OF = {
    "attention_sm80": "attention_backward_sm80",
    "attention_sm90": "attention_backward_sm90",
}


def _gradients_of(implementation: str | None) -> str | None:
    """Who is asked for the gradients of what an implementation was asked for."""
    return _GRADIENTS_OF.get(implementation or "", implementation)


def _jvp_of_reference(
    primitive: Primitive,
    f: Callable[..., list[Any]],
    primals: Arrays,
    tangents: Tangents,
    **params: Any,
) -> Differentiated:
    """Second order: the primitive's own value, the derivative of its reference."""
    outs = _aligned(primitive, *primals, **params)
    _, douts = references.jvp(functools.partial(f, **params), primals, tangents)
    return outs, douts


def _transpose(
    cts: Tangents, *operands: Operand, spec: Spec, **params: Any
) -> Cotangents:
    """Attention is linear in v; in nothing else."""
    if [ad.is_undefined_primal(x) for x in operands].index(True) != 2 or any(
        ad.is_undefined_primal(x) for x in operands[3:]
    ):
        raise NotLinear(
            "attention is linear in value only, so it has no transpose in others; use "
            "jax.vjp"
        )
    aval, ct = operands[2].aval, cts[0]
    if isinstance(ct, Zero):
        return [None, None, Zero(aval), *[None] * (len(operands) - 3)]

    def of_v(v: jax.Array) -> jax.Array:
        return reference(*operands[:2], v, *operands[3:], spec=spec)[0]

    (dv,) = linear_transpose(of_v, jax.ShapeDtypeStruct(aval.shape, aval.dtype))(ct)
    return [None, None, dv, *[None] * (len(operands) - 3)]


FIRST_ORDER = (
    "ring attention (axis_name=) has first derivatives in reverse mode only; for "
    "others gather keys and values, and call attention without axis_name"
)


def _no_jvp(primals: Arrays, tangents: Tangents, **_: Any) -> Differentiated:
    raise NotDifferentiable(FIRST_ORDER)


# --- vmap -----------------------------------------------------------------------------

_SHARED = ("bias", "mask", "dbias")  # may have a batch of 1
_BACKWARD = (attention_backward_p, attention_part_backward_p)


def _names(primitive: Primitive, params: Params) -> list[str]:
    """Names of a primitive's operands."""
    names = [*params["spec"].names]
    if primitive is attention_p:
        return names
    if primitive in _BACKWARD:
        return [*names, "o", "lse", "do"]
    which: Params = {n: params[n] for n in ("bias_gradient", "sinks_gradient")}
    return [*names, "o", "lse", *(f"d{n}" for n in references.differentiated(**which))]


def _batch(
    primitive: Primitive, operands: Arrays, dims: Dims, **params: Any
) -> Batched:
    """Folds the mapped axis into the batch."""
    names = _names(primitive, params)
    mapped = {n: d is not None for n, d in zip(names, dims, strict=True)}
    of_heads = (*references.OF_HEADS, "dsinks")
    if any(map(mapped.get, of_heads)) or _sums_sinks(primitive, params):
        return _batch_of_reference(primitive, operands, dims, **params)
    moved = {
        n: x if d is None else jnp.moveaxis(x, d, 0)
        for n, x, d in zip(names, operands, dims, strict=True)
    }
    size = next(moved[n].shape[0] for n in names if mapped[n])
    batch = moved["q"].shape[mapped["q"]]
    # Tangent and gradient have the bias's shape: none of them may stay shared alone.
    alone = mapped.get("bias") or mapped.get("dbias") or params.get("bias_gradient")
    shared = ("mask",) if alone else _SHARED

    def fold(name: str) -> jax.Array:
        x = moved[name]
        if name in of_heads:
            return x  # there is one for all examples
        if not mapped[name]:
            if name in shared and x.shape[0] == 1:
                return x
            x = jnp.broadcast_to(x, (size, *x.shape))
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    bind_one = (
        bind if primitive is attention_p else functools.partial(_aligned, primitive)
    )
    outs = bind_one(*[fold(n) for n in names], **params)
    outs = [y.reshape(size, batch, *y.shape[1:]) for y in outs]
    if (
        primitive is attention_backward_p
        and params["bias_gradient"]
        and moved["bias"].shape[mapped["bias"]] == 1
    ):
        outs[3] = outs[3].sum(1, keepdims=True)
    return outs, [0] * len(outs)


def _sums_sinks(primitive: Primitive, params: Params) -> bool:
    """Tests whether a gradient of sinks is asked for, which is a sum over the batch."""
    return primitive is attention_backward_p and params["sinks_gradient"]


def _batch_of_reference(
    primitive: Primitive, operands: Arrays, dims: Dims, **params: Any
) -> Batched:
    """Maps the reference: operands of heads have no batch dimension to fold into."""
    f = functools.partial(_REFERENCES[primitive], **params)
    outs = jax.vmap(f, in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs)


_REFERENCES = {
    attention_p: reference,
    attention_tangent_p: references.tangent_reference,
    attention_backward_p: references.backward_reference,
    attention_part_backward_p: part.backward_reference,
}
jax_rules.register(
    "attention",
    attention_p,
    _differentiable,
    jvp=_jvp,
    transpose=_transpose,
    batch=functools.partial(_batch, attention_p),
)
jax_rules.register(
    "attention",
    attention_tangent_p,
    references.tangent_reference,
    jvp=functools.partial(
        _jvp_of_reference, attention_tangent_p, references.tangent_reference
    ),
    transpose=_tangent_transpose,
    batch=functools.partial(_batch, attention_tangent_p),
)
jax_rules.register(
    "attention",
    attention_backward_p,
    references.backward_reference,
    jvp=functools.partial(
        _jvp_of_reference, attention_backward_p, references.backward_reference
    ),
    batch=functools.partial(_batch, attention_backward_p),
)
jax_rules.register(
    "attention",
    attention_part_backward_p,
    part.backward_reference,
    jvp=_no_jvp,
    batch=functools.partial(_batch, attention_part_backward_p),
)


# --- rematerialisation ----------------------------------------------------------------


def _as_dot(avals: Sequence[Aval], params: Params) -> tuple[Any, ...]:
    """The scores: products with batch dimensions."""
    q, k, *_ = avals
    return (
        jax.lax.dot_general_p,
        (q, k),
        {
            "dimension_numbers": (((3,), (3,)), ((0, 2), (0, 2))),
            "precision": None,
            "preferred_element_type": _LSE,
        },
    )


remat.seen_as(attention_p, _as_dot)

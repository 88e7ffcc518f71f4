"""transform: an unmodified function on our ops.

The function is traced, equations that compute matrix products, convolutions and
attention are replaced by calls of our primitives, and the result is compiled. Which
implementation runs is chosen when it is compiled, as for the ops themselves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from tracea_jax.call import Call
from tracea_jax.rewrite import OPS, RULES, Miss, splice

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)

F = TypeVar("F", bound=Callable[..., Any])

# What is still recognised in a function that has differentiated inside.
AFTER_GRAD = ("matmul", "conv2d")


def transform(
    fn: F, *, ops: Iterable[str] | None = None, after_grad: bool = False
) -> F:
    """``fn`` with matrix products, convolutions and attention on our ops.

        fast = tracea.transform(model.apply)
        loss, grads = jax.value_and_grad(lambda p: loss_of(fast(p, x)))(params)

    Signature, results, effects and derivatives are those of ``fn``; a fused epilogue
    rounds less often. Works under ``jit``, ``grad``, ``vmap``, ``scan`` and
    ``shard_map``. Apply it to the model or the loss, inside of ``grad``: there whole
    layers are recognised, and our derivative rules make the backward pass: of layers in
    a row with epilogues that multiply by the derivatives of activations.

    Like ``jax.jit``, it traces ``fn`` once for each signature: make it once, and pass
    what changes as arrays. Arguments that are no arrays (numbers, strings, functions,
    objects) are constants of the trace, and must be hashable; an object whose
    attributes have changed is another constant.

    Left exactly as they are: integer, complex and float64 products, any precision but
    the default (and for matrix products the highest), bodies of ``custom_vjp``
    functions and of Pallas kernels. ``explain`` lists every site, and what was left
    with its reason.

    Args:
      fn: a pure function of pytrees.
      ops: which ops to use, of "matmul", "gated_matmul", "conv2d", "attention"; all by
        default.
      after_grad: for a training step that differentiates inside: only products and
        convolutions are rewritten, one by one, those of the backward pass included.

    Raises:
      ValueError: on an unknown op.
    """
    chosen = check_ops(ops, after_grad)
    kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of_call(call: Call, arrays: list[Any]) -> Any:
        args, kwargs = call.arguments(arrays)
        return fn(*args, **kwargs)

    # Under jit the whole function is one equation: to run what it was spliced to, that
    # one is bound again, and not each of those inside. And it is traced only once.
    of_call.__name__ = getattr(fn, "__name__", of_call.__name__)  # as profiles show it
    traced = jax.make_jaxpr(
        jax.jit(of_call, static_argnums=0), static_argnums=0, return_shape=True
    )

    def run(call: Call, arrays: list[Any]) -> Any:
        jaxpr, shape = traced(call, arrays)
        results = jaxpr_as_fun(spliced_once(jaxpr, chosen, kept))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    run.__name__ = of_call.__name__
    compiled = jax.jit(run, static_argnums=0)

    @functools.wraps(fn)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        call, arrays = Call.of(args, kwargs)
        # What is being traced already needs no function to be traced in.
        is_traced = any(isinstance(x, Tracer) for x in arrays)
        return (run if is_traced else compiled)(call, arrays)

    return transformed  # pyright: ignore[reportReturnType]


def spliced_once(jaxpr: Any, ops: tuple[str, ...], kept: Any) -> Any:
    """A traced call of a jitted function, spliced when it is met first.

    Args:
      jaxpr: closed; its only equation is the call.
      ops: as for ``spliced``.
      kept: results by the jaxpr of the function, which is the same for calls alike.
    """
    calls = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    if len(calls) != 1 or jaxpr.consts:  # captured values decide what is recognised
        return spliced(jaxpr, ops, [])
    (function,) = calls
    result = kept.get(function)
    if result is None:
        result = spliced(jaxpr, ops, [])
        if result is not jaxpr:  # which would keep its key alive
            kept[function] = result
    return result


def check_ops(ops: Iterable[str] | None, after_grad: bool) -> tuple[str, ...]:
    """The ops that are meant, in the order of the rules.

    Raises:
      ValueError: on an unknown op.
    """
    wanted = set(OPS if ops is None else ops)
    if unknown := sorted(wanted - set(OPS)):
        raise ValueError(f"ops={unknown} must be some of {', '.join(OPS)}")
    if after_grad:
        wanted &= set(AFTER_GRAD)
    return tuple(op for op in OPS if op in wanted)


def spliced(jaxpr: Any, ops: tuple[str, ...], misses: list[Miss]) -> Any:
    """A closed jaxpr with the sites of these ops replaced."""
    rules = [rule for rule in RULES if rule.op in ops]
    return splice(jaxpr, rules, misses)

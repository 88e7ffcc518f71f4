"""transform: an unmodified function on our ops.

The function is traced, equations that compute matrix products, convolutions and
attention are replaced by calls of our primitives, and the result is compiled. Which
implementation runs is chosen when it is compiled, as for the ops themselves.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import jax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from tracea_jax import _compat, mutable, precompile
from tracea_jax.call import Call, unwrapped
from tracea_jax.mistakes import (
    check_function,
    flag,
    function_alone,
    name_of,
    shown,
    similar,
)
from tracea_jax.options import planned_device
from tracea_jax.rewrite import Rule, rules, splice
from tracea_jax.rewrite.fewer import fewer
from tracea_jax.rewrite.inside import splicing, unavailable
from tracea_jax.rewrite.left import warn_of_early_derivatives
from tracea_jax.verdicts import left_of

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def transform(
    fn: F, *, ops: str | Iterable[str] | None = None, after_grad: bool = False
) -> F: ...


@overload
def transform(
    *, ops: str | Iterable[str] | None = None, after_grad: bool = False
) -> Callable[[F], F]: ...


@function_alone
def transform(
    fn: Any = None,
    *,
    ops: str | Iterable[str] | None = None,
    after_grad: bool = False,
) -> Any:
    """``fn`` with matrix products, convolutions, attention and losses on our ops.

        fast = tracea.transform(model.apply)
        loss, grads = jax.value_and_grad(lambda p: loss_of(fast(p, x)))(params)

        @tracea.transform(ops=["matmul"])
        def loss_of(params, x): ...

    Signature, results, effects and derivatives are those of ``fn``; a fused epilogue
    rounds less often. Works under ``jit``, ``grad``, ``vmap``, ``scan`` and
    ``shard_map``. Apply it to the model, the loss or the whole training step. What fn
    differentiates in reverse mode is rewritten before JAX differentiates it: so whole
    layers are recognised, and our derivative rules make the backward pass, of layers in
    a row with epilogues that multiply by the derivatives of activations. In forward
    mode, and where that cannot be (``explain`` says where), what is left of layers
    after they were differentiated is rewritten: single products and convolutions.

    Like ``jax.jit``, it traces ``fn`` once for each signature: make it once, and pass
    what changes as arrays. Arguments that are no arrays (numbers, strings, functions,
    objects) are constants of the trace, and must be hashable; an object whose
    attributes have changed is another constant. What fn returns of them comes back as
    it is. Objects of flax nnx may be arguments, and fn may be one of them or its
    method: what fn changes in them is changed after the call, as if fn itself had been
    called. A jitted function that donates arguments, or has options for the
    compiler, does so when it is transformed, too.

    Sites without which the whole program was faster when ``tune`` raced it are left as
    they are written; an implementation that the settings ask for is used everywhere.

    Left exactly as they are: integer, complex and float64 products, any precision but
    the default (and for matrix products the highest), bodies of ``custom_vjp``
    functions and of Pallas kernels. ``explain`` lists every site, and what was left
    with its reason.

    Args:
      fn: a pure function of pytrees, or of objects of flax nnx. Without it, the result
        is a decorator.
      ops: which op or ops to use, of "attention", "conv2d", "linear_cross_entropy",
        "gated_matmul", "matmul", "max_pool", "group_norm", "channel_sums",
        "channel_affine"; all by default.
      after_grad: only products and convolutions are rewritten, one by one, after JAX
        has differentiated what fn differentiates: for functions that must see JAX's own
        tracers.

    Raises:
      ValueError: on an unknown op.
      TypeError: if fn is no function.

    Warns:
      UserWarning: once, if fn differentiates inside, and this version of JAX is not
        known well enough to rewrite anything before that.
    """
    if fn is None:
        options = {"ops": check_ops(ops, after_grad), "after_grad": after_grad}
        return functools.partial(transform, **options)
    are_ops = isinstance(fn, str)
    call = f"transform(ops={fn!r})" if are_ops else "transform(f)(*args)"
    check_function(fn, "transform takes a function", call)
    return Transformed(fn, ops, after_grad)


class Transformed:
    """A function on our ops: what ``transform`` returns.

    Defined in a class, it is a method. A pickle of it holds the function, to be traced
    anew. Of a jitted function it has ``lower``, ``trace``, ``eval_shape`` and
    ``clear_cache`` too, with the same static and donated arguments and options of the
    compiler.
    """

    def __init__(
        self, fn: Callable[..., Any], ops: str | Iterable[str] | None, after_grad: bool
    ) -> None:
        chosen = check_ops(ops, after_grad)
        functools.update_wrapper(self, fn)
        self._made_of = (fn, chosen, after_grad)
        self._forget_traces()
        self._jitted: Callable[..., Any] | None = None
        if _compat.is_jitted(fn):
            self._keep_jit_methods(fn)

    def _forget_traces(self) -> None:
        fn, ops, after_grad = self._made_of
        kept: Kept = collections.defaultdict(weakref.WeakKeyDictionary)

        @_on_behalf_of(fn)
        def of_call(call: Call, arrays: list[Any]) -> Any:
            return call.applied(fn, arrays)

        # Under jit the whole function is one equation: to run what it was spliced to,
        # that one is bound again, and not each of those inside. And it is traced only
        # once.
        traced = jax.make_jaxpr(
            jax.jit(of_call, static_argnums=0), static_argnums=0, return_shape=True
        )

        def made(rules: tuple[Rule, ...], call: Call, arrays: list[Any]) -> Any:
            inside = () if after_grad else rules
            with splicing(inside):
                jaxpr, shape = traced(call, arrays)
            if inside and (why := unavailable()):
                warn_of_early_derivatives(jaxpr, inside, why)
            with _collector_paused():
                return spliced_once(jaxpr, rules, kept), shape

        @_on_behalf_of(fn)
        def run(call: Call, arrays: list[Any]) -> Any:
            if _runs_outside_of_a_trace():
                return call.applied(fn, arrays)
            rules = rules_of(ops)
            own, shape = made(rules, call, arrays)
            if without := left_of(own, ops, after_grad, planned_device()):
                own, shape = made(fewer(rules, without), call, arrays)
            precompile.start(own, planned_device())
            # What is differentiated from here on is ours already.
            with splicing(()), _compat.marked("transform"):
                results = jaxpr_as_fun(own)(*arrays)
            return jax.tree.unflatten(jax.tree.structure(shape), results)

        # The same function of the state of objects that it changes; see ``mutable``.
        self._of_state: Transformed | None = None
        self._run = run
        self._compiled = jax.jit(run, static_argnums=0)

    def _keep_jit_methods(self, fn: Any) -> None:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return unwrapped(self._run(*Call.of(fn, args, kwargs)))

        arguments = _compat.jit_arguments(fn)
        jitted: Any = jax.jit(run, **arguments)
        # Where there are only static arguments, they are constants of ``_compiled``.
        if any(not name.startswith("static") for name in arguments):
            self._jitted = jitted

        def clear_cache() -> None:
            fn.clear_cache()
            jitted.clear_cache()
            self._forget_traces()

        self.lower, self.trace = jitted.lower, jitted.trace
        self.eval_shape, self.clear_cache = jitted.eval_shape, clear_cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self._made_of[0]
        if jax.config.jax_disable_jit:  # so that fn sees values
            return fn(*args, **kwargs)
        with mutable.opened(fn, args, kwargs) as (function, args, kwargs):
            if function is fn:
                return self._on_arrays(args, kwargs)
            if self._of_state is None:
                self._of_state = Transformed(function, *self._made_of[1:])
            result = self._of_state._on_arrays(args, kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return mutable.closed(result, caller=caller)

    def _on_arrays(self, args: Any, kwargs: Any) -> Any:
        call, arrays = Call.of(self._made_of[0], args, kwargs)
        is_traced = any(isinstance(x, Tracer) for x in arrays)
        # What is being traced already needs no function to be traced in; but one under
        # ``jit`` is repeated as it is written where JAX looks for the cause of a NaN.
        if is_traced and not _looks_for_special_values():
            return unwrapped(self._run(call, arrays))
        if self._jitted is not None and not is_traced:
            return self._jitted(*args, **kwargs)
        return unwrapped(self._compiled(call, arrays))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return Transformed, self._made_of

    def __repr__(self) -> str:
        fn, ops, after_grad = self._made_of
        parts = [f"transform of {getattr(fn, '__name__', type(fn).__name__)}"]
        if ops != check_ops(None, after_grad):
            parts.append(f"{ops=}")
        if after_grad:
            parts.append("after_grad=True")
        return f"<{', '.join(parts)}>"


def _looks_for_special_values() -> bool:
    """Returns whether JAX checks results for NaN or infinities."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def _runs_outside_of_a_trace() -> bool:
    """Returns whether JAX repeats a function under ``jit`` equation by equation.

    It does so to name the equation with the first special value.
    """
    if not _looks_for_special_values():
        return False
    return not isinstance(jax.lax.full((), False), Tracer)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collections meanwhile.

    Splicing makes many objects that stay, so each collection would walk the whole trace
    of the program and find nothing: a fifth of the time of tracing a large model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def made_of(fn: Any) -> tuple[Callable[..., Any], tuple[str, ...], bool] | None:
    """Function, ops and ``after_grad`` that a transformed function was made of.

    It may be under ``jit``. None of any other function.
    """
    if _compat.is_jitted(fn):
        fn = getattr(fn, "__wrapped__", None)
    return fn._made_of if isinstance(fn, Transformed) else None


def _on_behalf_of(fn: Callable[..., Any]) -> Callable[[F], F]:
    """Names a function of ours as the user's one, in profiles and errors."""
    source = fn
    while isinstance(source, functools.partial):
        source = source.func
    source = inspect.unwrap(source)
    if not hasattr(source, "__code__"):  # an object that can be called
        source = type(source).__call__

    def name(ours: F) -> F:
        signature = inspect.signature(ours)
        ours.__name__ = getattr(fn, "__name__", ours.__name__)
        # JAX reads the file and the line there, but the parameters here.
        ours.__wrapped__ = source  # pyright: ignore[reportFunctionMemberAccess]
        ours.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return ours

    return name


# What functions were spliced to, by the rules, and the jaxpr of the function, which is
# the same for calls alike.
Kept = dict[tuple[Rule, ...], Any]


def spliced_once(jaxpr: Any, rules: tuple[Rule, ...], kept: Kept) -> Any:
    """A traced call of a jitted function, spliced when it is met first.

    Args:
      jaxpr: closed; its only equation is the call.
      rules: as for ``splice``.
      kept: earlier results, to which this one is added.
    """
    calls = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    if len(calls) != 1 or jaxpr.consts:  # captured values decide what is recognised
        return splice(jaxpr, rules, [])
    (function,) = calls
    result = kept[rules].get(function)
    if result is None:
        result = splice(jaxpr, rules, [])
        if result is not jaxpr:  # which would keep its key alive
            kept[rules][function] = result
    return result


def op_names(ops: str | Iterable[str]) -> tuple[str, ...]:
    """One op by its name, or several, as a tuple.

    Raises:
      TypeError: if they are no names.
    """
    names = (ops,) if isinstance(ops, str) or not isinstance(ops, Iterable) else ops
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            hint = similar(name_of(name), known_ops())
            raise TypeError(f"ops must be names of ops, not {shown(name)}{hint}")
    return names


def known_ops() -> tuple[str, ...]:
    """The name of every op that there are rules for, in their order."""
    return tuple(dict.fromkeys(rule.op for rule in rules()))


def check_ops(ops: str | Iterable[str] | None, after_grad: bool) -> tuple[str, ...]:
    """The ops that are meant, in the order of the rules.

    Raises:
      ValueError: on an unknown op.
      TypeError: if ops are no names, or ``after_grad`` is neither True nor False.
    """
    known = known_ops()
    wanted = set(known if ops is None else op_names(ops))
    if unknown := sorted(wanted - set(known)):
        raise ValueError(
            f"ops={unknown} must be some of {', '.join(known)}"
            + similar(unknown[0], known)
        )
    if flag("after_grad", after_grad):
        wanted &= {rule.op for rule in rules() if rule.after_grad}
    return tuple(op for op in known if op in wanted)


def rules_of(ops: tuple[str, ...]) -> tuple[Rule, ...]:
    """The rules that find sites of these ops."""
    return tuple(rule for rule in rules() if rule.op in ops)

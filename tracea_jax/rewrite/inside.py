"""Splicing what a function differentiates inside, before it is differentiated.

While ``transform`` or ``explain`` traces a training step, JAX asks a ``Splicer`` for
every derivative in reverse mode. The function that is differentiated is traced and
spliced first, as if the user had transformed the loss. How equations are found and
replaced is not here, nor what is reported of those that were left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from tracea_jax import _compat
from tracea_jax.ops.common import choice
from tracea_jax.rewrite.left import unseen
from tracea_jax.rewrite.match import Rule
from tracea_jax.rewrite.splice import splice
from tracea_jax.rewrite.spliced import Spliced

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)


@contextlib.contextmanager
def splicing(rules: Sequence[Rule]) -> Iterator[None]:
    """Splices functions that are differentiated in reverse mode in this context.

    Without rules, or in a JAX where it cannot be, derivatives are JAX's own. The rules
    are part of the key of every trace: functions under ``jit`` that were traced outside
    are traced again, and their traces from here are never used outside.
    """
    hook = _splicer(tuple(rules)) if rules and unavailable() is None else None
    with _compat.linearize_hook(hook):
        yield


def unavailable() -> str | None:
    """Why nothing can be spliced before this JAX differentiates it; None if it can."""
    return _compat.install_linearize_hook()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Splicer:
    """The hook that JAX calls before it differentiates (``_compat.linearize_hook``).

    There is one for the same rules, equal to no other: JAX hashes it at every call.

    Attributes:
      rules: as for ``splice``.
    """

    rules: tuple[Rule, ...]

    def __call__(
        self, fun: Any, primals: Callable[[], Any], differentiate: Callable[[Any], Any]
    ) -> Any:
        traced = _trace(fun, primals)
        if traced is None:
            return differentiate(fun)
        misses = list(unseen(traced.jaxpr, self.rules))
        spliced = splice(traced.jaxpr, self.rules, misses)
        note = Spliced(misses=tuple(misses))
        if not (choice.are_made() and choice.all_left_to_xla(spliced)):
            traced = dataclasses.replace(traced, jaxpr=spliced)
        own = traced.function(fun, note)
        with _compat.linearize_hook(None):  # what derivative rules trace stays as it is
            if traced.jaxpr.effects:
                return differentiate(own)
            with contextlib.suppress(Exception):
                return differentiate(own)
        # A derivative rule needs JAX's own tracers; there were no effects to repeat.
        return differentiate(fun)


_splicer = functools.cache(lambda rules: Splicer(rules=rules))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """A function traced at the arguments at which it is differentiated.

    Attributes:
      jaxpr: from the traced arguments to the traced results; closed.
      inputs: which of the flat arguments it takes. The others are known numbers without
        a derivative, which the function saw as they are.
      outputs: the flat results, None where the jaxpr computes them. Others are no
        arrays, or do not depend on the traced arguments.
      tree: structure of the results.
    """

    jaxpr: Any
    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    tree: Any

    def function(self, fun: Any, note: Spliced) -> Callable[..., Any]:
        """The jaxpr in place of ``fun``; its equations carry the note."""

        @functools.wraps(fun, updated=())
        def evaluated(*args: Any) -> Any:
            leaves = jax.tree.leaves(args)
            with _compat.marked(note):
                values = iter(
                    jaxpr_as_fun(self.jaxpr)(*[leaves[i] for i in self.inputs])
                )
            results = [next(values) if x is None else x for x in self.outputs]
            return jax.tree.unflatten(self.tree, results)

        return evaluated


def _trace(fun: Any, primals: Callable[[], Any]) -> _Trace | None:
    """The function's trace, or None if it has to be differentiated as it is.

    It may need values that only JAX's own tracers have, change references, or raise.
    The caller runs it again then, so that errors of the user's look as ever.
    """
    kept: list[Any] = []
    try:
        leaves, tree = jax.tree.flatten(primals())
        if not all(map(_is_array, leaves)):
            return None
        inputs = tuple(i for i, x in enumerate(leaves) if _is_traced(x))

        def of_inputs(*values: Any) -> list[Any]:
            full = list(leaves)
            for i, value in zip(inputs, values, strict=True):
                full[i] = value
            out = fun(*jax.tree.unflatten(tree, full))
            results, structure = jax.tree.flatten(out)
            outputs = tuple(None if isinstance(x, Tracer) else x for x in results)
            kept[:] = outputs, structure
            return [x for x in results if isinstance(x, Tracer)]

        jaxpr = jax.make_jaxpr(of_inputs)(*[leaves[i] for i in inputs])
    except Exception:
        return None
    if not all(map(_is_array, jaxpr.consts)):
        return None
    outputs, structure = kept
    return _Trace(jaxpr=jaxpr, inputs=inputs, outputs=outputs, tree=structure)


def _is_array(x: Any) -> bool:
    """Returns whether this is an array or a number, and no reference."""
    return type(jax.typeof(x)) is ShapedArray


def _is_traced(x: Any) -> bool:
    """Tests whether the function gets a tracer; known integers it gets as they are."""
    if isinstance(x, Tracer):
        return True
    return jnp.issubdtype(getattr(x, "dtype", np.result_type(x)), np.inexact)

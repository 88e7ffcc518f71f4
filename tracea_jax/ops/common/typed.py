"""JAX as the rules of primitives see it: types for what JAX leaves without any.

``pyright`` is strict in ``ops``, but JAX annotates neither its modules for the rules of
primitives, nor every parameter of some public functions, such as ``jnp.zeros``. These
names get their types here, once; everything else is imported from JAX. No rule of its
own is here. Callers: the modules of ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir
import jax.interpreters.xla
import jax.numpy as jnp
from jax.extend import core

# --- what rules take and give ---------------------------------------------------------

Zero = jax.interpreters.ad.Zero  # a tangent or cotangent that is known to be zero

Params = dict[str, Any]  # parameters of an equation
Arrays = Sequence[jax.Array]
Tangent = jax.Array | Zero
Tangents = Sequence[Tangent]
Operand = Any  # of a transpose: an array, or ``ad.UndefinedPrimal`` of a linear one
Cotangents = list[Any]  # a transpose's results: an array, a Zero or None for each
Dims = Sequence[int | None]  # of a batching rule: where each operand is mapped

Differentiated = tuple[Arrays, Tangents]  # results of a derivative rule
Batched = tuple[Arrays, Sequence[int]]  # results of a batching rule, and where mapped


class Aval(Protocol):
    """The type of an operand in a trace, ``jax.core.ShapedArray``."""

    shape: tuple[Any, ...]
    dtype: Any
    sharding: Any

    @property
    def ndim(self) -> int: ...

    def update(self, **changes: Any) -> Aval: ...


if TYPE_CHECKING:

    class Primitive(core.Primitive):
        """JAX's own class, with types for what its rules are made of."""

        def bind(self, *args: Any, **params: Any) -> Any: ...

        def def_impl(self, impl: Callable[..., Any]) -> Any: ...

        def def_abstract_eval(self, abstract_eval: Callable[..., Any]) -> Any: ...

else:
    Primitive = core.Primitive


def unless_zero(tangent: Tangent | None) -> jax.Array | None:
    """The tangent; None in place of a zero."""
    return None if isinstance(tangent, Zero) else tangent


# --- what JAX does not annotate -------------------------------------------------------

ad: Any = jax.interpreters.ad
batching: Any = jax.interpreters.batching
mlir: Any = jax.interpreters.mlir
xla: Any = jax.interpreters.xla

jaxpr_as_fun: Any = core.jaxpr_as_fun
lax: Any = jax.lax
profiler: Any = jax.profiler

_jax: Any = jax
JaxRuntimeError: Any = _jax.errors.JaxRuntimeError
block_until_ready: Any = _jax.block_until_ready
checkpoint: Any = _jax.checkpoint
config: Any = _jax.config
custom_jvp: Any = _jax.custom_jvp
custom_vjp: Any = _jax.custom_vjp
device_put: Any = _jax.device_put
eval_shape: Any = _jax.eval_shape
jit: Any = _jax.jit
jvp: Any = _jax.jvp
linear_transpose: Any = _jax.linear_transpose
make_jaxpr: Any = _jax.make_jaxpr
make_user_context: Any = _jax.make_user_context
tree: Any = _jax.tree
vjp: Any = _jax.vjp
vmap: Any = _jax.vmap


def device_count() -> int:
    return _jax.device_count()


def local_devices(**how: Any) -> list[Any]:
    return _jax.local_devices(**how)


_jnp: Any = jnp
arange: Callable[..., jax.Array] = _jnp.arange
asarray: Callable[..., jax.Array] = _jnp.asarray
broadcast_shapes: Callable[..., tuple[int, ...]] = _jnp.broadcast_shapes
einsum: Callable[..., jax.Array] = _jnp.einsum
finfo: Any = _jnp.finfo
iinfo: Any = _jnp.iinfo
full: Callable[..., jax.Array] = _jnp.full
zeros: Callable[..., jax.Array] = _jnp.zeros
ones_like: Callable[..., jax.Array] = _jnp.ones_like
zeros_like: Callable[..., jax.Array] = _jnp.zeros_like

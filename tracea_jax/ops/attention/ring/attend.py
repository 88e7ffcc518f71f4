"""Ring attention: the function of JAX behind ``attention(..., axis_name=)``.

Each device keeps its queries, and keys and values go round. In every step the next ones
are sent before the present ones are used, so that both happen at once. The backward
pass sends keys and values round once more, and their gradients after them: with the
output and the log-sum-exp of all keys, the kernels for gradients compute those of a
part (``attention.part``). ``plan`` has the steps, ``parts`` the sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.faults import NotDifferentiable
from tracea_jax.ops.attention import definition
from tracea_jax.ops.attention.primitives import FIRST_ORDER, bind, bind_part_backward
from tracea_jax.ops.attention.reference import Spec
from tracea_jax.ops.attention.ring import order as orders
from tracea_jax.ops.attention.ring import parts
from tracea_jax.ops.attention.ring.order import SEQUENCE
from tracea_jax.ops.attention.ring.parts import LENGTH, Attended
from tracea_jax.ops.attention.ring.plan import (
    Block,
    Case,
    Order,
    Step,
    Window,
    longest,
    plan,
)
from tracea_jax.ops.common import lowering
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.ops.common.typed import (
    asarray,
    custom_jvp,
    custom_vjp,
    eval_shape,
    full,
    lax,
    tree,
    zeros,
)

_LSE = jnp.dtype("float32")
Ids = tuple[jax.Array, ...]  # segments of queries and keys, or none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring, as far as it is known before anything runs.

    Attributes:
      axis: names of the mesh axes that the sequence is split over.
      devices: how many there are.
      steps: what they compute.
      spec: of the attention, without rules on positions.
      hides_rows: whether masks may hide all keys from a query.
      implementation, config: as of the primitive, for each block.
    """

    axis: Any
    devices: int
    steps: tuple[Step, ...]
    spec: Spec
    hides_rows: bool
    implementation: str | None
    config: Any

    @property
    def how(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "config": self.config}

    def spec_of(self, block: Block) -> Spec:
        left, right = block.window.left, block.window.right
        unlimited = sum(block.shape)
        window = None
        if left is not None or right not in (None, 0):
            window = tuple(unlimited if n is None else n for n in (left, right))
        return dataclasses.replace(self.spec, is_causal=right == 0, window=window)

    def sent(self, arrays: Any, shift: int) -> Any:
        """Arrays of the device ``shift`` places before this one."""
        if shift % self.devices == 0:
            return arrays
        pairs = [(r, (r + shift) % self.devices) for r in range(self.devices)]

        def send(x: jax.Array) -> jax.Array:
            return lax.ppermute(x, self.axis, pairs)

        return tree.map(send, arrays)

    def visits(self, keys: Any) -> Iterator[tuple[Step, Any]]:
        """Each step with what goes round; the next step's is on its way by then."""
        for i, step in enumerate(self.steps):
            if i == 0:
                keys = self.sent(keys, step.shift)
            coming = None
            if i + 1 < len(self.steps):
                coming = self.sent(keys, self.steps[i + 1].shift - step.shift)
            yield step, keys
            keys = coming

    def computed(self, step: Step, run: Callable[[Case, Any], Any], state: Any) -> Any:
        """``run`` of the blocks that this device computes in a step.

        Where devices compute unlike blocks, results have the widest dtype of any.
        """
        runs = [functools.partial(run, case) for case in step.cases]
        if len(runs) == 1:
            return runs[0](state)
        results = [eval_shape(one, state) for one in runs]

        def widest(*alternatives: Any) -> Any:
            return promoted(*(x.dtype for x in alternatives))

        def rounded(x: jax.Array, dtype: Any) -> jax.Array:
            return x.astype(dtype)

        dtypes = tree.map(widest, *results)

        def alike(one: Callable[[Any], Any], state: Any) -> Any:
            return tree.map(rounded, one(state), dtypes)

        index = asarray(np.asarray(step.case_of, np.int32))[lax.axis_index(self.axis)]
        branches = [functools.partial(alike, one) for one in runs]
        return lax.switch(index, branches, state)

    def is_last(self, step: Step) -> bool:
        return step is self.steps[-1]


# --- the op ---------------------------------------------------------------------------


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: Ids,
    *,
    axis: Any,
    order: Order,
    spec: Spec,
    lse: Any,
    implementation: str | None,
    config: Any,
) -> list[jax.Array]:
    """The results of the primitive for a device's queries and all keys.

    Args:
      q, k, v: of rank 4, this device's part.
      ids: int32 segment ids of its queries and of its keys, or none.
      axis: the name, or names, of the axes that the sequence is split over.
      order: of the sequence.
      spec: of the whole attention.
      lse: dtype of the log-sum-exp as a second result; None for none.
      implementation, config: as of the primitive.

    Raises:
      ValueError: if there is no such axis.
    """
    devices = _devices(axis)
    lengths = q.shape[SEQUENCE], k.shape[SEQUENCE]
    left, right = spec.window or (None, None)
    if spec.is_causal:
        right = 0 if right is None else min(right, 0)
    total = [devices * n for n in lengths]
    window = Window(left=left, right=right).within(*total)
    chosen, is_exchanged = _order(order, devices, lengths, window)
    ring = Ring(
        axis=axis,
        devices=devices,
        steps=plan(chosen, devices, *lengths, window),
        spec=spec,
        hides_rows=bool(ids) or window.hides_rows(*total),
        implementation=implementation,
        config=config,
    )
    arrays: list[Any] = [q, k, v, *ids]
    if is_exchanged:
        arrays = [orders.exchanged(x, axis, devices) for x in arrays]
    here = lax.axis_index(axis)
    *arrays, _ = lowering.align_varying_axes([*arrays, here])
    q, k, v, *own = arrays
    o, residual = _ring(ring, q, k, v, tuple(own))
    if ring.hides_rows:
        hidden = residual == -jnp.inf
        o = _with_means(ring, o, v, hidden)
        residual = jnp.where(hidden, definition.fill(_LSE), residual)
    outs = [o] if lse is None else [o, residual.astype(lse).swapaxes(1, 2)]
    if is_exchanged:
        outs = [orders.returned(y, axis, devices) for y in outs]
    return [outs[0], *(y.swapaxes(1, 2) for y in outs[1:])]


def _devices(axis: Any) -> int:
    try:
        return lax.axis_size(axis)
    except NameError as e:
        raise ValueError(
            f"axis_name={axis!r} is no axis here: call attention inside of "
            "jax.shard_map over a mesh that has it"
        ) from e


def _order(
    order: Order, devices: int, lengths: tuple[int, int], window: Window
) -> tuple[Order, bool]:
    """The order to compute in, and whether devices exchange parts for it.

    Parts that follow each other are exchanged where zigzag order saves the scores of a
    pair of chunks or more: for causal masks, and not for windows that are short.
    """
    if order == "zigzag" or not orders.can_be_exchanged(*lengths):
        return order, False
    zigzag, contiguous = (
        longest(plan(one, devices, *lengths, window)) for one in ("zigzag", order)
    )
    of_chunks = lengths[0] * lengths[1] // 4
    is_worth = of_chunks > 0 and contiguous - zigzag >= of_chunks
    return ("zigzag", True) if is_worth else (order, False)


def _with_means(ring: Ring, o: jax.Array, v: jax.Array, hidden: jax.Array) -> jax.Array:
    """The output with the mean of all values for queries that see no key."""
    wide = promoted(v.dtype, jnp.float32)
    mean = lax.pmean(v.astype(wide).mean(SEQUENCE, keepdims=True), ring.axis)
    mean = jnp.repeat(mean, o.shape[2] // v.shape[2], axis=2).astype(o.dtype)
    return jnp.where(_by_query(hidden), mean, o)


# --- forward --------------------------------------------------------------------------


def _forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids
) -> tuple[jax.Array, jax.Array]:
    """(o, lse); where a query sees no key, o is 0 and lse is -inf."""
    nothing = _nothing(q, v)

    def run(is_last: bool, case: Case, state: tuple[Attended | None, Any]) -> Attended:
        whole, keys = state
        for block in case:
            part = _part(ring, block, q, keys, ids[:1])
            if whole is None and part.lse.shape != nothing.lse.shape:
                whole = nothing
            whole = parts.merged(whole, part, block.queries)
        o, lse = nothing if whole is None else whole
        return Attended(o.astype(q.dtype) if is_last else o, lse)

    whole = None
    for step, keys in ring.visits((k, v, *ids[1:])):
        own = functools.partial(run, ring.is_last(step))
        whole = ring.computed(step, own, (whole, keys))
    o, lse = nothing if whole is None else whole
    if ring.hides_rows:
        o = jnp.where(_by_query(lse == -jnp.inf), 0, o)
    return o.astype(q.dtype), lse


def _nothing(q: jax.Array, v: jax.Array) -> Attended:
    """What is known before the first part, varying over axes as results do."""
    batch, q_len, heads, _ = q.shape
    o = zeros((batch, q_len, heads, v.shape[3]), promoted(q.dtype, jnp.float32))
    lse = full((batch, heads, q_len), -jnp.inf, _LSE)
    return Attended(*lowering.align_varying_axes([o, lse, q])[:2])


def _part(ring: Ring, block: Block, q: jax.Array, keys: Any, own: Ids) -> Attended:
    """A block's attention."""
    operands, ids = _operands(block, q, keys, own)
    o, lse = bind(*operands, *ids, spec=ring.spec_of(block), lse=_LSE, **ring.how)
    sees = parts.seen(block, ids)
    return Attended(o, lse if sees is None else jnp.where(sees[:, None], lse, -jnp.inf))


def _operands(
    block: Block, q: jax.Array, keys: Any, own: Ids
) -> tuple[list[jax.Array], Ids]:
    """q, k, v of a block, and its segment ids."""
    k, v, *others = (parts.cut(x, block.keys) for x in keys)
    q, *mine = (parts.cut(x, block.queries) for x in (q, *own))
    return [q, k, v], (*mine, *others)


def _by_query(x: jax.Array) -> jax.Array:
    """(batch, heads, q_len) as a factor of (batch, q_len, heads, columns)."""
    return x.swapaxes(1, 2)[..., None]


# --- gradients ------------------------------------------------------------------------


def _backward(
    ring: Ring,
    saved: tuple[Any, ...],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Any, ...]:
    q, k, v, ids, o, lse = saved
    do = cotangents[0]  # the log-sum-exp has no derivative
    sizes = q.shape[SEQUENCE], k.shape[SEQUENCE]

    def run(is_last: bool, case: Case, state: tuple[Any, Any]) -> list[Any]:
        of_q, keys = state
        of_k = of_v = None
        for block in case:
            found = _part_gradients(ring, block, (q, o, lse, do), keys, ids[:1])
            of_q = parts.added(of_q, found[0], block.queries, sizes[0])
            of_k = parts.added(of_k, found[1], block.keys, sizes[1])
            of_v = parts.added(of_v, found[2], block.keys, sizes[1])
        known = zip((of_q, of_k, of_v), (q, k, v), strict=True)
        of_q, of_k, of_v = [_zeros(like) if x is None else x for x, like in known]
        return [of_q.astype(q.dtype) if is_last else of_q, of_k, of_v]

    of_q, home, away = None, [_zeros(k), _zeros(v)], None
    at = 0
    for step, keys in ring.visits((k, v, *ids[1:])):
        if away is not None:  # it arrives while this step is computed
            away = ring.sent(away, step.shift - at)
        own = functools.partial(run, ring.is_last(step))
        of_q, *new = ring.computed(step, own, (of_q, keys))
        if step.shift == 0:
            home = new  # of the device's own keys: it stays
        else:
            away = new if away is None else parts.sums(away, new)
        at = step.shift
    if away is not None:
        home = parts.sums(home, ring.sent(away, -at))
    grads = [_zeros(q) if of_q is None else of_q, *home]
    return *(g.astype(q.dtype) for g in grads), None


def _part_gradients(
    ring: Ring, block: Block, of_queries: tuple[Any, ...], keys: Any, own: Ids
) -> list[jax.Array]:
    """Gradients of q, k, v from a block."""
    q, o, lse, do = of_queries
    operands, ids = _operands(block, q, keys, own)
    o, do = (parts.cut(x, block.queries) for x in (o, do))
    lse = parts.cut(lse, block.queries, LENGTH)
    sees = parts.seen(block, ids)
    if sees is not None:  # kernels have rules of their own for queries without keys
        do = jnp.where(sees[..., None, None], do, 0)
    spec = ring.spec_of(block)
    how = {**ring.how, "config": None}
    return bind_part_backward(*operands, *ids, o, lse, do, spec=spec, **how)


def _zeros(like: jax.Array) -> jax.Array:
    """A sum of nothing."""
    empty = zeros(like.shape, promoted(like.dtype, jnp.float32))
    return lowering.align_varying_axes([empty, like])[0]


@custom_jvp
def _once(x: jax.Array) -> jax.Array:
    """x, which may be differentiated in ``_backward`` alone.

    The rules of kernels give a log-sum-exp no derivative, so that a derivative of the
    forward or backward pass would be wrong without an error.
    """
    return x


@_once.defjvp
def _no_jvp(primals: Any, tangents: Any) -> Any:
    raise NotDifferentiable(FIRST_ORDER)


def _saving(ring: Ring, *operands: Any) -> tuple[Any, tuple[Any, ...]]:
    """The results, and what the gradient needs."""
    q, k, v, ids = operands
    q, k, v = (_once(x) for x in (q, k, v))
    o, lse = _forward(ring, q, k, v, ids)
    known = lse
    if ring.hides_rows:  # scores of weight zero are not to become NaN
        known = jnp.where(lse == -jnp.inf, 0, lse)
    return (o, lse), (q, k, v, ids, o, known)


_ring = custom_vjp(_forward, nondiff_argnums=(0,))
_ring.defvjp(_saving, _backward)

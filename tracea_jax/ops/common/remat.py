"""Rematerialisation: makes policies of ``jax.checkpoint`` judge our ops as JAX's own.

Each primitive registers the operation of JAX that it replaces (``seen_as``); the splice
of ``rewrite`` wraps the policies of rewritten functions, and ``ops`` makes
``remat_policy`` public. The primitives themselves are in ``ops/<op>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

from tracea_jax.faults import reported
from tracea_jax.ops.common.typed import Aval, Params

Policy = Callable[..., Any]
# (abstract operands, params) -> (primitive, its abstract operands, its params)
View = Callable[[tuple[Aval, ...], Params], tuple[Any, tuple[Aval, ...], Params]]

_VIEWS: dict[Primitive, View] = {}


def seen_as(primitive: Primitive, view: View) -> None:
    """Makes policies judge a primitive of ours as the primitive of JAX it replaces."""
    _VIEWS[primitive] = view


def remat_policy(policy: Policy) -> Policy:
    """A policy for ``jax.checkpoint`` that decides on our ops as on JAX's own.

        jax.checkpoint(f, policy=remat_policy(jax.checkpoint_policies.dots_saveable))

    The policies of JAX know only primitives such as ``lax.dot_general``. Under them
    alone, a product of ours would be computed again in the backward pass. If a policy
    saves a product of ours, it saves all that the backward pass needs: the result, and
    with an activation also the sum before the activation.

    Args:
      policy: one of ``jax.checkpoint_policies``, or any function of a primitive, its
        abstract operands and its parameters.
    """

    def aware(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive in _VIEWS:
            try:
                primitive, avals, params = _VIEWS[primitive](avals, params)
            except Exception as e:
                reported(primitive.name.removeprefix("tracea_"), e, "save")
        return policy(primitive, *avals, **params)

    return aware

"""Rematerialisation: our ops as the policies of ``jax.checkpoint`` see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive

Policy = Callable[..., Any]
# (abstract operands, params) -> (primitive, its abstract operands, its params)
View = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], Any]]

_VIEWS: dict[Primitive, View] = {}


def seen_as(primitive: Primitive, view: View) -> None:
    """Makes policies judge a primitive of ours as the one of JAX that it replaces."""
    _VIEWS[primitive] = view


def remat_policy(policy: Policy) -> Policy:
    """A policy for ``jax.checkpoint`` that decides on our ops as on JAX's own.

        jax.checkpoint(f, policy=remat_policy(jax.checkpoint_policies.dots_saveable))

    The policies of JAX know only ``lax.dot_general``; without this, a product of ours
    is computed again in the backward pass. Saved is what the backward pass needs of it:
    the result, and with an activation also the sum before it.

    Args:
      policy: one of ``jax.checkpoint_policies``, or any function of a primitive, its
        abstract operands and its parameters.
    """

    def aware(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive in _VIEWS:
            primitive, avals, params = _VIEWS[primitive](avals, params)
        return policy(primitive, *avals, **params)

    return aware

"""Rematerialisation: our products as the policies of ``jax.checkpoint`` see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tracea_jax.ops.matmul import dimension_numbers, matmul_p

Policy = Callable[..., Any]


def remat_policy(policy: Policy) -> Policy:
    """A policy for ``jax.checkpoint`` that decides on our products as on JAX's own.

        jax.checkpoint(f, policy=remat_policy(jax.checkpoint_policies.dots_saveable))

    The policies of JAX know only ``lax.dot_general``; without this, a product of ours
    is computed again in the backward pass. Saved is what the backward pass needs of it:
    the result, and with an activation also the sum before it.

    Args:
      policy: one of ``jax.checkpoint_policies``, or any function of a primitive, its
        abstract operands and its parameters.
    """

    def aware(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not matmul_p:
            return policy(primitive, *avals, **params)
        lhs, rhs, *_ = avals
        return policy(
            jax.lax.dot_general_p,
            lhs,
            rhs,
            dimension_numbers=dimension_numbers(lhs, rhs, params["layout"]),
            precision=params["precision"],
            preferred_element_type=params["out"],
        )

    return aware

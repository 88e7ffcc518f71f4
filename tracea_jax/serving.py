"""Resolves an equation of an op to a plan: one answer for lowering and for explain.

| XLA serves an equation because                 | told by                            |
|------------------------------------------------|------------------------------------|
| its shapes are symbolic, or its arrays         | the request                        |
| partitioned, and no rule can split it          |                                    |
| no variant can run it: for want of kernels for | ``dispatch.plan``                  |
| the platform, dtypes, shapes, or a compiler    |                                    |
| XLA was asked for, measured or expected to win | ``dispatch.plan``                  |
| a library that was chosen is not installed     | ``WHY_NOT``, which the ops fill in |
| a kernel that was chosen does not compile      | the compiler; without compiling,   |
|                                                | the cache of kernels               |
| a function of ours failed while planning       | ``faults``, with a warning         |

Where kernels of ours were demanded, the first two are errors in place of reasons, as
are a missing library and a failure of ours; so is a kernel that does not compile where
its config was given, or which a user wrote.
Emitting what serves the equation is ``emission``'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tracea_jax import dispatch, faults, variants
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan, Unsupported
from tracea_jax.emit.kernel import Kernel
from tracea_jax.options import Options, current
from tracea_jax.problem import Problem
from tracea_jax.runtime import cubins
from tracea_jax.runtime.nvrtc import CompileError, Cubin
from tracea_jax.variants import Call, Inline
from tracea_jax.variants.base import Insisting

# (op, rule of ``Inline``) -> () -> the sentence why its equations cannot be compiled
# here, or None. Rules that are not listed can be compiled everywhere.
WHY_NOT: dict[tuple[str, str], Callable[[], str | None]] = {}

PARTITIONED = "the arrays are partitioned automatically; use shard_map"
PARTLY_MANUAL = "only some axes of the mesh are manual; use shard_map over all of them"
SPLIT = "the arrays are split by XLA, and each device plans its part"
SYMBOLIC = "the shapes are symbolic"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An equation of an op, as far as it decides what serves it.

    Attributes:
      op: its name.
      problem: what is asked; None for symbolic shapes, and after a failure.
      partitioned: why its arrays, which the compiler will split over several devices,
        are split by no rule of the op; None where they are not, or a rule does.
      implementation: the op's argument of that name.
      config: the op's argument of that name; a dict as a tuple of its items.
      failure: why there is no problem, where making it failed.
    """

    op: str
    problem: Problem | None
    partitioned: str | None = None
    implementation: str | None
    config: Any
    failure: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Answer to a request: a plan, XLA, or an error.

    Attributes:
      call: what the lowering emits.
      reason: why this, or why nothing can serve the request.
      plan: None where none applies, for ``reason``.
      cubins: the compiled code of the call's kernels, in their order; empty if they
        were not to be compiled.
      failure: what went wrong with the plan, in the words of who reported it, where
        XLA steps in for it.
      error: what lowering raises; ``call`` means nothing then.
    """

    call: Call = Inline()
    reason: str
    plan: Plan | None = None
    cubins: tuple[Cubin, ...] = ()
    failure: str | None = None
    error: Exception | None = None

    @property
    def variant(self) -> str | None:
        """The variant that runs; None if compiling the program would fail."""
        if self.error is not None:
            return None
        return "xla" if self.plan is None else self.plan.variant

    @property
    def is_xla(self) -> bool:
        """Returns whether XLA compiles the equations that people write for the op."""
        return self.error is None and self.call == Inline()


def serve(
    request: Request,
    device: Device,
    *,
    settings: Options | None = None,
    compiles: bool = False,
) -> Served:
    """Resolves a request on a device; see the module for the cases.

    Args:
      request: what is asked.
      device: what the program is compiled for.
      settings: those in force by default.
      compiles: whether kernels are compiled now. Otherwise only failures that the cache
        remembers are known.
    """
    settings = settings or current()
    reason = _left_to_xla(request)
    if reason is not None:
        error = refusal(request.op, request.implementation, reason, settings)
        return _failed(error) if error is not None else Served(reason=reason)
    assert request.problem is not None
    try:
        return _planned(request, request.problem, device, settings, compiles)
    except Exception as e:
        asked = request.implementation, request.config, settings
        if is_demanded(request.op, *asked) or faults.is_for_user(request.op, e):
            return _failed(e)
        return Served(reason=faults.reported(request.op, e, "plan"))


def _planned(
    request: Request,
    problem: Problem,
    device: Device,
    settings: Options,
    compiles: bool,
) -> Served:
    config = request.config
    plan = dispatch.plan(
        problem,
        device,
        implementation=request.implementation,
        config=dict(config) if isinstance(config, tuple) else config,
        settings=settings,
    )
    call = plan.call
    if isinstance(call, Inline):
        return _inline(request, plan, call, settings)
    try:
        code = _compiled(variants.kernels_in(call), settings, compiles)
    except CompileError as e:
        is_error = plan.origin == "user" or _insists(plan)
        return _failed(e) if is_error else _stepped_in(plan, str(e))
    return Served(call=call, reason=plan.reason, plan=plan, cubins=code)


def refusal(
    op: str, implementation: str | None, reason: str, settings: Options | None = None
) -> Unsupported | None:
    """The error for leaving an op to XLA where our kernels were demanded, else None."""
    implementation = implementation or dispatch.default_implementation(op, settings)
    if implementation in (None, "xla"):
        return None
    return Unsupported(f"{implementation=} cannot run here: {reason}")


def is_demanded(
    op: str, implementation: str | None, config: Any, settings: Options | None = None
) -> bool:
    """Returns whether a kernel has to run, by the op's arguments or the settings."""
    return config is not None or bool(refusal(op, implementation, "", settings))


def _left_to_xla(request: Request) -> str | None:
    """Why XLA serves a request whatever would be planned."""
    if request.problem is None:
        return request.failure or SYMBOLIC
    return request.partitioned


def _inline(request: Request, plan: Plan, call: Inline, settings: Options) -> Served:
    why_not = WHY_NOT.get((request.op, call.rule), lambda: None)
    if (reason := why_not()) is None:
        return Served(call=call, reason=plan.reason, plan=plan)
    error = refusal(request.op, request.implementation, reason, settings)
    return _failed(error) if error is not None else _stepped_in(plan, reason)


def _compiled(
    kernels: tuple[Kernel, ...], settings: Options, compiles: bool
) -> tuple[Cubin, ...]:
    """The kernels' code, if they are to be compiled.

    Raises:
      CompileError: if one cannot be compiled, or is known not to be.
    """
    if not kernels:
        return ()
    places = settings.directory, settings.shared
    if compiles:
        return tuple(cubins.get_or_compile(kernel, *places) for kernel in kernels)
    for kernel in kernels:
        if (known := cubins.known_failure(kernel, *places)) is not None:
            raise known
    return ()


def _insists(plan: Plan) -> bool:
    """Returns whether a kernel of the user's runs, whose mistakes the user must see."""
    return isinstance(variants.get(plan.problem.op, plan.variant), Insisting)


def _failed(error: Exception) -> Served:
    return Served(reason=str(error), error=error)


def _stepped_in(plan: Plan, failure: str) -> Served:
    """XLA in place of a plan that cannot be carried out."""
    summary = failure.partition("\n")[0]
    return Served(
        reason=f"{plan.variant} was chosen and cannot run: {summary}", failure=failure
    )

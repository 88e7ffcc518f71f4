"""Sites: where a traced program runs our ops, and the plan for each.

A jaxpr is walked with all jaxprs inside it, as lowering it would do; nothing is
compiled, measured or run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import source_info_util

from tracea_jax import catalogue, serving, variants
from tracea_jax.catalogue import Composite, Planned
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.explain import rows
from tracea_jax.explain.parts import Part, Parts
from tracea_jax.ops.common import lowering, partition
from tracea_jax.ops.common.programs import jaxprs_in
from tracea_jax.options import Options
from tracea_jax.page import Page, Printable
from tracea_jax.problem import Problem
from tracea_jax.rewrite.left import KERNELS
from tracea_jax.serving import Request, Served


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Site(Printable):
    """One equation of a program that calls an op of ours, and what will run for it.

    Attributes:
      scope: names of the scopes it is in, those of enclosing functions first.
      source: the line it was traced from.
      op: name of the op.
      problem: what is asked; None for symbolic shapes, and for an op that is made of
        the sites after it.
      count: how often it runs in a call of the function; None in a loop whose length
        is not known. Branches count as if they were taken.
      plan: None where no plan applies, for ``reason``.
      parts: plans of the problems that what runs is made of, if it is a composed one.
      variant: what runs; None if compiling the program would fail, for ``reason``.
      reason: why this runs, or why it cannot.
      local: problems that each device solves, where the compiler splits the arrays.
    """

    scope: str
    source: str
    op: str
    problem: Problem | None
    count: int | None
    plan: Plan | None
    parts: tuple[Plan, ...] = ()
    variant: str | None
    reason: str
    local: tuple[Part, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is solved on one device."""
        if self.local:
            return tuple(part.problem for part in self.local)
        return () if self.problem is None else (self.problem,)

    @property
    def may_vary(self) -> str | None:
        """Why bits of the results may differ from run to run, or None."""
        return self.plan and self.plan.may_vary

    @property
    def flops(self) -> int:
        """Operations of all runs; of one run if their number is unknown."""
        if self.problem is None:
            return 0
        return self.problem.flops * (1 if self.count is None else self.count)

    @property
    def page(self) -> Page:
        return Page((rows.of_sites([self]),))

    def to_json(self) -> dict[str, Any]:
        """The site as plain data."""
        plan = self.plan
        return {
            "scope": self.scope,
            "source": self.source,
            "op": self.op,
            "problem": self.problem and self.problem.to_json(),
            "count": self.count,
            "variant": self.variant,
            "config": dataclasses.asdict(plan.config) if plan else None,
            "origin": plan and plan.origin,
            "reason": self.reason,
            "time_us": plan and plan.time_us,
            "xla_us": plan and plan.xla_us,
            "may_vary": self.may_vary,
            "parts": [_part_to_json(part) for part in self.parts],
            "local": [part.to_json() for part in self.local],
            "rejected": [dataclasses.asdict(r) for r in plan.rejected] if plan else [],
        }


def sites(
    jaxpr: Any,
    device: Device,
    settings: Options,
    *,
    devices: int = 1,
    parts: Callable[[], Parts | str] | None = None,
) -> tuple[Site, ...]:
    """The sites of a program in the order of its equations.

    Args:
      jaxpr: open or closed.
      device: what the program is compiled for.
      settings: decide as in ``serving.serve``; on a miss nothing is measured.
      devices: over how many the arguments are spread.
      parts: says what is solved on one device where the compiler splits arrays; asked
        once, and only if there is such a site.
    """
    known = functools.cache(parts or (lambda: "it is not compiled"))

    if settings.on_miss == "tune":
        settings = dataclasses.replace(settings, on_miss="heuristic")
    planned = catalogue.planned()
    composites = {c.primitive: c for c in catalogue.composites()}
    found = list(_walk(jaxpr, _Around()))
    spread = max([devices, *(devices_of(eqn) for eqn, _ in found)]) > 1

    @functools.cache  # the layers of a model ask alike
    def served(request: Request) -> Served:
        return serving.serve(request, device, settings=settings)

    def site(eqn: Any, around: _Around) -> Site | None:
        if eqn.primitive in composites:
            return _composite(composites[eqn.primitive], eqn, around)
        if eqn.primitive not in planned:
            return None
        splits = spread and not around.manual
        how = planned[eqn.primitive]
        if splits and lowering.has_rule(how, eqn.params):
            one = _site(how, eqn, around, None, served)
            certain = lowering.leaves_choice_to_parts(how, eqn.params)
            if one.variant is None or (one.variant == "xla" and not certain):
                return one
            return _planned_in_parts(one, eqn, known(), device)
        return _site(how, eqn, around, around.why_partitioned(spread), served)

    every = (site(eqn, around) for eqn, around in found)
    return tuple(one for one in every if one is not None)


# --- walking --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The context of the equations of a jaxpr.

    Attributes:
      scope: of the jaxpr.
      count: how often it runs; None if that is not known.
      manual: mesh axes over which arrays are local here.
      is_local: whether those are all axes of the mesh.
    """

    scope: str = ""
    count: int | None = 1
    manual: frozenset[str] = frozenset()
    is_local: bool = False

    def scope_of(self, eqn: Any) -> str:
        names = (self.scope, str(eqn.source_info.name_stack))
        return "/".join(name for name in names if name)

    def why_partitioned(self, is_spread: bool) -> str | None:
        """Why the compiler splits arrays here, and no rule; None where it does not."""
        if self.is_local or not is_spread:
            return None
        return serving.PARTLY_MANUAL if self.manual else serving.PARTITIONED

    def inside(self, eqn: Any) -> _Around:
        """The context of the jaxprs that an equation holds."""
        name, params = eqn.primitive.name, eqn.params
        inner = dataclasses.replace(self, scope=self.scope_of(eqn))
        if name == "scan" and self.count is not None:
            return dataclasses.replace(inner, count=self.count * params["length"])
        if name == "while":
            return dataclasses.replace(inner, count=None)
        if name == "shard_map":
            manual = self.manual | params["newly_manual_axes"]
            is_local = manual >= frozenset(params["mesh"].axis_names)
            return dataclasses.replace(inner, manual=manual, is_local=is_local)
        return inner


def _walk(jaxpr: Any, around: _Around) -> Iterator[tuple[Any, _Around]]:
    """Every equation that is lowered, with what is around it."""
    for eqn in jaxpr.eqns:
        yield eqn, around
        if eqn.primitive.name not in KERNELS:
            for inner in jaxprs_in(list(eqn.params.values())):
                yield from _walk(inner, around.inside(eqn))


def devices_of(eqn: Any) -> int:
    """Over how many devices an equation asks its arrays to be spread."""
    params = eqn.params
    spread = [
        *params.get("in_shardings", ()),
        *params.get("out_shardings", ()),
        params.get("sharding"),
    ]
    counts = [getattr(sharding, "num_devices", 1) for sharding in spread]
    mesh = params.get("mesh") if eqn.primitive.name == "shard_map" else None
    return max(1, *counts, 1 if mesh is None else mesh.size)


# --- one site -------------------------------------------------------------------------


def _composite(composite: Composite, eqn: Any, around: _Around) -> Site:
    return Site(
        scope=around.scope_of(eqn),
        source=source_info_util.summarize(eqn.source_info),
        op=composite.name,
        problem=None,
        count=around.count,
        plan=None,
        variant=composite.how,
        reason=composite.reason([x.aval for x in eqn.invars], **eqn.params),
    )


def _planned_in_parts(site: Site, eqn: Any, parts: Parts | str, device: Device) -> Site:
    """A site whose arrays the compiler splits: each device has a plan of its own."""
    reason = f"{serving.SPLIT}; the whole problem: {site.reason}"
    if isinstance(parts, str):
        return dataclasses.replace(site, reason=f"{reason}; parts: {parts}")
    avals = [x.aval for x in eqn.invars]
    key = partition.key_of(eqn.primitive, eqn.params, avals, device.platform, device)
    return dataclasses.replace(site, reason=reason, local=parts.get(key, ()))


def _site(
    planned: Planned,
    eqn: Any,
    around: _Around,
    partitioned: str | None,
    serve: Callable[[Request], Served],
) -> Site:
    avals = [x.aval for x in eqn.invars]
    request = lowering.request(planned, avals, eqn.params, partitioned=partitioned)
    served = serve(request)
    return Site(
        scope=around.scope_of(eqn),
        source=source_info_util.summarize(eqn.source_info),
        op=request.op,
        problem=request.problem,
        count=around.count,
        plan=served.plan,
        parts=tuple(_parts(served, serve)),
        variant=served.variant,
        reason=served.reason,
    )


def _parts(served: Served, serve: Callable[[Request], Served]) -> Iterator[Plan]:
    """The plans of what a composed variant runs."""
    plan = served.plan
    if plan is None or served.variant is None:
        return
    variant = variants.get(plan.problem.op, plan.variant)
    if not isinstance(variant, variants.Composed):
        return
    for part in variant.parts(plan.problem):
        asked = Request(
            op=part.op,
            problem=part,
            implementation=variant.implementation,
            config=None,
        )
        if (found := serve(asked).plan) is not None:
            yield found


def _part_to_json(plan: Plan) -> dict[str, Any]:
    return {
        "problem": plan.problem.to_json(),
        "variant": plan.variant,
        "config": dataclasses.asdict(plan.config),
        "origin": plan.origin,
        "reason": plan.reason,
    }

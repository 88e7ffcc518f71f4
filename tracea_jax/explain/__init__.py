"""explain: what an unmodified function would run on, site by site, and why.

print(tracea.explain(model)(x))
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from tracea_jax import device as devices
from tracea_jax import mutable
from tracea_jax.call import Call
from tracea_jax.device import Device
from tracea_jax.diagnosis import by_reason
from tracea_jax.explain import rows
from tracea_jax.explain.parts import parts_of
from tracea_jax.explain.sites import Site, sites
from tracea_jax.mistakes import check_function, function_alone
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.options import current, device_called, options, planning
from tracea_jax.page import Page, Printable, Table
from tracea_jax.rewrite import Miss, Rule, splice
from tracea_jax.rewrite.fewer import fewer
from tracea_jax.rewrite.inside import splicing
from tracea_jax.rewrite.left import left
from tracea_jax.schema import one_line
from tracea_jax.transform import check_ops, rules_of
from tracea_jax.verdicts import Verdict, are_known, left_of, verdict

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


@function_alone
def explain(
    fn: Callable[..., Any],
    *,
    ops: str | Iterable[str] | None = None,
    device: str | Device | None = None,
    after_grad: bool = False,
) -> Callable[..., Explanation]:
    """Explains what ``transform(fn)`` would run: a row for each site, with reasons.

        print(tracea.explain(model)(x))
        tracea.explain(step, device="H200")(params, batch).to_json()

    The function is traced, never run, and nothing is measured. Calls of our ops that it
    makes itself are sites too. Arguments may be ``jax.ShapeDtypeStruct`` in place of
    arrays. Settings in force apply, but a problem without a tuned answer is never tuned
    here: with ``on_miss="tune"`` what is shown is what runs before the tuning. Where
    the compiler splits arrays over devices, the program is compiled, as only that tells
    what each of them computes; with abstract arguments, too. Where fn
    differentiates inside, the sites are those that ``transform`` finds before JAX
    differentiates, and their gradients; what it cannot reach so early is listed too.

    Args:
      fn, ops, after_grad: as in ``transform``.
      device: "cpu", or a GPU that need not be there (see ``device.NAMED``), nor a
        compiler for it, by name or as a profile; by default that of the settings, and
        without one the device that JAX computes on.

    Returns:
      A function of fn's arguments that returns an ``Explanation``; print it.

    Raises:
      ValueError: on an unknown op or device.
      TypeError: if fn is no function, or if its arguments are passed along with it.
    """
    check_function(fn, "explain takes a function", "explain(f)(*args)")
    chosen = check_ops(ops, after_grad)
    target = None if device is None else device_called(device)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        def spliced(rules: tuple[Rule, ...]) -> tuple[Any, list[Any], list[Miss]]:
            with splicing(() if after_grad else rules):
                jaxpr, arrays = _traced(fn, args, kwargs)
            misses = left(jaxpr, rules, after_grad=after_grad)
            return splice(jaxpr, rules, misses), arrays, misses

        rules, settings = rules_of(chosen), current()
        # Rules ask for plans while they look; none may be measured, or missing.
        with planning(target) as where, options(on_miss="heuristic"):
            raced, without = None, ()
            if are_known(where):
                program, *_ = spliced(rules)  # as transform makes it, and as it raced
                raced = verdict(program, chosen, after_grad, where)
                without = left_of(program, chosen, after_grad, where)
            with without_choices():
                result, arrays, misses = spliced(fewer(rules, without))
            spread = max(map(_device_count, arrays), default=1)
            parts = functools.partial(parts_of, result, arrays, where)
            found = sites(result, where, settings, devices=spread, parts=parts)
        return Explanation(
            function=getattr(fn, "__name__", type(fn).__name__),
            device=where,
            sites=found,
            misses=tuple(misses),
            verdict=raced,
        )

    return explained


def _traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """The jaxpr of a call, and its array arguments."""
    with mutable.opened(fn, args, kwargs) as (function, args, kwargs):
        call, arrays = Call.of(function, args, kwargs)

        def of_arrays(*arrays: Any) -> Any:
            return call.applied(function, arrays)

        with jax.disable_jit(False):  # what is compiled is explained
            return jax.make_jaxpr(of_arrays)(*arrays), arrays


def _device_count(array: Any) -> int:
    return getattr(getattr(array, "sharding", None), "num_devices", 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Printable):
    """Every site of a function with its plan; a shell and a notebook show it.

    Attributes:
      function: its name.
      device: what it is explained for.
      sites: in the order of the program; see ``sites.Site``.
      misses: what was left as it is; see ``rewrite.Miss``.
      verdict: how the whole program raced against plain when it was last tuned; None
        if that is not known.
    """

    function: str
    device: Device
    sites: tuple[Site, ...]
    misses: tuple[Miss, ...]
    verdict: Verdict | None = None

    @property
    def ops(self) -> dict[str, int]:
        """Number of sites of each op."""
        return dict(collections.Counter(site.op for site in self.sites))

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations of a call that each variant serves.

        Loops of unknown length count once. What was left as it is does not count.
        """
        totals = collections.Counter[str]()
        for site in self.sites:
            if site.variant is not None:
                totals[site.variant] += site.flops
        return dict(totals)

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain data, for ``json.dumps``."""
        return {
            "function": self.function,
            "device": devices.to_json(self.device),
            "sites": [site.to_json() for site in self.sites],
            "misses": [dataclasses.asdict(miss) for miss in self.misses],
            "ops": self.ops,
            "flops": self.flops,
            "verdict": self.verdict and self.verdict.to_json(),
        }

    @property
    def page(self) -> Page:
        lines = [f"{self.function} on {self.device}", _totals(self)]
        if self.verdict is not None:
            lines.append(_raced(self.verdict))
        elsewhere = rows.rejected_everywhere(self.sites)
        lines += by_reason(elsewhere, "not used anywhere: {variants} ({reason})")
        parts: list[str | Table] = ["\n".join(lines)]
        if self.sites:
            parts.append(rows.of_sites(self.sites))
        if self.misses:
            parts.append(rows.of_misses(self.misses))
        return Page(tuple(parts))


# --- text -----------------------------------------------------------------------------


def _totals(explanation: Explanation) -> str:
    count = len(explanation.sites)
    if not count:
        return "no sites"
    ops = ", ".join(f"{n} {op}" for op, n in explanation.ops.items())
    text = f"{count} site{'s' if count > 1 else ''}: {ops}"
    flops = explanation.flops
    if not (total := sum(flops.values())):
        return text
    ranked = sorted(flops.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in ranked if n)
    return f"{text}; of {_flops(total)} {shares}"


def _raced(verdict: Verdict) -> str:
    text = f"whole program: {verdict}; raced {verdict.written[:10]}"
    return one_line(f"{text} on {verdict.environment}")


def _flops(count: int) -> str:
    """ "4.12 Tflop"."""
    scale, prefix = next((s, p) for s, p in _PREFIXES if count >= s)
    return f"{count / scale:.3g} {prefix}flop"

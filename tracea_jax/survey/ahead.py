"""The plan of a survey, made without the device, and the kernels that it needs.

    <directory>/plan.jsonl    the problems, and the choices that will be measured
    <directory>/cubin/...     their kernels, compiled; see ``runtime.cubins``

Sizes are mostly parameters of kernels, so that many problems share one. Of random
configs those are preferred whose kernels are needed anyway, so what there is to compile
grows more slowly than the number of problems.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.diagnosis import compiled_elsewhere
from tracea_jax.emit.kernel import Kernel
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.runtime import nvrtc
from tracea_jax.survey.candidates import Preferences, candidates
from tracea_jax.survey.problems import Numbered
from tracea_jax.tuning.lab.ahead import kernels_of
from tracea_jax.tuning.lab.compile_pool import CompilePool
from tracea_jax.variants import Space

PLAN = "plan.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A problem, and the choices that will be measured."""

    numbered: Numbered
    choices: tuple[Choice, ...]


_TRIED = 24  # configs whose kernels are looked up for a variant of a problem

Choose = Callable[[Numbered], Sequence[Choice]]


class Planner:
    """Plans problems one after another; each prefers the kernels of those before.

    Attributes:
      device: what the plan is for; it need not be here.
      kernels: what the problems planned so far need, by key.
    """

    def __init__(
        self,
        device: Device,
        wishes: Preferences | None = None,
        choose: Choose | None = None,
    ) -> None:
        """Plans nothing yet.

        Args:
          device: see above.
          wishes: preferences among the choices.
          choose: the choices of a problem, in place of ``candidates``.
        """
        self.device = device
        self.kernels: dict[str, Kernel] = {}
        wishes = wishes or Preferences()
        self._wishes = dataclasses.replace(wishes, compiled=self._compiled)
        self._choose = choose or self._candidates
        # Configs that were chosen, the last one last, by variant and form.
        self._used: dict[Hashable, dict[Any, None]] = {}

    def planned(self, numbered: Numbered) -> Planned:
        """The plan of a problem, whose kernels are known from then on.

        A choice whose kernels cannot be written down is left out.
        """
        problem = numbered.problem
        with compiled_elsewhere():
            kept: list[Choice] = []
            for choice in self._choose(numbered):
                with contextlib.suppress(ValueError):
                    self.kernels |= self._needed(problem, choice)
                    kept.append(choice)
        for choice in kept:
            used = self._used.setdefault(_form(problem, choice.variant), {})
            used.pop(choice.config, None)
            used[choice.config] = None
        return Planned(numbered=numbered, choices=tuple(kept))

    def _candidates(self, numbered: Numbered) -> Sequence[Choice]:
        return candidates(numbered.problem, self.device, numbered.name, self._wishes)

    def _compiled(self, problem: Problem, variant: str, space: Space) -> Iterator[Any]:
        used = self._used.get(_form(problem, variant), {})
        for config in itertools.islice(reversed(used), _TRIED):
            choice = Choice(variant=variant, config=config)
            if space.index(config) is not None:
                if self.kernels.keys() >= self._needed(problem, choice).keys():
                    yield config

    def _needed(self, problem: Problem, choice: Choice) -> dict[str, Kernel]:
        found = kernels_of(problem, choice, self.device)
        return {nvrtc.key(kernel): kernel for kernel in found}


def _form(problem: Problem, variant: str) -> Hashable:
    """The fields that problems with common kernels share: all but numbers."""
    values = (getattr(problem, f.name) for f in dataclasses.fields(cast(Any, problem)))
    return variant, tuple(v for v in values if not isinstance(v, int | float | tuple))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The outcome of compiling a plan's kernels."""

    kernels: int
    failed: tuple[str, ...]


def compile_all(
    kernels: Iterable[Kernel],
    directory: pathlib.Path,
    workers: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Compiled:
    """Compiles kernels in processes, those that the directory has not.

    Args:
      kernels: distinct ones.
      directory: whose store receives them, as a cache directory.
      workers: processes at most.
      on_done: called after each kernel.

    Returns:
      How many there are, and why some of them could not be compiled. Choices that need
      these fail when they are measured, too.
    """
    with contextlib.closing(CompilePool(directory, workers=workers)) as pool:
        futures = [pool.submit(kernel) for kernel in kernels]
        failed = []
        for future in futures:
            try:
                future.result()
            except Exception as e:  # is a result like others
                failed.append(f"{type(e).__name__}: {e}")
            on_done()
    return Compiled(kernels=len(futures), failed=tuple(failed))


# --- files ----------------------------------------------------------------------------


def write(directory: pathlib.Path, plan: Sequence[Planned]) -> None:
    """Writes a plan in place of any other."""
    lines = [
        json.dumps(
            {
                "problem": planned.numbered.problem.op,
                "seed": planned.numbered.seed,
                "index": planned.numbered.index,
                "choices": [
                    {"variant": c.variant, "config": dataclasses.asdict(c.config)}
                    for c in planned.choices
                ],
            },
            separators=(",", ":"),
        )
        for planned in plan
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PLAN).write_text("".join(f"{line}\n" for line in lines))


def read(directory: pathlib.Path, platform: str = "cuda") -> Iterator[Planned]:
    """The plan that was written for a platform, by the same version of the package.

    Raises:
      ValueError: on a choice that is no longer known.
    """
    for line in (directory / PLAN).read_text().splitlines():
        data = json.loads(line)
        numbered = Numbered.of(data["problem"], data["seed"], platform, data["index"])
        op = data["problem"]
        yield Planned(
            numbered=numbered,
            choices=tuple(
                Choice(
                    variant=c["variant"],
                    config=variants.config_from_json(
                        variants.get(op, c["variant"]), c["config"]
                    ),
                )
                for c in data["choices"]
            ),
        )

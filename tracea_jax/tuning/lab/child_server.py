"""The program of a lab's child process: a local lab whose methods are called by name.

The parent's side is ``child``, which also is the module that the child runs; messages
and the loop that answers them are in ``serving``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.local import LocalLab
from tracea_jax.tuning.lab.serving import Tell, serve
from tracea_jax.tuning.measure import Race, Timing


class _Server:
    """Answers questions (method, arguments ...); the question "hello" makes the lab."""

    def __init__(self) -> None:
        self._lab: LocalLab | None = None

    def __call__(self, question: tuple[Any, ...], tell: Tell) -> Any:
        method, *arguments = question
        if method == "hello":
            return self._hello(*arguments)
        assert self._lab is not None
        if method == "race":
            return self._race(self._lab, tell, *arguments)
        return _METHODS[method](self._lab, *arguments)

    def _hello(self, factory: str, device: Device, timing: Timing) -> None:
        module, _, function = factory.partition(":")
        bench_of = getattr(importlib.import_module(module), function)
        self._lab = LocalLab(bench_of, device, timing)

    @staticmethod
    def _race(
        lab: LocalLab,
        tell: Tell,
        problem: Problem,
        choices: Sequence[Choice],
        limit_s: float,
        known_us: Mapping[Choice, float] | None,
        is_heat: bool,
    ) -> Race:
        return lab.race(
            problem,
            choices,
            limit_s=limit_s,
            known_us=known_us,
            is_heat=is_heat,
            on_round=lambda done, total: tell(("round", done, total)),
            on_turn=lambda choice: tell(("turn", choices.index(choice))),
        )


_METHODS: dict[str, Callable[..., Any]] = {
    "prepare": LocalLab.prepare,
    "sample": lambda lab, problem, choice, incumbent_us: lab.sample(
        problem, choice, incumbent_us=incumbent_us
    ),
    "verify": LocalLab.verify,
    "kernel_race": LocalLab.kernel_race,
    "check": LocalLab.check,
}


def main() -> None:
    serve(_Server())

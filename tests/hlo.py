"""Compiled programs as graphs: names and the order of instructions do not count."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r", (metadata|origin)=\{[^}]*\}")


def compiled(f: Callable[..., Any], *args: Any) -> collections.Counter[Any]:
    """Instructions that a function compiles to, each with all it is made of."""
    text = jax.jit(f).lower(*args).compile().as_text()
    assert text is not None
    return graph(text)


def graph(text: str) -> collections.Counter[Any]:
    """The instructions of a module, each hashed with its operands and computations.

    A computation has the hash of its root and of how often each instruction is in it.
    """
    computations: dict[str, dict[str, str]] = {}
    lines: dict[str, str] = {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations[match[1]] = {}
        elif match := _INSTRUCTION.match(line):
            lines[match[2]] = _METADATA.sub("", match[3])
    memory: dict[str, int] = {}

    def of_computation(name: str) -> int:
        if name not in memory:
            hashes = of_instructions(computations[name])
            memory[name] = hash(tuple(sorted(hashes.values())))
        return memory[name]

    def of_instructions(lines: dict[str, str]) -> dict[str, int]:
        known: dict[str, int] = {}
        for name, line in lines.items():  # in the order of their uses

            def named(match: re.Match[str]) -> str:
                if match[1] in known:
                    return str(known[match[1]])
                return str(of_computation(match[1]))

            known[name] = hash(_NAME.sub(named, line))
        return known

    (*_, entry) = computations  # the last one
    return collections.Counter(of_instructions(computations[entry]).values())

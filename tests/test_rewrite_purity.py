"""Recognisers change nothing: what they refuse leaves no trace, and nor does an order.

Each rule is asked at each anchor of many programs, first as a rewrite would ask, then
again, then on a view that no rule has seen; all three answers must be equal, and the
view as it was.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from attention_spellings import GROUPS, RARE
from edge_programs import LAYERS, edge_program
from losses import LOSSES, logits_of, operands
from norm_programs import norm_program
from value_programs import program

import tracea_jax as tracea
from tracea_jax import rewrite
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.ops.linear_cross_entropy import chunks
from tracea_jax.rewrite import Match, Rule, rules, splice
from tracea_jax.rewrite.view import View


@pytest.fixture(autouse=True)
def few_logits_are_many(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    monkeypatch.setattr(chunks, "_ALIGNMENT", 8)


def state(view: View) -> Any:
    """All of a view that rules read, but for what it remembers."""
    return (
        list(map(id, view.eqns)),
        list(view.outvars),
        set(view.taken),
        view.vain,
        {x: list(users) for x, users in view._consumers.items() if users},
        dict(view._producers),
        dict(view.outside),
    )


def unread(view: View) -> View:
    """The view without what it remembers of earlier questions."""
    new = copy.copy(view)
    new.taken, new.memory, new._scalars = set(view.taken), {}, {}
    consumers = {x: list(users) for x, users in view._consumers.items()}
    new._consumers = collections.defaultdict(list, consumers)
    return new


def checked(rule: Rule, counts: collections.Counter[Any]) -> Rule:
    def match(view: View, index: int) -> Any:
        before = state(view)
        fresh = unread(view)
        found = rule.match(view, index)
        assert state(view) == before, f"{rule.op} changed the view"
        assert rule.match(view, index) == found, f"{rule.op} remembers"
        assert rule.match(fresh, index) == found, f"{rule.op} depends on others"
        assert state(view) == before, f"{rule.op} changed the view"
        counts[rule.op, isinstance(found, Match)] += 1
        return found

    return dataclasses.replace(rule, match=match)


def asked(jaxprs: Iterator[Any], device: str) -> collections.Counter[Any]:
    """How often each rule refused (False), and how often it found a match (True)."""
    counts: collections.Counter[Any] = collections.Counter()
    with without_choices(), tracea.options(device=device):
        every = [checked(rule, counts) for rule in rules()]
        for jaxpr in jaxprs:
            splice(jaxpr, every, [])
    return counts


@np.errstate(all="ignore")
def jaxprs(count: int) -> Iterator[Any]:
    """Those of random programs of all kinds."""
    for seed in range(count):
        for made in (norm_program(seed), program(seed)):
            yield jax.make_jaxpr(made)(*made.arguments)
        kind = range(seed % len(LAYERS), 1000, len(LAYERS))
        some = map(edge_program, kind[seed // len(LAYERS) :])
        edge = next(e for e in some if all(x.size for x in e.arguments))
        yield jax.make_jaxpr(edge.layer)(*edge.arguments)


def spelled() -> Iterator[Any]:
    """Those of attention and of cross entropies, as people write them."""
    for spellings in (*GROUPS.values(), *RARE.values()):
        for case in list(spellings.values())[::9]:
            yield jax.make_jaxpr(case.fn)(*case.args)
    x, w, labels = operands()
    for loss in list(LOSSES.values())[::3]:
        yield jax.make_jaxpr(lambda x, w, loss=loss: loss(logits_of(x, w), labels))(
            x, w
        )


def test_rules_leave_no_trace_in_random_programs():
    counts = asked(jaxprs(len(LAYERS)), "H200")
    for op in ("matmul", "gated_matmul", "conv2d", "attention", "group_norm"):
        assert counts[op, True], op
    assert sum(n for (_, is_match), n in counts.items() if not is_match) > 100


def test_rules_leave_no_trace_in_spellings():
    counts = asked(spelled(), "H200")
    for op in ("attention", "linear_cross_entropy"):
        assert counts[op, True] and counts[op, False], op


@pytest.mark.slow
@pytest.mark.parametrize("device", ["H200", "A100"])
def test_rules_leave_no_trace_in_many_programs(device):
    asked(jaxprs(500), device)


# The graph itself, and classes of which each instance belongs to one reading, that a
# refusal ends.
WRITERS = {"View", "Labels", "Reading", "_Program", "_Reader"}


def classes() -> Iterator[type]:
    for info in pkgutil.walk_packages(rewrite.__path__, f"{rewrite.__name__}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def test_what_recognisers_know_is_frozen():
    found = list(classes())
    assert len(found) > 60
    loose = [
        c.__name__
        for c in found
        if not issubclass(c, Exception | tuple)
        and not (dataclasses.is_dataclass(c) and c.__dataclass_params__.frozen)
    ]
    assert set(loose) == WRITERS

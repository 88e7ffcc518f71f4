"""Choices as XLA programs that repeat them, for times as a program pays them.

A program has a loop whose body is one execution: what precedes an execution in a user's
program is another one, not a dispatch from Python. A barrier makes each round of the
loop depend on its number, so that XLA cannot take the execution out of the loop.
Results go to the same buffers each time, and operands stay where they are.

What XLA does not compile, calls of prebuilt kernels, shares one program with a branch
for each choice, since compiling takes most of a survey's time. XLA's own code has a
program to itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tracea_jax import catalogue, variants
from tracea_jax.device import Device
from tracea_jax.ops.common.bench import random_normal, reusing_numbers
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, Problem
from tracea_jax.tuning.measure import CandidateError, Run, candidate_error
from tracea_jax.variants.base import CpuCall

Arrays = list[jax.Array]
Execute = Callable[..., Arrays]
Prepared = Mapping[Choice, Run | CandidateError]


def prepared(problem: Problem, choices: Sequence[Choice], device: Device) -> Prepared:
    """Functions that execute each choice any number of times, or why it cannot run.

    Raises:
      ValueError: if the problem itself cannot be run.
    """
    workload = catalogue.get(problem.op).bench(problem, device).workload
    inputs = operands(problem, workload)
    one = functools.partial(workload.execute, problem=problem)
    found: dict[Choice, Run | CandidateError] = {}
    for group in _groups(problem, choices, device):
        found |= _prepared(group, one, inputs)
    return {choice: found[choice] for choice in choices}


def operands(problem: Problem, workload: Any) -> Arrays:
    """Random operands, as the op's workload draws them.

    Only the gradients of attention get other outputs and log-sum-exps, of about the
    right size: a program that computes the real ones would have to be compiled.
    """
    is_backward = getattr(problem, "direction", "") == "backward"
    with reusing_numbers():
        if not (isinstance(problem, AttentionProblem) and is_backward):
            return workload.operands(problem, 0)
        forward = dataclasses.replace(
            problem, direction="forward", bias_gradient=False, saves_lse=True
        )
        inputs = workload.operands(forward, 0)
        xla = Choice(variant="xla", config=variants.XLA.config_type())
        execute = functools.partial(workload.execute, problem=forward, choice=xla)
        out, lse = jax.eval_shape(execute, *inputs)
        outs = random_normal([(out.shape, out.dtype.name)] * 2, 0)
        usual = math.log(problem.kv_len) + 0.5
        return [*inputs, outs[0], jnp.full(lse.shape, usual, lse.dtype), outs[1]]


def _groups(
    problem: Problem, choices: Sequence[Choice], device: Device
) -> list[list[Choice]]:
    """The choices that share a program."""
    together: list[Choice] = []
    groups = [together]
    for choice in choices:
        variant = variants.get(problem.op, choice.variant)
        call = variant.call(problem, choice.config, device)
        if isinstance(call, CpuCall):
            together.append(choice)
        else:
            groups.append([choice])
    return [group for group in groups if group]


def _prepared(group: Sequence[Choice], one: Execute, inputs: Arrays) -> Prepared:
    """The runs of a group; if its program fails, those of each choice alone."""
    try:
        program = _Program(
            [functools.partial(one, choice=choice) for choice in group], inputs
        )
    except Exception as e:
        if len(group) == 1:
            return {group[0]: candidate_error(e, "compile_error")}
        alone = [_prepared([choice], one, inputs) for choice in group]
        return {choice: run for found in alone for choice, run in found.items()}
    return {c: functools.partial(program.run, i) for i, c in enumerate(group)}


class _Program:
    """A compiled program with a branch for each of several executions."""

    def __init__(self, executions: Sequence[Execute], inputs: Arrays) -> None:
        shapes = jax.eval_shape(executions[0], *inputs)
        self._results = [jnp.zeros(s.shape, s.dtype) for s in shapes]
        self._inputs = inputs
        branches = [functools.partial(repeated, execute) for execute in executions]

        def program(which: Any, count: Any, inputs: Arrays, results: Arrays) -> Arrays:
            if len(branches) == 1:
                return branches[0](count, inputs, results)
            return lax.switch(which, branches, count, inputs, results)

        jitted = jax.jit(program, donate_argnums=3)
        zero = np.int32(0)
        self._compiled = jitted.lower(zero, zero, inputs, self._results).compile()

    def run(self, which: int, count: int) -> None:
        results, self._results = self._results, []
        self._results = self._compiled(
            np.int32(which), np.int32(count), self._inputs, results
        )
        jax.block_until_ready(self._results)


def repeated(execute: Execute, count: Any, inputs: Arrays, results: Arrays) -> Arrays:
    """The results of ``count`` executions, one after another."""

    def body(state: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
        done, inputs_now = lax.optimization_barrier((state[0], inputs))
        return done + 1, execute(*inputs_now)

    def is_left(state: tuple[Any, Arrays]) -> Any:
        return state[0] < count

    return lax.while_loop(is_left, body, (jnp.int32(0), results))[1]

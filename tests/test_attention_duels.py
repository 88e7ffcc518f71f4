"""Who of ours won meets cuDNN in a process that may be lost, hang or talk nonsense."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import faulty_duels
import pytest

from tracea_jax.device import NAMED, local_cpu
from tracea_jax.problem import AttentionProblem
from tracea_jax.tuning.lab.worker import WorkerLost

pytestmark = pytest.mark.once

DEVICE = NAMED["H200"]


def won(answers: Any, problem: AttentionProblem, device: Any = DEVICE) -> Any:
    """A race without cuDNN."""
    rival = answers.cudnn(problem, device)
    ours = [c for c in answers.candidates(problem, device) if c != rival]
    return answers.Raced(
        problem=problem,
        best=ours[-1],
        usual=answers.default(problem, device),
        times={ours[-1]: [10.0] * 5},
        apart=0.0,
    )


class Scripted:
    """A process whose answers are told; what is raised is an exception among them."""

    def __init__(self, *script: Any) -> None:
        self._script = list(script)
        self.asked: list[Any] = []
        self.open = 0
        self._lock = threading.Lock()

    def __call__(self, program: Any, environment: Any) -> Scripted:
        self.open += 1
        return self

    def ask(self, question: Any, limit_s: float) -> Any:
        with self._lock:
            self.asked.append(question)
            told = self._script.pop(0)
        if isinstance(told, Exception):
            raise told
        return told(question) if callable(told) else told

    def close(self) -> None:
        self.open -= 1


def settled(duels: Any, monkeypatch: Any, found: Any, *script: Any) -> Any:
    process = Scripted(*script)
    monkeypatch.setattr(duels, "Worker", process)
    over = dict(duels.settled(found, DEVICE))
    assert process.open == 0 and not process._script
    return over, process


def test_a_winner_meets_cudnn_unless_cudnn_has_no_program(module, monkeypatch):
    answers, duels = module("attention_answers"), module("attention_duels")
    problems = module("model_attention").order()
    with_rival = next(p for p in problems if answers.cudnn(p, DEVICE))
    without = next(p for p in problems if not answers.cudnn(p, DEVICE))
    found = [won(answers, p) for p in (with_rival, without)]
    over, process = settled(
        duels, monkeypatch, found, lambda race: dataclasses.replace(race, apart=0.5)
    )
    assert process.asked == [found[0]]
    assert over[without] is found[1] and over[with_rival].apart == 0.5


@pytest.mark.parametrize("bad", [WorkerLost("gone", began=True), "nonsense", None, 7])
def test_a_process_that_fails_is_replaced_once(bad, module, monkeypatch):
    answers, duels = module("attention_answers"), module("attention_duels")
    found = [won(answers, module("model_attention").order()[0])]
    problem = found[0].problem
    over, process = settled(duels, monkeypatch, found, bad, lambda race: race)
    assert over[problem] == found[0] and len(process.asked) == 2
    over, _ = settled(duels, monkeypatch, found, bad, bad)
    assert over[problem].startswith("it did not meet cuDNN")


def test_another_problem_is_no_answer(module, monkeypatch):
    answers, duels = module("attention_answers"), module("attention_duels")
    asked, other = (won(answers, p) for p in module("model_attention").order()[:2])
    over, _ = settled(duels, monkeypatch, [asked], other, other)
    assert isinstance(over[asked.problem], str)


def test_all_that_ours_can_win_against_are_finalists(module):
    answers, duels = module("attention_answers"), module("attention_duels")
    for problem in module("model_attention").order()[::9]:
        race = won(answers, problem)
        last = duels.finalists(race, DEVICE)
        rival = answers.cudnn(problem, DEVICE)
        assert {race.best, race.usual, *([rival] if rival else [])} == set(last)
        assert len(set(last)) == len(last) <= 3


_SHAPE: Any = {"batch": 2, "q_len": 40, "kv_len": 48, "heads": 4, "kv_heads": 2}
SMALL = AttentionProblem(**_SHAPE, head_dim=16, dtype="float32", scale=0.25)


def test_a_duel_is_a_race_of_all_finalists(module, monkeypatch):
    answers, duels = module("attention_answers"), module("attention_duels")
    monkeypatch.setattr(answers, "ROUNDS", 1)
    race = won(answers, SMALL, local_cpu())
    assert race.best != race.usual
    last = duels.duel(race, local_cpu())
    assert set(last.times) == set(duels.finalists(race, local_cpu()))
    assert last.apart <= answers.DIFFERENCE

    def broken(choice: Any, *operands: Any) -> Any:
        raise RuntimeError("INTERNAL: capturing stream has unjoined work")

    def prepared(problem: Any, choices: Any) -> Any:
        ready = module("attention_ahead").prepared_alone(problem, choices)
        runs = dict(ready.runs)
        runs[race.best] = broken
        return dataclasses.replace(ready, runs=runs)

    monkeypatch.setattr(duels, "prepared_alone", prepared)
    with pytest.raises(duels.NotRun, match="xla.* did not run"):
        duels.duel(race, local_cpu())


@pytest.mark.slow
def test_whatever_becomes_of_processes_other_problems_are_answered(
    module, monkeypatch, tmp_path
):
    answers, duels = module("attention_answers"), module("attention_duels")
    monkeypatch.setenv(faulty_duels.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(duels, "PROGRAM", ("-m", "faulty_duels"))
    monkeypatch.setattr(duels, "LONGEST_S", 10.0)
    order = [p for p in module("model_attention").order() if answers.cudnn(p, DEVICE)]
    problems = dict(zip(faulty_duels.FAULTS, order, strict=False))
    monkeypatch.setenv(
        faulty_duels.PROBLEMS, "\n".join(f"{n}|{p}" for n, p in problems.items())
    )
    over = dict(duels.settled([won(answers, p) for p in problems.values()], DEVICE))
    for name, problem in problems.items():
        is_answered = name in ("none", "lost once")
        assert isinstance(over[problem], answers.Raced) == is_answered, name
    assert "no end after" in over[problems["hangs"]]
    assert "garbage" in over[problems["garbage"]]
    assert "unjoined" in over[problems["raises"]]

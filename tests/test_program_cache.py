"""Cache of races of whole programs: files, faults and processes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from typing import Any

import jax
import pytest
from program_races import ARGUMENTS, layers
from test_agreement import together
from test_cache_cli import run

import tracea_jax as tracea
from tracea_jax import catalogue, knowledge, verdicts
from tracea_jax.campaign.executions import Program
from tracea_jax.device import local_cpu
from tracea_jax.options import current, options
from tracea_jax.problem import problem_from_json
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.runtime import trust
from tracea_jax.transform import check_ops
from tracea_jax.tuning.store.code import code_of
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.variants import XLA

CPU = local_cpu()
OPS = check_ops(None, False)


def problem() -> ProgramProblem:
    """The problem of ``layers`` where kernels serve it."""
    program = Program(fn=layers, args=ARGUMENTS, ops=OPS, after_grad=False)
    with program.opened() as executions:
        return verdicts.problem_of(executions.sites()[0], OPS, False)


PROGRAM = problem()


def best(without: Any = ("conv2d",), **changes: Any) -> Best:
    name = verdicts.name_of(PROGRAM, ("conv2d",), CPU)
    times = {"time_us": 80.0, "xla_us": 100.0, "ratio": 1.25}
    return Best(**{**name, "config": {"without": without}, **times, **changes})


def remember(made: Best | None = None) -> Entry:
    """Records the entry of a race in the cache."""
    about = {"function": "layers", "every": 0.8}
    entry = verdicts.record(PROGRAM, CPU, current(), made or best(), (), about)
    knowledge.refresh(current())
    return entry


def left() -> set[str]:
    """The ops that transform leaves of those with sites in ``layers``."""
    knowledge.refresh(current())
    text = str(jax.make_jaxpr(tracea.transform(layers))(*ARGUMENTS))
    return {op for op in ("matmul", "conv2d") if f"tracea_{op}" not in text}


def file_of(cache: pathlib.Path) -> pathlib.Path:
    (found,) = cache.glob("tuned/*/program/*.json")
    return found


def test_what_is_remembered_is_followed(cache_dir):
    assert left() == set()
    remember()
    assert left() == {"conv2d"}
    assert file_of(cache_dir).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "made",
    [
        best(3),
        best([1]),
        best(["matmul", "conv2d"]),  # not as this version sorts it
        best(config={"without": ["conv2d"], "more": 1}),
        best(config={}, variant="faster"),
        best(code="0" * 16),  # other kernels
        best(time_us=None),
        best(xla_us=None),
    ],
    ids=lambda made: f"{made.variant} {made.config} {made.code[:4]}",
)
def test_what_makes_no_sense_or_is_out_of_date_is_passed_over(made):
    remember(made)
    assert left() == set()
    assert tracea.explain(layers)(*ARGUMENTS).verdict is None


def test_classes_of_another_version_leave_nothing():
    remember(best(["a problem that nobody asks", "convolution"]))
    assert left() == set()


def test_a_damaged_file_is_set_aside_and_made_anew(cache_dir):
    remember()
    path = file_of(cache_dir)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert left() == set()
    assert list(path.parent.glob("*.corrupt-*")) and not path.exists()
    remember()
    assert left() == {"conv2d"}


def test_a_file_of_another_program_does_not_count(cache_dir):
    remember()
    path = file_of(cache_dir)
    other = dataclasses.replace(PROGRAM, jaxpr="0" * 32)
    verdicts.record(other, CPU, current(), best(), (), {})
    (second,) = set(path.parent.glob("*.json")) - {path}
    os.replace(second, path)
    assert left() == set()


def test_a_file_that_others_can_write_does_not_count(cache_dir, monkeypatch):
    monkeypatch.setattr(trust, "_warned", set())
    remember()
    file_of(cache_dir).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        assert left() == set()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give away"
)
def test_a_file_of_another_user_does_not_count(cache_dir, monkeypatch):
    monkeypatch.setattr(trust, "_warned", set())
    remember()
    os.chown(file_of(cache_dir), 65534, 65534)
    with pytest.warns(RuntimeWarning, match="belongs to user 65534"):
        assert left() == set()


def test_a_directory_that_cannot_be_written_keeps_it_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_warned", set())
    place = tmp_path / "file"
    place.write_text("no directory")
    with options(cache_dir=str(place)), pytest.warns(RuntimeWarning, match="cannot be"):
        remember()
        assert left() == {"conv2d"}


def test_a_shared_cache_is_followed(tmp_path):
    with options(cache_dir=str(tmp_path / "shared")):
        remember()
    assert left() == set()
    with options(cache_path=str(tmp_path / "shared")):
        assert left() == {"conv2d"}


def test_a_later_race_replaces_the_earlier_one(cache_dir):
    remember()
    remember(best([]))
    assert left() == set()
    remember(best(["matmul"]))
    assert left() == {"matmul"}
    assert file_of(cache_dir).exists()


# --- the command ----------------------------------------------------------------------


def test_the_command_lists_shows_and_verifies(capsys, cache_dir):
    remember()
    status, out, err = run(capsys, "list")
    assert status == 0 and err.startswith("1 tuned problems")
    assert f"{CPU.name}: {PROGRAM}: spliced [without ['conv2d']], 80.0 us, " in out
    assert "XLA 100.0 us, 1.25x" in out
    status, out, _ = run(capsys, "show", "program")
    assert status == 0 and "function layers" in out
    for how in ([], ["--run"]):
        assert run(capsys, "verify", *how) == (0, "", "1 tuned problems, 0 wrong\n")
    remember(best(code="0" * 16))
    status, out, _ = run(capsys, "verify")
    assert status == 0 and "its kernels have changed" in out
    remember(best(["b", "a"]))
    assert run(capsys, "verify")[0] == 1


def test_the_command_carries_it_to_another_cache(capsys, tmp_path, cache_dir):
    remember()
    file = tmp_path / "answers.json"
    assert run(capsys, "export", file, "--op", "program")[0] == 0
    assert run(capsys, "export", tmp_path / "none", "--op", "matmul")[2].startswith("0")
    with options(cache_dir=str(tmp_path / "other")):
        assert left() == set()
        assert run(capsys, "merge", file)[0] == 0
        assert left() == {"conv2d"}
        assert run(capsys, "prune", "--max-entries", "0")[0] == 0
        assert left() == set()
    assert left() == {"conv2d"}


def test_what_was_raced_with_other_kernels_is_pruned(capsys, cache_dir):
    remember()
    run(capsys, "prune", "--other-environments")
    assert left() == {"conv2d"}
    remember(best(code="0" * 16))
    _, out, _ = run(capsys, "prune", "--other-environments")
    assert "its kernels have changed" in out and not list(cache_dir.rglob("p*/*.json"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("jaxpr", "0" * 31),
        ("jaxpr", 5),
        ("jaxpr", "../" * 10 + "ab"),
        ("ops", "matmul"),
        ("ops", [1]),
        ("ops", None),
        ("after_grad", "no"),
        ("jax", 12),
        ("later", True),
    ],
)
def test_a_program_of_wrong_fields_is_none(field, value):
    assert problem_from_json(PROGRAM.to_json()) == PROGRAM
    with pytest.raises(ValueError):
        problem_from_json({**PROGRAM.to_json(), field: value})


def test_a_change_of_any_kernel_ends_all_races():
    remember()
    conv2d = catalogue.get("conv2d")
    code_of.cache_clear()
    try:
        with catalogue.using(dataclasses.replace(conv2d, variants=(XLA,))):
            assert left() == set()
    finally:
        code_of.cache_clear()
    assert left() == {"conv2d"}


def test_another_jax_is_another_program(monkeypatch):
    remember()
    monkeypatch.setattr(jax, "__version__", "99.0")
    assert left() == set()


def test_programs_are_no_op_that_users_call(capsys):
    assert "program" not in check_ops(None, False)
    with pytest.raises(ValueError, match="must be some of"):
        tracea.transform(layers, ops=["program"])
    assert not hasattr(tracea.Graph(), "add_program")
    with pytest.raises(ValueError, match=r"measured by tune\(function"):
        tracea.tune(PROGRAM, effort="none")
    assert isinstance(PROGRAM, ProgramProblem)


# --- several processes ----------------------------------------------------------------

PROCESSES = """
    import pathlib, sys
    sys.path.insert(0, {tests!r})
    import pytest
    from program_races import ARGUMENTS, Script, layers
    import tracea_jax as tracea
    from tracea_jax.variants import cpu_calls
    cpu_calls.CALL_NS = 0.0  # kernels serve tiny sites
    times = {{None: 100.0, (): 125.0, ("conv2d",): 80.0, ("matmul",): 140.0}}
    script = Script(times)
    script.install(pytest.MonkeyPatch())
    def text():
        return str(jax.make_jaxpr(tracea.transform(layers))(*ARGUMENTS))
    before = "conv2d" in text()
    whole = tracea.tune(layers, *ARGUMENTS).whole
    digest = known(current()).digest(cpu)
    lowered = jax.jit(tracea.transform(layers)).lower(*ARGUMENTS).as_text()
    print(json.dumps([
        str(whole), before, "tracea_conv2d" in text(), digest, lowered,
        len(script.compiled),
    ]))
"""


def test_process_0_decides_for_all(tmp_path):
    here = str(pathlib.Path(__file__).parent)
    program = PROCESSES.format(tests=here)
    first, second = together(program, str(tmp_path / "one"), str(tmp_path / "other"))
    assert first[:5] == second[:5]
    assert "without conv2d" in first[0] and first[1:3] == [True, False]
    assert first[5] > 0 and second[5] == 0
    assert not (tmp_path / "other" / "tuned").exists()


def test_nothing_warns_where_all_is_well():
    remember()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert left() == {"conv2d"}

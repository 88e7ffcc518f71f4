"""Surveys: the draw, the candidates, and what a survey measures and keeps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import lzma
import math
import pathlib
import signal
import subprocess
import sys
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

from tracea_jax import catalogue, cli, variants
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.diagnosis import diagnose
from tracea_jax.policy import Choice
from tracea_jax.survey import problems, programs, rows
from tracea_jax.survey.candidates import PEERS, Preferences, candidates
from tracea_jax.survey.measure import TIMING, measured, row_of
from tracea_jax.survey.problems import Numbered
from tracea_jax.survey.run import OPS, SHARES, Part, survey, wanted
from tracea_jax.tuning.measure import CandidateError, Race

pytestmark = pytest.mark.once

QUICK = dataclasses.replace(TIMING, slice_s=1e-5, rounds=4, max_rounds=4)
DRAWN = 60

# The draw.


@pytest.mark.parametrize("platform", problems.REACHES)
@pytest.mark.parametrize("op", problems.DRAWS)
def test_a_problem_follows_from_its_number(op, platform):
    drawn = itertools.islice(problems.draw(op, 3, platform, first=5), 4)
    assert list(drawn) == [problems.problem(op, 3, platform, i) for i in range(5, 9)]
    assert problems.problem(op, 3, platform, 7) != problems.problem(op, 4, platform, 7)


def test_the_distribution_is_known_by_name():
    """A change of the draw is a change of all numbers, which rows are resumed by."""
    drawn = [str(problems.problem(op, 3, "cpu", 7)) for op in problems.DRAWS]
    assert drawn == [
        "matmul 1x40x3520 float32 tn",
        "gated_matmul 64x2688x37 bfloat16 nn silu",
        "conv2d 7x27x27x40 * 7x7x11 float32 nhwc pad 3,3x3,3 bias+silu",
        "attention 15x23x23 heads 16 dim 192/128 bfloat16 causal",
    ]


@pytest.mark.parametrize(
    "what", [("relu", "cpu"), ("matmul", "tpu")], ids=["op", "platform"]
)
def test_nothing_is_drawn_for_unknown_names(what):
    op, platform = what
    with pytest.raises(ValueError, match="must be one of"):
        problems.problem(op, 0, platform, 0)


@pytest.mark.parametrize("platform", problems.REACHES)
@pytest.mark.parametrize("op", problems.DRAWS)
def test_problems_can_be_run_and_are_of_bounded_size(op, platform):
    device = {"cpu": local_cpu(), "cuda": NAMED["H100"]}[platform]
    least, most = problems.REACHES[platform].flops
    for problem in itertools.islice(problems.draw(op, 1, platform), DRAWN):
        catalogue.get(op).bench(problem, device)  # refuses what cannot be run
        assert least <= problem.flops <= most
        assert problem.bytes <= problems.REACHES[platform].bytes


@pytest.mark.parametrize("op", problems.DRAWS)
def test_every_variant_can_serve_some_of_the_problems(op):
    devices = (NAMED["H100"], local_cpu())
    left = {v.name: v for v in variants.of(op)}
    for i in range(2000):
        for device in devices:
            problem = problems.problem(op, i // 50, device.platform, i)
            for name, variant in tuple(left.items()):
                if variant.why_not(problem, device) is None:
                    del left[name]
        if not left:
            return
    pytest.fail(f"of {op}, {', '.join(left)} can serve no problem that is drawn")


def test_the_draw_has_all_alignments_and_kinds():
    drawn: list[Any] = [problems.problem("matmul", 0, "cuda", i) for i in range(300)]
    shares = {
        "64": sum(p.n % 64 == 0 for p in drawn),
        "8": sum(p.n % 64 > 0 and p.n % 8 == 0 for p in drawn),
        "odd": sum(p.n % 8 > 0 for p in drawn),
        "few": sum(p.m <= 16 for p in drawn),
        "epilogue": sum(not p.epilogue.is_identity for p in drawn),
        "batch": sum(p.batch > 1 for p in drawn),
    }
    assert all(30 < count < 270 for count in shares.values()), shares
    drawn = [problems.problem("matmul", 0, "cpu", i) for i in range(300)]
    assert len({(p.lhs, p.layout) for p in drawn}) == 2 * 4


# Candidates.


def test_candidates_are_peers_defaults_and_legal_configs():
    device = local_cpu()
    for op in OPS:
        for i in range(6):
            problem = problems.problem(op, 0, "cpu", i)
            found = candidates(problem, device, "0", Preferences())
            assert len(found) == len({*found}) <= Preferences().count
            assert found[0].variant == "xla"
            ours = [c for c in found if c.variant not in PEERS]
            names = [n for n in diagnose(problem, device).candidates if n != "xla"]
            defaults = [variants.get(op, n).heuristic(problem, device) for n in names]
            assert [c.config for c in ours[: len(names)]] == defaults
            for choice in ours:
                variants.get(op, choice.variant).check(problem, choice.config, device)


def a_product(**fields):
    drawn: Any = problems.problem("matmul", 0, "cpu", 1)
    return dataclasses.replace(drawn, m=400, n=600, k=500, **fields)


def test_candidates_follow_from_the_seed():
    problem, device = a_product(), local_cpu()
    found = [candidates(problem, device, s, Preferences()) for s in ("1", "1", "2")]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == len(found[2]) == Preferences().count


def test_the_favourites_of_a_model_are_candidates():
    problem, device = a_product(), local_cpu()

    def ranked(problem, device, choices):
        return [abs(c.config.nc - 384) + c.config.tasks for c in choices]

    found = candidates(problem, device, "1", Preferences(ranked=ranked))
    space = variants.get("matmul", "gemm_cpu").space(problem, device).configs()
    best = sorted(space, key=lambda c: abs(c.nc - 384) + c.tasks)[:4]
    assert {(c.nc, c.tasks) for c in best} <= {
        (c.config.nc, c.config.tasks) for c in found if c.variant != "xla"
    }


def test_compiled_configs_are_preferred():
    problem, device = a_product(), local_cpu()

    def compiled(problem, variant, space):
        return [c for c in space.configs() if c.tasks == 4][:5]

    wishes = Preferences(compiled=compiled)
    _, _, *random = candidates(problem, device, "1", wishes)
    plain = candidates(problem, device, "1", Preferences())
    assert random[0] == plain[2]  # one may be new
    fours = compiled(problem, "gemm_cpu", space_of(problem, device))
    assert {c.config for c in random[1:]} == {*fours}


def space_of(problem, device):
    return variants.get(problem.op, "gemm_cpu").space(problem, device)


# Rows.


def a_row(index=0, seed=0, us=(3.0, 5.0), problem=None, **fields):
    problem = problem or problems.problem("matmul", seed, "cpu", index)
    configs = ((), (("kc", 64), ("nc", index), ("ends", (1, (2, 3)))))
    choices = [
        rows.Candidate(variant=name, config=config, code=code)
        for name, config, code in zip(
            ("xla", "gemm_cpu"), configs, ("", "0123456789abcdef"), strict=True
        )
    ]
    fields = {
        "index": index,
        "seed": seed,
        "problem": rows.slim(problem),
        "device": {"platform": "cpu", "name": "x", "isa": "avx2", "cores": 2},
        "versions": {"jax": "1"},
        "rounds": 5,
        "times": tuple(
            rows.Time(choice=c, time_us=t, spread=0.01)
            for c, t in zip(choices, us, strict=False)
        ),
        "failed": ((choices[0], "timeout"),),
        **fields,
    }
    return rows.Row(**fields)


def test_rows_round_trip(tmp_path):
    file = tmp_path / "a" / "matmul.jsonl"
    other = a_row(2, versions={"jax": "2"})
    wanted = [a_row(0), a_row(1), other, a_row(3, 7), a_row(4, failed=())]
    rows.write(file, wanted[:2])
    rows.write(file, wanted)  # goes on with the numbers of the file
    assert rows.read(file) == wanted
    assert len(file.read_text().splitlines()) == 5 + 2 + 6


def test_compressed_rows_are_read(tmp_path):
    file = tmp_path / "matmul.jsonl"
    wanted = [a_row(i) for i in range(3)]
    rows.write(file, wanted)
    packed = tmp_path / "matmul.jsonl.xz"
    packed.write_bytes(lzma.compress(file.read_bytes()))
    assert rows.read(packed) == wanted
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(rows.Damaged, match=r"matmul\.jsonl\.xz"):
        rows.read(packed)


@pytest.mark.parametrize("op", problems.DRAWS)
def test_problems_of_rows_round_trip(tmp_path, op):
    for platform in problems.REACHES:
        drawn = list(itertools.islice(problems.draw(op, 2, platform), DRAWN))
        file = tmp_path / f"{platform}.jsonl"
        rows.write(file, (a_row(i, problem=p) for i, p in enumerate(drawn)))
        assert [row.asked for row in rows.read(file)] == drawn


def test_devices_of_rows_are_devices_again():
    from tracea_jax.device import to_json

    for device in (local_cpu(), *NAMED.values()):
        data = json.loads(json.dumps(to_json(device)))
        assert rows.device_of(data) == device
    assert rows.slug(NAMED["H100"]) == "nvidia_h100_80gb_hbm3"
    narrow = dataclasses.replace(local_cpu(), isa="avx2")
    assert rows.slug(narrow).endswith("_avx2")


def test_rows_are_small(tmp_path):
    file = tmp_path / "matmul.jsonl"
    choices = [
        rows.Candidate(variant="gemm_cpu", config=(("kc", i), ("nc", 8)), code="ab")
        for i in range(40)
    ]

    def row(i):
        some = choices[i % 28 : i % 28 + 12]
        times = [
            rows.Time(choice=c, time_us=math.pi * (i + 1), spread=1 / 3) for c in some
        ]
        return a_row(i, times=tuple(times), failed=())

    rows.write(file, map(row, range(100)))
    assert file.stat().st_size < 100 * 500


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_row_that_was_cut_off_is_dropped(tmp_path, cut):
    file = tmp_path / "matmul.jsonl"
    rows.write(file, [a_row(0), a_row(1)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    with pytest.warns(UserWarning, match="was cut off and is dropped"):
        assert rows.read(file) == [a_row(0)]
    with pytest.warns(UserWarning, match="was cut off and is dropped"):
        rows.write(file, [a_row(1)])
    assert rows.read(file) == [a_row(0), a_row(1)]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "no JSON",
        '{"row":1}',
        '{"run":3,"device":{},"versions":{}}',
        '{"choice":0,"variant":"xla","config":{},"code":""}',
        '{"row":1,"seed":0,"of":0,"problem":{},"rounds":1,"times":[[0,-1,0]],"failed":[]}',
        '{"row":1,"seed":0,"of":0,"problem":{},"rounds":1,"times":[[9,1,0]],"failed":[]}',
        '{"row":1,"seed":0,"of":0,"problem":{},"rounds":1,"times":[[-1,1,0]],"failed":[]}',
        '{"row":-1,"seed":0,"of":0,"problem":{},"rounds":1,"times":[],"failed":[]}',
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path, line):
    file = tmp_path / "matmul.jsonl"
    rows.write(file, [a_row(0)])
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(rows.Damaged, match=r"matmul\.jsonl:5: "):
        rows.read(file)


VICTIM = """
    import dataclasses, pathlib
    from tracea_jax.survey import rows
    file = pathlib.Path({file!r})
    (first,) = rows.read(file)
    writer = rows.Writer(file)
    for i in range(1, 10**5):
        writer.append(dataclasses.replace(first, index=i))
        if i == 20:
            print("written", flush=True)
"""


def test_a_kill_while_appending_loses_one_row_at_most(tmp_path):
    file = tmp_path / "matmul.jsonl"
    rows.write(file, [a_row(0)])
    code = textwrap.dedent(VICTIM).format(file=str(file))
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        written = victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)
    assert written == b"written\n"
    lines = file.read_bytes().count(b'{"row":')
    with_cut = file.read_bytes()[-1:] != b"\n"
    if with_cut:
        with pytest.warns(UserWarning, match="cut off"):
            found = rows.read(file)
    else:
        found = rows.read(file)
    assert len(found) >= max(20, lines - 1)
    assert [row.index for row in found] == [*range(len(found))]


# Measuring.


def numbered(problem, index=0, seed=0):
    return Numbered(index=index, seed=seed, problem=problem)


@pytest.mark.parametrize("op", problems.DRAWS)
def test_programs_compute_what_the_workload_says(op):
    """A program's last results are those of one execution, of whichever choice."""
    device = local_cpu()
    repeated = jax.jit(programs.repeated, static_argnums=0)
    for i in (2, 5):
        problem = next(
            p
            for p in problems.draw(op, 5 + i, "cpu")
            if p.flops < 1 << 18 and p.operand_dtypes[0] == "float32"
            # Gradients of attention are not given the real outputs.
            if getattr(p, "direction", "") != "backward"
        )
        choices = candidates(problem, device, "0", Preferences(count=4))
        workload = catalogue.get(op).bench(problem, device).workload
        inputs = programs.operands(problem, workload)
        execute = functools.partial(workload.execute, problem=problem)
        expected = execute(*inputs, choice=choices[0])
        zeros = [jax.numpy.zeros_like(x) for x in expected]
        for choice in choices:
            one = functools.partial(execute, choice=choice)
            found = repeated(one, 3, inputs, zeros)
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_program_runs_as_often_as_it_is_told():
    """Twice as many executions take longer: XLA does not take them out of the loop."""
    counted = []

    def execute(x):
        jax.debug.callback(lambda: counted.append(1))
        return [x + 1]

    zeros = [jax.numpy.zeros(3)]
    found = jax.jit(programs.repeated, static_argnums=0)(execute, 5, zeros, zeros)
    jax.block_until_ready(found)
    jax.effects_barrier()
    assert len(counted) == 5


def test_the_loop_stays_in_the_compiled_program():
    device = local_cpu()
    problem = a_product()
    workload = catalogue.get("matmul").bench(problem, device).workload
    xla = candidates(problem, device, "0", Preferences(count=1))[0]

    def execute(*x):
        return workload.execute(*x, problem=problem, choice=xla)

    inputs = programs.operands(problem, workload)
    zeros = [
        jax.numpy.zeros(s.shape, s.dtype) for s in jax.eval_shape(execute, *inputs)
    ]
    compiled = (
        jax.jit(programs.repeated, static_argnums=0)
        .lower(execute, 5, inputs, zeros)
        .compile()
    )
    text = compiled.as_text()
    assert text is not None
    bodies = [part for part in text.split("\n\n") if "while" not in part.split("{")[0]]
    entry = next(part for part in bodies if part.lstrip().startswith("ENTRY"))
    assert "while(" in entry and " dot(" not in entry


def test_a_survey_measures_problems_and_goes_on_with_others(tmp_path, monkeypatch):
    small = dataclasses.replace(
        problems.REACHES["cpu"], flops=(1 << 9, 1 << 15), dtypes=((1.0, "float32"),)
    )
    monkeypatch.setattr(problems, "REACHES", {**problems.REACHES, "cpu": small})
    device, ops = local_cpu(), ("matmul", "gated_matmul")

    def one(numbered):
        wishes = Preferences(count=2)
        choices = candidates(numbered.problem, device, "", wishes)
        return measured(numbered, choices, device, timing=QUICK)

    told = []
    measure_all = functools.partial(map, one)
    how = {"budget_s": 1e6, "measure_all": measure_all, "tell": told.append}
    found = survey(tmp_path, device, most=3, ops=ops, **how)
    assert found.counts == {"matmul": 2, "gated_matmul": 1} and not found.interrupted
    assert [p.done for p in told] == [1, 2, 3]
    assert "3 problems measured" in str(found)
    for op in ops:
        there = rows.read(rows.path(tmp_path, device, op))
        assert [row.key for row in there] == [(0, i) for i in range(found.counts[op])]
        for row in there:
            assert row.asked == problems.problem(op, 0, "cpu", row.index)
            assert [t.choice.variant for t in row.times][0] == "xla"
            assert len(row.times) == 2 and not row.failed
            assert rows.device_of(row.device) == device
            assert all(t.choice.code for t in row.times if t.choice.variant != "xla")
    file = rows.path(tmp_path, device, "matmul")
    before = file.read_bytes()
    again = survey(tmp_path, device, most=1, ops=("matmul",), **how)
    assert again.counts == {"matmul": 1}
    assert file.read_bytes().startswith(before)
    assert [row.index for row in rows.read(file)] == [0, 1, 2]


def test_a_choice_that_fails_has_no_time(monkeypatch):
    problem, device = a_product(), local_cpu()
    choices = candidates(problem, device, "0", Preferences(count=4))

    def fails(count):
        raise RuntimeError("it launches nothing")

    def prepared(problem, choices, device):
        runs: dict[Any, Any] = dict.fromkeys(choices, lambda count: None)
        runs[choices[1]] = CandidateError("compile_error", "no")
        runs[choices[2]] = fails
        return runs

    monkeypatch.setattr(programs, "prepared", prepared)
    row = measured(numbered(problem), choices, device, timing=QUICK)
    assert [t.choice.variant for t in row.times] == ["xla", "gemm_cpu"]
    assert row.times[1].choice.config == tuple(
        dataclasses.asdict(choices[3].config).items()
    )
    assert [(dict(c.config)["tasks"], kind) for c, kind in row.failed] == [
        (choices[1].config.tasks, "compile_error"),
        (choices[2].config.tasks, "launch_error"),
    ]


def test_programs_that_fail_together_are_tried_alone(monkeypatch):
    problem, device = a_product(), local_cpu()
    choices = candidates(problem, device, "0", Preferences(count=4))
    bench = catalogue.get("matmul").bench(problem, device)
    execute = bench.workload.execute

    def failing(*inputs, problem, choice):
        if choice == choices[2]:
            raise ValueError("no such program")
        return execute(*inputs, problem=problem, choice=choice)

    workload = dataclasses.replace(bench.workload, execute=failing)
    op = dataclasses.replace(
        catalogue.get("matmul"),
        bench=lambda p, d: dataclasses.replace(bench, workload=workload),
    )
    with catalogue.using(op):
        found: Any = programs.prepared(problem, choices, device)
    assert [isinstance(r, CandidateError) for r in found.values()] == [
        *(False, False, True, False)
    ]
    for choice in choices[:2]:
        found[choice](2)


def test_times_are_of_the_race_and_spreads_are_its_errors():
    problem, device = a_product(), local_cpu()
    xla, ours = candidates(problem, device, "0", Preferences(count=2))
    times = {xla: (10.0, 10.4, 10.2), ours: (5.0, 5.2, 5.1)}
    race = Race(times_us=times, repeats=dict.fromkeys(times, 1), failures={})
    row = row_of(numbered(problem, 3, 9), race, {}, device)
    assert row.key == (9, 3) and row.rounds == 3
    assert row.times[0].time_us / row.times[1].time_us == pytest.approx(2.0)
    assert row.times[0].spread < 1e-9
    alone = Race(times_us={xla: (3.0,)}, repeats={xla: 1}, failures={})
    assert row_of(numbered(problem), alone, {}, device).times[0].spread == 1.0


# Which problems are measured.


def fake_row(numbered):
    return a_row(numbered.index, numbered.seed, problem=numbered.problem)


fake_rows = functools.partial(map, fake_row)


def test_no_problem_is_measured_twice(tmp_path):
    device = local_cpu()
    how = {"budget_s": 1e6, "measure_all": fake_rows, "ops": ("matmul", "conv2d")}
    parts = [Part(index=i, of=2) for i in range(2)]
    for part, most in ((parts[0], 4), (parts[1], 2), (parts[0], 2), (Part(), 6)):
        survey(tmp_path, device, part=part, most=most, **how)
    survey(tmp_path, device, seed=1, most=2, **how)
    for op in ("matmul", "conv2d"):
        there = rows.read(rows.path(tmp_path, device, op))
        assert sorted(r.key for r in there) == [*((0, i) for i in range(7)), (1, 0)]
        assert all(
            r.asked == problems.problem(op, r.seed, "cpu", r.index) for r in there
        )


def test_all_ops_have_their_turns():
    drawn = wanted(OPS, 0, "cpu")
    some = [n.problem.op for n in itertools.islice(drawn, 20)]
    assert collections.Counter(some) == {op: 2 * n for op, n in SHARES.items()}
    assert {*some[:4]} >= {"matmul", "conv2d", "attention"}


def test_a_part_is_one_of_several():
    with pytest.raises(ValueError, match="count from 0"):
        Part(index=2, of=2)


def test_a_survey_ends_when_its_time_is_over(tmp_path):
    now = [0.0]

    def one(numbered):
        now[0] += 10.0
        return fake_row(numbered)

    how = {
        "measure_all": functools.partial(map, one),
        "clock": lambda: now[0],
        "ops": ("matmul",),
    }
    found = survey(tmp_path, local_cpu(), budget_s=35.0, **how)
    assert found.counts == {"matmul": 4} and found.spent_s == 40.0


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path):
    def one(numbered):
        if numbered.index == 3:
            raise KeyboardInterrupt
        return fake_row(numbered)

    how = {
        "measure_all": functools.partial(map, one),
        "ops": ("matmul",),
        "budget_s": 9.0,
    }
    found = survey(tmp_path, local_cpu(), **how)
    assert found.interrupted and "interrupted" in str(found)
    assert len(rows.read(rows.path(tmp_path, local_cpu(), "matmul"))) == 3


# The command.


def test_the_command_surveys_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tracea_jax.survey.run.measurer", lambda *_: fake_rows)
    how = ["--op", "matmul", "--minutes", "0.005", "--seed", "4"]
    assert cli.main(["survey", *how, "--out", str(tmp_path)]) == 0
    assert "problems measured" in capsys.readouterr().out
    assert rows.read(rows.path(tmp_path, local_cpu(), "matmul"))[0].seed == 4


@pytest.mark.parametrize(
    "how", [["--minutes", "0"], ["--minutes", "nan"], ["--op", "relu"]]
)
def test_the_command_refuses_what_it_cannot_survey(capsys, how, tmp_path):
    assert cli.main(["survey", *how, "--out", str(tmp_path)]) == 1
    assert how[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_parts_for_several_gpus_are_put_together(tmp_path):
    """A second call goes on where the first one ended; here the parts share a CPU."""
    script = pathlib.Path(__file__).parent.parent / "benchmarks/survey/run.py"
    how = ["--gpus=0,1", "--op", "matmul", "--most", "2", "--out", str(tmp_path)]
    file = rows.path(tmp_path, local_cpu(), "matmul")
    for count in (4, 8):
        subprocess.run([sys.executable, str(script), *how], check=True)
        indices = [row.index for row in rows.read(file)]
        assert sorted(indices) == list(range(count)), "each problem once"
    assert not list(tmp_path.glob("tmp*"))


def test_choices_are_plain_data():
    """Rows name what older and newer versions had, too."""
    row = a_row(0)
    assert not isinstance(row.times[1].choice, Choice)
    assert dict(row.times[1].choice.config)["ends"] == (1, (2, 3))

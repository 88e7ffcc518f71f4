"""tracea.bench: plain against transformed, as values and as text."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import synthetic_bench as synthetic
from cross_entropies import operands
from numerics import normal
from program_races import ARGUMENTS, Script, layers
from report_ratios import checked

import tracea_jax as tracea
from tracea_jax import knowledge
from tracea_jax.bench.report import SiteTime, WholeTime
from tracea_jax.bench.timed import Load, Timed
from tracea_jax.campaign.executions import Executions
from tracea_jax.device import local_cpu
from tracea_jax.dispatch import plan
from tracea_jax.policy import Choice

pytestmark = pytest.mark.once

MODULE = importlib.import_module("tracea_jax.bench")
PRODUCT = "matmul 64x8x16 float32 nn relu"
CONV = "conv2d 1x8x8x8 * 3x3x8 float32 nhwc pad 1,1x1,1"
FASTER = {None: 100.0, (): 80.0}


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """The machine is idle, whatever else runs on it."""
    loads = [Load(0.5, 2)]
    monkeypatch.setattr(Load, "now", lambda: loads[-1])
    return loads


@pytest.fixture
def benches(monkeypatch):
    """The bench of each problem, on a clock of its own: kernels take half of XLA's
    100 us."""
    made: dict[str, Any] = {}

    def bench_of(problem, device):
        times_us = {synthetic.XLA: 100.0, _plan(problem, device): 50.0}
        bench = synthetic.Bench(clock, times_us)
        return made.setdefault(str(problem), bench)

    clock = synthetic.Clock()
    timing = synthetic.timing(clock, rounds=9)
    monkeypatch.setattr(MODULE, "SITE_TIMING", timing)
    monkeypatch.setattr(knowledge, "bench_of", bench_of)
    return made


def _plan(problem, device):
    found = plan(problem, device)
    return Choice(variant=found.variant, config=found.config)


def times_of(site: SiteTime | WholeTime) -> Timed:
    assert site.timed is not None
    return site.timed


def scripted(monkeypatch, times, fn=layers, args=ARGUMENTS, spoil=((1,),), **how):
    """The report of whole programs that take these times, and the script."""
    with monkeypatch.context() as patch:
        script = Script(times, spoil=spoil)
        script.install(patch)
        patch.setattr(MODULE, "TIMING", synthetic.timing(script.clock))
        return tracea.bench(fn, *args, **how), script


def test_the_whole_and_each_site_are_timed(monkeypatch, benches):
    report, script = scripted(monkeypatch, FASTER)
    assert script.compiled == [None, ()]
    whole = times_of(report.whole)
    assert (whole.plain_us, whole.ours_us) == (100.0, 80.0)
    assert (whole.ratio, whole.low, whole.high) == pytest.approx((1.25,) * 3)
    assert report.whole.ratio == whole.ratio and whole.rounds >= 11
    assert [str(site.problem) for site in report.sites] == [PRODUCT, CONV]
    assert report.timed == report.sites
    for site in report.sites:
        assert (times_of(site).plain_us, times_of(site).ours_us) == (100.0, 50.0)
        assert times_of(site).ratio == 2.0 and site.by == "wall clock"
        assert set(benches[str(site.problem)].executed) == {
            synthetic.XLA,
            _plan(site.problem, report.device),
        }


def test_the_report_is_a_table(monkeypatch, benches):
    report, _ = scripted(monkeypatch, FASTER)
    head, whole, gap, names, product, conv, _, total = str(report).splitlines()
    assert head == f"layers on {local_cpu()}" and gap == ""
    assert whole == (
        "whole program: plain 100.0 us, transformed 80.0 us: 1.25x (1.25 to 1.25 in "
        "100 rounds; plain against itself: 1.00 to 1.00)"
    )
    assert names.split()[:7] == ["runs", "problem", "XLA", "us", "ours", "us", "ratio"]
    assert product.startswith(f"   1  {PRODUCT}")
    assert re.search(r" 100.0     50.0   2.00  2.00 to 2.00 +1.00 to 1.00 ", product)
    assert CONV in conv and "program_races.py" in conv
    assert total == (
        "Sum of runs x time, each site alone, by wall clock: XLA 200.0 us, "
        "ours 100.0 us: 2.00x"
    )
    assert checked(report) == 4
    assert repr(report) == str(report)
    shown = report._repr_html_()
    assert shown.count("<tr>") == 3 and PRODUCT in shown
    for part in (report.whole, *report.sites):
        assert repr(part) == str(part) and part._repr_html_().startswith("<div")


def test_sites_of_one_problem_are_timed_once(monkeypatch, benches):
    def repeated(x, w):
        for _ in range(2):
            with jax.named_scope("layer"):
                x = jax.nn.relu(x @ w)
        step = jax.lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, length=3)
        return step[0]

    args = (normal(8, 8), normal(8, 8, seed=1))
    report, _ = scripted(monkeypatch, FASTER, repeated, args)
    (site,) = report.sites
    assert site.count == 5 and site.where.startswith("layer")
    assert "XLA 500.0 us, ours 250.0 us: 2.00x" in str(report)

    def unknown(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ w + 1, x)

    report, _ = scripted(monkeypatch, FASTER, unknown, args)
    assert [site.count for site in report.sites] == [None]
    assert str(report).splitlines()[4].split()[0] == "?"


def left_to_xla(x):
    """Nothing here can be served by a kernel of ours on a CPU."""
    return x.astype("int32") @ x.T.astype("int32"), jnp.tanh(x)


def nothing(x):
    return jnp.tanh(x)


@pytest.mark.parametrize(
    ("fn", "args", "how", "why"),
    [
        (layers, ARGUMENTS, {"implementation": "xla"}, "XLA serves every site"),
        (left_to_xla, ARGUMENTS[1:2], {}, "it has no sites"),
        (nothing, ARGUMENTS[:1], {}, "it has no sites"),
    ],
)
def test_identical_programs_do_not_race(monkeypatch, benches, fn, args, how, why):
    with tracea.options(**how):
        report, script = scripted(monkeypatch, FASTER, fn, args)
    assert script.compiled == [] and benches == {}
    assert report.whole.is_identical and report.whole.ratio is None
    text = f"whole program: identical programs, nothing to compare ({why})"
    assert text in str(report)
    assert report.timed == () and report.total is None
    for site in report.sites:
        assert site.is_identical and str(site.problem) in str(report)
    assert ("served by XLA, as in the plain" in str(report)) == bool(report.sites)
    assert checked(report) == 0 and "not measured alone" not in str(report)


def test_a_program_that_is_left_as_written_does_not_race(monkeypatch, benches):
    losing = {None: 100.0, (): 125.0, ("conv2d",): 120.0, ("matmul",): 140.0}
    with monkeypatch.context() as patch:
        Script(losing).install(patch)
        tracea.tune(layers, *ARGUMENTS)
    report, script = scripted(monkeypatch, losing)
    assert report.whole.is_identical and script.compiled == []


def test_sites_that_xla_serves_are_named_beside_others(monkeypatch, benches):
    with tracea.options(implementation="xla"):
        served = tracea.explain(layers, ops="conv2d")(*ARGUMENTS).sites
    subject = MODULE.Subject.of(layers, ARGUMENTS, "matmul")
    explanation = subject.explanation
    both = dataclasses.replace(explanation, sites=(*explanation.sites, *served))
    subject = dataclasses.replace(subject, explanation=both)
    report = MODULE.measured(subject, budget_s=5)
    assert [site.is_identical for site in report.sites] == [False, True]
    before, _, after = str(report).partition("served by XLA, as in the plain program:")
    assert PRODUCT in before and CONV not in before and CONV in after
    assert set(benches) == {PRODUCT}
    assert str(report.sites[1]).startswith("served by XLA, as in the plain program:")


def test_kernel_times_count_where_there_are_any(monkeypatch, benches):
    def bench_of(problem, device):
        choice = _plan(problem, device)
        return synthetic.Bench(
            clock, {choice: 90.0}, kernel_us={choice: 20.0, synthetic.XLA: 30.0}
        )

    clock = synthetic.Clock()
    monkeypatch.setattr(MODULE, "SITE_TIMING", synthetic.timing(clock))
    monkeypatch.setattr(knowledge, "bench_of", bench_of)
    report, _ = scripted(monkeypatch, FASTER)
    for site in report.sites:
        assert (times_of(site).plain_us, times_of(site).ours_us) == (30.0, 20.0)
        assert site.by == "kernels"
    assert "each site alone, by kernels: XLA" in str(report)
    assert checked(report) == 4


def test_a_verdict_is_followed(monkeypatch, benches):
    losing = {None: 100.0, (): 125.0, ("conv2d",): 80.0, ("matmul",): 140.0}
    with monkeypatch.context() as patch:
        Script(losing).install(patch)
        tracea.tune(layers, *ARGUMENTS)
    report, script = scripted(monkeypatch, losing)
    assert script.compiled == [None, ("conv2d",)]
    assert report.whole.ratio == pytest.approx(1.25)
    assert [str(site.problem) for site in report.sites] == [PRODUCT]


def test_results_that_differ_are_reported_instead_of_times(monkeypatch, benches):
    report, _ = scripted(monkeypatch, FASTER, spoil=((),))
    assert report.whole.timed is None and report.whole.ratio is None
    assert "whole program: not raced: a result is not finite where" in str(report)
    assert len(report.timed) == 2


def test_a_transformed_program_that_fails_is_told(monkeypatch, benches):
    def prepare(self, without):
        if without is not None:
            raise RuntimeError("no memory")
        return prepared(self, without)

    prepared = Executions.prepare
    monkeypatch.setattr(Executions, "prepare", prepare)
    report = tracea.bench(layers, *ARGUMENTS)
    assert report.whole.reason == "transformed, it fails: RuntimeError: no memory"


def test_a_program_is_timed_whatever_contexts_say(quick):
    """Debugging a program is no reason to measure it otherwise, or not at all."""
    with jax.transfer_guard("disallow"), jax.disable_jit(), jax.debug_nans(True):
        report = tracea.bench(lambda x: x @ x, normal(8, 8), budget_s=5)
    assert report.whole.timed is not None


def test_an_error_of_the_function_is_raised(quick):
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        tracea.bench(lambda x: x @ normal(3, 3), normal(4, 4))


def test_what_has_effects_does_not_race(quick):
    def printing(x):
        jax.debug.print("{}", x[0, 0])
        return x @ x

    report = tracea.bench(printing, normal(4, 4))
    assert "not raced: it has effects" in str(report)
    assert len(report.timed) == 1


def test_what_cannot_run_alone_has_a_reason(monkeypatch, quick):
    def bench_of(problem, device):
        raise ValueError("no inputs")

    monkeypatch.setattr(knowledge, "bench_of", bench_of)
    report = tracea.bench(layers, *ARGUMENTS)
    assert [site.timed for site in report.sites] == [None, None]
    assert str(report).endswith(f"{CONV}: ValueError: no inputs")
    assert "not measured alone:" in str(report) and "Sum of runs" not in str(report)


def test_the_time_may_not_suffice_for_sites(monkeypatch, benches):
    report, _ = scripted(monkeypatch, FASTER, budget_s=1e-9)
    assert report.whole.timed is not None and report.timed == ()
    assert {site.reason for site in report.sites} == {"the time was used up"}
    assert benches == {}


def test_an_op_made_of_others_is_named_beside_its_parts(quick):
    x, w, labels, _ = operands(8, 16)
    report = tracea.bench(
        lambda *args: tracea.ops.linear_cross_entropy(*args, chunk=8).sum(),
        x,
        w,
        labels,
    )
    (composite,) = [s for s in report.sites if s.op == "linear_cross_entropy"]
    assert composite.timed is None and composite.problem is None
    assert report.timed == tuple(s for s in report.sites if s is not composite) != ()
    assert "whole program: not raced: it calls our ops itself" in str(report)
    (line,) = [x for x in str(report).splitlines() if ": linear_cross_entropy: " in x]
    assert line.endswith(composite.reason)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, tracea.transform, lambda f: jax.jit(tracea.transform(f))],
    ids=["plain", "jitted", "transformed", "both"],
)
def test_any_form_of_a_function_is_plain_against_transformed(quick, wrap):
    report = tracea.bench(wrap(layers), *ARGUMENTS)
    assert report.function == "layers" and report.whole.timed is not None
    assert [str(site.problem) for site in report.sites] == [PRODUCT, CONV]
    assert all(times_of(site).ours_us > 0 for site in report.timed)


def test_shapes_pytrees_and_constants_are_arguments(quick):
    def model(parameters, x, power):
        return (x @ parameters["w"]) ** power

    x = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    w = jnp.ones((4, 2), jnp.bfloat16)
    with tracea.options(implementation="tracea"):  # also where XLA is the default
        report = tracea.bench(model, {"w": w}, x, 2)
    assert report.whole.timed is not None
    assert [str(site.problem) for site in report.sites] == ["matmul 8x2x4 bfloat16 nn"]


def test_nothing_is_donated_or_kept(quick, cache_dir):
    x = normal(8, 8)
    tracea.bench(jax.jit(lambda x: x @ x, donate_argnums=0), x)
    assert not x.is_deleted() and not (cache_dir / "tuned").exists()


def test_ops_are_those_of_transform(quick):
    report = tracea.bench(layers, *ARGUMENTS, ops="conv2d")
    assert [site.op for site in report.sites] == ["conv2d"]
    report = tracea.bench(lambda x: x + 1, normal(4, 4))
    assert report.sites == () and report.whole.is_identical
    assert "\nno sites\nwhole program: identical programs" in str(report)


def test_mistakes_are_named(quick):
    with pytest.raises(TypeError, match=r"function, not 3; write bench\(f, \*args\)"):
        tracea.bench(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="budget_s=0 must be positive seconds"):
        tracea.bench(layers, *ARGUMENTS, budget_s=0)
    with pytest.raises(ValueError, match="ops=.*sort.* must be some of"):
        tracea.bench(layers, *ARGUMENTS, ops="sort")


def test_progress_is_told(quick):
    steps = []
    tracea.bench(layers, *ARGUMENTS, progress=lambda *step: steps.append(step))
    assert steps[0] == ("whole program", 0, 3)
    assert {step[0] for step in steps[1:]} == {PRODUCT, CONV}
    assert [step[1:] for step in steps] == [(0, 3), (1, 3), (2, 3)]

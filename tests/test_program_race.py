"""The race of whole programs: what is kept, how it is told, and that it is followed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxprs import count
from numerics import normal
from processes import run_python
from program_races import ARGUMENTS, OPS, Script, layers, step
from transformed import assert_near

import tracea_jax as tracea
from tracea_jax import knowledge, verdicts
from tracea_jax.campaign.executions import Executions, difference
from tracea_jax.campaign.keep import Undecided, decide
from tracea_jax.graph import Graph
from tracea_jax.options import current
from tracea_jax.tuning.measure import Race

CONV = "conv2d 1x8x8x8 * 3x3x8 float32 nhwc pad 1,1x1,1"


# --- what is kept ---------------------------------------------------------------------

BOTH = {"matmul": ["product"], "conv2d": ["convolution"]}


def field(times: dict[Any, Any], held: list | None = None):
    """Races with these times in every round; of a tuple, each in its turn."""

    def rounds(us):
        turns = us if isinstance(us, tuple) else (us,)
        return tuple(itertools.islice(itertools.cycle(turns), 24))

    def race(racers):
        if held is not None:
            held.append(list(racers))
        known = {r: times[r] for r in racers}
        failed = {r: us for r, us in known.items() if isinstance(us, Exception)}
        return Race(
            times_us={r: rounds(us) for r, us in known.items() if r not in failed},
            repeats=dict.fromkeys(racers, 1),
            failures=failed,
        )

    return race


def test_a_program_that_wins_with_every_site_keeps_all():
    held = []
    times = {None: 100.0, (): 80.0}
    decision = decide(field(times, held), {"matmul": ["a", "b"]})
    assert decision.kept.without == () and decision.kept.ratio == pytest.approx(1.25)
    assert decision.every == decision.kept
    assert held == [[None, ()]]  # one op: without it the program is plain


def test_a_loss_behind_a_gain_is_found():
    times = {None: 100.0, (): 80.0, ("conv2d",): 60.0, ("matmul",): 120.0}
    kept = decide(field(times), BOTH).kept
    assert kept.without == ("conv2d",) and kept.time_us == 60.0
    assert kept.ratio == pytest.approx(100 / 60)


def test_ops_are_left_greedily():
    ops = {op: [f"{op} 1"] for op in "abc"}
    times = {None: 100.0, (): 130.0, ("a",): 110.0, ("b",): 115.0, ("c",): 140.0}
    times |= {("a", "b"): 90.0, ("a", "c"): 120.0}
    assert decide(field(times), ops).kept.without == ("a", "b")


def test_classes_of_sites_race_only_while_the_program_loses():
    times = {None: 100.0, (): 110.0, ("big",): 90.0, ("small",): 112.0}
    assert decide(field(times), {"matmul": ["big", "small"]}).kept.without == ("big",)
    times[()] = 99.0
    assert decide(field(times), {"matmul": ["big", "small"]}).kept.without == ()


def test_classes_of_an_op_that_is_left_do_not_race():
    held = []
    times: dict[Any, Any] = {None: 100.0, (): 130.0}
    times |= {("conv2d",): 110.0, ("matmul",): 150.0}
    times |= {("conv2d", "big"): 105.0, ("conv2d", "small"): 108.0}
    times = {r and tuple(sorted(r)): us for r, us in times.items()}
    many = {"matmul": ["big", "small"], "conv2d": ["x", "y", "z"]}
    assert decide(field(times, held), many).kept.without == ("conv2d", "matmul")
    assert {name for racers in held for r in racers for name in r or ()} == {
        *("conv2d", "matmul", "big", "small")
    }


def test_few_of_many_classes_race():
    held = []
    names = [f"class {i}" for i in range(50)]
    times = {None: 100.0, (): 120.0, **{(name,): 121.0 for name in names}}
    decide(field(times, held), {"matmul": names})
    assert max(map(len, held)) == 2 + 8


def test_what_loses_in_every_form_is_left_as_written():
    times = {None: 100.0, (): 120.0, ("conv2d",): 110.0, ("matmul",): 104.0}
    decision = decide(field(times), BOTH)
    assert decision.kept.without == ("conv2d", "matmul")
    assert (decision.kept.ratio, decision.kept.time_us) == (1.0, 100.0)
    assert decision.every is not None and decision.every.ratio == pytest.approx(1 / 1.2)


@pytest.mark.parametrize(
    ("plain", "ours", "is_kept"),
    [
        (100.0, 100.5, False),  # slower than no noise explains
        (100.0, (97.0, 105.0, 101.0), True),  # within the noise
        ((108.0, 92.0, 100.0), (95.0, 111.0, 103.0), False),  # more than any may lose
    ],
)
def test_noise_is_no_loss_but_only_so_far(plain, ours, is_kept):
    kept = decide(field({None: plain, (): ours}), {"matmul": ["product"]}).kept
    assert (kept.without == ()) == is_kept
    assert kept.ratio >= 0.985


def test_luck_leaves_no_site():
    """Half a percent is no reason, nor is what lies within the noise."""
    times: dict[Any, Any] = {None: 100.0, (): 80.0}
    times |= {("conv2d",): 79.7, ("matmul",): 95.0}
    assert decide(field(times), BOTH).kept.without == ()
    times[("conv2d",)] = (60.0, 98.0, 80.0)
    assert decide(field(times), BOTH).kept.without == ()


def test_what_fails_is_left():
    broken = RuntimeError("no memory")
    times: dict[Any, Any] = {None: 100.0, (): broken}
    times |= {("conv2d",): 90.0, ("matmul",): broken}
    decision = decide(field(times), BOTH)
    assert decision.kept.without == ("conv2d",) and decision.every is None
    times[("conv2d",)] = broken
    kept = decide(field(times), BOTH).kept
    assert kept.without == ("conv2d", "matmul")
    with pytest.raises(Undecided, match="plain fails: no memory"):
        decide(field({None: broken, (): 1.0}), {"matmul": ["product"]})


def test_the_end_of_the_time_keeps_what_is_known():
    def race(racers):
        if len(racers) > 2:
            raise TimeoutError("the budget was used up")
        return field({None: 100.0, (): 120.0})(racers)

    assert decide(race, dict.fromkeys(OPS, ["one"])).kept.without == tuple(sorted(OPS))
    with pytest.raises(Undecided, match="budget"):
        decide(lambda racers: race([*racers, None]), BOTH)


# --- from tune to transform -----------------------------------------------------------

LOSING = {None: 100.0, (): 125.0, ("conv2d",): 80.0, ("matmul",): 140.0}
WINNING = {None: 100.0, (): 70.0, ("conv2d",): 90.0, ("matmul",): 80.0}
HOPELESS = {**LOSING, ("conv2d",): 115.0}


def raced(monkeypatch, times, fn=layers, args=ARGUMENTS, **how) -> Any:
    """The report of a tuning whose races take these times."""
    with monkeypatch.context() as patch:
        Script(times).install(patch)
        return tracea.tune(fn, *args, **how)


def sites(fn=layers, args=ARGUMENTS, **how) -> tuple[int, int]:
    """How many products and convolutions of ours a transformed function has."""
    fast = tracea.transform(fn, **how)
    names = ("tracea_matmul", "tracea_conv2d")
    first, second = (count(fast, *args, name=name) for name in names)
    return first, second


def test_sites_that_hurt_are_left_from_then_on(monkeypatch):
    assert sites() == (1, 1)
    report = raced(monkeypatch, LOSING)
    assert report.whole.verdict.without == ("conv2d",)
    assert str(report).endswith(
        "whole program: 1.25x of plain (80.0 us, plain 100.0 us, wall clock), without "
        "conv2d (0.80x with every site): such sites are left as written"
    )
    assert sites() == (1, 0)
    assert_near(tracea.transform(layers)(*ARGUMENTS), layers(*ARGUMENTS), 1e-5)


def test_a_training_step_leaves_them_in_its_gradient_too(monkeypatch):
    assert sites(step) == (2, 3)
    raced(monkeypatch, LOSING, step)
    assert sites(step) == (2, 0)
    assert sites(layers) == (1, 1)  # another program
    assert_near(tracea.transform(step)(*ARGUMENTS), step(*ARGUMENTS), 1e-5)


def test_another_process_follows(monkeypatch):
    raced(monkeypatch, LOSING, step)
    program = """
        import jax, tracea_jax as tracea
        from jaxprs import count
        from program_races import ARGUMENTS, step
        from tracea_jax.variants import cpu_calls
        cpu_calls.CALL_NS = 0.0  # as in these tests: kernels serve tiny sites
        for how in ({}, {"ops": ["conv2d"]}, {"ops": ["conv2d", "matmul"]}):
            fast = tracea.transform(step, **how)
            for name in ("tracea_matmul", "tracea_conv2d"):
                print(count(fast, *ARGUMENTS, name=name), end=" ")
        print(tracea.explain(step)(*ARGUMENTS))
    """
    monkeypatch.setenv("PYTHONPATH", _with_tests())
    out = run_python(program)
    assert out.startswith("2 0 0 3 2 3 step on ")
    assert "whole program: 1.25x of plain" in out


def _with_tests() -> str:
    import os
    import pathlib

    here = str(pathlib.Path(__file__).parent)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def test_what_was_traced_before_is_traced_again(monkeypatch):
    fast = jax.jit(tracea.transform(layers))

    def text():
        return str(fast.trace(*ARGUMENTS).jaxpr)

    assert "tracea_conv2d" in text()
    raced(monkeypatch, LOSING)
    assert "tracea_conv2d" not in text() and "tracea_matmul" in text()


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        lambda f: jax.jit(lambda *args: jax.nn.relu(f(*args))),
        lambda f: lambda *args: jax.lax.scan(lambda c, _: (c, f(*args)), 0, length=2),
        lambda f: jax.checkpoint(f),
    ],
    ids=["jit", "a larger program", "scan", "checkpoint"],
)
def test_the_program_is_known_inside_of_others(monkeypatch, around):
    raced(monkeypatch, LOSING)
    fast = around(tracea.transform(layers))
    assert count(fast, *ARGUMENTS, name="tracea_conv2d") == 0
    assert count(fast, *ARGUMENTS, name="tracea_matmul") == 1


@pytest.mark.parametrize("wrap", [jax.jit, tracea.transform, lambda f: jax.jit(f)])
def test_jitted_and_transformed_functions_are_the_same_program(monkeypatch, wrap):
    wrapped = wrap(layers)
    raced(monkeypatch, LOSING, wrapped)
    assert sites() == sites(jax.jit(layers)) == (1, 0)
    assert tracea.explain(layers)(*ARGUMENTS).verdict is not None


def test_captured_arrays_count_by_shape_and_dtype(monkeypatch):
    x, w, k = ARGUMENTS
    raced(monkeypatch, LOSING, lambda x: layers(x, w, k), (x,))
    other = normal(16, 8, seed=7)
    assert sites(lambda x: layers(x, other, k), (x,)) == (1, 0)
    assert tracea.explain(lambda x: layers(x, other, k))(x).verdict is not None
    assert sites(lambda x: layers(x, w[:, :4], k[:, :, :4]), (x,)) == (1, 1)


def test_other_shapes_dtypes_and_programs_are_not_known(monkeypatch):
    raced(monkeypatch, LOSING)
    x, w, k = ARGUMENTS
    assert sites(args=(x, w[:, :4], k[:, :, :4])) == (1, 1)
    half = tuple(a.astype("bfloat16") for a in ARGUMENTS)
    assert sites(args=half) == (1, 1)
    assert sites(lambda *args: layers(*args) * 2) == (1, 1)


def test_what_is_asked_for_explicitly_is_used(monkeypatch):
    raced(monkeypatch, LOSING)
    assert sites(ops=["conv2d"]) == (0, 1)
    assert sites(ops=["conv2d", "matmul"]) == (1, 1)
    with tracea.options(implementation="tracea"):
        assert sites() == (1, 1)
    assert sites() == (1, 0)


def test_a_race_with_some_ops_is_about_these(monkeypatch):
    ops = ["matmul", "conv2d"]
    raced(monkeypatch, LOSING, ops=ops)
    assert sites(ops=ops) == (1, 0) and sites() == (1, 1)


def test_a_race_after_differentiation_is_about_that(monkeypatch):
    raced(monkeypatch, LOSING, step, after_grad=True)
    assert sites(step, after_grad=True) == (2, 0) and sites(step) == (2, 3)


def test_a_program_that_plain_beats_stays_as_it_is(monkeypatch):
    report = raced(monkeypatch, HOPELESS)
    assert str(report).endswith(
        "whole program: plain is the fastest, 100.0 us wall clock (0.80x with every "
        "site): all is left as written"
    )
    assert report.whole.verdict.ratio == 1.0 and report.whole.verdict.leaves_all
    told = str(tracea.explain(layers)(*ARGUMENTS))
    assert "whole program: plain is the fastest, 100.0 us wall clock; raced 20" in told
    fast = jax.make_jaxpr(tracea.transform(layers))(*ARGUMENTS)
    assert "tracea" not in str(fast)
    found, plain = jax.jit(tracea.transform(layers))(*ARGUMENTS), jax.jit(layers)
    assert jnp.array_equal(found, plain(*ARGUMENTS))


def test_one_class_of_sites_can_be_left(monkeypatch):
    def two(x, w, k, h):
        return layers(x, w, k), layers(x, w, h)[..., :1]

    x, w, k = ARGUMENTS
    args = (x, w, k, normal(5, 5, 8, 8, seed=3))
    large = CONV.replace("3x3x8", "5x5x8").replace("1,1x1,1", "2,2x2,2")
    product = "matmul 64x8x16 float32 nn relu"
    times = dict.fromkeys([(), ("conv2d",), ("matmul",), (CONV,), (product,)], 120.0)
    times |= {None: 100.0, (large,): 50.0}
    times |= {tuple(sorted((large, other))): 70.0 for other in (CONV, product)}
    report = raced(monkeypatch, times, two, args)
    assert report.whole.verdict.without == (large,)
    assert sites(two, args)[1] == 1
    explained = tracea.explain(two)(*args)
    assert [s.op for s in explained.sites].count("conv2d") == 1
    assert "the whole program was measured to be faster without" in str(explained)


def test_a_later_race_counts(monkeypatch):
    raced(monkeypatch, LOSING)
    assert len(Graph.from_function(layers, *ARGUMENTS)) == 2  # tuned again, both
    raced(monkeypatch, WINNING)
    assert sites() == (1, 1)


# --- what is told ---------------------------------------------------------------------


def test_explain_tells_the_figure(monkeypatch):
    assert "whole program" not in str(tracea.explain(layers)(*ARGUMENTS))
    raced(monkeypatch, WINNING)
    explained = tracea.explain(layers)(*ARGUMENTS)
    (line,) = [x for x in str(explained).splitlines() if x.startswith("whole program")]
    start = "whole program: 1.43x of plain (70.0 us, plain 100.0 us, wall clock), "
    assert line.startswith(f"{start}every site; raced 20")
    assert explained.verdict is not None
    assert line.endswith(str(explained.verdict.environment))
    data = json.loads(json.dumps(explained.to_json()))["verdict"]
    assert data["without"] == [] and data["time_us"] == 70.0
    assert tracea.explain(layers, device="H200")(*ARGUMENTS).verdict is None


def test_the_report_is_plain_data_too(monkeypatch):
    data = json.loads(json.dumps(raced(monkeypatch, LOSING).to_json()))["whole"]
    assert data["verdict"]["without"] == ["conv2d"] and data["every"] == 0.8
    assert tracea.tune(Graph(), effort="none").to_json()["whole"] is None


def test_progress_is_told(monkeypatch):
    steps = []
    raced(monkeypatch, WINNING, progress=lambda **step: steps.append(step))
    assert {step["phase"] for step in steps} >= {"compile", "race"}
    assert all(step["problem"] == "whole program" for step in steps)
    *running, last = steps
    assert all(step["ratio"] is None and step["share"] < 1 for step in running)
    assert (last["phase"], last["share"], last["best_us"]) == ("done", 1.0, 70.0)
    assert last["ratio"] == pytest.approx(100 / 70)


# --- races that are not held ----------------------------------------------------------


def printing(x, w, k):
    jax.debug.print("{}", x[0, 0])
    return layers(x, w, k)


def ours(x, w, k):
    return layers(tracea.ops.matmul(x, w), jnp.eye(8), k)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (printing, "it has effects"),
        (ours, "it calls our ops itself"),
        (lambda x, w, k: x + 1, "it has no sites"),
    ],
)
def test_programs_that_do_not_race(monkeypatch, fn, why):
    report = raced(monkeypatch, {}, fn)
    assert f"whole program: not raced: {why}" in str(report)
    assert report.whole.verdict is None


def test_no_race_where_none_is_wanted_or_possible(monkeypatch):
    assert raced(monkeypatch, {}, race=False).whole is None
    with tracea.options(implementation="xla"):
        report = raced(monkeypatch, {})
    assert report.whole.reason == "implementation='xla' is asked for"
    assert sites() == (1, 1)
    report = raced(monkeypatch, {}, budget_s=1e-9)
    assert report.whole.reason == "the budget was used up"


def test_an_error_of_the_race_does_not_end_the_tuning(monkeypatch):
    def fails(own):
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(Executions, "filled", fails)
    report = raced(monkeypatch, {})
    assert report.whole.reason == "RuntimeError: RESOURCE_EXHAUSTED: no memory"

    def interrupts(own):
        raise KeyboardInterrupt

    monkeypatch.setattr(Executions, "filled", interrupts)
    assert raced(monkeypatch, {}).whole.reason == "interrupted"


# --- correctness ----------------------------------------------------------------------


def test_wrong_results_never_win(monkeypatch):
    with monkeypatch.context() as patch:
        script = Script({**WINNING, (): 1.0}, spoil=((), ("matmul",)))
        script.install(patch)
        whole = tracea.tune(layers, *ARGUMENTS).whole
    assert whole is not None and whole.verdict is not None
    assert whole.verdict.without == ("conv2d",) and whole.every is None
    known = knowledge.known(current()).own.entries(complete=True)
    (entry,) = [e for e in known if e.problem["op"] == "program"]
    failed = [o.config["without"] for o in entry.observations if o.failure]
    assert sorted(failed) == [[], ["matmul"]]
    assert {o.failure for o in entry.observations} == {None, "wrong_result"}


def test_results_are_compared_as_wholes():
    x, noise = normal(100), normal(100, seed=1)
    assert difference([x], [x]) is None
    assert difference([x + 0.01 * noise], [x]) is None
    assert "differ from plain's by 1" in str(difference([2 * x], [x]))
    # A gradient that is zero but for rounding, beside one that is not.
    assert difference([x, 1e-6 * noise], [x, -1e-6 * noise]) is None
    assert "not finite" in str(difference([x.at[3].set(jnp.inf)], [x]))
    both = x.at[3].set(jnp.nan)
    assert difference([both], [both]) is None
    assert difference([jnp.arange(3)], [jnp.arange(3) + 1]) is None
    assert difference([1e30 * x], [1e30 * x]) is None
    zero = jnp.zeros(3)
    assert difference([zero], [zero]) is None and difference([zero + 1], [zero])


def test_the_callers_arrays_stay(monkeypatch):
    donating = jax.jit(layers, donate_argnums=(0, 1, 2))
    args = tuple(jnp.array(a) for a in ARGUMENTS)
    report = raced(monkeypatch, LOSING, donating, args)
    assert report.whole.verdict is not None
    assert not any(a.is_deleted() for a in args)


def test_abstract_arguments_are_random_arrays(monkeypatch):
    def fn(tree, key, flag):
        noise = jax.random.bernoulli(key, 0.5, tree["w"].shape)
        y = layers(tree["x"], jnp.where(noise, tree["w"], 0), tree["k"])
        return jnp.where(flag, y, 0)

    key = jax.random.key(0)
    tree = dict(zip("xwk", ARGUMENTS, strict=True))
    concrete = (tree, key, jnp.array(True))
    abstract = jax.eval_shape(lambda *args: args, *concrete)
    raced(monkeypatch, LOSING, fn, abstract)
    assert sites(fn, concrete) == (1, 0)


def test_a_real_race_has_real_times(monkeypatch):
    """Nothing is scripted but the protocol, which is short."""
    from tracea_jax.campaign import program, run
    from tracea_jax.tuning import measure

    short = measure.Timing(slice_s=0.001, settle_s=0.01, race_s=0.01, rounds=3)
    monkeypatch.setattr(program, "TIMING", short)
    monkeypatch.setattr(run.Run, "_rows", lambda *_: {})
    whole = tracea.tune(step, *ARGUMENTS).whole
    verdict = whole and whole.verdict
    assert verdict is not None and verdict.time_us > 0 and verdict.ratio >= 0.985
    assert tracea.explain(step)(*ARGUMENTS).verdict == verdict
    assert_near(tracea.transform(step)(*ARGUMENTS), step(*ARGUMENTS), 1e-5)


def test_what_xla_serves_is_plain_already(monkeypatch, calls_cost):
    report = raced(monkeypatch, LOSING)
    assert "not raced: XLA serves every site" in str(report.whole)


def test_objects_of_nnx_race_with_what_they_change(monkeypatch):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.k = (nnx.Param(jnp.array(x)) for x in ARGUMENTS[1:])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return layers(x, self.w[...], self.k[...])

    def update(model, optimizer, x):
        def loss(model):
            return (model(x) ** 2).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    args = model, optimizer, ARGUMENTS[0]
    report = raced(monkeypatch, LOSING, update, args)
    assert report.whole.verdict.without == ("conv2d",)
    assert model.calls[...] == 0  # a race changes nothing
    assert tracea.explain(update)(*args).verdict == report.whole.verdict

    calls = []
    monkeypatch.setattr(
        verdicts.Verdict, "of_entry", lambda entry: calls.append(entry) or None
    )
    tracea.transform(update)(*args)
    assert calls  # the very program that raced
    assert model.calls[...] == 1


# --- the key --------------------------------------------------------------------------


def test_programs_are_not_hashed_while_no_race_is_known(monkeypatch):
    def hashed(jaxpr):
        raise AssertionError("a program was hashed")

    monkeypatch.setattr(verdicts, "fingerprint", hashed)
    assert sites(step) == (2, 3)


def fingerprint_of(fn, *args):
    return verdicts.problem_of(jax.make_jaxpr(fn)(*args), OPS, False).jaxpr


def test_programs_are_told_apart():
    x, w = normal(4, 4), normal(4, 4, seed=1)

    def nested(scale):
        return lambda x, w: jax.lax.scan(
            lambda c, _: (c @ w * scale, None), x, length=3
        )

    programs = [
        lambda x, w: x @ w,
        lambda x, w: w @ x,
        lambda x, w: (x @ w) @ w,
        lambda x, w: (x @ w, w),
        lambda x, w: (x @ w, x),
        lambda x, w: x @ w + 1.0,
        lambda x, w: x @ w + 2.0,
        lambda x, w: x.T @ w,
        lambda x, w: jax.lax.cumsum(x @ w),
        lambda x, w: jax.lax.cumsum(x @ w, reverse=True),
        nested(1.5),
        nested(2.5),
    ]
    found = [fingerprint_of(f, x, w) for f in programs]
    assert len(set(found)) == len(programs)
    assert found[10] == fingerprint_of(nested(1.5), x, w)
    assert found[0] == fingerprint_of(jax.jit(programs[0]), x, w)
    assert found[0] == fingerprint_of(jax.jit(jax.jit(programs[0])), x, w)
    assert found[0] != fingerprint_of(programs[0], x.astype("bfloat16"), w)


def test_names_and_donation_make_no_other_program():
    x, w = normal(4, 4), normal(4, 4, seed=1)

    def one(x, w):
        return jax.nn.relu(x @ w)

    def other(rows, weights):
        return jax.nn.relu(rows @ weights)

    inner = [jax.jit(one), jax.jit(other), jax.jit(one, donate_argnums=0)]
    found = {fingerprint_of(lambda x, w, f=f: f(x, w) + x, x, w) for f in inner}
    assert len(found) == 1


def test_the_order_of_arguments_counts():
    x, w = normal(4, 4), normal(4, 4, seed=1)
    swapped = jax.jit(lambda w, x: x @ w)
    straight = fingerprint_of(lambda x, w: x @ w, x, w)
    assert straight != fingerprint_of(lambda x, w: swapped(w, x), x, w)


def test_a_key_is_the_same_in_every_process(monkeypatch):
    program = """
        import jax
        from program_races import ARGUMENTS, OPS, step
        from tracea_jax import verdicts
        import tracea_jax as tracea
        fast = tracea.transform(jax.checkpoint(jax.nn.silu))
        f = lambda x, w, k: (fast(x), step(x, w, k), jax.nn.softmax(x))
        print(verdicts.problem_of(jax.make_jaxpr(f)(*ARGUMENTS), OPS, False).jaxpr)
    """
    monkeypatch.setenv("PYTHONPATH", _with_tests())
    found = {run_python(program, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(found) == 1

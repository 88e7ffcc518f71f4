"""``options(deterministic=)``: what may give other bits from run to run, and when."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import repeated
from attentions import qkv

import tracea_jax as tracea
from tracea_jax import catalogue, dispatch, variants
from tracea_jax.campaign.run import Run
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.dispatch import Unsupported, plan
from tracea_jax.emit import sources
from tracea_jax.graph import Node
from tracea_jax.ops import attention
from tracea_jax.options import current
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import AttentionProblem, Problem
from tracea_jax.tuning.answers import interpolate
from tracea_jax.tuning.answers.answer import Question
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.neighbours import Neighbour
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.base import Varying
from tracea_jax.variants.steady import WORTH, steadiest

pytestmark = pytest.mark.once

H100, H200, A100 = NAMED["H100"], NAMED["H200"], NAMED["A100"]
GPUS = (H100, H200, A100)
BACKWARD = repeated.attention(direction="backward", is_causal=True)
FORBIDDEN = "deterministic=True or a flag of XLA forbids"
OURS = ATTENTION_BACKWARD_SM90


@pytest.fixture(autouse=True)
def with_any_toolchain() -> Iterator[None]:
    with compiled_elsewhere():
        yield


def planned(problem: Problem, deterministic: bool | None, **how: Any) -> dispatch.Plan:
    gpu = how.pop("device", H100)
    with tracea.options(deterministic=deterministic):
        return plan(problem, gpu, **how)


def config(dq: str, problem: AttentionProblem = BACKWARD) -> Any:
    configs = OURS.space(problem, H100).configs()
    return next(c for c in configs if c.dq == dq)


# --- what variants say ----------------------------------------------------------------

# Headers with atomic operations. Those of integers count, or deal tiles to blocks of
# threads; those of floats add in an order that is not fixed, unless turns are waited
# for (kOrdered).
COUNTING = {"tile/attention_producer.cuh", "tile/segment_map.cuh"}
ADDING = {"tile/attention_sums.cuh"}
ATOMIC = re.compile(r"\batomic[A-Z]\w*\(|\bred\.|\batom\.|cp_reduce_async_bulk_add\(")


def test_every_header_with_atomic_operations_was_looked_at():
    root = sources.directory()
    found = {str(f.relative_to(root)): f.read_text() for f in root.rglob("*.cuh")}
    atomic = {name for name, text in found.items() if ATOMIC.search(text)}
    assert atomic == COUNTING | ADDING | {"ptx/bulk_add.cuh"}


def test_variants_that_add_floats_in_no_order_say_so():
    adding = set()
    for op in catalogue.in_programs():
        for variant in op.variants:
            roots = [s.removeprefix("cuda/") for s in variant.sources if "cuda/" in s]
            if ADDING & {name for name, _ in sources.headers(*roots)}:
                adding.add(variant.name)
                assert isinstance(variant, Varying)
    assert adding == {OURS.name}


def random_problem(draw: random.Random) -> Problem:
    """A problem of any op that has kernels, of sizes that nobody measured."""
    if draw.random() < 0.6:
        return _attention(draw)
    problem = draw.choice(OTHERS)
    sizes = {name: getattr(problem, name) for name in problem.extents}
    sizes |= {"heads": 0, "kv_heads": 0} if "kv_heads" in sizes else {}
    changed = {
        name: max(1, round(size * 2 ** draw.uniform(-4, 1)))
        for name, size in sizes.items()
        if size and name != "batch"
    }
    return dataclasses.replace(problem, **changed)


OTHERS = tuple(p for p in repeated.problems() if p.op != "attention")


def _attention(draw: random.Random) -> AttentionProblem:
    heads = draw.choice((1, 2, 8, 12))
    q_len = draw.choice((1, 7, 64, 128, 500, 1024, 4096))
    kv_len = draw.choice((q_len, 1, 77, 512, 3000))
    how: dict[str, Any] = {
        "batch": draw.choice((1, 3, 16)),
        "heads": heads,
        "kv_heads": draw.choice([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": draw.choice((8, 64, 72, 128, 256)),
        "dtype": draw.choice(("bfloat16", "float16", "float32")),
        "direction": draw.choice(("forward", "backward")),
        "is_causal": draw.random() < 0.4,
        "kv_lengths": draw.random() < 0.3,
        "segments": draw.random() < 0.2,
        "sinks": draw.random() < 0.1,
        "soft_cap": draw.choice((None, None, 30.0)),
        "window": draw.choice((None, None, (128, 0))),
    }
    if draw.random() < 0.2:
        how |= {"bias": (1, heads, q_len, kv_len), "bias_dtype": how["dtype"]}
        how["bias_gradient"] = how["direction"] == "backward"
    return AttentionProblem(q_len=q_len, kv_len=kv_len, scale=0.1, **how)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 100), pytest.param(1, 5000, marks=pytest.mark.slow)]
)
def test_nothing_that_may_vary_is_planned_where_bits_must_not_differ(seed, count):
    draw, allowed = random.Random(seed), 0
    for _ in range(count):
        problem, gpu = random_problem(draw), draw.choice(GPUS)
        found = planned(problem, True, device=gpu)
        assert found.may_vary is None and found.variant != "cudnn"
        assert found.warnings == ()
        allowed += planned(problem, False, device=gpu).may_vary is not None
    assert allowed > count / 20


def test_the_default_config_varies_only_if_every_config_does():
    draw, seen = random.Random(1), set()
    for _ in range(60):
        problem, gpu = _attention(draw), draw.choice(GPUS)
        kinds: tuple[Any, ...] = (ATTENTION_CUDNN, OURS)
        for variant in kinds:
            if variant.why_not(problem, gpu) is None:
                default = variant.heuristic(problem, gpu)
                says = variant.may_vary(problem, default, gpu)
                configs = variant.space(problem, gpu).configs()
                every = [variant.may_vary(problem, c, gpu) for c in configs]
                assert says is None or None not in every
                seen.add((variant.name, says is None, None in every))
    assert {name for name, *_ in seen} == {"cudnn", OURS.name}


def test_spaces_have_no_config_that_may_vary():
    def configs(deterministic: bool | None) -> list[Choice]:
        return [
            c
            for c in decide(diagnose(BACKWARD, H100, deterministic)).choices
            if variants.may_vary(
                variants.get("attention", c.variant), BACKWARD, c.config, H100
            )
        ]

    assert configs(True) == []
    assert configs(None) == configs(False)
    assert {c.variant for c in configs(None)} == {"cudnn", OURS.name}
    strict = decide(diagnose(BACKWARD, H100, True)).spaces[OURS.name]
    whole = OURS.space(BACKWARD, H100)
    refused = strict.pruned["deterministic"]
    assert refused > 0 and len(strict) + refused == len(whole)
    assert strict.configs() == tuple(c for c in whole.configs() if c.dq != "atomic")


def test_another_kernel_stands_in_for_one_whose_bits_may_differ():
    short = repeated.attention(q_len=128, kv_len=128)
    assert planned(short, None).variant == "cudnn"
    found = planned(short, True)
    assert found.variant == "attention_sm90"
    assert re.search("stands in for cudnn, .* whose bits may differ", found.reason)
    assert any(r.variant == "cudnn" and FORBIDDEN in r.reason for r in found.rejected)
    only_cudnn = repeated.attention(head_dim=136, direction="backward", is_causal=True)
    assert planned(only_cudnn, True).may_vary is None


def test_naming_what_may_vary_is_an_error():
    with pytest.raises(Unsupported, match=f"cudnn: cuDNN adds up.*{FORBIDDEN}"):
        planned(BACKWARD, True, implementation="cudnn")
    atomic, ordered = config("atomic"), config("ordered")
    with pytest.raises(ValueError, match=f"dq='atomic' adds up.*{FORBIDDEN}"):
        planned(BACKWARD, True, config=atomic)
    assert planned(BACKWARD, True, config=ordered).origin == "user"
    for allows in (None, False):
        assert planned(BACKWARD, allows, implementation="cudnn").variant == "cudnn"
        assert planned(BACKWARD, allows, config=atomic).may_vary is not None
    q, k, v = (x.astype("bfloat16") for x in qkv(32, 32))
    with tracea.options(deterministic=True, device="H100"):
        call = jax.jit(lambda *x: attention(*x, implementation="cudnn"))
        with pytest.raises(Unsupported, match=FORBIDDEN):
            jax.export.export(call, platforms=["cuda"])(q, k, v)


# --- measured answers -----------------------------------------------------------------


def raced(ours_us: float, cudnn_us: float, xla_us: float | None = None, **more: float):
    """An entry of a race that cuDNN won, with the times of our configs by ``dq``."""
    times = {"ordered": ours_us, **more}
    ours = [
        Observation(
            **named(BACKWARD, Choice(variant=OURS.name, config=config(dq)), H100),
            time_us=us,
            extra={"protocol": "race"},
        )
        for dq, us in times.items()
    ]
    return Entry(
        problem=BACKWARD.to_json(),
        environment=environment(H100),
        best=Best(variant="cudnn", config={}, time_us=cudnn_us, xla_us=xla_us),
        observations=tuple(ours),
    )


def answer(directory: Any, entry: Entry, deterministic: bool | None) -> Any:
    Knowledge(directory).own.record(entry)
    found = Knowledge(directory).lookup(BACKWARD, H100, deterministic=deterministic)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("slower", "deterministic", "variant"),
    [
        (1.02, None, OURS.name),
        (1.02, True, OURS.name),
        (1.02, False, "cudnn"),
        (1.04, None, "cudnn"),
        (1.04, True, OURS.name),
        (1.04, False, "cudnn"),
        (3.0, True, OURS.name),
    ],
)
def test_equal_bits_are_worth_three_percent(tmp_path, slower, deterministic, variant):
    found = answer(tmp_path, raced(100.0 * slower, 100.0), deterministic)
    assert found.choice.variant == variant and found.origin == "tuned"
    if variant != "cudnn":
        assert found.time_us == pytest.approx(100.0 * slower)
        assert "from run to run" in found.reason


def test_configs_that_vary_are_passed_over(tmp_path):
    entry = raced(100.0, 99.0, atomic=98.0)
    best = entry.observations[-1]
    won = Best(
        variant=OURS.name, config=best.config, code=best.code, time_us=best.time_us
    )
    entry = dataclasses.replace(entry, best=won)
    assert answer(tmp_path, entry, True).choice.config.dq == "ordered"
    assert answer(tmp_path, entry, None).choice.config.dq == "ordered"
    assert answer(tmp_path, entry, False).choice.config.dq == "atomic"


def test_xla_may_be_what_is_hardly_slower(tmp_path):
    entry = raced(150.0, 100.0, xla_us=101.0)
    assert answer(tmp_path, entry, None).choice.variant == "xla"
    assert answer(tmp_path, entry, True).choice.variant == "xla"
    assert answer(tmp_path, entry, False).choice.variant == "cudnn"


def test_without_other_times_the_policy_answers(tmp_path):
    entry = dataclasses.replace(raced(1.0, 100.0), observations=())
    Knowledge(tmp_path).own.record(entry)
    known = Knowledge(tmp_path)
    assert known.lookup(BACKWARD, H100, deterministic=True) is None
    assert known.lookup(BACKWARD, H100).choice.variant == "cudnn"  # type: ignore
    question = Question.about(BACKWARD, H100, deterministic=True)
    assert known.answer(question).choice.variant == OURS.name


@pytest.mark.parametrize(
    ("deterministic", "variant"), [(None, "cudnn"), (False, "cudnn"), (True, OURS.name)]
)
def test_tune_knows_what_runs(tmp_path, deterministic, variant):
    """It races a program again if other choices run than before the search."""
    Knowledge(tmp_path).own.record(raced(200.0, 100.0))
    with tracea.options(cache_dir=tmp_path, deterministic=deterministic):
        run = Run(
            device=H100,
            settings=current(),
            search={},
            budget_s=1.0,
            watch=None,  # pyright: ignore[reportArgumentType]
            program=None,
        )
        graph: Any = [Node(problem=BACKWARD, count=1)]
        assert run._choices(graph)[BACKWARD].variant == variant
        assert planned(BACKWARD, deterministic).variant == variant


@pytest.mark.parametrize("slower", [1.01, 2.0])
@pytest.mark.parametrize("deterministic", [None, True, False])
def test_interpolated_answers(slower, deterministic):
    def near(batch: int) -> Neighbour:
        problem = dataclasses.replace(BACKWARD, batch=batch)
        ours = dataclasses.asdict(config("ordered"))
        second = {"variant": OURS.name, "config": ours, "time_us": 50.0 * slower}
        best = Best(variant="cudnn", config={}, time_us=50.0, runner_up=second)
        return Neighbour(
            problem=problem, distance=1.0, origin="tuned", best=best, observations=()
        )

    question = Question.about(BACKWARD, H100, deterministic=deterministic)
    found = interpolate.answer(question, [near(2), near(8)])
    assert found is not None and found.origin == "interpolated"
    is_ours = deterministic or (deterministic is None and slower < WORTH)
    assert found.choice.variant == (OURS.name if is_ours else "cudnn")


def test_the_steadiest_is_at_most_so_much_slower():
    draw = random.Random(2)
    for _ in range(500):
        count = draw.randint(1, 6)
        times = sorted(draw.uniform(1, 1.1) for _ in range(count))
        varies = [draw.random() < 0.5 for _ in range(count)]
        found = steadiest(range(count), times.__getitem__, varies.__getitem__)
        steady = [i for i in range(count) if not varies[i]]
        close = [i for i in steady if times[i] <= WORTH * times[0]]
        assert found == (close[0] if varies[0] and close else 0)
    assert steadiest([0, 1], lambda i: None, lambda i: True) == 0


# --- kernels of CPUs ------------------------------------------------------------------


def cpu_problems() -> Iterator[Problem]:
    for problem in repeated.problems():
        if problem.operand_dtypes[0] == "float32":
            continue
        if problem.op == "matmul":
            yield dataclasses.replace(problem, m=130, n=136, k=300)
        elif problem.op == "conv2d" and problem.in_channels == 64:
            yield dataclasses.replace(problem, batch=2, height=9, width=11)
    for direction in ("forward", "backward"):
        yield repeated.attention(
            batch=2, q_len=70, kv_len=90, heads=4, kv_heads=2, direction=direction
        )


def test_kernels_of_cpus_give_the_same_bits():
    here, seen = local_cpu(), set()
    for problem in cpu_problems():
        for choice in repeated.choices(problem, here):
            run = repeated.runner(problem, choice, here)
            assert repeated.differing(run, 30) == 0, f"{problem}: {choice}"
            seen.add(choice.variant)
    assert {"gemm_cpu", "conv2d_cpu", "attention_cpu"} <= seen

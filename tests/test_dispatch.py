"""From a problem to a plan, and from a plan to a lowering."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import warnings

import jax
import numpy as np
import pytest
from jax.core import Tracer
from numerics import exact, normal

import tracea_jax as tracea
from tracea_jax import device, knowledge
from tracea_jax.device import OtherDevice
from tracea_jax.dispatch import plan
from tracea_jax.ops import matmul
from tracea_jax.options import Options, current, device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.variants.gemm_cpu import GEMM_CPU, GemmCpuConfig
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

pytestmark = pytest.mark.once

CPU = device.local_cpu()
H200 = device.NAMED["H200"]
SMALL = GemmProblem(m=16, n=24, k=8)
INTEGER = dataclasses.replace(SMALL, lhs="int32", rhs="int32", out="int32")
WIDE = GemmProblem(  # of a size that no shipped answer has
    m=4104,
    n=4096,
    k=4096,
    lhs="bfloat16",
    rhs="bfloat16",
    out="bfloat16",
    epilogue=Epilogue(bias="row", activation="gelu"),
)
CONFIG = GemmCpuConfig(kc=48, nc=80, tasks=3)


def remember(problem, target, variant, config, time_us=10.0):
    """Puts an answer into the cache as a tuning of another process would."""
    made = legal_choice(variant, config, problem, target)
    name = {"variant": variant, "config": config}
    if isinstance(made, Choice):
        name = named(problem, made, target)
    knowledge.known(current()).own.record(
        Entry(
            problem=problem.to_json(),
            environment=environment(target),
            best=Best(**name, time_us=time_us, xla_us=15.0),
            observations=(),
            verified={},
            tuner={},
            written=datetime.datetime.now(datetime.UTC).isoformat(),
        )
    )
    knowledge.refresh(current())


# --- who decides ----------------------------------------------------------------------


def test_unmeasured_the_policy_decides():
    found = plan(SMALL, CPU)
    assert (found.variant, found.origin) == ("gemm_cpu", "policy")
    assert found.config == GEMM_CPU.heuristic(SMALL, CPU)
    assert "usually wins" in found.reason
    integer = plan(INTEGER, CPU)
    assert (integer.variant, integer.origin) == ("xla", "policy")
    narrow = dataclasses.replace(SMALL, lhs="float16", rhs="float16")
    assert plan(narrow, CPU).variant == "xla"
    asked = plan(narrow, CPU, implementation="tracea")
    assert asked.variant == "gemm_cpu" and "'tracea' was asked for" in asked.reason


def test_a_tiny_product_is_left_to_xla_for_what_its_call_costs(calls_cost):
    found = plan(SMALL, CPU)
    assert (found.variant, found.origin) == ("xla", "policy")
    assert found.reason == "the product saves less than its call costs"
    assert plan(SMALL, CPU, implementation="tracea").variant == "gemm_cpu"


def test_the_tuned_answer_outranks_the_policy():
    remember(SMALL, CPU, "gemm_cpu", dataclasses.asdict(CONFIG))
    found = plan(SMALL, CPU)
    assert (found.variant, found.config, found.origin) == ("gemm_cpu", CONFIG, "tuned")
    assert (found.time_us, found.xla_us) == (10.0, 15.0)
    other = dataclasses.replace(SMALL, m=17)
    near = plan(other, CPU)
    assert (near.config, near.origin) == (CONFIG, "interpolated")
    assert "scored best by the model from 1 tuned neighbour" in near.reason
    assert (near.time_us, near.xla_us) == (None, None)  # nothing was measured
    assert plan(dataclasses.replace(SMALL, layout="nt"), CPU).origin == "policy"


def test_the_caller_outranks_the_tuned_answer():
    remember(SMALL, CPU, "xla", {})
    assert plan(SMALL, CPU).variant == "xla"
    config = dataclasses.asdict(CONFIG)
    for given in (CONFIG, config):
        found = plan(SMALL, CPU, config=given)
        assert (found.variant, found.config, found.origin) == (
            "gemm_cpu",
            CONFIG,
            "user",
        )
    for wanted in ("tracea", "gemm_cpu"):
        found = plan(SMALL, CPU, implementation=wanted)
        assert (found.variant, found.origin) == ("gemm_cpu", "policy")
    found = plan(SMALL, CPU, implementation="xla")
    assert (found.variant, found.origin) == ("xla", "user")


def test_the_option_is_the_arguments_default():
    with tracea.options(implementation="xla"):
        assert plan(SMALL, CPU).variant == "xla"
        assert plan(SMALL, CPU, implementation="gemm_cpu").variant == "gemm_cpu"


def test_an_answer_that_is_no_longer_legal_is_passed_over():
    remember(SMALL, CPU, "gemm_cpu", {"kc": 0, "nc": 16, "tasks": 1})
    assert plan(SMALL, CPU).origin == "policy"
    remember(SMALL, CPU, "gemm_gone", {})
    assert plan(SMALL, CPU).origin == "policy"


def test_answers_do_not_change_until_knowledge_is_refreshed():
    assert plan(SMALL, CPU).origin == "policy"
    known = knowledge.known(current())
    remember(SMALL, CPU, "gemm_cpu", dataclasses.asdict(CONFIG))
    assert known.lookup(SMALL, CPU) is None
    assert plan(SMALL, CPU).origin == "tuned"


def test_on_miss_error():
    with tracea.options(on_miss="error"):
        with pytest.raises(LookupError, match="no tuned answer.*tracea tune"):
            plan(SMALL, CPU)
        with pytest.raises(LookupError, match="matmul 3x3x3"):
            matmul(normal(3, 3), normal(3, 3))
        assert plan(SMALL, CPU, config=CONFIG).origin == "user"
        assert plan(SMALL, CPU, implementation="xla").origin == "user"
        remember(SMALL, CPU, "xla", {})
        assert plan(SMALL, CPU).origin == "tuned"
        with pytest.raises(LookupError, match="matmul 17x24x8"):
            plan(dataclasses.replace(SMALL, m=17), CPU)


@pytest.fixture
def quick_tuning(monkeypatch):
    """A short search space; gives the problems that were tuned."""
    tuned = []
    tuning = knowledge.tuning

    def counted(problem, *args, **how):
        tuned.append(problem)
        return tuning(problem, *args, **{**how, "effort": "none", "budget_s": 0.5})

    monkeypatch.setattr(knowledge, "tuning", counted)
    return tuned


def test_on_miss_tune_measures_while_lowering(quick_tuning, cache_dir):
    a, b = normal(16, 8), normal(8, 24)
    f = jax.jit(lambda a, b: matmul(a, b))
    with tracea.options(on_miss="tune"):
        exact(a, b).assert_near(f(a, b))
        assert quick_tuning == [SMALL]
        assert list(cache_dir.glob("tuned/*/matmul/*.json"))
        assert plan(SMALL, CPU).origin == "tuned"
        exact(a, b).assert_near(matmul(a, b, bias=None))
    assert plan(SMALL, CPU).origin == "tuned"
    assert quick_tuning == [SMALL]


def test_on_miss_tune_measures_while_a_program_is_differentiated(quick_tuning):
    """JAX is tracing then, and would trace what is measured."""
    a, b = normal(16, 8), normal(8, 24)
    with tracea.options(on_miss="tune"):
        grad = jax.grad(lambda a: tracea.transform(lambda a: a @ b)(a).sum())(a)
    assert SMALL in quick_tuning
    exact(np.ones((16, 24), np.float32), b.T).assert_near(grad)


def test_on_miss_tune_measures_in_a_program_that_forbids_transfers(quick_tuning):
    a, b = normal(16, 8), normal(8, 24)
    with tracea.options(on_miss="tune"), jax.transfer_guard("disallow"):
        y = jax.jit(matmul)(a, b)
    assert quick_tuning == [SMALL]
    exact(a, b).assert_near(y)


def test_measuring_sees_no_context_of_the_program():
    traced = []

    @jax.jit
    def f(x):
        with knowledge.undisturbed():
            y = jax.jit(lambda x: x * np.nan)(np.ones(3, np.float32))
            traced.append(isinstance(y, Tracer))
        return x

    with jax.debug_nans(True), jax.disable_jit(False):
        f(1.0)
    assert traced == [False]


def test_on_miss_tune_measures_what_was_interpolated(quick_tuning):
    remember(SMALL, CPU, "xla", {})
    near = dataclasses.replace(SMALL, m=17)
    with tracea.options(on_miss="tune"):
        assert plan(near, CPU).origin == "tuned"
    assert quick_tuning == [near]


def test_on_miss_tune_never_measures_for_another_machine(quick_tuning):
    with tracea.options(on_miss="tune"):
        assert plan(WIDE, H200).origin in ("interpolated", "policy")
        assert plan(SMALL, dataclasses.replace(CPU, name="another")).origin == "policy"
    assert quick_tuning == []


def test_on_miss_tune_needs_a_single_process(quick_tuning, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with tracea.options(on_miss="tune"):
        assert plan(SMALL, CPU).origin == "policy"
    assert quick_tuning == []


# --- devices --------------------------------------------------------------------------


def test_the_device_of_a_lowering(monkeypatch):
    assert device_for("cpu") == CPU
    assert device_for("tpu") == OtherDevice(platform="tpu", name="tpu")
    with tracea.options(device="H100"):
        assert device_for("cuda") == device.NAMED["H100"]
        assert device_for("cpu") == CPU

    def broken(ordinal):
        raise RuntimeError("no driver")

    monkeypatch.setattr(device, "local_cuda", broken)
    unknown = device_for("cuda")
    assert isinstance(unknown, OtherDevice) and "no driver" in unknown.name
    assert plan(WIDE, unknown).variant == "xla"


def test_a_platform_without_kernels_is_lowered_to_plain_xla():
    a = jax.ShapeDtypeStruct((8, 8), "float32")
    f = jax.jit(lambda a: matmul(a, a, activation="relu"))
    text = f.trace(a).lower(lowering_platforms=("tpu",)).as_text()
    assert "dot_general" in text and "tracea" not in text.replace("tracea_matmul", "")


# --- what the plan says ---------------------------------------------------------------


def test_a_plan_prints_choice_origin_and_refusals():
    lines = str(plan(INTEGER, CPU)).splitlines()
    assert lines[0].startswith("matmul 16x24x8 int32 nn: xla, policy: ")
    assert lines[1].startswith("  not gemm_sm90, gemm_sm90_padded")
    assert lines[1].endswith(": it runs on NVIDIA GPUs; the device is cpu")
    assert lines[-1].startswith("  not gemm_cpu: operands of dtype int32")
    ours = str(plan(SMALL, CPU, config=CONFIG))
    assert ours.startswith(
        "matmul 16x24x8 float32 nn: gemm_cpu [kc 48 nc 80 tasks 3], user"
    )


def test_a_missing_compiler_is_the_reason(monkeypatch):
    why = "cuda-bindings is not installed; pip install 'tracea_jax[cuda13]'"
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: why)
    found = plan(WIDE, H200)
    assert found.variant == "xla" and f": {why}\n" in str(found)
    with pytest.raises(tracea.Unsupported, match="gemm_sm90: cuda-bindings is not"):
        plan(WIDE, H200, implementation="tracea")


@pytest.mark.nvrtc
def test_other_gpus_are_refused_with_the_reason():
    assert plan(WIDE, H200).variant == "gemm_sm90"
    found = plan(WIDE, device.NAMED["A100"])
    assert found.variant == "xla" and "the device is sm_80" in str(found)


def test_unknown_names_and_configs():
    with pytest.raises(ValueError, match="'cublas' is unknown"):
        plan(SMALL, CPU, implementation="cublas")
    with pytest.raises(ValueError, match="fits no allowed variant: gemm_cpu: kc=-1"):
        plan(SMALL, CPU, config={"kc": -1, "nc": 1, "tasks": 1})


# --- lowering -------------------------------------------------------------------------


def lowered(f, *args, target="H200"):
    with tracea.options(device=target):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.nvrtc
def test_a_kernel_that_does_not_compile_leaves_the_problem_to_xla(monkeypatch):
    a = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    config = GEMM_SM90.heuristic(dataclasses.replace(WIDE, m=64, n=64, k=64), H200)

    def refuse(kernel, *places):
        raise nvrtc.CompileError("NVRTC cannot compile", "line 1: error")

    monkeypatch.setattr(cubins, "get_or_compile", refuse)
    with pytest.warns(
        UserWarning, match="matmul 64x64x64.*left to XLA.*cannot compile"
    ):
        text = lowered(lambda a: matmul(a, a, implementation="gemm_sm90"), a)
    assert "dot_general" in text and "tracea_cuda_launch" not in text
    with pytest.raises(nvrtc.CompileError, match="cannot compile"):
        lowered(lambda a: matmul(a, a, config=config), a)


@pytest.mark.nvrtc
def test_the_tuned_config_is_the_one_that_is_lowered():
    a = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    problem = GemmProblem(
        m=64, n=64, k=64, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    configs = GEMM_SM90.space(problem, H200).configs()

    def f(a):
        return matmul(a, a, implementation="gemm_sm90")

    texts = []
    for config in (configs[0], configs[-1]):
        remember(problem, H200, "gemm_sm90", dataclasses.asdict(config))
        with tracea.options(device="H200"):
            assert plan(problem, H200).config == config
        texts.append(lowered(lambda a: f(a), a))
    assert texts[0] != texts[1]


@pytest.mark.nvrtc
def test_a_directory_that_cannot_be_written_keeps_kernels_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    a = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    cubins._memory.clear()
    with tracea.options(cache_dir=str(tmp_path / "file" / "cache")):
        with pytest.warns(
            RuntimeWarning, match="kernels are kept in memory.*TRACEA_CACHE"
        ):
            text = lowered(lambda a: matmul(a, a, implementation="gemm_sm90"), a)
    assert "tracea_cuda_launch_v1" in text


# --- a cache in trouble ---------------------------------------------------------------


def test_an_unreadable_entry_costs_one_warning_and_is_set_aside(cache_dir):
    remember(SMALL, CPU, "xla", {})
    (file,) = cache_dir.glob("tuned/*/matmul/*.json")
    file.write_bytes(b"\0 not an entry")
    knowledge.refresh(current())
    a, b = normal(16, 8), normal(8, 24)
    with pytest.warns(RuntimeWarning, match=str(file)) as caught:
        exact(a, b).assert_near(matmul(a, b))
    assert len(caught) == 1 and not file.exists()
    assert b"\0 not an entry" in {
        f.read_bytes() for f in cache_dir.rglob("*") if f.is_file()
    }
    knowledge.refresh(current())
    assert plan(SMALL, CPU).origin == "policy"


def test_a_cache_that_cannot_be_written_lasts_as_long_as_the_process(
    tmp_path, quick_tuning
):
    (tmp_path / "file").write_text("")
    a, b = normal(16, 8), normal(8, 24)
    with tracea.options(cache_dir=str(tmp_path / "file" / "cache"), on_miss="tune"):
        with pytest.warns(RuntimeWarning, match="cannot be written.*in memory"):
            exact(a, b).assert_near(matmul(a, b))
        with warnings.catch_warnings(action="error"):
            assert plan(SMALL, CPU).origin == "tuned"
    assert quick_tuning == [SMALL]


def test_every_cache_directory_has_its_own_answers(tmp_path):
    remember(SMALL, CPU, "xla", {})
    assert plan(SMALL, CPU).origin == "tuned"
    elsewhere = Options(cache_dir=str(pathlib.Path(tmp_path)))
    assert plan(SMALL, CPU, settings=elsewhere).origin == "policy"

"""The child process: whatever a choice does to the child, the tuning goes on."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import faulty_benches as faulty
import pytest
from synthetic_bench import DEVICE, HERO, PROBLEM, XLA, choice

import tracea_jax
from tracea_jax import device as devices
from tracea_jax import policy
from tracea_jax.diagnosis import diagnose
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure
from tracea_jax.tuning.lab import child, worker
from tracea_jax.tuning.lab.child import ChildLab, Limits
from tracea_jax.tuning.lab.local import LabError, LocalLab
from tracea_jax.tuning.measure import CandidateError

pytestmark = pytest.mark.once

TIMING = measure.Timing(
    slice_s=1e-4,
    settle_s=1e-3,
    candidate_s=0.01,
    rounds=3,
    max_rounds=3,
    race_s=1e-4,
    cold_runs=2,
    max_repeats=4,
)
LIMITS = Limits(run_s=0.1, prepare_s=1.0, verify_s=1.0)


def lab_of(factory="at_run", **arguments):
    arguments = {"limits": LIMITS, **arguments}
    return ChildLab(f"faulty_benches:{factory}", DEVICE, TIMING, **arguments)


def fault(name):
    return choice(faulty.KC[name])


def child_of(lab) -> worker.Worker:
    assert lab._child is not None
    return lab._child


def pid_of(lab) -> int:
    """Process id that the answering child reports."""
    return int(lab.verify(PROBLEM, HERO).max_rel_error)


@pytest.fixture(scope="module", autouse=True)
def without_jax():
    """Children that do not import JAX start quickly; these benches do not need it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            child, "PROGRAM", worker.bare("tracea_jax.tuning.lab.child_server")
        )
        yield


@pytest.fixture(scope="module")
def shared():
    """One lab for faults that leave it working; what they leave behind is tested."""
    with contextlib.closing(lab_of()) as lab:
        yield lab


def failure_of(lab, bad, step="sample"):
    with pytest.raises(CandidateError) as caught:
        getattr(lab, step)(PROBLEM, bad)
    return caught.value.kind, str(caught.value)


def test_it_measures_verifies_and_races_like_a_local_lab(shared):
    local = LocalLab(faulty.at_run, DEVICE, TIMING)
    for lab in (local, shared):
        sample = lab.sample(PROBLEM, HERO, incumbent_us=1e6)
        assert sample.time_us > faulty.GOOD_US and sample.cold_us is not None
        assert sample.repeats >= 1 and not sample.abandoned
        assert lab.sample(PROBLEM, HERO, incumbent_us=1e-3).abandoned
        assert lab.verify(PROBLEM, HERO).failure is None
        rounds: list[int] = []
        race = lab.race(PROBLEM, (HERO, XLA), on_round=lambda *r: rounds.extend(r))  # noqa: B023
        assert rounds == [1, 3, 2, 3, 3, 3]
        assert set(race.times_us) == set(race.cold_us) == {HERO, XLA}
        heat = lab.race(PROBLEM, (HERO, XLA), known_us={HERO: 1e9}, is_heat=True)
        assert set(heat.times_us) == {HERO, XLA} and heat.cold_us == {}
    assert pid_of(local) == os.getpid() != pid_of(shared)


def test_one_child_serves_all_problems(shared):
    before = pid_of(shared)
    shared.sample(PROBLEM, HERO)
    failure_of(shared, fault("raise"))
    shared.race(PROBLEM, (HERO, fault("raise"), XLA))
    assert pid_of(shared) == before


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("abort", "launch_error", "SIGABRT"),
        ("segfault", "launch_error", "SIGSEGV"),
        ("killed", "launch_error", "SIGKILL"),
        ("exit", "launch_error", "status 3\n  out of patience"),
        ("leave", "launch_error", "status 4"),
        ("hang", "timeout", "no end after"),
        ("raise", "launch_error", "RuntimeError: bad launch"),
        ("unsendable", "launch_error", "bad launch, and more"),
        ("lose_context", "launch_error", "illegal address"),
        ("garbage", "launch_error", "garbage: b'Warning: the GPU is hot"),
        ("half_a_frame", "launch_error", "status 0"),
    ],
)
def test_a_fault_costs_one_choice(shared, name, kind, words):
    found = failure_of(shared, fault(name))
    assert found[0] == kind and words in found[1]
    assert shared.sample(PROBLEM, HERO).time_us > faulty.GOOD_US
    assert shared.sample(PROBLEM, XLA).time_us > faulty.GOOD_US


@pytest.mark.parametrize(
    ("name", "kind"), [("abort", "compile_error"), ("hang", "timeout")]
)
def test_a_compiler_that_crashes_or_hangs_costs_one_choice(name, kind):
    with contextlib.closing(lab_of("at_prepare")) as lab:
        assert failure_of(lab, fault(name))[0] == kind
        assert lab.sample(PROBLEM, HERO).time_us > faulty.GOOD_US


def test_a_crash_while_verifying_costs_one_choice():
    with contextlib.closing(lab_of("at_verify")) as lab:
        assert failure_of(lab, fault("segfault"), "verify")[0] == "launch_error"
        assert failure_of(lab, fault("hang"), "verify")[0] == "timeout"
        assert lab.verify(PROBLEM, HERO).ok


def test_a_race_goes_on_without_those_that_end_it(shared):
    bad = ("segfault", "raise", "hang", "lose_context")
    choices = (HERO, *(fault(name) for name in bad), XLA)
    race = shared.race(PROBLEM, choices)
    assert set(race.times_us) == {HERO, XLA}
    assert all(len(t) == 3 for t in race.times_us.values())
    kinds = {c: e.kind for c, e in race.failures.items()}
    assert kinds == {
        fault("segfault"): "launch_error",
        fault("raise"): "launch_error",
        fault("hang"): "timeout",
        fault("lose_context"): "launch_error",
    }
    assert shared.race(PROBLEM, (fault("abort"),)).times_us == {}


@pytest.mark.parametrize("name", ["chatter", "jump"])
def test_prints_and_clock_jumps_do_not_disturb(name, capfd):
    with contextlib.closing(lab_of()) as lab:
        assert faulty.GOOD_US < lab.sample(PROBLEM, fault(name)).time_us < 1e6
        assert lab.sample(PROBLEM, HERO).time_us < 1e6
    assert capfd.readouterr() == ("", "")


def test_a_child_killed_between_questions_is_replaced_without_blame(shared):
    before = pid_of(shared)
    os.kill(before, signal.SIGKILL)
    assert pid_of(shared) != before
    os.kill(pid_of(shared), signal.SIGSTOP)  # the kill comes when it looks alive
    stopped = child_of(shared)
    threading.Timer(0.2, stopped.kill).start()
    assert shared.sample(PROBLEM, HERO).time_us > faulty.GOOD_US
    assert child_of(shared).pid != stopped.pid


def test_a_dead_device_is_not_blamed_on_every_choice(tmp_path):
    broken = tmp_path / "broken"
    with contextlib.closing(lab_of(environment={faulty.FILE: str(broken)})) as lab:
        lab.start(PROBLEM)
        broken.touch()
        assert failure_of(lab, fault("segfault"))[0] == "launch_error"
        for _ in range(2):
            with pytest.raises(LabError, match=r"kc 101.*SIGSEGV.*no device.*new") as e:
                lab.sample(PROBLEM, HERO)
            assert e.value.choice == fault("segfault")
        broken.unlink()
        assert lab.sample(PROBLEM, HERO).time_us > faulty.GOOD_US


def test_a_device_that_is_dead_from_the_start_is_told(tmp_path):
    (tmp_path / "broken").touch()
    environment = {faulty.FILE: str(tmp_path / "broken")}
    with contextlib.closing(lab_of(environment=environment)) as lab:
        with pytest.raises(LabError, match="no device") as caught:
            lab.start(PROBLEM)
        assert caught.value.choice is None


def test_a_child_that_cannot_start_says_why():
    with contextlib.closing(lab_of("no_such")) as lab:
        with pytest.raises(LabError, match="no attribute 'no_such'"):
            lab.sample(PROBLEM, HERO)
    hopeless = Limits(start_s=0.0)
    with contextlib.closing(lab_of(limits=hopeless)) as lab:
        with pytest.raises(LabError, match="cannot start.*no end"):
            lab.sample(PROBLEM, HERO)


def test_a_bench_that_refuses_the_problem_raises_as_here():
    with contextlib.closing(lab_of("refuses")) as lab:
        with pytest.raises(ValueError, match="m=96 is odd"):
            lab.sample(PROBLEM, HERO)


def test_the_child_has_our_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "PROGRAM", ("-m", "tracea_jax.tuning.lab.child"))
    environment = {"JAX_ENABLE_X64": "1"}
    lab = lab_of("settings", directory=tmp_path, environment=environment)
    with contextlib.closing(lab):
        told = failure_of(lab, HERO)[1]
    assert told == repr(["cpu", str(tmp_path), "false", True, True])


def test_a_childs_results_are_those_of_the_ops(monkeypatch):
    monkeypatch.setattr(child, "PROGRAM", ("-m", "tracea_jax.tuning.lab.child"))
    problem, device = GemmProblem(m=24, n=40, k=16), devices.local_cpu()
    choices = policy.decide(diagnose(problem, device)).heroes
    with contextlib.closing(ChildLab(child.FACTORY, device, TIMING)) as lab:
        race = lab.race(problem, choices)
        assert not race.failures
        assert set(race.times_us) == set(race.cold_us) == set(choices)
        for c in choices:
            assert lab.verify(problem, c).failure is None


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises: in jobs that run in the background, shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_a_lab_that_works(ctrl_c):
    # A child that is late on a busy machine must not be taken for hung.
    patient = Limits(run_s=60.0, prepare_s=60.0, verify_s=60.0)
    with contextlib.closing(lab_of(limits=patient)) as lab:
        pid = pid_of(lab)
        with pytest.raises(KeyboardInterrupt):
            lab.sample(PROBLEM, fault("interrupt_parent"))
        assert lab.verify(PROBLEM, HERO).max_rel_error == pid


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_child(shared):
    os.kill(pid_of(shared), signal.SIGINT)
    assert os.getsid(pid_of(shared)) != os.getsid(0)
    assert shared.sample(PROBLEM, HERO).time_us > faulty.GOOD_US


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def is_running(pid: int) -> bool:
    """Whether it runs or is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files")
def test_nothing_is_left_behind():
    before = open_files()
    lab = lab_of()
    pids = [pid_of(lab)]
    failure_of(lab, fault("abort"))
    pids.append(pid_of(lab))
    lab.close()
    lab.close()
    assert open_files() == before
    # Also if it is never closed.
    lab = lab_of()
    pids.append(pid_of(lab))
    del lab
    gc.collect()
    assert open_files() == before
    assert not any(map(is_running, pids))


def has_ended(pid: int) -> bool:
    """Whether an orphan has; not every container has a process that waits for them."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return not is_running(pid)


PARENT = """
import sys, time, types
package = types.ModuleType("tracea_jax")  # as it is, it imports JAX
package.__path__ = [{package!r}]
sys.modules["tracea_jax"] = package
sys.path.append({tests!r})
from tracea_jax.tuning.lab import child, worker
child.PROGRAM = worker.bare("tracea_jax.tuning.lab.child_server")
from faulty_benches import KC
from synthetic_bench import DEVICE, HERO, PROBLEM, choice
lab = child.ChildLab("faulty_benches:at_run", DEVICE)
print(int(lab.verify(PROBLEM, HERO).max_rel_error), flush=True)
if sys.argv[1] == "busy":
    lab.sample(PROBLEM, choice(KC["hang"]))
time.sleep(1000)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_child_ends_with_its_parent(state):
    script = PARENT.format(
        package=os.path.dirname(tracea_jax.__file__),
        tests=os.path.dirname(faulty.__file__),
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, state],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        time.sleep(0.3)  # for the hanging run to begin
        parent.kill()
    end = time.monotonic() + 20
    while not has_ended(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert has_ended(pid)
